import pytest
import torch

from trainer.profiling.timeline import HostClock, Timeline, recording_to

torch.set_num_threads(1)  # other processes of the tests want a core too


@pytest.fixture
def timeline():
    """A timeline that is recording, also what `span` names."""
    timeline = Timeline(HostClock())
    timeline.start()
    with recording_to(timeline):
        yield timeline
