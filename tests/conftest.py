import logging

import pytest
import torch


def pytest_collection_modifyitems(items):
    """Collect the tests that need a GPU, and report them as not run where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and this machine has none"))


@pytest.fixture(autouse=True)
def put_logging_back():
    """Commands and tasks set up logging for their process; here many of them share one, and their streams are closed."""
    loggers = [logging.getLogger(name) for name in (None, "trainer", "components")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)
