"""The rule on the teacher's part of a distillation's steps, which recorded outputs take out of them."""

from __future__ import annotations

from trainer import formatting
from trainer.config import ReinforceSettings
from trainer.profiling.rules.causes import remaining_s
from trainer.profiling.rules.outcomes import Case, Finding, Healthy, NotJudged, Outcome, Rule, Saving
from trainer.profiling.rules.system.compared_steps import Steps
from trainer.profiling.rules.system.tracing import is_traced
from trainer.profiling.throughput import phase_shares

_PHASE = "teacher_forward"
_VIEWS = ReinforceSettings().views
"""Passes over the training images that a recording takes by default, where the run's settings are not known."""


def _teacher_share(case: Case) -> Outcome:
    steps, limit = Steps(case), case.rules.teacher_share.share
    rank, settings = steps.ranks[0], steps.record.context.settings
    if settings.get("teacher") != "online" or _PHASE not in rank.ranges:
        return NotJudged(reason="no teacher runs in the steps")
    if is_traced(rank):
        return NotJudged(reason="on XLA a step is one graph, in which the teacher's part is not seen")
    if steps.too_few:
        return steps.too_few
    share = phase_shares(rank).get(_PHASE, 0.0)
    summary = f"The teacher's forward pass takes {formatting.percent(share)} of a step"
    if share <= limit:
        return Healthy(text=f"{summary}.")
    epochs, views = int(settings["epochs"]), case.rules.teacher_share.views or _VIEWS
    seconds = share * (steps.total_s + remaining_s(case))
    return Finding(
        severity="note",
        confidence=0.7,
        text=(
            f"{summary}: from recorded outputs a step would be up to {1 / (1 - share):.2g} times as fast. To record them the teacher "
            f"sees each image {views} times (reinforce.views), once for all distillations; in this one it sees each image "
            f"{epochs} times, once an epoch."
        ),
        advice=(
            f"Set distill.teacher=recorded{' and reinforce.features=true' if settings.get('feature_weight') else ''}: "
            f"{_when_it_pays(epochs, views)}. The student then sees each image in these views only."
        ),
        saving=_saving(seconds, epochs, views),
        numbers={"teacher_share": share, "teacher_s": seconds},
        steps=steps.span,
    )


def _when_it_pays(epochs: int, views: int) -> str:
    if epochs > views:
        return f"it pays in one distillation already, because {epochs} epochs are more than {views} views"
    distillations = views // epochs + 1
    return f"it pays where there are at least {distillations} distillations of {epochs} epochs, or with reinforce.views below {epochs}"


def _saving(seconds: float, epochs: int, views: int) -> Saving | None:
    """Estimate what one distillation saves, less the recording; None where that takes as long as the teacher in its steps."""
    if epochs <= views:
        return None
    return Saving(
        seconds=seconds * (1 - views / epochs),
        reason=f"the teacher's time in the steps, less that of {views} views in place of {epochs} epochs; the next distillation saves all",
    )


TEACHER_SHARE = Rule(
    name="teacher_share",
    kind="system",
    title="Teacher in every step",
    needs="phase `teacher_forward` of the steps",
    fires=(
        "the teacher's forward pass takes more than `share` of the steps' time; this is a note, which spoils no verdict. The saving is the "
        "teacher's time less that of recording its outputs; there is none where the epochs are not more than `views`"
    ),
    advises="recorded outputs, and when they pay",
    judge=_teacher_share,
)
