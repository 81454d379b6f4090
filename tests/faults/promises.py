"""What is promised of a job that a fault strikes, checked."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.faults.inside import NONE, Fault
from tests.faults.jobs import Ending, Job
from trainer.io import storage

Start = Callable[..., Ending]
"""`Job.run` or `Job.fork`."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A promise that was kept."""

    outcome: str
    seconds: float
    """From the fault to the end of the command that it struck."""
    recovered_s: float | None = None
    """From the fault until the same command, given again at once, had done all that was done before; none where it need not be given."""
    repeated: int | None = None
    """Steps of the training that were done twice."""


def stops(job: Job, fault: Fault = NONE, *, code: int, message: str, start: Start = Job.run) -> Kept:
    """The job ends with this exit code and message, and nothing half-written is believed.

    Raises:
        AssertionError: one of that is not so.
    """
    ending = start(job, fault)
    _check_stop(ending, code, message)
    assert not job.believed(), "an output says that it is complete"
    return Kept(
        outcome=f"stopped ({_ended(code)}) with its message", seconds=ending.ended - (ending.fired or ending.began)
    )


def stops_and_goes_on(
    job: Job,
    whole: Mapping[str, str],
    fault: Fault = NONE,
    *,
    code: int,
    message: str = "",
    start: Start = Job.run,
    mend: Callable[[], None] = lambda: None,
) -> Kept:
    """The fault ends the job with this exit code and message, nothing half-written is believed, and the same command goes on to the same
    result.

    Args:
        job: is started twice.
        whole: the result.
        fault: what strikes; nothing where something outside of the job does.
        code: the exit code, or minus the number of a signal.
        message: regular expression of what the first command says.
        start: how it is started.
        mend: puts an end to what strikes from outside.

    Raises:
        AssertionError: one of that is not so.
    """
    broken = start(job, fault)
    assert broken.fired is not None, f"{fault} did not strike; the job ended with {broken.code}: {broken.said[-1500:]}"
    _check_stop(broken, code, message)
    mend()
    believed = job.believed()
    again = start(job)
    goes_through(job, whole, again)
    complete = f", {len(believed)} outputs complete" if believed else ""
    return Kept(
        outcome=f"stopped ({_ended(broken.code)}){complete}, then the same result",
        seconds=broken.ended - broken.fired,
        recovered_s=again.recovered(broken),
        repeated=again.repeats(broken) if job.trains else None,
    )


def goes_on(
    job: Job, whole: Mapping[str, str], fault: Fault = NONE, *, message: str = "", start: Start = Job.run
) -> Kept:
    """The fault strikes, and the job comes to the same result all the same.

    Raises:
        AssertionError: one of that is not so.
    """
    ending = start(job, fault)
    assert ending.fired is not None, f"{fault} did not strike: {ending.said[-1500:]}"
    assert re.search(message, ending.said), f"did not say {message!r}: {ending.said[-3000:]}"
    goes_through(job, whole, ending)
    return Kept(outcome="the same result", seconds=ending.ended - ending.fired)


def goes_through(job: Job, whole: Mapping[str, str], ending: Ending) -> None:
    """The job came to its result, and what it needed meanwhile is gone."""
    assert ending.code == 0, f"ended with {ending.code}: {ending.said[-3000:]}"
    result = job.result()
    differing = sorted(name for name in whole.keys() | result.keys() if whole.get(name) != result.get(name))
    assert not differing, f"not the same result as undisturbed: {', '.join(differing[:5])}"
    left = storage.files(job.checkpoints)
    assert not left, f"left behind: {', '.join(sorted(left)[:5])}"


def _check_stop(ending: Ending, code: int, message: str) -> None:
    assert ending.code == code, f"ended with {ending.code} instead of {code}: {ending.said[-3000:]}"
    assert re.search(message, ending.said), f"did not say {message!r}: {ending.said[-3000:]}"
    assert not message or "Traceback" not in ending.said, f"showed a traceback: {ending.said[-3000:]}"


def _ended(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
