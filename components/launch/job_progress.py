"""What is known of a job: the status of its pods, its lines and its events go in; messages, the outcome and its cause come out.

Nothing here waits, reads a clock or asks a server; the launcher does.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from components.launch.job_manifest import JobState
from trainer.io.errors import (
    CRASH_EXIT_CODE,
    CRASHED_NODE_EXIT_CODE,
    EXIT_CODE,
    INTERRUPTED_EXIT_CODE,
    MISSED_ANOTHER,
    PREEMPTED_EXIT_CODE,
)
from trainer.io.formatting import duration

STUCK_S = 300.0  # how long a replica may wait for what rarely arrives by itself, such as an image of a wrong name
TAIL_LINES = 10  # last lines of each replica that are kept for messages
_STUCK_REASONS = {
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
}  # reasons of a waiting container that rarely resolve by themselves
_DISRUPTION_REASONS = {
    "PreemptionByScheduler",
    "DeletionByTaintManager",
    "EvictionByEvictionAPI",
    "DeletionByPodGC",
    "TerminationByKubelet",
}  # reasons of the pod condition DisruptionTarget: Kubernetes has taken the machine away
_NORMAL_PROBLEMS = {"Preempted", "TaintManagerEviction"}  # events of type Normal that are a problem for the job
_UNSCHEDULED = {"FailedScheduling", "Unschedulable"}
"""Events of a pod that waits for a machine; out of date once its replica has one."""
_REPORTED_COUNTS = {10, 100, 1000, 10000}  # how often a problem has to happen to be reported again


@dataclass(frozen=True, kw_only=True)
class Termination:
    """How a replica's container ended, or why its pod was taken away."""

    replica: str
    exit_code: int | None  # None: the pod ended and its container had not started
    reason: str  # Kubernetes' reason: Completed, Error, OOMKilled, Evicted, PreemptionByScheduler, ...
    message: str  # the container's termination message, or Kubernetes' message
    finished: str  # RFC 3339 time, in whole seconds

    @property
    def asked_to_end(self) -> bool:
        """Whether it left on request, as a replica does that is preempted, or that the others leave behind."""
        return self.exit_code in {INTERRUPTED_EXIT_CODE, PREEMPTED_EXIT_CODE}

    @property
    def missed_another(self) -> bool:
        """Whether its message says that another replica was gone."""
        return self.message.endswith(MISSED_ANOTHER)

    @property
    def failed(self) -> bool:
        """Whether it ended by a fault of its own, as far as its status shows."""
        disrupted = self.exit_code is None or self.reason in _DISRUPTION_REASONS
        return self.exit_code != 0 and not (disrupted or self.asked_to_end or self.missed_another)

    def __str__(self) -> str:
        code = "" if self.exit_code is None else f" with exit code {self.exit_code}"
        return f"ended{code}" + (f" ({self.reason})" if self.reason not in {"", "Error", "Completed"} else "")


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One pod of a job."""

    name: str  # such as `worker-0`
    pod: str
    uid: str
    placed: bool  # whether its container runs or ran: it does not wait for a node, an image or a volume
    running: bool = False
    restarts: int = 0
    waiting: str = ""  # why its container waits, such as ImagePullBackOff
    waiting_message: str = ""
    over: bool = False  # whether its container has ended and is not started again
    ended: Termination | None = None  # the last end of its container
    deleting: bool = False  # whether its deletion was requested
    created: str = ""  # RFC 3339 time, in whole seconds

    @property
    def stuck(self) -> bool:
        """Whether it waits for something that rarely arrives by itself."""
        return self.waiting in _STUCK_REASONS


def read_replica(pod: Mapping[str, Any], name: str, container: str) -> Replica:
    """Read the status of a pod as the API shows it; `name` is the replica's, `container` the one that trains."""
    status = pod.get("status", {})
    containers = status.get("containerStatuses") or []
    own: dict[str, Any] = next((one for one in containers if one["name"] == container), {})
    state, over = own.get("state", {}), status.get("phase") in {"Succeeded", "Failed"}
    waiting: dict[str, Any] = {}
    if "running" not in state:
        # An init container comes first, since the others wait for it.
        states = [one.get("state", {}) for one in [*(status.get("initContainerStatuses") or []), *containers]]
        waiting = next((one["waiting"] for one in states if one.get("waiting")), {})
    return Replica(
        name=name,
        pod=pod["metadata"]["name"],
        uid=pod["metadata"]["uid"],
        placed=bool(own.get("restartCount") or state.keys() & {"running", "terminated"} or over),
        running="running" in state,
        restarts=own.get("restartCount", 0),
        waiting=waiting.get("reason", ""),
        waiting_message=waiting.get("message", ""),
        over=over,
        ended=_termination(name, status, own),
        deleting="deletionTimestamp" in pod["metadata"],
        created=pod["metadata"].get("creationTimestamp", ""),
    )


def _termination(name: str, status: Mapping[str, Any], own: Mapping[str, Any]) -> Termination | None:
    end = own.get("state", {}).get("terminated") or own.get("lastState", {}).get("terminated") or {}
    # Why Kubernetes itself ended the pod, if it did.
    disruption: Mapping[str, Any] = status if status.get("phase") == "Failed" and status.get("reason") else {}
    if not disruption:
        conditions = status.get("conditions") or []
        targets = (one for one in conditions if one["type"] == "DisruptionTarget" and one["status"] == "True")
        disruption = next(targets, {})
    if not end and not disruption:
        return None
    return Termination(
        replica=name,
        exit_code=end.get("exitCode"),
        reason=disruption.get("reason") or end.get("reason") or "",
        message=(disruption.get("message") or end.get("message") or "").strip(),
        finished=end.get("finishedAt") or disruption.get("lastTransitionTime") or "",
    )


@dataclass(frozen=True, kw_only=True)
class JobLimits:
    """How long a job may take, in seconds."""

    queued_s: float  # from the start of the wait for machines until all replicas run
    running_s: float  # all replicas running, all periods together
    silent_s: float  # running without a line of output
    retries: int = 0
    """Failures that a replica may have if the operator restarts it; 0: the operator itself fails the job."""


@dataclass(frozen=True, kw_only=True)
class JobOutcome:
    """How a job ended, or which limit it reached."""

    kind: Literal["succeeded", "failed", "deleted", "limit"]
    message: str = ""  # of a limit, at which the job is to be deleted: which one, and the next move
    retryable: bool = False  # of a limit: whether a new job need not reach it again


class JobProgress:
    """The observations of a job."""

    def __init__(self, *, nodes: int, limits: JobLimits, now: float) -> None:
        """Start the clocks, whose `now` is in monotonic seconds in all methods; the job runs once `nodes` replicas run."""
        self.state = JobState(phase="pending")
        self.replicas: dict[str, Replica] = {}
        self.log_tails: dict[str, deque[str]] = {}
        self.last_line_at: dict[str, float] = {}  # replica -> when its last line was written
        self.events: dict[str, Mapping[str, Any]] = {}
        """Uid -> Kubernetes' event, in its last version: an event that happens again keeps its uid and has a higher count."""
        self.lost: dict[str, str] = {}
        """Replica -> how its pod went away without a termination, until a new pod starts in its place."""
        self.replaced: dict[str, Termination] = {}
        """Replica -> the failed end of a pod that another has replaced, until all replicas run again. The training operator may create
        the pods of a job once more that it is about to report as failed; how those end explains nothing."""
        self.problem = ""  # the last problem that is not resolved
        self._problem_about = ""  # the replica that has it, or what else
        self._problem_counts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        """Failures of each replica. Not their sum counts, since one failure makes the other replicas end too."""
        self._last_failure = ""
        self.pods_readable = self.logs_readable = True
        """Without its pods, the job's own state decides; without its logs, silence says nothing."""
        self._log_is_open = True
        self._nodes, self.limits = nodes, limits
        self._deleted = False
        self.running, self._since, self._ran_s = False, now, 0.0  # running: all replicas run
        self._last_output_at = now
        self._stuck, self._stuck_since = False, now
        self._status = ""
        self._messages: list[str] = []

    def take_messages(self) -> list[str]:
        """Return the messages since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def set_job_state(self, state: JobState, *, deleting: bool, now: float) -> None:
        """Record the state of the job; `deleting`: its deletion was requested."""
        self.state, self._deleted = state, deleting
        self._update(now)

    def mark_job_deleted(self) -> None:
        """Record that the job no longer exists."""
        self._deleted = True

    def update_replica(self, replica: Replica, now: float) -> None:
        """Record the state of a pod of the job."""
        before = self.replicas.get(replica.name)
        if before and before.uid != replica.uid and (before.created, replica.over) > (replica.created, before.over):
            return  # a pod that failed and stays, while another one has its place
        self.replicas[replica.name] = replica
        if before and before.uid != replica.uid and before.ended and before.ended.exit_code != 0:
            self.replaced[replica.name] = before.ended
        end = replica.ended
        if end and end != (before and before.ended) and end.exit_code != 0:
            message = f"{end.replica} {end}" + (f": {end.message}" if end.message else "")
            self._messages.append(message)
            if end.failed:  # a machine that was taken away is no failure, however often that happens
                self._failures[end.replica] += 1
                self._last_failure = message
        if replica.stuck and (before is None or before.waiting != replica.waiting):
            self._report_problem(replica.name, f"{replica.waiting}: {replica.waiting_message}")
        if replica.over and not end:
            self._lose(replica, f"{'was deleted' if replica.deleting else 'ended'} before it had started")
        elif replica.placed:
            self.lost.pop(replica.name, None)
            if self._problem_about == replica.name:
                self.problem = self._problem_about = ""
        self._update(now)

    def remove_replica(self, replica: Replica, now: float) -> None:
        """Record that a pod of the job was deleted, in this last state; a new one may have its name already."""
        if self.replicas.get(replica.name, replica).uid == replica.uid:
            if not replica.over:
                self._lose(replica, f"was deleted {'while it ran' if replica.placed else 'before it had started'}")
            self.update_replica(replace(replica, placed=False, over=True, waiting=""), now)

    def add_line(self, replica: str, text: str, now: float, *, age_s: float = 0.0, new: bool = True) -> None:
        """Record a line that a replica wrote `age_s` seconds ago by its node's clock; a `new` one is output of now, whatever that says."""
        self.log_tails.setdefault(replica, deque(maxlen=TAIL_LINES)).append(text)
        self.last_line_at[replica] = now - age_s
        self._last_output_at = now if new else max(self._last_output_at, min(now, now - age_s))

    def set_log_state(self, now: float, *, readable: bool) -> None:
        """Record whether the log that is followed can be read: where its node does not answer, silence says nothing."""
        self._log_is_open, self._last_output_at = readable, now

    def add_event(self, about: str, event: Mapping[str, Any]) -> None:
        """Record an event of Kubernetes; `about`: the job, one of its replicas, or what else was made for it."""
        uid = event["metadata"]["uid"]
        if self.events.get(uid) == event:
            return
        self.events[uid] = event
        reason, message = event.get("reason") or "", (event.get("message") or "").strip()
        if event.get("type") != "Warning" and reason not in _NORMAL_PROBLEMS:
            return
        count = event.get("count") or (event.get("series") or {}).get("count") or 1
        replica = self.replicas.get(about)
        resolved = reason in _UNSCHEDULED and (self.running or (replica is not None and replica.placed))
        self._report_problem(about, f"{reason}: {message}", count, resolved=resolved)

    def outcome(self, now: float) -> JobOutcome | None:
        """Return how the job has ended, or which limit it has reached; None while it continues."""
        if self.state.phase in {"succeeded", "failed"}:
            return JobOutcome(kind="succeeded" if self.state.phase == "succeeded" else "failed")
        if self._deleted:
            return JobOutcome(kind="deleted")
        again = [one.ended for one in self.replicas.values() if one.restarts and one.ended]
        if refused := next((end for end in again if end.exit_code == EXIT_CODE), None):
            message = (
                f"would fail again, but its pods are started again: {refused.replica} {refused}: {refused.message}"
            )
            return JobOutcome(kind="limit", message=message)
        failures, retries = max(self._failures.values(), default=0), self.limits.retries
        if retries and failures > retries:
            message = (
                f"has failed {failures} times, and its pool allows {retries} retries; the last time {self._last_failure}; fix that and "
                "run again, which resumes from the last checkpoint, or raise the pool's retries"
            )
            return JobOutcome(kind="limit", message=message)
        for limit_s, since, outcome in self._current_limits():
            if now - since >= limit_s:
                return outcome
        return None

    def next_limit_s(self, now: float) -> float:
        """Return the seconds until the next limit, if nothing is observed until then."""
        return max(0.0, min(since + limit_s - now for limit_s, since, _ in self._current_limits()))

    def _current_limits(self) -> Iterator[tuple[float, float, JobOutcome]]:
        """Yield the limits that apply now: seconds, the start of their clock, and the outcome when they are reached."""
        if self.running:
            yield from self._running_limits()
            return
        limit_s = self.limits.queued_s
        message = (
            f"was not running after {duration(limit_s)} ({self._status})"
            + (f"; last problem: {self.problem}" if self.problem else "")
            + "; choose another pool or fewer nodes, or raise the pool's queued_minutes"
        )
        yield limit_s, self._since, JobOutcome(kind="limit", message=message)
        if self._stuck:
            # The status names the image; Kubernetes' events are shorter and leave it out.
            stuck = next(one for one in self.replicas.values() if one.stuck)
            message = (
                f"could not start for {duration(STUCK_S)}; last problem: {stuck.name}: {stuck.waiting}: "
                f"{stuck.waiting_message}; fix that and run again"
            )
            yield STUCK_S, self._stuck_since, JobOutcome(kind="limit", message=message)

    def _running_limits(self) -> Iterator[tuple[float, float, JobOutcome]]:
        running_s, silent_s = self.limits.running_s, self.limits.silent_s
        message = (
            f"ran for {duration(running_s)}, the longest that its pool allows; run again, which resumes from the last "
            "checkpoint, or raise the pool's running_minutes"
        )
        yield running_s - self._ran_s, self._since, JobOutcome(kind="limit", message=message)
        if self.logs_readable and self._log_is_open:
            last = ""
            if self.last_line_at:
                replica = max(self.last_line_at, key=lambda name: self.last_line_at[name])
                last = f" (the last was {replica}'s: {self.log_tails[replica][-1]})"
            message = (
                f"wrote no line for {duration(silent_s)}, so it seems to hang{last}; read the lines above, "
                "or raise the pool's silent_minutes"
            )
            # A new job resumes from the last checkpoint and need not hang.
            yield silent_s, self._last_output_at, JobOutcome(kind="limit", message=message, retryable=True)

    def _lose(self, replica: Replica, how: str) -> None:
        """Record a pod that went away without a termination."""
        if self.state.phase == "succeeded":  # the operator removes what is left
            return
        # After a failure too: what is removed then must not hide an earlier loss.
        cleaned_up = self.state.phase == "failed" and self.lost
        if replica.name not in self.lost and not replica.ended and not cleaned_up:
            self.lost[replica.name] = how
            self._messages.append(f"{replica.name} {how}")

    def _update(self, now: float) -> None:
        """Switch between waiting and running, and report a new status."""
        placed = sum(replica.placed for replica in self.replicas.values())
        enough = placed >= self._nodes or not self.pods_readable
        running = self.state.phase in {"running", "restarting"} and enough
        if running:
            self.replaced.clear()
        if running != self.running:
            self._ran_s += now - self._since if self.running else 0.0
            self.running, self._since, self._last_output_at = running, now, now
            if running:
                self.problem = self._problem_about = ""
        stuck = any(replica.stuck for replica in self.replicas.values())
        if stuck != self._stuck:
            self._stuck, self._stuck_since = stuck, now
        phase, status = self.state.phase, str(self.state.phase)
        if phase == "suspended":
            status = "suspended, waiting in its queue"
        elif phase in {"pending", "running"} and self.pods_readable:
            word = "running" if self.running else "waiting for its machines"
            status = f"{word} ({min(placed, self._nodes)} of {self._nodes} replicas)"
        elif phase in {"restarting", "failed"} and self.state.message:
            status = f"{phase}: {self.state.message}"
        if status != self._status:
            self._status = status
            self._messages.append(status)

    def _report_problem(self, about: str, what: str, count: int = 1, *, resolved: bool = False) -> None:
        """Report a problem the first time, and again when its count has reached the next of `_REPORTED_COUNTS`.

        Equal problems have an equal text `what`; a `resolved` one no longer explains why the job waits.
        """
        text = f"{about}: {what}"
        before = self._problem_counts[text]
        if not resolved:
            self.problem, self._problem_about = text, about
        self._problem_counts[text] = now = max(before + 1, count)
        if before == 0:
            self._messages.append(text)
        elif any(before < number <= now for number in _REPORTED_COUNTS):
            self._messages.append(f"{text} ({now} times so far)")


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
    culprit = _root_failure(progress)
    return culprit is not None and culprit.exit_code == EXIT_CODE


def explain_failure(job: str, describe: str, progress: JobProgress) -> str:
    """Return the message for a failed job; `describe` is a command that shows more."""
    state = progress.state
    failed = f"job {job} failed ({state.reason})" if state.reason else f"job {job} failed"
    culprit = _root_failure(progress)
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


def _root_failure(progress: JobProgress) -> Termination | None:
    ended = [(one.ended, one.running) for one in progress.replicas.values() if one.ended]
    ended += [(end, False) for end in progress.replaced.values()]
    # A replica that was seen running again, and then no more, is the cause only if no other one is.
    return first_failure([end for end, running in ended if not running], progress.last_line_at) or first_failure(
        [end for end, _ in ended], progress.last_line_at
    )


def first_failure(ends: Iterable[Termination], last_line_at: Mapping[str, float]) -> Termination | None:
    """Return the termination that caused the others, from those of all replicas; None if none failed."""
    failed = [end for end in ends if end.exit_code != 0]
    # Times are in whole seconds; within one, the replica that fell silent first failed first.
    return min(failed, key=lambda end: (_rank(end), end.finished, last_line_at.get(end.replica, 0.0)), default=None)


def _rank(end: Termination) -> int:
    # What Kubernetes ended (out of memory, evicted, preempted) comes first: the others fail as soon as they miss it, even before it
    # has ended.
    if end.reason not in _PLAIN_REASONS:
        return 0
    # Replicas that were terminated or lost a peer are victims, not causes; SIGKILL may be the operator cleaning up.
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
