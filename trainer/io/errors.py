"""The exceptions a user can meet: each is a `TrainerError`, whose text is the whole message for the user.

A message names the thing, the value and the next move. `python -m trainer` prints it without a traceback (`--debug` shows that too) and
exits with `EXIT_CODE`.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from trainer.io import limits

EXIT_CODE = 2
CRASH_EXIT_CODE = 1
INTERRUPTED_EXIT_CODE = 130
CRASHED_NODE_EXIT_CODE = 200
"""Of a node of a cluster's job whose process crashed, was killed or missed another node. It is above 127 and not of a signal, so that the
job's operator starts the node again; the second crash of one kind has `EXIT_CODE`."""
PREEMPTED_EXIT_CODE = 143
"""Of a process that was asked to end by SIGTERM (128 + 15, as in a shell): start it again, and it continues."""
MISSED_ANOTHER = "the connection to another process was lost, so another node may have failed first: its log says why"
"""How the message of a node ends that misses another one; the search for the cause starts elsewhere."""


class TrainerError(Exception):
    """Base of all errors that a user can meet and correct."""

    is_transient: ClassVar[bool] = False
    """Whether another attempt may succeed without any change, since the cause was the machine, the network or a server."""

    def __str__(self) -> str:
        """Return the message, cut to a readable length; names from elsewhere in it cannot control a terminal."""
        return limits.cut(limits.printable(super().__str__()), limits.MESSAGE_CHARACTERS)


class SettingsError(TrainerError):
    """A recipe, a setting or an override is wrong."""


class DataError(TrainerError):
    """The images, labels or splits are not usable."""


class ArtifactError(TrainerError):
    """A directory handed from one stage to another is missing, damaged or of another kind."""


class ModelError(TrainerError):
    """A model cannot be built, or does not fit the data set."""


class TrainingError(TrainerError):
    """A training stopped: loss not finite, or processes that do not form one group."""


class LostProcessError(TrainingError):
    """A process of the group did not come to a rendezvous, or is gone; another attempt may succeed."""

    is_transient = True


class SupersededError(TrainingError):
    """A later attempt of the same training has begun: this one must write nothing more, not even how it ended."""


class PreemptedError(TrainerError):
    """A training was asked to end; its checkpoint is written, and the same command continues it."""

    is_transient = True


class LaunchError(TrainerError):
    """A launched process or job failed."""


class CrashError(LaunchError):
    """A launched process crashed or was killed, and left no message of its own."""


class BudgetError(TrainerError):
    """The forecast is over the budget, or cannot be held against it."""


class DeployError(TrainerError):
    """Kubeflow Pipelines is not found or refuses, or a run there did not succeed."""


class TrackingError(TrainerError):
    """MLflow does not answer or refuses."""


class TrackingAwayError(TrackingError):
    """MLflow does not answer, or answers with a server error; another attempt may succeed."""

    is_transient = True


class StorageError(TrainerError):
    """The object store does not answer, refuses, or has lost something."""


class StorageAwayError(StorageError):
    """The object store did not answer, or not in time; another attempt may succeed."""

    is_transient = True


class ObjectNotFoundError(StorageError):
    """An object, or file, is missing."""


class ObjectExistsError(StorageError):
    """An object that was to be created exists already."""


class ObjectDamagedError(StorageError):
    """An object does not match its checksum."""


class ObjectTooLargeError(StorageError):
    """An object, or file, exceeds the limit for its kind."""


class OutputError(TrainerError):
    """An output cannot be written."""


_OUTPUT_ADVICE = {
    errno.ENOSPC: "the disk is full; free some space or choose another output",
    errno.EDQUOT: "the disk quota is used up; free some space or choose another output",
    errno.EROFS: "the file system is read-only; choose another output",
    errno.EACCES: "no permission to write; choose another output or change its permissions",
    errno.EPERM: "no permission to write; choose another output or change its permissions",
    errno.ENOTDIR: "a part of the path is a file, not a directory; choose another output",
    errno.EEXIST: "there is a file where a directory is needed; choose another output",
    errno.EFBIG: "the file is larger than this file system takes; choose another output",
}


def make_directory(path: Path) -> None:
    """Make a directory and those above it, where missing; an `OutputError` where the operating system refuses."""
    with writing_to(path):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileNotFoundError as error:  # such as below /proc
            raise OutputError(
                f"cannot write to {path}: no directory can be made there; choose another output"
            ) from error


@contextmanager
def writing_to(path: Path | str) -> Iterator[None]:
    """Turn the refusal to write below `path` (disk full, rights missing, read-only) into an `OutputError`; other `OSError`s pass."""
    try:
        yield
    except OSError as error:
        refusal = refused_to_write(error, path)
        if not refusal:
            raise
        raise OutputError(refusal) from error


def refused_to_write(error: Exception, path: Path | str) -> str:
    """Return what the operating system refused to write below `path`, and the next move; empty for any other error."""
    advice = _OUTPUT_ADVICE.get(error.errno or 0) if isinstance(error, OSError) else None
    return f"cannot write to {getattr(error, 'filename', None) or path}: {advice}" if advice else ""
