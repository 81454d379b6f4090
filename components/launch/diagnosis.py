"""Why a job failed: which replica is to blame, what it said, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from components.launch.progress import JobProgress
from components.launch.replicas import Replica, Termination
from trainer.errors import CRASH_EXIT_CODE, CRASHED_NODE_EXIT_CODE, EXIT_CODE, PREEMPTED_EXIT_CODE

SHOWN_LINES = 5
_PLAIN_ENDS = {"", "Completed", "Error"}
"""Reasons by which a container ended of itself, or was ended by whoever."""
_KILLED = 137
_AGAIN = "run again, which goes on from the last checkpoint"

_ADVICE_BY_REASON: Mapping[str, str] = {
    "OOMKilled": "it ran out of memory: lower batch_size (and raise accumulation), or choose a pool with more memory",
    "Evicted": f"its node ran short of something: {_AGAIN}, or raise the pool's resources",
    "DeadlineExceeded": "raise the pool's running_minutes",
    "ContainerCannotRun": "the image does not fit: check the pool's image and TRAINER_IMAGE",
    "StartError": "the image does not fit: check the pool's image and TRAINER_IMAGE",
}
_TAKEN_AWAY = f"its machine was taken away: {_AGAIN}; a pool without spot nodes is not interrupted, one with retries starts again by itself"
_ADVICE_BY_EXIT_CODE: Mapping[int, str] = {
    CRASH_EXIT_CODE: "its log above has the traceback",
    CRASHED_NODE_EXIT_CODE: "its log above has the traceback",
    126: "the image does not fit: check the pool's image and TRAINER_IMAGE",
    127: "the image does not fit: check the pool's image and TRAINER_IMAGE",
    134: "it crashed below Python; its log above may say where",
    137: "it was killed from outside; if the node ran out of memory, lower batch_size or choose a larger pool",
    139: "it crashed below Python; its log above may say where",
    PREEMPTED_EXIT_CODE: f"it was asked to end from outside: {_AGAIN}",
}


def fails_again(progress: JobProgress) -> bool:
    """Whether the same job would fail again: the trainer itself ended it with a message, such as for a wrong setting."""
    culprit = _culprit(progress)
    return culprit is not None and culprit.exit_code == EXIT_CODE


def explain_failure(job: str, look: str, progress: JobProgress) -> str:
    """The message for a failed job.

    Args:
        job: its name.
        look: a command that shows more.
        progress: all that was seen of it.
    """
    state = progress.state
    failed = f"job {job} failed ({state.reason})" if state.reason else f"job {job} failed"
    culprit = _culprit(progress)
    if culprit is None:
        said = "; ".join([state.message.rstrip(".") or "no replica told why", *_missing(progress)])
        trouble = f"; last trouble: {progress.trouble}" if progress.trouble else ""
        return f"{failed}: {said}{trouble}; see `{look}`"
    said = f": {culprit.message}" if culprit.message else ""
    lines = "" if culprit.message else _last_lines(culprit.replica, progress.tails.get(culprit.replica, ()))
    return f"{failed}: {culprit.replica} {culprit}{said}{_advice(culprit)}{lines}"


def _missing(progress: JobProgress) -> list[str]:
    """Replicas that did not end but were deleted, or that never started, in words."""
    waiting = {
        name: f"had not started{f' ({one.waiting})' if one.waiting else ''}"
        for name, one in progress.replicas.items()
        if not one.placed
    }
    return [f"{name} {what}" for name, what in sorted((waiting | progress.lost).items())]


def _culprit(progress: JobProgress) -> Termination | None:
    ended = [one for one in progress.replicas.values() if one.ended]
    # One that was seen running again, and then no more, failed in the end if nothing else did.
    return _first([one for one in ended if not one.running], progress) or _first(ended, progress)


def _first(replicas: Iterable[Replica], progress: JobProgress) -> Termination | None:
    return first_failure([one.ended for one in replicas if one.ended], progress.heard)


def first_failure(ends: Iterable[Termination], heard: Mapping[str, float]) -> Termination | None:
    """The one that is to blame; None if none failed.

    What Kubernetes itself ended (out of memory, evicted, preempted) goes first, since the others fail as soon as they miss it,
    even before it has ended. Then those that failed of themselves, those that were killed, those that say that they missed another one,
    and last those that were asked to end. Of equals the earliest; times are in whole seconds, and within one who fell silent
    first failed first.

    Args:
        ends: how each replica ended.
        heard: replica -> when its last line came.
    """
    failed = [end for end in ends if end.exit_code != 0]
    return min(failed, key=lambda end: (_weight(end), end.finished, heard.get(end.replica, 0.0)), default=None)


def _weight(end: Termination) -> int:
    if end.reason not in _PLAIN_ENDS:
        return 0
    if end.asked_to_end:
        return 4
    if end.missed_another:
        return 3
    return 2 if end.exit_code == _KILLED else 1


def _advice(end: Termination) -> str:
    known = _ADVICE_BY_REASON.get(end.reason)
    if known is None and (end.exit_code is None or end.reason not in _PLAIN_ENDS):
        known = _TAKEN_AWAY
    if known is None and not end.message:
        known = _ADVICE_BY_EXIT_CODE.get(end.exit_code or 0)
    return f"; {known}" if known else ""


def _last_lines(replica: str, lines: Iterable[str]) -> str:
    shown = "".join(f"\n    {replica} | {line}" for line in list(lines)[-SHOWN_LINES:])
    return f"; its last lines:{shown}" if shown else ""
