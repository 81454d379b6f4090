"""The page on an export: which variant was chosen, what each one measured, and why others were not taken."""

from __future__ import annotations

from collections.abc import Sequence

from trainer import pages
from trainer.evaluation.metrics import Machine
from trainer.export import variants
from trainer.export.variants import ServingCandidate
from trainer.pages import BulletList, PageSection, Paragraph, Table

_ALIKE = f" (of those within {variants.ALIKE:.0%} of its time the one nearest to the student)"


def render(
    title: str,
    candidates: Sequence[ServingCandidate],
    chosen: str | None,
    notes: Sequence[str],
    machine: Machine,
    *,
    photos: int,
) -> str:
    """Build the whole page, self-contained.

    Args:
        title: of the student.
        chosen: the name of a candidate; None where the student stays in torch.
        notes: why there is no variant, or none that passes.
        photos: how many test images each one answered.
    """
    heading, *rows = variants.rows(candidates, chosen) if candidates else [()]
    verdict = Paragraph(
        f"{chosen} is served: the fastest that passes{_ALIKE}." if chosen else "No ONNX file is served."
    )
    threads = "1 thread" if machine.threads == 1 else f"{machine.threads} threads"
    measured = Paragraph(
        f"On {photos:,} test images, and timed in turns on {machine.processor}, {threads}, from squares to logits. "
        "Shift: how much of the probability goes to other classes than the student itself gives it to.",
        "soft",
    )
    refused = variants.refusals(candidates)
    return pages.render(
        f"Export: {chosen or 'the student stays in torch'}",
        title,
        [
            PageSection("Choice", [verdict, BulletList(notes) if notes else None]),
            PageSection("Variants", [Table(heading, rows), measured]) if candidates else None,
            PageSection("Why not", [BulletList(refused)]) if refused else None,
        ],
    )
