import importlib.util
import os
from pathlib import Path

import pytest

WANTED = importlib.util.find_spec("torch_xla") is not None or "PJRT_DEVICE" in os.environ
"""Who names an XLA device means to run these tests: then a missing torch_xla is a failure."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark all tests of this folder, before `-m` selects; without torch_xla they are reported as not run."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("xla")
            if not WANTED:
                item.add_marker(
                    pytest.mark.skip(reason="needs torch_xla, which has an environment of its own: make test-xla")
                )


@pytest.fixture(scope="session", autouse=True)
def device():
    """The runtime comes first: autograd counts the kinds of devices when it first goes back."""
    import torch_xla

    return torch_xla.device()
