import pytest
import torch

from trainer.profiling.timeline import HostClock, Timeline

torch.set_num_threads(1)  # other processes of the tests want a core too


@pytest.fixture
def timeline():
    """A timeline that is recording."""
    timeline = Timeline(HostClock())
    timeline.start()
    return timeline
