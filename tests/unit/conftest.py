import pytest
import torch

from tests import shared_folders
from trainer.profiling.timeline import HostClock, Timeline, recording_to

torch.set_num_threads(1)  # other processes of the tests want a core too


@pytest.fixture
def timeline():
    """A timeline that is recording, also what `span` names."""
    timeline = Timeline(HostClock())
    timeline.start()
    with recording_to(timeline):
        yield timeline


@pytest.fixture(scope="session")
def trained_digits(tmp_path_factory):
    """A small real data set, and a teacher and a student that were trained on it (`TrainedDigits`)."""
    from tests.trained_digits import make_trained_digits  # here, because most tests need no data set

    directory = tmp_path_factory.mktemp("trained_digits")
    digits = make_trained_digits(directory)
    shared_folders.share(directory)
    return digits


@pytest.fixture(scope="session")
def tagged_dataset(trained_digits, tmp_path_factory):
    """The same data set with attributes and a hierarchy."""
    from tests.trained_digits import write_tagged_dataset

    path = tmp_path_factory.mktemp("tagged") / "dataset"
    write_tagged_dataset(trained_digits.dataset, path)
    return path
