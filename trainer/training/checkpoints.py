"""The checkpoints of one training: written in the background, the newest kept, the newest valid one found again.

A checkpoint is an artifact of safetensors and one JSON file (`trainer.training.training_state`). The order of samples, the views, the
schedule and what the generators draw in a step are functions of the number of steps and of the settings, which the manifest holds with the
fingerprints of the inputs; so there is no generator and no counter to keep, and the same checkpoint serves any number of processes.

    ROOT/NAME-KEY/                      KEY: digest of the inputs and of the settings that decide what is learned (`compatible`)
        generation-003                  the third attempt at this training, which fences off the first two (`trainer.training.attempts`)
        step-00000500-g003/             a checkpoint that the third attempt has written

A training may be resumed with the settings that it began with, but for a few that do not decide what is learned, and on another number
of processes. Where the micro-batch does decide, a checkpoint says into how many a step is dealt (`Dealing`). What asks a store here
raises `StorageError` where that does not answer or refuses.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from trainer.config import with_present_names
from trainer.devices.process_group import Processes, wait_limit_s
from trainer.io import artifacts, storage
from trainer.io.artifacts import CHECKPOINTS_VARIABLE, Manifest
from trainer.io.base_models import flatten
from trainer.io.errors import (
    ArtifactError,
    OutputError,
    SettingsError,
    StorageError,
    SupersededError,
    TrainerError,
    TrainingError,
    writing_to,
)
from trainer.io.formatting import listed
from trainer.training.attempts import Lease, claim
from trainer.training.background import LAST_WAIT_S, MOST_FAILURES, TRANSIENT, BackgroundWriter
from trainer.training.training_state import Snapshot, TrainingState, read_state

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""How long a step waits for a checkpoint that is on its way to a store; then the one that is due is passed over."""

CHANGEABLE_ON_RESUME = frozenset(
    {
        # Who loads, and where: a sample's views are a function of the seed, its key and the epoch.
        "workers",
        "views_on",
        "decode_on",
        "resident",
        # What is noted and kept of the training.
        "log_every",
        "checkpoint_every",
        "pause_epochs",
        "latency_runs",
        "checkpoint_keep",
        "validate_every_epochs",
        "evidence",
        "watch",
        # How the same mathematics is computed and cut up, as the number of processes is free: rounding differs, and what dropout draws.
        # Where the micro-batch is a part of what is learned, `spec.keep_micro_batches` sees to `accumulation`.
        "compile",
        "zero",
        "sharding",
        "accumulation",
        "activation_checkpointing",
        "activation_memory_budget",
        "teacher_batch",
        "deterministic",
    }
)
"""Settings, of whatever section, with which a training may resume. `precision` and `gradient_compression` are not among them: they change
every gradient."""
_SHOWN, _SHOWN_DIGITS = 10, 12
"""Differences in a message, and digits of a fingerprint."""

_NAME = re.compile(r"step-(\d{8,})-g(\d{3,})")
_DRAFT = ".step-"
"""Begins the name of a folder, beside the others, in which a checkpoint is made."""


class Dealing(NamedTuple):
    """How a training deals a step to its processes."""

    micro_batches: int
    """Of a step, of all processes."""
    accumulation: int
    """The setting, which on another number of processes may not be what makes so many."""


class CheckpointEntry(NamedTuple):
    """A checkpoint, ordered by (generation, step): the maximum is the one to resume from."""

    generation: int
    step: int

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}-g{self.generation:03d}"


def root_is_shared() -> bool:
    """Return whether checkpoints of other runs may stand where these do (`artifacts.unfinished`)."""
    return bool(os.environ.get(CHECKPOINTS_VARIABLE))


class Checkpoints:
    """The checkpoints of one training; all processes read the `newest`, one saves and, at the end, finishes."""

    def __init__(
        self,
        root: str | Path,
        name: str,
        *,
        settings: Mapping[str, Any],
        parents: Mapping[str, str],
        section: str = "",
        keep: int = 2,
        shared: bool = True,
        output: str | Path = "",
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        """Below `root`, for the training `name`.

        Args:
            settings: of which those that decide what is learned name the folder.
            section: of the settings, for their full names in messages.
            keep: newest checkpoints that are kept.
            shared: whether other runs' checkpoints may stand there; if not, those of a training of this name are this one's.
            output: the artifact that the training is for: where it is complete, a later attempt has ended.
            before_write: is called in the background before each checkpoint is written, for what has to be there when it is.
        """
        self._root, self._name, self._section = root, name, section
        self._settings, self._parents, self._keep, self._shared = settings, parents, keep, shared
        self._output, self._before_write = output, before_write
        self.dealing: Dealing | None = None
        """Is noted in each checkpoint that is written."""
        key = artifacts.digest({"settings": compatible(settings), "parents": parents})[:16]
        self.uri = storage.join(root, f"{name}-{key}")
        self._generation: Lease | None = None
        self._whole: set[CheckpointEntry] = set()
        """Complete ones, not known to be damaged."""
        self._snapshot, self._writer = Snapshot(), BackgroundWriter(name)
        self._passed_over = False
        """Whether the last one that was due was passed over."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not self._writer.wait(LAST_WAIT_S):
            logger.warning("%s  ends before its last checkpoint is written; the one before counts", self._name)

    # -----------------------------------------------------------------------------------------------------------------
    # Beginning

    def begin(self) -> None:
        """Begin a new attempt: fence off those before it, and remove what they have left half-written; raises as `newest`."""
        if not self.entries():
            self._look_at_others()
        self._generation = claim(self.uri)
        for entry in self.entries():
            if not artifacts.exists(self._uri(entry)):
                storage.remove(self._uri(entry))
                continue
            with suppress(ArtifactError):  # `read` reports it
                artifacts.manifest(self._uri(entry), "checkpoint")
                self._whole.add(entry)
        for name in storage.children(self.uri):
            if name.startswith(_DRAFT):
                storage.remove(storage.join(self.uri, name))

    def _look_at_others(self) -> None:
        """Before a training begins anew: refuse to leave an unfinished one of other settings or inputs behind, or say that there is one."""
        folder = re.compile(rf"{re.escape(self._name)}-[0-9a-f]{{16}}")
        uris = [storage.join(self._root, name) for name in storage.children(self._root) if folder.fullmatch(name)]
        others = [uri for uri in uris if uri != self.uri and _entries(uri)]
        if others and self._shared:
            text = f"the checkpoints at {self._root} are of other settings or inputs"
            logger.info("%s  begins anew: %s", self._name, text)
        for uri in [] if self._shared else others:
            try:
                self._refuse_others(uri, artifacts.manifest(storage.join(uri, _entries(uri)[0].name), "checkpoint"))
            except ArtifactError as error:
                logger.warning("%s  passing over a checkpoint: %s", self._name, error)

    def _refuse_others(self, uri: str, manifest: Manifest) -> None:
        """Refuse a checkpoint of other settings or inputs."""
        was, now = (manifest.settings, manifest.parents), (self._settings, self._parents)
        differing = differences(was, now, section=self._section)
        if differing:
            shown = listed(differing, _SHOWN, last=", and ")
            raise SettingsError(
                f"{self._name}: {uri} holds an unfinished training of other settings or inputs: {shown}; give the old "
                "ones to continue it, remove that folder to begin anew, or choose another output"
            )

    # -----------------------------------------------------------------------------------------------------------------
    # Reading

    def entries(self) -> list[CheckpointEntry]:
        """List all that seem to be there, the one that counts most first."""
        return _entries(self.uri)

    def last_dealing(self) -> Dealing | None:
        """Return what the newest readable checkpoint notes; None where there is none, or it is of an older version."""
        for entry in self.entries():
            with suppress(ArtifactError):  # `read` reports it
                figures = artifacts.manifest(self._uri(entry), "checkpoint").figures
                micro_batches, accumulation = (figures.get(name) for name in Dealing._fields)
                if isinstance(micro_batches, int) and isinstance(accumulation, int):
                    return Dealing(micro_batches, accumulation)
                return None
        return None

    def read(self, entry: CheckpointEntry) -> TrainingState | None:
        """Read a checkpoint, if it is valid; a damaged one is named in the log, one of other settings or inputs a `SettingsError`."""
        uri = self._uri(entry)
        try:
            artifact = artifacts.read(uri, "checkpoint")
            self._refuse_others(uri, artifact)
            return read_state(artifact.path, uri)
        except ArtifactError as error:
            logger.warning("%s  passing over a checkpoint: %s", self._name, error)
            self._whole.discard(entry)
            return None

    def _uri(self, entry: CheckpointEntry) -> str:
        return storage.join(self.uri, entry.name)

    # -----------------------------------------------------------------------------------------------------------------
    # Writing

    def save(self, state: TrainingState, *, needed: bool = False) -> None:
        """Copy a state, unless this attempt has written that step, and write it in the background; as `takes`."""
        if self.takes(state.step, needed=needed):
            self.take(state)

    def take(self, state: TrainingState) -> None:
        """Copy a state that `takes` wants, and write it in the background."""
        self._snapshot.take(state)
        self._writer.start(partial(self._write, state.step), "a checkpoint could not be written", counts=True)

    def takes(self, step: int, *, needed: bool = False) -> bool:
        """Return whether to copy the state after `step` steps, when the write before has ended; this attempt may have written it.

        Where a store holds that write up, the state is passed over: the training continues, and has another one to keep soon.

        Args:
            needed: whether no step follows, so that it is not passed over.

        Raises:
            SupersededError: a later attempt at this training has begun.
            OutputError, StorageError: too many writes in a row have failed, or one does not end.
        """
        # Waits a little for the write before, unless it is known that it does not come to its end at the store.
        patience_s = 0.0 if self._passed_over or storage.is_away() else PATIENCE_S
        if not needed and storage.is_remote(self.uri) and not self._writer.wait(patience_s):
            if not self._passed_over:
                text = (
                    f"the one before is still on its way to {self.uri}; the training continues, and keeps the next one that can be "
                    "written"
                )
                logger.warning("%s  no checkpoint after step %d: %s", self._name, step, text)
            self._passed_over = True
            return False
        self._passed_over = False
        self._wait()
        self.check_failures()
        if self._generation is None:
            self.begin()
        return self._generation is None or CheckpointEntry(self._generation.number, step) not in self._whole

    def check_failures(self) -> None:
        """Raise what the background thread has met that ends the training, as `save` does; takes no time."""
        if self._writer.gives_up:
            self._raise(f"{MOST_FAILURES} or more checkpoints in a row could not be written")

    def finish(self, *, needed: bool = False) -> None:
        """Wait until the last checkpoint is written; raises what `save` does, and what one that is `needed` has failed with.

        It is needed where the training ends with it, without a result.
        """
        self._wait()
        self.check_failures()
        if needed and self._writer.failure is not None:
            self._raise("the last checkpoint could not be written")

    def check_ours(self) -> None:
        """Raise `SupersededError` where a later attempt at this training has begun, before something is written that it writes too.

        A store that has lost the record of the attempts says nothing of a later one: this attempt's is written again.
        """
        if self._generation is None:
            return
        standing = self._generation.state()
        # A later attempt that has ended and left its output has removed its checkpoints then, and the claims with them.
        is_complete = standing == "gone" and bool(self._output) and artifacts.exists(self._output)
        if standing == "gone" and not is_complete:
            if self._generation.acquire():
                text = f"is gone from {self.uri}, and was written again; checkpoints may be gone from there too"
                logger.warning("%s  the record of attempt %d %s", self._name, self._generation.number, text)
                return
            standing = self._generation.state()
        if standing != "newest":
            raise SupersededError(
                f"{self._name}: superseded: this is attempt {self._generation.number} of this training, and a later one has begun, or has "
                f"ended, at {self.uri}; this one writes nothing more; see to the later one"
            )

    def remove(self) -> None:
        """Drop all checkpoints: the training has ended and its result is kept."""
        self._wait()
        storage.remove(self.uri)

    def _wait(self) -> None:
        """Wait for what is under way, as long as processes wait for one another."""
        limit_s = wait_limit_s()
        if not self._writer.wait(limit_s):
            raise OutputError(
                f"{self._name}: a checkpoint is still being written to {self.uri} after {limit_s:g} s of waiting for it; see to that disk "
                "or store, then run the same command again"
            )

    def _raise(self, what: str) -> None:
        """Raise what the last write has failed with, and say what is left; an error that is not of storage is raised as it is."""
        error = self._writer.failure
        assert error is not None, "a write has failed"
        if not isinstance(error, TRANSIENT):
            raise error
        kind = type(error) if isinstance(error, TrainerError) else OutputError
        last = max(self._whole, default=None)
        left = f"the same command resumes from {self._uri(last)}, which is whole" if last else "there is no other one"
        raise kind(f"{self._name}: {what}: {error}; {left}") from error

    def _write(self, step: int) -> None:
        """In the background: write the snapshot, then drop old ones."""
        assert self._generation is not None, "an attempt begins before something is saved"
        self.check_ours()
        self._before_write()
        entry = CheckpointEntry(self._generation.number, step)
        figures = {"step": step, **(self.dealing._asdict() if self.dealing else {})}
        try:
            self._write_snapshot(self._uri(entry), figures)
        except TRANSIENT:
            self.check_ours()  # a later attempt removes what this one has half-written
            raise
        self._whole.add(entry)
        try:
            present = self.entries()
            self._whole &= set(present)  # a store may lose some
            kept = sorted(self._whole, reverse=True)[: self._keep]
            for old in present:
                if old not in kept and old.generation <= self._generation.number:  # those of a later attempt stay
                    artifacts.remove(self._uri(old))
                    self._whole.discard(old)
        except (OutputError, StorageError) as error:  # when the next one is written it is tried again
            logger.warning("%s  old checkpoints stay: %s", self._name, error)

    def _write_snapshot(self, uri: str, figures: Mapping[str, Any]) -> None:
        if storage.is_remote(uri):
            self._write_artifact(uri, figures)
            return
        path = storage.local_path(uri)
        draft = path.with_name(f".{path.name}")
        try:
            self._write_artifact(draft, figures)
            self.check_ours()
            with writing_to(path):
                draft.rename(path)
                storage.flush(path.parent)
        finally:
            shutil.rmtree(draft, ignore_errors=True)  # of one that failed; its bytes may be what fills the disk

    def _write_artifact(self, uri: str | Path, figures: Mapping[str, Any]) -> None:
        with artifacts.create(uri, "checkpoint", settings=self._settings, parents=self._parents) as draft:
            draft.figures.update(figures)
            self._snapshot.write(draft.path)


def newest(checkpoints: Checkpoints, processes: Processes) -> TrainingState | None:
    """Begin a new attempt at a training: from the newest checkpoint that is valid on all its processes; a damaged one is passed over.

    Raises:
        TrainingError: the processes do not see the same checkpoints.
        SettingsError: an unfinished training of other settings or inputs stands in the way.
        OutputError: the folder cannot be written.
    """
    if processes.is_first:
        checkpoints.begin()
    processes.barrier("the start of an attempt at its checkpoints")
    found = processes.gather(checkpoints.entries(), "the checkpoints that each process finds")
    if any(found) and not all(found):
        lacking = ", ".join(str(rank) for rank, entries in enumerate(found) if not entries)
        raise TrainingError(
            f"process {lacking} of {processes.world_size} finds no checkpoints at {checkpoints.uri}, where others find some; let "
            "TRAINER_CHECKPOINTS name a place that all machines reach, such as s3://BUCKET/NAME"
        )
    for entry in sorted(set.intersection(*map(set, found)), reverse=True):
        state = checkpoints.read(entry)
        if all(processes.gather(state is not None, f"the reading of {entry.name}")):
            return state
    return None


def _entries(uri: str) -> list[CheckpointEntry]:
    matches = (_NAME.fullmatch(name) for name in storage.children(uri))
    return sorted((CheckpointEntry(int(match[2]), int(match[1])) for match in matches if match), reverse=True)


# ---------------------------------------------------------------------------------------------------------------------
# Settings with which a training may resume


def compatible(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide what is learned."""
    return {
        name: compatible(value) if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if name not in CHANGEABLE_ON_RESUME
    }


def differences(
    was: tuple[Mapping[str, Any], Mapping[str, str]], now: tuple[Mapping[str, Any], Mapping[str, str]], *, section: str
) -> list[str]:
    """List what keeps a training from resuming, each difference in a few words."""
    settings = [flatten(compatible(with_present_names(side[0], section)), section) for side in (was, now)]
    inputs = [{f"input {name}": value[:_SHOWN_DIGITS] for name, value in side[1].items()} for side in (was, now)]
    return [
        f"{name} was {before.get(name, 'not there')}, is {after.get(name, 'not there')}"
        for before, after in (settings, inputs)
        for name in {**after, **before}
        if name not in before or name not in after or before[name] != after[name]
    ]
