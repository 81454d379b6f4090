"""The rules on what a training learns from, and whether it learns: classes, teacher, terms of the loss, and its curves."""

from __future__ import annotations

import math
import statistics
from functools import reduce

import numpy as np

from trainer.config import rules
from trainer.config.loss_terms import TAUGHT, TERMS
from trainer.config.rules import FEW_LABELS
from trainer.profiling.rules.gradients import UnchangedWeights, UpdateRatio, VanishingGradients
from trainer.profiling.rules.inputs import wrong_input
from trainer.profiling.rules.layers import AllZero, DeadRelu, SaturatedActivation, TensorVariance
from trainer.profiling.rules.outcomes import Case, Finding, Healthy, NotJudged, Outcome, TrainingRule, too_short
from trainer.profiling.rules.weights import ExplodingGradients, PoorInitialization, loss_is_lost
from trainer.report.scores import VAL_TITLES, val_name

_PARTS = 3  # a term that vanished by being learned has a share in the first of these parts
_FEWEST_POINTS = 6
_SOFTENED = ("kl", "dkd")  # logit losses that are multiplied by the temperature's square, as is their rounding error
_POINTS = 10  # fewer points of a curve show no trend
_FIRST = 3  # points that count as the start of a curve
_LOST = 0.5  # share of its fall by which the loss may rise again
_MEASUREMENTS = 3  # fewer measurements on the validation split show no trend
_TINY = float(np.finfo(np.float64).tiny)


class ClassImbalance(TrainingRule, rules.ClassImbalanceThresholds):
    """Classes of very different sizes.

    Fires when the largest class has more than `ratio` times the images of the smallest.

    Needs the number of training images of each class.
    Advises more images of the small classes, or fewer of the large ones.
    """

    def judge(self, case: Case) -> Outcome:
        limit, classes = self.ratio, case.record.context.classes
        if not classes or case.training.name == "mae":
            return NotJudged("the training learns from no labels, or did not record how many images its classes have")
        rarest, largest = min(classes, key=classes.__getitem__), max(classes, key=classes.__getitem__)
        ratio = classes[largest] / max(classes[rarest], 1)
        if ratio <= limit:
            return Healthy(f"the largest of {len(classes)} classes has {ratio:.3g} times the images of the smallest")
        rare = sum(count * limit < classes[largest] for count in classes.values())
        return Finding(
            confidence=0.9,
            text=(
                f"Class {largest!r} has {classes[largest]:,} training images and {rarest!r} has {classes[rarest]:,}: {ratio:.3g} times "
                f"as many (limit {limit:g}); {rare} of {len(classes)} classes are so much smaller than the largest."
            ),
            advice="Add images of the small classes, or remove some of the large ones; check the accuracy of each class in the evaluation.",
            numbers={"ratio": ratio, "small_classes": float(rare)},
        )


class WeakTeacher(TrainingRule, rules.WeakTeacherThresholds):
    """A teacher that hardly knows more than chance, or no more than its student.

    Fires when the teacher is near chance: its validation score is at most `chance_times` that of a guess which knows only how frequent
    the classes are, or less than `headroom` of the way from there to perfection; or the student's score is above its by more than `margin`
    and two standard errors. The score is top-1 accuracy, or mAP where an image may have several labels.

    Needs the teacher's validation score, which the stage pretrain measures, and the student's.
    Advises a better teacher, with few labels a class a linear probe of public weights, or more weight for the labels.
    """

    def judge(self, case: Case) -> Outcome:
        context = case.record.context
        if not any(case.settings.get(f"{term}_weight") for term in TAUGHT):
            return NotJudged("no term of the loss compares with a teacher")
        several = context.teacher_val_map is not None
        teacher = context.teacher_val_map if several else context.teacher_val_top1
        if teacher is None:
            why = "it was not trained, or not measured, by the stage pretrain"
            return NotJudged(f"the teacher's validation score is not known: {why}")
        score = "mAP" if several else "accuracy"
        # on images that are distributed as the training images; 0 if unknown
        images = (context.classes or {}).values()
        labels, labeled = sum(images), context.labeled or 0
        # A probe is fitted to images with one label each.
        labels_a_class = statistics.median(images) if images and not several else math.inf
        if several:
            # in a random order a class's precision is, in the mean, its share of the images
            guess, guesser = labels / max(labeled * len(images), 1), "ranking them at random"
            # AP is a mean of precisions, one at each image of the class: of independent ones the variance is at most p(1 - p) / images
            weight = math.sqrt(labeled / labels) if labels else 1.0
        else:
            guess, guesser = max(images, default=0) / max(labels, 1), "always saying the most frequent class"
            weight = 1.0
        near = min(self.chance_times * guess, guess + self.headroom * (1 - guess))
        if teacher <= near:
            return _weak(
                f"The teacher's validation {score}, {teacher:.1%}, is near chance: {guesser} gives {guess:.1%} (limit {near:.1%}).",
                0.95,
                labels_a_class,
            )
        chance = (
            weight * case.accuracy_noise(guess) / math.sqrt(2)
        )  # the standard error of one score, not of a difference
        if teacher <= guess + chance:
            measured = f"on {context.val_samples} validation images the teacher's {score}, {teacher:.1%}"
            return NotJudged(f"{measured}, may be chance ({guess:.1%})")
        curve = case.curves.get("val_map" if several else "val_top1")
        if curve is None:
            return too_short("the student has not been measured on the validation split yet")
        student, margin = float(curve.values[-1]), self.margin + weight * case.accuracy_noise(teacher)
        if student - teacher <= margin:
            return Healthy(f"the teacher's validation {score} is {teacher:.1%}, the student's {student:.1%}")
        return _weak(
            f"The student's validation {score}, {student:.1%}, is above its teacher's, {teacher:.1%}, by more than {margin:.1%}.",
            0.8,
            labels_a_class,
        )


def _weak(text: str, confidence: float, labels_a_class: float) -> Finding:
    better = "Train the teacher longer (pretrain.finetune.epochs, pretrain.mae.epochs) or take a better one (pretrain.weights)"
    if labels_a_class <= FEW_LABELS:
        better = (
            f"With {labels_a_class:g} labels a class fit a linear head to public weights, and take unlabeled photos of the same kind "
            "(pretrain.head=probe, as in the recipe few-labels)"
        )
    advice = f"{better}; until then raise distill.label_weight against distill.logit_weight."
    return Finding(confidence=confidence, text=text, advice=advice)


class LowRecordedMass(TrainingRule, rules.LowRecordedMassThresholds):
    """Recorded outputs that hold too little of the teacher's distribution.

    Fires when the recorded classes hold less than `mass` of the teacher's probability in the mean, at the temperature nearest to the
    loss's.

    Needs the coverage of the teacher's recorded outputs.
    Advises recording more classes of each view, or asking the teacher in every step.
    """

    def judge(self, case: Case) -> Outcome:
        context, limit = case.record.context, self.mass
        if not context.recorded_mass:
            return NotJudged("the training reads no recorded outputs of a teacher")
        wanted = float(context.settings.get("logit", {}).get("temperature", 1.0))
        temperature = min(context.recorded_mass, key=lambda text: abs(float(text) - wanted))
        mass = context.recorded_mass[temperature]
        seen = f"hold {mass:.1%} of the teacher's probability at temperature {temperature} in the mean"
        if mass >= limit:
            return Healthy(f"the recorded outputs {seen}")
        return Finding(
            confidence=0.9 if float(temperature) == wanted else 0.7,
            text=f"The recorded outputs {seen} (limit {limit:.0%}); of the other classes only their sum is known.",
            advice=(
                "Record more of them (reinforce.top_k=all, or twice the number), lower distill.logit.temperature, or set "
                "distill.teacher=online."
            ),
            numbers={"mass": mass},
        )


class VanishingLossTerm(TrainingRule, rules.VanishingLossTermThresholds):
    """A weighted loss term that makes no difference.

    Fires when a term with a weight has less than `share` of the weighted loss in each third of the training; or the temperature is so
    high that the rounding of float32, times its square, is larger than the logit term.

    Needs {_FEWEST_POINTS} points of each term of the distillation's loss, and their weights.
    Advises a larger weight or another temperature; or none, to save the term's work.
    """

    def judge(self, case: Case) -> Outcome:
        settings, metrics = case.settings, case.curves
        weight = {name: float(settings.get(f"{name}_weight", 0)) for name in TERMS}
        curves = {name: metrics[name] for name in weight if weight[name] and name in metrics}
        if not curves:
            return NotJudged("only a distillation's loss has terms")
        common = reduce(np.intersect1d, [curve.steps for curve in curves.values()])
        terms = {name: curve.values[np.isin(curve.steps, common)] for name, curve in curves.items()}
        if min(map(len, terms.values())) < _FEWEST_POINTS:
            return too_short(f"fewer than {_FEWEST_POINTS} points of the loss were recorded")
        if answer := case.start_unseen or case.first_cause(WeakTeacher):
            return answer
        logit = settings.get("logit", {})
        temperature = float(logit.get("temperature", 1))
        if logit.get("loss") in _SOFTENED and "logit" in terms:
            rounding, term = temperature**2 * float(np.finfo(np.float32).eps), float(np.median(np.abs(terms["logit"])))
            if rounding > term:
                return Finding(
                    confidence=0.8,
                    text=(
                        f"At temperature {temperature:g} the logit term is lost in float32's rounding: that is {rounding:.2g} in each "
                        f"image, and the term {term:.2g}."
                    ),
                    advice="Choose a distill.logit.temperature between 1 and 10.",
                    numbers={"rounding": rounding, "term": term},
                )
        sizes = np.stack([weight[name] * np.abs(values) for name, values in terms.items()])
        shares = sizes / np.maximum(sizes.sum(0), _TINY)
        largest = np.max([np.median(part, axis=1) for part in np.array_split(shares, _PARTS, axis=1)], axis=0)
        shares = dict(zip(terms, largest.tolist(), strict=True))
        least = min(shares, key=shares.__getitem__)
        if shares[least] >= self.share:
            listing = ", ".join(f"{name} up to {share:.0%}" for name, share in shares.items())
            return Healthy(f"shares of the loss: {listing}")
        softened = f" (now {weight[least]:g})"
        if least == "logit" and "temperature" in logit:
            softened += f" or distill.logit.temperature (now {temperature:g})"
        return Finding(
            confidence=0.85,
            text=(
                f"The {least} term is never more than {shares[least]:.1e} of the weighted loss (limit "
                f"{self.share:g}), so it teaches nothing."
            ),
            advice=f"Raise distill.{least}_weight{softened}, or set the weight to 0 and save the term's work.",
            numbers={"share": shares[least]},
        )


_CAUSES = (
    PoorInitialization,
    ExplodingGradients,
    DeadRelu,
    SaturatedActivation,
    AllZero,
    TensorVariance,
    VanishingGradients,
    UnchangedWeights,
    UpdateRatio,
    WeakTeacher,
    VanishingLossTerm,
)  # what keeps a loss from falling, and says more than that it does not fall


class LossNotFalling(TrainingRule, rules.LossNotFallingThresholds):
    """A loss that stays where it is.

    Fires when the median loss in the last `window` of the training is not below its first {_FIRST} points by `fall`; or the loss has
    risen again by more than {_LOST:.0%} of what it had fallen.

    Needs {_POINTS} points of the loss; while the training runs, the share `window` of its steps.
    Advises checking whether images and labels belong together; another learning rate.
    """

    def judge(self, case: Case) -> Outcome:
        curve = case.curves.get("loss")
        if curve is None or len(curve.values) < _POINTS:
            return too_short(f"fewer than {_POINTS} points of a finite loss were recorded")
        if answer := case.start_unseen:
            return answer
        record, window, total = case.record, self.window, case.record.context.total_steps
        if case.live and not (total and record.steps.count >= window * total):
            return NotJudged(
                f"judged after {window:.0%} of the steps" if total else "the number of steps is not known yet"
            )
        if answer := wrong_input(case) or case.first_cause(*_CAUSES) or loss_is_lost(case):
            return answer
        rate = case.setting("base_learning_rate")
        middles = np.array([np.median(part) for part in np.array_split(curve.values, _POINTS)])
        start, last = float(np.median(curve.values[:_FIRST])), float(np.median(middles[-math.ceil(window * _POINTS) :]))
        if start - last <= self.fall * abs(start):  # also of a loss that is always 0
            since_s = float(curve.seconds[-1] if case.live else np.quantile(curve.seconds, window))
            return Finding(
                severity="severe",
                confidence=0.8,
                text=(
                    f"The loss is {last:.4g} in the last {window:.0%} of the training and was {start:.4g} at its start: it did not fall by "
                    f"{self.fall:.0%}."
                ),
                advice=(
                    "Check whether images and labels belong together (pictures of the views are in the card of the data set), then try "
                    f"{rate} three times as large and a third of it."
                ),
                saving=case.saving_after(since_s, "nothing was learned"),
                numbers={"start": start, "last": last},
            )
        lowest, least, end = int(middles.argmin()), float(middles.min()), float(middles[-1])
        if end - least <= _LOST * (start - least):
            return Healthy(f"the loss fell from {start:.4g} to {last:.4g}, by {(start - last) / abs(start):.0%}")
        last_of_part = int(np.array_split(np.arange(len(curve.values)), _POINTS)[lowest][-1])
        step, seconds = int(curve.steps[last_of_part]), float(curve.seconds[last_of_part])
        return Finding(
            severity="severe",
            confidence=0.8,
            text=f"The loss fell from {start:.4g} to {least:.4g} at step {step + 1} and rose again to {end:.4g}.",
            advice=f"Lower {rate} to a third, or raise warmup_epochs; the best weights are those of about step {step + 1}.",
            saving=case.saving_after(seconds, "what was learned is lost again"),
            numbers={"start": start, "lowest": least, "last": end},
            window_s=(seconds, record.ended_s),
            steps=(step, int(curve.steps[-1])),
        )


class Overfitting(TrainingRule, rules.OverfittingThresholds):
    """A validation loss that leaves the training loss behind.

    Fires when the validation loss is above its lowest by more than `ratio`, and above the training loss with labels by as much, which
    fell meanwhile, while the validation accuracy did not rise (by two standard errors).

    Needs {_MEASUREMENTS} measurements on the validation split, and a training loss with labels (`label_weight` above 0).
    Advises looking for wrong labels; more augmentation or regularization, more images, or fewer epochs.
    """

    def judge(self, case: Case) -> Outcome:
        metrics, limit = case.curves, self.ratio
        curve = metrics.get("label" if case.training.name == "distill" else "loss")
        if curve is None or "val_loss" not in metrics:
            return NotJudged("no training loss with labels, or no validation loss, was recorded")
        name = val_name(metrics)
        if name is None:
            return NotJudged("no score on the validation split was recorded")
        if answer := loss_is_lost(case):
            return answer
        losses, accuracies = metrics["val_loss"], metrics[name]
        if len(losses.values) < _MEASUREMENTS:
            known = f"{len(losses.values)} measurements on the validation split, and {_MEASUREMENTS} are needed"
            return too_short(f"{known} ({case.setting('validate_every_epochs')})")
        best = int(losses.values.argmin())
        # the median of the last points of the training loss at each measurement
        ends = np.searchsorted(curve.steps, losses.steps, side="right")
        train = [float(np.median(curve.values[max(0, end - _FIRST) : max(1, end)])) for end in ends]
        lowest, last = float(losses.values[best]), float(losses.values[-1])
        rise, gap = (last / (against or _TINY) - 1 for against in (lowest, train[-1]))
        seen = f"the validation loss is {last:.3g}, at its lowest it was {lowest:.3g}; the training loss is {train[-1]:.3g}"
        # a loop of your own may measure the one more often than the other
        measured = max(1, int(np.searchsorted(accuracies.steps, losses.steps[best], side="right")))
        before, after = float(accuracies.values[measured - 1]), float(accuracies.values[-1])
        learns = train[-1] >= train[best] or after > before + case.accuracy_noise(before)
        if not (rise > limit and gap > limit) or learns:  # nor where a loss is not a number
            return Healthy(seen)
        step, seconds = int(losses.steps[best]), float(losses.seconds[best])
        return Finding(
            confidence=0.8,
            text=(
                f"Since step {step + 1} the training learns its images by heart: {seen}, and the validation {VAL_TITLES[name]} went from "
                f"{before:.1%} to {after:.1%}."
            ),
            advice=(
                "Look for wrong labels; augment more (views.min_scale, mixup, cutmix), raise weight_decay or drop_path, add images, or set "
                f"epochs so that it ends at about step {step + 1}."
            ),
            saving=case.saving_after(seconds, "the validation loss rose"),
            numbers={"rise": rise, "gap": gap},
            window_s=(seconds, case.record.ended_s),
            steps=(step, int(losses.steps[-1])),
        )
