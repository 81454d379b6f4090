import pytest

from tests.distillations import Distillation, blank_teacher, prepared_digits
from tests.pathologies import Patient, train_teacher


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """The digits, prepared."""
    return prepared_digits(tmp_path_factory.mktemp("data") / "digits")


@pytest.fixture(scope="session")
def teacher(tmp_path_factory):
    """A model directory with a teacher that has not learned anything."""
    return blank_teacher(tmp_path_factory.mktemp("models") / "teacher")


@pytest.fixture
def distillation(digits, teacher, tmp_path):
    """Makes distillations below this test's folder."""
    return lambda name, **settings: Distillation(digits, teacher, tmp_path / name, **settings)


@pytest.fixture(scope="session")
def patient(digits, tmp_path_factory):
    """The digits with a teacher that has learned them; see `tests/pathologies.py`."""
    folder = tmp_path_factory.mktemp("patient")
    return Patient(dataset=digits, teacher=train_teacher(digits, folder), folder=folder)
