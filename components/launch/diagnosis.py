"""Why a job failed: which replica is the cause, its last words, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from components.launch.job_progress import JobProgress, Termination
from trainer.errors import CRASH_EXIT_CODE, CRASHED_NODE_EXIT_CODE, EXIT_CODE, PREEMPTED_EXIT_CODE

SHOWN_LINES = 5
_PLAIN_REASONS = {"", "Completed", "Error"}
"""Reasons of a container that ended by itself, or was killed without Kubernetes."""
_KILLED = 137  # 128 + SIGKILL
_RESUME = "run again, which resumes from the last checkpoint"
_IMAGE_ADVICE = "the image does not fit: check the pool's image and TRAINER_IMAGE"
_CRASH_ADVICE = "it crashed below Python; its log above may say where"

_ADVICE_BY_REASON: Mapping[str, str] = {
    "OOMKilled": "it ran out of memory: lower batch_size (and raise accumulation), or choose a pool with more memory",
    "Evicted": f"its node ran short of something: {_RESUME}, or raise the pool's resources",
    "DeadlineExceeded": "raise the pool's running_minutes",
    "ContainerCannotRun": _IMAGE_ADVICE,
    "StartError": _IMAGE_ADVICE,
}
_DISRUPTION_ADVICE = (
    f"its machine was taken away: {_RESUME}; a pool without spot nodes is not interrupted, "
    "one with retries starts again by itself"
)
_ADVICE_BY_EXIT_CODE: Mapping[int, str] = {
    CRASH_EXIT_CODE: "its log above has the traceback",
    CRASHED_NODE_EXIT_CODE: "its log above has the traceback",
    126: _IMAGE_ADVICE,  # the command cannot be executed
    127: _IMAGE_ADVICE,  # the command is not there
    134: _CRASH_ADVICE,  # SIGABRT
    _KILLED: "it was killed from outside; if the node ran out of memory, lower batch_size or choose a larger pool",
    139: _CRASH_ADVICE,  # SIGSEGV
    PREEMPTED_EXIT_CODE: f"it was asked to end from outside: {_RESUME}",
}


def fails_again(progress: JobProgress) -> bool:
    """Return whether the same job would fail again: the trainer itself ended it with a message, such as for a wrong setting."""
    culprit = _culprit(progress)
    return culprit is not None and culprit.exit_code == EXIT_CODE


def explain_failure(job: str, describe: str, progress: JobProgress) -> str:
    """Return the message for a failed job.

    Args:
        job: its name.
        describe: a command that shows more.
        progress: what was observed of it.
    """
    state = progress.state
    failed = f"job {job} failed ({state.reason})" if state.reason else f"job {job} failed"
    culprit = _culprit(progress)
    if culprit is None:
        missing = {
            name: f"had not started{f' ({one.waiting})' if one.waiting else ''}"
            for name, one in progress.replicas.items()
            if not one.placed
        } | progress.lost
        reasons = [state.message.rstrip(".") or "no replica reports why"]
        reasons += [f"{name} {what}" for name, what in sorted(missing.items())]
        problem = f"; last problem: {progress.problem}" if progress.problem else ""
        return f"{failed}: {'; '.join(reasons)}{problem}; see `{describe}`"
    ended = f"{failed}: {culprit.replica} {culprit}"
    if culprit.message:
        return f"{ended}: {culprit.message}{_advice(culprit)}"
    lines = list(progress.log_tails.get(culprit.replica, ()))[-SHOWN_LINES:]
    shown = "".join(f"\n    {culprit.replica} | {line}" for line in lines)
    return f"{ended}{_advice(culprit)}" + (f"; its last lines:{shown}" if shown else "")


def _culprit(progress: JobProgress) -> Termination | None:
    ended = [(one.ended, one.running) for one in progress.replicas.values() if one.ended]
    # A replica that was seen running again, and then no more, is the cause only if no other one is.
    return first_failure([end for end, running in ended if not running], progress.last_line_at) or first_failure(
        [end for end, _ in ended], progress.last_line_at
    )


def first_failure(ends: Iterable[Termination], last_line_at: Mapping[str, float]) -> Termination | None:
    """Return the termination that caused the others; None if none failed.

    Args:
        ends: how each replica ended.
        last_line_at: replica -> when its last line came.
    """
    failed = [end for end in ends if end.exit_code != 0]
    # Times are in whole seconds; within one, the replica that fell silent first failed first.
    return min(failed, key=lambda end: (_rank(end), end.finished, last_line_at.get(end.replica, 0.0)), default=None)


def _rank(end: Termination) -> int:
    # What Kubernetes ended (out of memory, evicted, preempted) comes first: the others fail as soon as they miss it, even before it
    # has ended.
    if end.reason not in _PLAIN_REASONS:
        return 0
    # Those that were asked to end, or missed another one, ended because of it; a kill may come from the operator's cleaning up.
    if end.asked_to_end:
        return 4
    if end.missed_another:
        return 3
    return 2 if end.exit_code == _KILLED else 1


def _advice(end: Termination) -> str:
    known = _ADVICE_BY_REASON.get(end.reason)
    if known is None and (end.exit_code is None or end.reason not in _PLAIN_REASONS):
        known = _DISRUPTION_ADVICE
    if known is None and not end.message:
        known = _ADVICE_BY_EXIT_CODE.get(end.exit_code or 0)
    return f"; {known}" if known else ""
