import dataclasses
import gc
import logging
import os
import shutil
import signal

import pytest
import torch
from huggingface_hub import constants

from tests import mlflow_store, shared_folders
from tests.distillations import Distillation, blank_teacher, prepared_digits
from tests.stand_ins.hub import Hub
from tests.stand_ins.object_store import ObjectStore
from trainer.io import storage
from trainer.io.retry import Outage

LONGEST_FILES = ("tests/local/", "tests/pipelines/", "tests/unit/stages/", "tests/unit/training/")
"""Where the tests are that take longest."""
SHARED = {"digits", "teacher", "trained_digits", "patient"}
"""Fixtures whose folders all tests of a process read."""


# A shell that starts the tests in the background lets them ignore Ctrl-C, and so whatever they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Begin with the longest files, so that no process is alone with one at the end; what needs a GPU is reported as not run."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST_FILES))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and this machine has none"))


def pytest_collection_finish():
    """Keep the garbage collector off what was imported: going through its million objects took 0.6 s, more than limits in tests of time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    """Let the end of the process clear up what was imported, else libraries report it as leaked."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def put_logging_back():
    """Commands and tasks set up logging for their process; here many of them share one, and their streams are closed."""
    loggers = [logging.getLogger(name) for name in (None, "trainer", "components")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def put_environment_back():
    """Commands set variables for the stages that they run in their process; a later test would belong to their run."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def put_signals_back():
    """Torch's agent, where a test runs it in this process, keeps the handlers of signals that it took."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def leave_shared_folders_alone(request):
    """The test that writes there fails itself, and not a later one that takes what it left for a part of the data."""
    yield
    if SHARED.intersection(request.fixturenames) and (changed := shared_folders.changes()):
        pytest.fail(
            f"{', '.join(changed)}: changed by this test, but others read it too; work on a copy", pytrace=False
        )


@pytest.fixture(scope="session")
def object_store_server():
    """An S3 server, for all tests of this process."""
    with ObjectStore() as server:
        yield server


@pytest.fixture
def object_store(object_store_server, monkeypatch, tmp_path):
    """An S3 server with an empty bucket and without faults; the environment points to it and to an empty cache."""
    object_store_server.reset()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in object_store_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(storage, "RETRY", dataclasses.replace(storage.RETRY, first_s=0.01))
    monkeypatch.setattr(storage, "outage", Outage(storage._store, storage.logger))
    return object_store_server


@pytest.fixture(scope="session")
def empty_mlflow_store(tmp_path_factory):
    """An MLflow store in a SQLite file, to be copied."""
    return mlflow_store.make(tmp_path_factory.mktemp("mlflow") / "mlflow.db")


@pytest.fixture
def mlflow_uri(empty_mlflow_store, tmp_path):
    """An MLflow store without runs, for this test alone."""
    return f"sqlite:///{shutil.copy(empty_mlflow_store, tmp_path / 'mlflow.db')}"


@pytest.fixture
def model_hub(monkeypatch, tmp_path):
    """A Hugging Face Hub with no repositories, in the place of the real one, and an empty cache of it."""
    with Hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        yield hub


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    folder = prepared_digits(tmp_path_factory.mktemp("data") / "digits")
    shared_folders.share(folder)
    return folder


@pytest.fixture(scope="session")
def teacher(tmp_path_factory):
    """A model directory with a teacher that has not learned anything."""
    folder = blank_teacher(tmp_path_factory.mktemp("models") / "teacher")
    shared_folders.share(folder)
    return folder


@pytest.fixture
def distillation(digits, teacher, tmp_path):
    """Makes distillations below this test's folder."""
    return lambda name, **settings: Distillation(digits, teacher, tmp_path / name, **settings)
