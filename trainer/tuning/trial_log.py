"""What a tuning has measured, kept beside the checkpoints until it is complete: one that is started again does not measure it again.

The search is a function of what is measured, so with the same measurements it takes the same decisions and continues where it was; the time
of the trials counts as if it had never been interrupted.
"""

from __future__ import annotations

import logging

from pydantic import ValidationError

from trainer import storage
from trainer.base_models import StrictModel
from trainer.errors import ObjectDamagedError, ObjectNotFoundError
from trainer.training.process_group import Processes
from trainer.tuning.tuning_schema import Candidate, Trial

logger = logging.getLogger(__name__)

FILE = "trials.jsonl"


class RecordingTime(StrictModel):
    """What it would take to record the teacher's outputs."""

    teacher_s: float
    """Seconds that the teacher needs for an image, on all processes together."""
    recording_s: float
    """Seconds that the whole recording takes."""


class _Notes(StrictModel):
    recording: RecordingTime | None = None
    trials: tuple[Trial, ...] = ()


class TrialLog:
    """The measurements of one tuning; every process has them, the first one writes them down."""

    def __init__(self, uri: str, processes: Processes) -> None:
        """Below `uri`, a folder that is named by all that the measurements depend on."""
        self.uri, self._is_first = uri, processes.is_first
        self._notes = processes.gather(self._read() if self._is_first else _Notes())[0]
        if self._is_first and self._notes.trials:
            logger.info("tune  resuming: %d trials were measured by an earlier attempt", len(self._notes.trials))

    @property
    def recording(self) -> RecordingTime | None:
        """What was measured of recording."""
        return self._notes.recording

    def trial(self, candidate: Candidate) -> Trial | None:
        """The trial of a candidate; none if it was not measured."""
        return next((trial for trial in self._notes.trials if trial.candidate == candidate), None)

    def note_recording(self, recording: RecordingTime) -> None:
        """Keep what was measured of recording, the same on every process.

        Raises:
            StorageError: the store does not answer or refuses.
            OutputError: the file cannot be written.
        """
        self._write(self._notes.model_copy(update={"recording": recording}))

    def note(self, trial: Trial) -> None:
        """Keep a trial, the same on every process.

        Raises:
            StorageError: the store does not answer or refuses.
            OutputError: the file cannot be written.
        """
        self._write(self._notes.model_copy(update={"trials": (*self._notes.trials, trial)}))

    def remove(self) -> None:
        """Drop it: the tuning is complete.

        Raises:
            StorageError: the store does not answer or refuses.
        """
        if self._is_first:
            storage.remove(self.uri)

    def _read(self) -> _Notes:
        try:
            return _Notes.model_validate_json(storage.read_checksummed(storage.join(self.uri, FILE)))
        except ObjectNotFoundError:
            return _Notes()
        except ObjectDamagedError as error:
            logger.warning("%s; measuring again", error)
            return _Notes()
        except ValidationError:  # another version of this project has written it
            return _Notes()

    def _write(self, notes: _Notes) -> None:
        self._notes = notes
        if self._is_first:
            storage.write_checksummed(storage.join(self.uri, FILE), notes.model_dump_json())
