import pytest
import torch

from tests import shared_folders
from tests.pathologies import Patient, train_teacher
from trainer.config import DEVICE_VARIABLE


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Lets trainings of this process take the GPU, and gives its memory back."""
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda")
    yield
    torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def patient(digits, tmp_path_factory):
    """The digits with a teacher that has learned them; see `tests/pathologies.py`."""
    folder = tmp_path_factory.mktemp("patient")
    teacher = train_teacher(digits, folder)
    shared_folders.share(teacher)
    return Patient(dataset=digits, teacher=teacher, folder=folder)
