import pytest

from tests import shared_folders
from tests.pathologies import Patient, train_teacher


@pytest.fixture(scope="session")
def patient(digits, tmp_path_factory):
    """The digits with a teacher that has learned them; see `tests/pathologies.py`."""
    folder = tmp_path_factory.mktemp("patient")
    teacher = train_teacher(digits, folder)
    shared_folders.share(teacher)
    return Patient(dataset=digits, teacher=teacher, folder=folder)
