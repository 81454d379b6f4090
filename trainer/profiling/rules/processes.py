"""The rules on training processes beside one another: who waits for whom, and for what.

A process's own work is what it does before it has to wait for the others' gradients: everything but the backward pass. Shapes: R
processes, S steps.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from trainer.config import rules
from trainer.profiling.rules.compared_steps import Steps, winsorized_mean
from trainer.profiling.rules.loading import CoresOversubscribed
from trainer.profiling.rules.outcomes import Case, Finding, Healthy, NotJudged, Outcome, Saving, SystemRule
from trainer.profiling.series import Series

_BLOCKS = 5  # parts of the training, in all but one of which a straggler is slower
_BINS = 10
_UNCERTAIN = 0.1
"""Of the time in which a process had no core, so much may be counted in a neighboring phase: the kernel counts it when it ends."""


def _unjudgeable(case: Case, steps: Steps) -> NotJudged | None:
    """Why processes cannot be compared, if they cannot."""
    if steps.record.world_size == 1:
        return NotJudged("one process trains alone")
    if case.live:
        return NotJudged("while a training runs, only one process's record is at hand")
    if steps.on_gpu and (
        other := case.first_cause(CoresOversubscribed)
    ):  # on a CPU what it takes is left out of each process's work
        return other
    return steps.too_few


def own_work(steps: Steps) -> Series:
    """Compute the seconds of each process's own work in each step, [R, S], without the time that other programs took.

    On XLA the host waits for the device, and so for the other processes, where it hands over the step's graph.
    """
    waiting = ["backward", "dispatch"]
    if steps.record.context.settings.get("zero"):  # then processes exchange weights in the optimizer, too
        waiting.append("optimizer")
    return np.asarray(steps.seconds - steps.phase(*waiting) - steps.delayed + steps.delayed_in("backward"))


class Stragglers(SystemRule, rules.StragglersThresholds):
    """A process that is slower than the others, which wait for it.

    Fires when a process's own work (all but the backward pass) takes longer than that of the others, by more than `slower` of the step,
    all the time.

    Needs all processes' steps, after the training.
    Advises another node; the phase that is slower.
    """

    live: ClassVar = False

    def judge(self, case: Case) -> Outcome:
        steps = Steps(case)
        if unjudgeable := _unjudgeable(case, steps):
            return unjudgeable
        limit, own = self.slower, own_work(steps)
        means = winsorized_mean(own)
        slowest = int(means.argmax())
        behind_s = max(0.0, _behind(own, slowest) - _uncertain_s(steps))
        share = behind_s / steps.step_s
        blocks = [_behind(block, slowest) > limit / 2 * steps.step_s for block in np.array_split(own, _BLOCKS, axis=1)]
        record = steps.ranks[slowest].record
        summary = (
            f"process {slowest} on {record.host} takes {1e3 * means[slowest]:.3g} ms a step for its own work, the others "
            f"{1e3 * (means[slowest] - behind_s):.3g} ms: {share:.0%} of the step"
        )
        if share <= limit or sum(blocks) < _BLOCKS - 1:
            return Healthy(f"Slowest: {summary}.")
        phases = ("data", "to_device", "teacher_forward", "forward", "optimizer", "other")
        phase = max(phases, key=lambda name: _behind(steps.phase(name), slowest))
        return Finding(
            confidence=0.9,
            text=f"The others wait for one: {summary}. Most of it is in `{phase}`.",
            advice=(
                f"Look at {record.host} (other programs, a throttled or broken device, slow storage), replace that node, and keep "
                "pools to machines of one kind."
            ),
            saving=Saving(share * steps.total_s, "the time that the others wait in each step"),
            numbers={"rank": float(slowest), "behind_s": behind_s, "undisturbed_step_s": steps.step_s},
            steps=steps.span,
        )


def _behind(own: Series, number: int) -> float:
    """Compute by how many seconds a process is slower than the others' median, in a usual step."""
    means = winsorized_mean(own)
    return float(means[number] - np.median(np.delete(means, number)))


def _uncertain_s(steps: Steps) -> float:
    """Estimate by how many seconds of a usual step own work may be miscounted on a machine with other work."""
    return _UNCERTAIN * float(winsorized_mean(steps.delayed).max())


class LoadBalance(SystemRule, rules.LoadBalanceThresholds):
    """Processes with unequal work.

    Fires when waiting for the process with the most work takes more than `waiting_share` of the step, or the histograms of two GPUs' use
    are more than `distance` apart; a process that is always the slowest is a straggler instead.

    Needs all processes' steps and, on GPUs, their use, after the training.
    Advises the same work for every process.
    """

    live: ClassVar = False

    def judge(self, case: Case) -> Outcome:
        steps = Steps(case)
        if unjudgeable := _unjudgeable(case, steps):
            return unjudgeable
        if isinstance(case.rule(Stragglers).judge(case), Finding):
            return NotJudged("one process is slower than the others, which comes first (stragglers)")
        own = own_work(steps)
        own = np.minimum(own, np.percentile(own, 95, axis=1, keepdims=True))
        # in which they wait for one that is not always the same
        alternating_s = float(own.max(axis=0).mean() - own.mean(axis=1).max())
        waiting_s, distance = max(0.0, alternating_s - _uncertain_s(steps)), _distance(steps)
        share = waiting_s / steps.step_s
        summary = f"{share:.0%} of each step ({1e3 * waiting_s:.3g} ms) is waiting for the process with the most work"
        if distance is not None:
            summary += f"; the histograms of the GPUs' use are {distance:.2f} apart"
        if share <= self.waiting_share and (distance is None or distance <= self.distance):
            return Healthy(f"{summary[0].upper()}{summary[1:]}.")
        return Finding(
            confidence=0.7,
            text=f"The processes have unequal work: {summary}.",
            advice=(
                "Give every process the same work in each step: images of one size (data.image_size), and no branch in model or "
                "objective that depends on the batch or the process."
            ),
            saving=Saving(share * steps.total_s, "the steps if the work of each were spread evenly"),
            numbers={"waiting_share": share} | ({} if distance is None else {"distance": distance}),
            steps=steps.span,
        )


def _distance(steps: Steps) -> float | None:
    """Largest distance between the histograms of two GPUs' use: half the sum of absolute differences."""
    samples = [rank.system.get("gpu_percent") for rank in steps.ranks]
    shares = [
        np.histogram(values[np.isfinite(values)], bins=_BINS, range=(0, 100))[0] / max(1, np.isfinite(values).sum())
        for values in samples
        if values is not None and len(values)
    ]
    if len(shares) < 2:
        return None
    return max(float(np.abs(one - other).sum() / 2) for one in shares for other in shares)


def _exchange_s(case: Case, steps: Steps) -> float | NotJudged:
    """Measure the seconds of a step in which gradients travel and nothing is computed, without the waiting for slower processes."""
    if unjudgeable := _unjudgeable(case, steps):
        return unjudgeable
    if case.is_traced:
        return NotJudged("XLA exchanges gradients within its graphs, where no clock of the host sees them")
    if not steps.on_gpu:
        # Of a median step, in which no process could continue its backward pass. The threads that exchange gradients lack a core, too,
        # where the training's thread does; what that may have cost is left out.
        blocked = steps.phase("backward") - steps.column("host_backward_cpu_seconds") - steps.delayed_in("backward")
        return max(0.0, float(np.median(blocked.min(axis=0))) - 2 * _uncertain_s(steps))
    measured = [rank.record.communication for rank in steps.ranks]
    exposed = [max(0.0, record.exchange_s - record.hidden_s) for record in measured if record is not None]
    if len(exposed) < len(measured):
        reason = steps.record.missing.get("communication", "too few steps")
        return NotJudged(f"how long gradients travel was not measured: {reason}")
    # Who waits for a slower process does so in the exchange; the process that all wait for waits for nothing but the network.
    own = steps.seconds - steps.phase("backward")
    return float(np.maximum(exposed - (own.max(axis=0) - own).mean(axis=1), 0).min())


def communication_share(case: Case) -> float | None:
    """Compute the share of an undisturbed step in which gradients travel and nothing is computed; None where it was not measured."""
    steps = Steps(case)
    seconds = _exchange_s(case, steps)
    return None if isinstance(seconds, NotJudged) else seconds / steps.step_s


class Communication(SystemRule, rules.CommunicationThresholds):
    """A step that waits for gradients of other processes.

    Fires when the exchange that no computation hides takes more than `share` of the steps' time, without the waiting for slower
    processes.

    Needs all processes' steps, after the training; on GPUs DistributedDataParallel's own times of the exchange of gradients.
    Advises fewer bytes, fewer exchanges, a faster network.
    """

    live: ClassVar = False

    def judge(self, case: Case) -> Outcome:
        steps, limit = Steps(case), self.share
        seconds = _exchange_s(case, steps)
        if isinstance(seconds, NotJudged):
            return seconds
        share = seconds / steps.step_s
        summary = f"{share:.0%} of each step ({1e3 * seconds:.3g} of {1e3 * steps.step_s:.3g} ms undisturbed)"
        if share <= limit:
            return Healthy(f"{summary} waits for gradients that travel.")
        return Finding(
            confidence=0.8,
            text=(
                f"{summary} waits for gradients that travel between {steps.record.world_size} processes, with nothing to compute "
                "meanwhile."
            ),
            advice=(
                "Halve the bytes (gradient_compression=bf16), exchange more rarely (a larger batch_size, or more accumulation at the same "
                "memory), or train on fewer nodes, or ones with a faster network."
            ),
            saving=Saving(share * steps.total_s, "the steps if computation hid the exchange"),
            numbers={"communication_share": share, "exposed_s": seconds, "undisturbed_step_s": steps.step_s},
            steps=steps.span,
        )
