"""Why a job failed: which replica is to blame, what it said, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from components.launch.progress import Progress
from components.launch.replicas import Termination

SHOWN_LINES = 5
_BY_KUBERNETES = {"", "Completed", "Error"}
"""Reasons that say nothing of who ended the container."""
_ASKED_TO_END = {130, 137, 143}
"""Exit codes after SIGINT, SIGKILL and SIGTERM: how replicas end because another one failed."""
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
    1: "its log above has the traceback",
    126: "the image does not fit: check the pool's image and TRAINER_IMAGE",
    127: "the image does not fit: check the pool's image and TRAINER_IMAGE",
    134: "it crashed below Python; its log above may say where",
    137: "it was killed from outside; if the node ran out of memory, lower batch_size or choose a larger pool",
    139: "it crashed below Python; its log above may say where",
    143: f"it was asked to end from outside: {_AGAIN}",
}


def explain_failure(job: str, kind: str, progress: Progress) -> str:
    """The message for a failed job.

    Args:
        job: its name.
        kind: its kind, as kubectl takes it.
        progress: all that was seen of it.
    """
    condition = f" ({progress.state.reason})" if progress.state.reason else ""
    replicas = progress.replicas.values()
    last = [replica.ended for replica in replicas if replica.ended and not replica.running]
    culprit = first_failure(last, progress.heard)
    if culprit is None:
        said = progress.state.message or "no replica told why"
        trouble = f"; last trouble: {progress.trouble}" if progress.trouble else ""
        return f"job {job} failed{condition}: {said}{trouble}; see `kubectl describe {kind} {job}`"
    said = culprit.message or _last_lines(culprit.replica, progress.tails.get(culprit.replica, ()))
    return f"job {job} failed{condition}: {culprit.replica} {culprit}{said and f': {said}'}{_advice(culprit)}"


def first_failure(ends: Iterable[Termination], heard: Mapping[str, float]) -> Termination | None:
    """The one that is to blame; None if none failed.

    What Kubernetes itself ended (out of memory, evicted, preempted) goes first, since the others fail as soon as they miss it,
    even before it has ended. Replicas that were asked to end come last. Of the rest, the earliest; times are in whole
    seconds, and within one who fell silent first failed first.

    Args:
        ends: how each replica ended.
        heard: replica -> when its last line came.
    """
    failed = [end for end in ends if end.exit_code != 0]
    return min(failed, key=lambda end: (_weight(end), end.finished, heard.get(end.replica, 0.0)), default=None)


def _weight(end: Termination) -> int:
    if end.reason not in _BY_KUBERNETES:
        return 0
    return 2 if end.exit_code in _ASKED_TO_END else 1


def _advice(end: Termination) -> str:
    known = _ADVICE_BY_REASON.get(end.reason)
    if known is None and end.exit_code is None:
        known = _TAKEN_AWAY
    if known is None and end.reason not in _BY_KUBERNETES:
        known = _TAKEN_AWAY
    if known is None and not end.message:
        known = _ADVICE_BY_EXIT_CODE.get(end.exit_code or 0)
    return f"; {known}" if known else ""


def _last_lines(replica: str, lines: Sequence[str]) -> str:
    shown = list(lines)[-SHOWN_LINES:]
    return "its last lines:" + "".join(f"\n    {replica} | {line}" for line in shown) if shown else ""
