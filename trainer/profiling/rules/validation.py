"""The rules on what the validation split shows: no progress any more, and classes that are taken for others."""

from __future__ import annotations

import math

from trainer.config import rules
from trainer.profiling.rules.learning import LossNotFalling, Overfitting
from trainer.profiling.rules.outcomes import Case, Finding, Healthy, NotJudged, Outcome, TrainingRule, too_short
from trainer.profiling.rules.weights import loss_is_lost
from trainer.report.scores import VAL_TITLES, val_name


class Overtraining(TrainingRule, rules.OvertrainingThresholds):
    """A training that goes on after it has learned what it can.

    Fires when over the last `share` of the training, and `measurements` on the validation split, neither the validation loss fell by
    `delta` nor the score rose to a new best. A validation loss that rises is for overfitting.

    Needs more than `measurements` measurements on the validation split.
    Advises fewer epochs, or more augmentation.
    """

    def judge(self, case: Case) -> Outcome:
        metrics = case.curves
        name, losses = val_name(metrics), metrics.get("val_loss")
        if name is None or losses is None:
            return NotJudged("no loss, or no score, was measured on the validation split")
        if len(losses.values) <= self.measurements:
            known = f"{len(losses.values)} measurements on the validation split, and {self.measurements + 1} are needed"
            return too_short(f"{known} ({case.setting('validate_every_epochs')})")
        if answer := loss_is_lost(case) or case.first_cause(LossNotFalling, Overfitting):
            return answer
        scores = dict(zip(metrics[name].steps.tolist(), metrics[name].values.tolist(), strict=True))
        progress, loss, best = 0, math.inf, -math.inf
        for number, (step, value) in enumerate(zip(losses.steps.tolist(), losses.values.tolist(), strict=True)):
            score = scores.get(step, -math.inf)
            if value < loss * (1 - self.delta) or score > best:
                progress = number
                loss = min(loss, value)
            best = max(best, score)
        last = int(losses.steps[-1])
        total, since = case.record.context.total_steps or last + 1, int(losses.steps[progress])
        share, count = (last - since) / total, len(losses.values) - 1 - progress
        if share < self.share or count < self.measurements:
            return Healthy(f"the last progress on the validation split was at step {since + 1} of {total}")
        seconds = float(losses.seconds[progress])
        return Finding(
            confidence=0.7,
            text=(
                f"Since step {since + 1}, for {share:.0%} of the training and {count} measurements, the validation loss did not fall by "
                f"{self.delta:.0%} below {loss:.3g}, nor the {VAL_TITLES[name]} rise above {best:.1%}."
            ),
            advice=(
                f"Set epochs so that it ends soon after step {since + 1}; if it should become better, add images, augment more, or raise "
                f"{case.setting('base_learning_rate')}."
            ),
            saving=case.saving_after(seconds, "the validation split shows no progress"),
            numbers={"share": share, "measurements": float(count)},
            window_s=(seconds, case.record.ended_s),
            steps=(since, last),
        )


class ConfusedClasses(TrainingRule, rules.ConfusedClassesThresholds):
    """A class that the model takes for another one.

    Fires when in the last validation more than `share` of a class's images, of at least `fewest`, got one and the same wrong answer,
    though the model answers most images right (at least `score` of them).

    Needs validation by this package's trainings, of images with one label each.
    Advises a look at the labels of both classes.
    """

    def judge(self, case: Case) -> Outcome:
        confused, curve = case.record.confused, case.curves.get("val_top1")
        if confused is None or curve is None:
            return NotJudged("no validation compared the answers with the classes")
        score = float(curve.values[-1])
        if score < self.score:
            return NotJudged(f"the validation top-1 is {score:.1%}: the model confuses classes in general")
        known = [one for one in confused if one.of >= self.fewest]
        found = [one for one in known if one.images > self.share * one.of]
        if not found:
            worst = known[0] if known else None
            seen = f"; at most {worst.label!r} for {worst.answer!r}, {worst.images} of {worst.of}" if worst else ""
            return Healthy(f"no class is mostly taken for another one{seen}")
        pairs = [f"{one.label!r} for {one.answer!r} ({one.images} of {one.of})" for one in found]
        return Finding(
            confidence=0.8,
            text=f"The model, {score:.1%} of whose answers are right, takes {', '.join(pairs[:3])}{' and others' if found[3:] else ''}.",
            advice=(
                f"Look at images of {found[0].label!r} and {found[0].answer!r}: labels that were swapped, two names of one thing, or a "
                "difference that is lost at this size; the page of the stage evaluate has such pairs with pictures."
            ),
            numbers={"pairs": float(len(found)), "largest_share": found[0].images / found[0].of},
        )
