from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trainer.profiling.evidence import (
    STEP_COLUMNS,
    TENSOR_COLUMNS,
    OutsideRecord,
    RankEvidence,
    Spans,
    TensorSamples,
    TrainingEvidence,
)
from trainer.profiling.over_time import by_layer, layers, phase_shares, section
from trainer.profiling.training_summary import summarize
from trainer.report.pages import Figure

EDGES = np.linspace(0, 10, 11)


@pytest.fixture
def rank(plain: list[TrainingEvidence]) -> RankEvidence:
    """Four steps of 1.5 s at 0, 2, 4 and 8 s, a third of each in the data phase; an evaluation from 5.5 to 7.5 s."""
    columns = {name: np.zeros(4) for name in STEP_COLUMNS}
    steps = {
        **columns,
        "start_s": np.array([0.0, 2, 4, 8]),
        "seconds": np.full(4, 1.5),
        "data": np.full(4, 0.5),
        "forward": np.full(4, 0.75),
        "forward/attention": np.full(4, 0.25),
    }
    spans = Spans(names=["evaluate"], start_s=np.array([5.5]), seconds=np.array([2.0]))
    first = plain[1].ranks[0]
    outside = {"between": OutsideRecord(count=4, seconds=2.0), "evaluate": OutsideRecord(count=1, seconds=2.0)}
    return replace(first, record=first.record.model_copy(update={"outside": outside}), steps=steps, spans=spans)


def test_shares_over_time_add_up_to_seconds_recorded(rank: RankEvidence) -> None:
    shares = phase_shares(rank, EDGES)
    np.testing.assert_allclose(np.sum(list(shares.values()), axis=0), 1)
    assert {name: values.sum() for name, values in shares.items()} == pytest.approx(
        {"data": 2.0, "forward": 4.0, "evaluate": 2.0, "between": 2.0}
    )
    assert shares["evaluate"].tolist() == pytest.approx([0, 0, 0, 0, 0, 0.5, 1, 0.5, 0, 0])


def test_time_that_is_not_kept(rank: RankEvidence) -> None:
    thinned = rank.record.model_copy(update={"steps": rank.record.steps.model_copy(update={"kept_of": 2})})
    shares = phase_shares(replace(rank, record=thinned), EDGES)
    assert "between" not in shares
    assert shares["data"][:4].tolist() == pytest.approx([1 / 3] * 4)
    # Where ranges outside of steps are not kept their time is not between steps.
    outside = {"between": OutsideRecord(count=5, seconds=1.7), "evaluate": OutsideRecord(count=2, seconds=2.3)}
    thinned = replace(rank, record=rank.record.model_copy(update={"outside": outside}))
    shares = phase_shares(thinned, EDGES)
    assert "between" not in shares
    assert shares["evaluate"].tolist() == pytest.approx([0, 0, 0, 0, 0, 0.5, 1, 1, 0, 0])
    # A device that ends a step late does not count time twice.
    late = replace(rank, steps={**rank.steps, "start_s": np.array([0.0, 1, 2, 3])})
    shares = phase_shares(late, EDGES)
    assert np.sum(list(shares.values()), axis=0).max() == pytest.approx(1)


def test_late_loaders_are_drawn_in_one_bin(plain: list[TrainingEvidence]) -> None:
    first = plain[1].ranks[0]
    queued = np.where(first.steps["step"] < 13, np.nan, 2.0)
    long = first.record.model_copy(update={"ended_s": 1e6})
    given = replace(first, record=long, steps={**first.steps, "queued": queued})
    training = replace(plain[1], ranks=[given])
    (_, figure) = section(training, summarize(training), []).blocks
    assert isinstance(figure, Figure)
    assert "batches ready" in figure.chart


def looks(names: list[str], steps: int = 2, **columns: list[float]) -> TensorSamples:
    shape, order = (steps, len(names)), np.arange(steps) * 50.0
    usual = {name: np.zeros(shape) if name.endswith("nonfinite") else np.ones(shape) for name in TENSOR_COLUMNS}
    given = {name: np.asarray(values, dtype=float).reshape(shape) for name, values in columns.items()}
    return TensorSamples(tensors=names, steps=order, seconds=order / 10, values=usual | given)


def test_layers_are_all_their_tensors() -> None:
    grouped = by_layer(looks(["blocks.0.a.weight", "blocks.0.a.bias", "head.weight"], gradient_norm=[3, 4, 1, 6, 8, 2]))
    assert grouped.names == ["blocks.0", "head"]
    assert grouped.steps.tolist() == [0, 50]
    assert grouped.values["gradient_norm"].tolist() == [[5, 10], [1, 2]]
    # A layers update is against all its weights.
    grouped = by_layer(looks(["blocks.0.w", "blocks.0.b"], steps=1, weight_norm=[3, 4], update_ratio=[1, 0]))
    assert grouped.values["update_ratio"].tolist() == [[pytest.approx(3 / 5)]]
    # What is not known of a frozen layer stays unknown.
    grouped = by_layer(looks(["frozen.weight", "head.weight"], steps=1, gradient_norm=[np.nan, 1]))
    assert np.isnan(grouped.values["gradient_norm"][0, 0])
    assert grouped.values["gradient_norm"][1, 0] == 1
    # A layer is broken where one of its tensors is not finite.
    given = looks(["blocks.0.w", "blocks.0.b"], gradient_nonfinite=[0, 0, 0, 0.5], gradient_norm=[1, 1, 1, np.inf])
    assert by_layer(given).broken.tolist() == [[False, True]]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([f"stages.{i}.blocks.{j}.w" for i in range(4) for j in range(9)], 36),
        ([f"stages.{i}.blocks.{j}.w" for i in range(4) for j in range(20)], 4),
        ([f"layer{i}.weight" for i in range(100)], 34),
    ],
    ids=["to the last number", "to the first number", "neighbors together"],
)
def test_many_layers_are_brought_together(names: list[str], expected: int) -> None:
    assert len(by_layer(looks(names)).names) == expected


def test_maps_with_nothing_to_draw(plain: list[TrainingEvidence]) -> None:
    first = replace(plain[0].ranks[0], tensors=looks([], steps=0))
    assert layers(replace(plain[0], ranks=[first], metrics={})) is None
    # Weights that are all zero have no map of their norm.
    zeros = looks(["head.weight"], weight_norm=[0, 0], update_ratio=[np.nan, np.nan])
    shown = layers(replace(plain[0], ranks=[replace(plain[0].ranks[0], tensors=zeros)]))
    assert shown is not None
    [figure] = [block for block in shown.blocks if isinstance(block, Figure)]
    assert "Norm of the gradient" in figure.caption
