import pytest

from tests import shared_folders
from tests.pathologies import Patient, train_teacher
from tests.pipelines.local_runs import COVERAGE

UNMEASURED = ("failures", "faults", "pathologies_system", "pathologies_training", "resume")
"""Files whose trainings run code that other tests measure too; coverage would take a quarter of their time."""


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.stem.removeprefix("test_") in UNMEASURED and item.path.parent.name == "local":
            item.add_marker(pytest.mark.no_cover)


@pytest.fixture(scope="module", autouse=True)
def unmeasured_processes(request):
    """Neither are the processes that such a file starts."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.stem.removeprefix("test_") in UNMEASURED:
            patch.setenv(COVERAGE, "")
        yield


@pytest.fixture(scope="session")
def patient(digits, tmp_path_factory):
    """The digits with a teacher that has learned them; see `tests/pathologies.py`."""
    folder = tmp_path_factory.mktemp("patient")
    teacher = train_teacher(digits, folder)
    shared_folders.share(teacher)
    return Patient(dataset=digits, teacher=teacher, folder=folder)
