import pytest
import torch


def pytest_collection_modifyitems(items):
    """Collect the tests that need a GPU, and report them as not run where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and this machine has none"))
