"""How a job goes: what was seen of it goes in, what to tell and how it ended comes out.

Nothing here waits, reads a clock or talks to a server; `following` does.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from components.launch.api_errors import format_duration
from components.launch.replicas import Replica, Termination
from components.launch.state import JobState

STUCK_S = 300.0
"""How long a replica may wait for what seldom comes by itself, such as an image of another name."""
TAIL_LINES = 10
"""Last lines of each replica that are kept for the message."""
_TROUBLE = frozenset({"Preempted", "TaintManagerEviction"})
"""Events that Kubernetes calls normal, though whoever waits for the job wants to know."""
_UNSCHEDULED = frozenset({"FailedScheduling", "Unschedulable"})
"""Events of waiting for a machine; of a replica that has one, they are old."""
_TOLD_AGAIN = frozenset({10, 100, 1000, 10000})


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a job may take, in seconds."""

    queued_s: float
    """From when it starts to wait for machines until all replicas run."""
    running_s: float
    """All replicas running, all periods together."""
    silent_s: float
    """Running without a line of output."""
    retries: int = 0
    """How many failures of a replica it may survive, if it is one that is started again; 0: whoever runs it knows when it has failed."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How it ended, as far as can be told from here."""

    kind: Literal["succeeded", "failed", "deleted", "overdue"]
    message: str = ""
    """Of `overdue`, a job that is to be ended: which limit, and the next move."""
    passing: bool = False
    """Of `overdue`: whether another job need not reach that limit."""


class JobProgress:
    """What is known of a job."""

    def __init__(self, *, nodes: int, limits: Limits, now: float) -> None:
        """Begin.

        Args:
            nodes: how many replicas have to run before it counts as running.
            limits: how long it may take.
            now: seconds on any clock that only goes forward, here and in all methods.
        """
        self.state = JobState(phase="pending")
        self.replicas: dict[str, Replica] = {}
        self.tails: dict[str, deque[str]] = {}
        self.heard: dict[str, float] = {}
        """Replica -> when its last line came."""
        self.events: dict[str, Mapping[str, Any]] = {}
        """Uid -> Kubernetes' event, as it was last: one that happens again is the same, with a higher count."""
        self._nodes, self._limits = nodes, limits
        self._deleted = self._blind = self._deaf = self._stuck = False
        self._since, self._ran_s, self._running = now, 0.0, False
        self._last_sign, self._stuck_since = now, now
        self._counts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        """Replica -> how often it has failed; one failure makes the others end, so it is not their sum that counts."""
        self._last_failure = ""
        self.trouble = self._status = ""
        """The last trouble that is not over."""
        self._about = ""
        """Which replica it is about, or what else."""
        self.lost: dict[str, str] = {}
        """Replica -> how its pod went away without an end of its own, while no other one has started in its place."""
        self._news: list[str] = []

    def news(self) -> list[str]:
        """What has not been told yet, one line each."""
        told, self._news = self._news, []
        return told

    def see_job(self, state: JobState, *, deleting: bool, now: float) -> None:
        """The job is in this state; `deleting`: somebody has asked for its deletion."""
        self.state, self._deleted = state, deleting
        self._judge(now)

    def see_job_gone(self) -> None:
        """The job does not exist any more."""
        self._deleted = True

    def see_replica(self, replica: Replica, now: float) -> None:
        """A pod of the job is in this state."""
        before = self.replicas.get(replica.name)
        self.replicas[replica.name] = replica
        if replica.ended and replica.ended != (before and before.ended) and replica.ended.exit_code != 0:
            self._take_end(replica.ended)
        if replica.stuck and (before is None or before.waiting != replica.waiting):
            self._tell_trouble(replica.name, f"{replica.waiting}: {replica.waiting_message}")
        if replica.over and not replica.ended:
            self._lose(replica, f"{'was deleted' if replica.deleting else 'ended'} before it had started")
        elif replica.placed:
            self.lost.pop(replica.name, None)
            if self._about == replica.name:
                self.trouble = self._about = ""
        self._judge(now)

    def see_replica_gone(self, replica: Replica, now: float) -> None:
        """A pod of the job was deleted, and looked like this last; a new one may have taken its place already."""
        if self.replicas.get(replica.name, replica).uid == replica.uid:
            if not replica.over:
                self._lose(
                    replica, "was deleted while it ran" if replica.placed else "was deleted before it had started"
                )
            self.see_replica(replace(replica, placed=False, over=True, waiting=""), now)

    def see_no_replicas(self) -> None:
        """Pods cannot be seen: the job's own state has to do."""
        self._blind = True

    def see_no_logs(self) -> None:
        """Logs cannot be read: their silence means nothing."""
        self._deaf = True

    def see_line(self, replica: str, text: str, now: float) -> None:
        """A replica has written a line."""
        self.tails.setdefault(replica, deque(maxlen=TAIL_LINES)).append(text)
        self.heard[replica] = self._last_sign = now

    def see_event(self, about: str, event: Mapping[str, Any]) -> None:
        """Kubernetes reports something about the job or one of its pods; `about` says which, in words."""
        self.events[event["metadata"]["uid"]] = event
        reason, message = event.get("reason") or "", (event.get("message") or "").strip()
        if event.get("type") != "Warning" and reason not in _TROUBLE:
            return
        count = event.get("count") or (event.get("series") or {}).get("count") or 1
        replica = self.replicas.get(about)
        over = reason in _UNSCHEDULED and (self._running or (replica is not None and replica.placed))
        self._tell_trouble(about, f"{reason}: {message}", count, over=over)

    def ending(self, now: float) -> Ending | None:
        """How the job has ended, or that its time is up; None while it goes on."""
        if self.state.phase in {"succeeded", "failed"}:
            return Ending(kind="succeeded" if self.state.phase == "succeeded" else "failed")
        if self._deleted:
            return Ending(kind="deleted")
        if self._limits.retries and max(self._failures.values(), default=0) > self._limits.retries:
            return Ending(kind="overdue", message=self._too_often())
        for limit_s, since, overdue in self._clocks():
            if now - since >= limit_s:
                return overdue
        return None

    def next_limit_s(self, now: float) -> float:
        """Seconds until the next limit, if nothing is seen until then."""
        return max(0.0, min(since + limit_s - now for limit_s, since, _ in self._clocks()))

    def _take_end(self, end: Termination) -> None:
        """Tell that a replica did not end well; a machine that is taken away is nobody's failure, and may be as often as it likes."""
        told = f"{end.replica} {end}" + (f": {end.message}" if end.message else "")
        self._news.append(told)
        if end.failed:
            self._failures[end.replica] += 1
            self._last_failure = told

    def _lose(self, replica: Replica, how: str) -> None:
        """Note a pod that went away without an end of its own; what is cleaned up after the job's end hides no earlier one."""
        if self.state.phase == "succeeded":  # the operator removes what is left
            return
        over = self.state.phase == "failed"
        if replica.name not in self.lost and not replica.ended and not (over and self.lost):
            self.lost[replica.name] = how
            self._news.append(f"{replica.name} {how}")

    def _too_often(self) -> str:
        return (
            f"has failed {max(self._failures.values())} times, and its pool allows {self._limits.retries} retries; the last time "
            f"{self._last_failure}; mend that and run again, which goes on from the last checkpoint, or raise the pool's retries"
        )

    def _clocks(self) -> list[tuple[float, float, Ending]]:
        """The limits that hold now: seconds, when they began to count, and the end when they are reached."""
        return self._clocks_of_running() if self._running else self._clocks_of_waiting()

    def _clocks_of_waiting(self) -> list[tuple[float, float, Ending]]:
        limits, because = self._limits, f"; last trouble: {self.trouble}" if self.trouble else ""
        message = (
            f"was not running after {format_duration(limits.queued_s)} ({self._status}){because}; choose another pool or fewer nodes, "
            "or raise the pool's queued_minutes"
        )
        clocks = [(limits.queued_s, self._since, Ending(kind="overdue", message=message))]
        if self._stuck:
            message = f"could not start for {format_duration(STUCK_S)}; last trouble: {self._why_stuck()}; mend that and run again"
            clocks.append((STUCK_S, self._stuck_since, Ending(kind="overdue", message=message)))
        return clocks

    def _why_stuck(self) -> str:
        """What the first replica that is stuck waits for; Kubernetes' events say it shorter, without the image's name."""
        stuck = next(one for one in self.replicas.values() if one.stuck)
        return f"{stuck.name}: {stuck.waiting}: {stuck.waiting_message}"

    def _clocks_of_running(self) -> list[tuple[float, float, Ending]]:
        limits = self._limits
        message = (
            f"ran for {format_duration(limits.running_s)}, the longest that its pool allows; run again, which goes on from the last "
            "checkpoint, or raise the pool's running_minutes"
        )
        clocks = [(limits.running_s - self._ran_s, self._since, Ending(kind="overdue", message=message))]
        if not self._deaf:
            message = (
                f"wrote no line for {format_duration(limits.silent_s)}, so it seems to hang{self._last_line()}; look into the lines above, "
                "or raise the pool's silent_minutes"
            )
            hanging = Ending(kind="overdue", message=message, passing=True)  # it goes on from the last checkpoint
            clocks.append((limits.silent_s, self._last_sign, hanging))
        return clocks

    def _judge(self, now: float) -> None:
        """Move from waiting to running or back, and tell a change."""
        running = self._is_running()
        if running != self._running:
            self._ran_s += now - self._since if self._running else 0.0
            self._running, self._since, self._last_sign = running, now, now
            if running:
                self.trouble = self._about = ""
        stuck = any(replica.stuck for replica in self.replicas.values())
        if stuck != self._stuck:
            self._stuck, self._stuck_since = stuck, now
        status = self._describe()
        if status != self._status:
            self._status = status
            self._news.append(status)

    def _is_running(self) -> bool:
        enough = self._blind or self._placed() >= self._nodes
        return self.state.phase in {"running", "restarting"} and enough

    def _placed(self) -> int:
        return sum(replica.placed for replica in self.replicas.values())

    def _describe(self) -> str:
        phase = self.state.phase
        if phase == "suspended":
            return "suspended, waiting in its queue"
        if phase in {"pending", "running"} and not self._blind:
            word = "running" if self._running else "waiting for its machines"
            return f"{word} ({min(self._placed(), self._nodes)} of {self._nodes} replicas)"
        return f"{phase}: {self.state.message}" if phase in {"restarting", "failed"} and self.state.message else phase

    def _tell_trouble(self, about: str, what: str, count: int = 1, *, over: bool = False) -> None:
        """Tell a trouble when it comes first, and when it has come so often that this is news.

        Args:
            about: the replica, or what else has it.
            what: the same for the same trouble.
            count: how often it came, as far as Kubernetes has counted.
            over: whether it explains nothing that comes now.
        """
        text = f"{about}: {what}"
        before = self._counts[text]
        if not over:
            self.trouble, self._about = text, about
        self._counts[text] = now = max(before + 1, count)
        if before == 0:
            self._news.append(text)
        elif any(before < number <= now for number in _TOLD_AGAIN):
            self._news.append(f"{text} ({now} times by now)")

    def _last_line(self) -> str:
        if not self.heard:
            return ""
        replica = max(self.heard, key=lambda name: self.heard[name])
        return f" (the last was {replica}'s: {self.tails[replica][-1]})"
