"""The rule on the images that a network gets."""

from __future__ import annotations

import numpy as np

from trainer.config import rules
from trainer.profiling.evidence import INPUT
from trainer.profiling.rules.outcomes import Case, Finding, Healthy, NotJudged, Outcome, TrainingRule, too_short

_IMAGES = 16  # fewer images say little of a data set
_CONSTANT = 1e-4  # standard deviation of a channel below which nothing differs
_NORMALIZE = "Scale pixels to 0..1, then take off the mean and divide by the standard deviation that the network was trained with, once."


class CheckInputImages(TrainingRule, rules.CheckInputImagesThresholds):
    """Images that reach the network unscaled, scaled twice, or empty.

    Fires when a channel of the first layer's input is the same at each place of each image; more than `blank` of the images have no two
    pixels that differ; or a channel's mean is further from 0 than `largest_mean`, or its standard deviation below `smallest_std` or above
    `largest_std`. A note where all pixels lie in 0..1, so were scaled and not centered.

    Needs a first layer of weights that is a convolution, or linear and gets rows of numbers; {_IMAGES} of its images.
    Advises one normalization, and a look at the pictures.
    """

    def judge(self, case: Case) -> Outcome:
        history = case.rank.layers
        rows = [number for number, name in enumerate(history.tensors) if name.startswith(INPUT)]
        if not rows:
            return NotJudged("no images that reach a first layer were looked at (`missing` says why)")
        values = {name: grid[:, rows] for name, grid in history.values.items()}  # [L, C]
        values = {name: grid[np.isfinite(values["mean"]).all(1)] for name, grid in values.items()}
        images = float(values["images"][:, 0].sum())
        if images < _IMAGES:
            return too_short(f"{images:.0f} images were looked at, and {_IMAGES} are needed")
        means = values["mean"].mean(0)
        spreads = np.sqrt(np.maximum(0.0, (values["std"] ** 2 + values["mean"] ** 2).mean(0) - means**2))
        low, high = float(values["smallest"].min()), float(values["largest"].max())
        blank = float(np.average(values["blank"].max(1), weights=values["images"][:, 0]))
        seen = f"pixels from {low:.3g} to {high:.3g}, " + ", ".join(
            f"channel {number}: {mean:.2g} ± {spread:.2g}"
            for number, (mean, spread) in enumerate(zip(means, spreads, strict=True))
        )
        numbers = {"largest_mean": float(np.abs(means).max()), "largest_std": float(spreads.max()), "blank": blank}
        constant = np.flatnonzero(spreads <= _CONSTANT).tolist()
        if constant:
            every = len(constant) == len(rows)
            which = "All channels" if every else f"Channel {', '.join(map(str, constant))} of {len(rows)}"
            return Finding(
                severity="severe" if every else "warning",
                confidence=0.95,
                text=f"{which} of the input hold one value at each place of {images:.0f} images ({seen}).",
                advice="Look at the pictures and at what reads them: an empty or transparent channel, or a scale that rounds to nothing.",
                numbers=numbers,
            )
        if blank > self.blank:
            return Finding(
                confidence=0.9,
                text=f"{blank:.0%} of {images:.0f} images have no two pixels that differ (limit {self.blank:.0%}).",
                advice="Look at these pictures: files that were not read whole, or a crop or erasing that leaves nothing.",
                numbers=numbers,
            )
        if np.abs(means).max() > self.largest_mean or spreads.max() > self.largest_std:
            guess = "were not scaled" if low >= 0 else "were normalized twice, or by other figures"
            return Finding(
                confidence=0.85,
                text=f"The input looks as if its pixels {guess}: {seen}; about 0 ± 1 is usual.",
                advice=_NORMALIZE,
                numbers=numbers,
            )
        if spreads.min() < self.smallest_std:
            return Finding(
                confidence=0.85,
                text=f"The input hardly varies, as if it was scaled down twice: {seen}; about 0 ± 1 is usual.",
                advice=_NORMALIZE,
                numbers=numbers,
            )
        if low >= 0 and high <= 1:
            return Finding(
                severity="note",
                confidence=0.7,
                text=f"The input is scaled and not centered: {seen}.",
                advice=_NORMALIZE,
                numbers=numbers,
            )
        return Healthy(f"{images:.0f} images were looked at: {seen}")


def wrong_input(case: Case) -> NotJudged | None:
    """Return the answer of a rule whose symptoms wrong images explain; None where they are right, or only not centered."""
    rule = case.rule(CheckInputImages)
    outcome = rule.judge(case) if rule.enabled else None
    return case.explained_by(rule) if isinstance(outcome, Finding) and outcome.severity != "note" else None
