"""What is counted of records, against a slow computation on the logits that they were made of."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.unit.objectives.distillation.test_recording import DESCRIPTION, records_of
from trainer.objectives.distillation import recording_report

VIEWS = 400


@pytest.fixture(scope="module", params=[1, 6, 40], ids=["flat", "peaked", "very peaked"])
def logits(request):
    return request.param * torch.randn(VIEWS, 12, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def labels():
    return np.random.default_rng(3).integers(0, 12, VIEWS)


def masses(logits, temperature, entries):
    """Mass of the largest entries of each view, in float64."""
    kept = []
    for row in logits.double().numpy():
        powers = [np.exp((value - max(row)) / temperature) for value in row]
        kept.append(sum(sorted(powers, reverse=True)[:entries]) / sum(powers))
    return np.array(kept)


@pytest.mark.parametrize("top_k", [1, 4, 5, 12])
def test_mass_and_labels_are_those_of_slow_computation(logits, labels, top_k):
    held = recording_report.count(records_of(logits, replace(DESCRIPTION, top_k=top_k)), labels, 12)
    assert held.views == VIEWS
    order = (-logits).argsort(1).numpy()[:, :top_k]
    assert held.labels_recorded == sum(label in row for label, row in zip(labels, order, strict=True))
    assert held.labels_first == sum(label == row[0] for label, row in zip(labels, order, strict=True))
    for row, temperature in enumerate(recording_report.TEMPERATURES):
        for column, entries in enumerate(recording_report.entries(top_k)):
            assert held.mean_held()[row, column] == pytest.approx(masses(logits, temperature, entries).mean(), abs=5e-4)
        assert held.mean_mass()[row] == pytest.approx(masses(logits, temperature, top_k).mean(), abs=5e-4)
        twice = masses(logits, temperature, min(12, 2 * top_k)).mean()
        assert held.mean_mass_of_twice()[row] >= twice - 5e-4
        assert held.mean_mass_of_twice()[row] <= 1 + 1e-12


@pytest.mark.parametrize("share", [0.01, 0.05, 0.5, 1.0])
def test_quantiles_are_those_of_the_sorted_records(logits, labels, share):
    records = records_of(logits, DESCRIPTION)
    held = recording_report.count(records, labels, 12)
    for column, temperature in enumerate(recording_report.TEMPERATURES):
        missing = []
        for values, rest in zip(records["logits"].astype(float), records["rest"][:, column].astype(float), strict=True):
            missing.append(1 / (1 + sum(np.exp(value / temperature - rest) for value in values)))
        exact = np.sort(missing)[::-1][int(np.ceil(share * VIEWS)) - 1]
        assert 1 - held.quantile(share, temperature) == pytest.approx(exact, rel=0.012, abs=1e-6)


def test_parts_add_up_to_the_whole(logits, labels):
    records = records_of(logits, DESCRIPTION)
    whole = recording_report.count(records, labels, 12)
    parts = recording_report.total(
        recording_report.count(records[part], labels[part], 12)
        for part in (slice(0, 7), slice(7, 300), slice(300, None))
    )
    for name, value in vars(whole).items():
        assert np.allclose(getattr(parts, name), value, rtol=1e-12), name


def test_shares_and_entries(logits, labels):
    records, half = records_of(logits, DESCRIPTION), np.where(np.arange(VIEWS) % 2, labels, -1)
    held, labeled = recording_report.count(records, half, 12), recording_report.count(records[1::2], labels[1::2], 12)
    assert (held.views, held.labeled) == (VIEWS, VIEWS // 2)
    for name in ("label_recorded", "teacher_top1"):
        assert held.figures()[name] == labeled.figures()[name] > 0
    nothing = recording_report.count(records, np.full(VIEWS, -1), 12)
    assert nothing.figures()["teacher_top1"] == 0
    # The numbers of entries end with those recorded.
    assert [recording_report.entries(top_k) for top_k in (1, 2, 3, 10, 16)] == [
        [1], [1, 2], [1, 2, 3], [1, 2, 4, 8, 10], [1, 2, 4, 8, 16],
    ]  # fmt: skip


@pytest.mark.parametrize(("features", "tokens"), [(16, None), (0, (2, 3, 8)), (16, (2, 3, 8))])
def test_the_page_of_a_headless_teacher(features, tokens):
    held = replace(DESCRIPTION, classes=0, top_k=0, features=features, tokens=tokens)
    parents = {"teacher": "1" * 16, "dataset": "2" * 16}
    page = recording_report.render(held, None, recording_report.RecordedWork(views=0, seconds=0.0), parents)
    note = page[page.index("what is kept is") :].partition("</p>")[0]
    assert ("an embedding of 16 numbers, standardized; as fp16" in note) == (features > 0)
    assert ("2 x 3 patch tokens of 8 numbers, standardized; as int8" in note) == (tokens is not None)
    figures = recording_report.figures(held, None, recording_report.RecordedWork(views=0, seconds=0.0))
    assert (figures["features"], figures.get("tokens")) == (features, tokens and list(tokens))
