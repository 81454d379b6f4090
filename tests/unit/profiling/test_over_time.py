from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from trainer.profiling import over_time
from trainer.profiling.evidence import (
    STEP_COLUMNS,
    TENSOR_COLUMNS,
    OutsideRecord,
    RankEvidence,
    Spans,
    TensorSamples,
    TrainingEvidence,
)
from trainer.profiling.over_time import by_layer, layers, machines, phase_shares, section
from trainer.profiling.training_summary import summarize
from trainer.report.pages import Details, Figure, Paragraph

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


def on_hosts(rank: RankEvidence, hosts: int, *, gpus: int = 0, late_s: float = 0.0) -> list[RankEvidence]:
    """A process for each GPU of each machine, or one a machine; machines begin one after another."""
    use = {"gpu_percent": 50.0, "gpu_memory_used_bytes": 30e9, "gpu_memory_total_bytes": 40e9}
    ranks = []
    for number in range(hosts * max(gpus, 1)):
        host = number // max(gpus, 1)
        began = rank.record.began_unix + late_s * host
        record = rank.record.model_copy(update={"rank": number, "host": f"node-{host}", "began_unix": began})
        first = number % max(gpus, 1) == 0
        system = {name: values for name, values in rank.system.items() if first or not name.startswith("cpu")}
        if gpus:
            system |= {name: np.full(len(rank.system["end_s"]), value) for name, value in use.items()}
        ranks.append(replace(rank, record=record, system=system))
    return ranks


def titles(blocks: Sequence[Any]) -> list[str]:
    return [block.caption for block in blocks if isinstance(block, Figure)]


def test_every_machine_is_drawn(plain: list[TrainingEvidence]) -> None:
    training = plain[0]
    [rank] = training.ranks[:1]
    assert machines(replace(training, ranks=on_hosts(rank, 1))) is None, "it stands above"
    found = machines(replace(training, ranks=on_hosts(rank, 2, gpus=4)))
    assert found is not None
    assert titles(found.blocks) == ["node-0: processes 0 to 3", "node-1: processes 4 to 7"]
    chart = str(next(block.chart for block in found.blocks if isinstance(block, Figure)))
    for lane in ("CPU cores", "GPUs", "GPU memory", "Network"):
        assert lane in chart, lane
    one = machines(replace(training, ranks=on_hosts(rank, 1, gpus=2)))
    assert one is not None
    assert "GPUs" in str(next(block.chart for block in one.blocks if isinstance(block, Figure)))


def test_machines_are_folded_above_eight(plain: list[TrainingEvidence]) -> None:
    found = machines(replace(plain[0], ranks=on_hosts(plain[0].ranks[0], 50)))
    assert found is not None
    assert len(titles(found.blocks)) == 8
    [folded] = [block for block in found.blocks if isinstance(block, Details)]
    assert (folded.title, len(titles(folded.blocks))) == ("32 more machines", 32)
    assert isinstance(found.blocks[0], Paragraph)
    assert "The first 40 of 50 machines are drawn." in found.blocks[0].text


def test_machines_share_one_clock(plain: list[TrainingEvidence]) -> None:
    """The second machine began when the first one was nearly done: its samples lie in the last quarter."""
    rank = plain[1].ranks[0]
    length = rank.record.ended_s
    busy = {name: np.full(len(values), 100.0) for name, values in rank.system.items() if name.startswith("cpu")}
    first, late = on_hosts(replace(rank, system=dict(rank.system) | busy), 2, late_s=3.2 * length)
    edges = np.linspace(0, 4 * length, 5)
    lanes = [over_time._lanes_of_machine([one], edges, 4 * length, first.record.began_unix) for one in (first, late)]
    starts = [re.findall(r'd="M(\d+) ', str(lane[0].content)) for lane in lanes]
    assert set(starts[0]) == {"0"}
    assert set(starts[1]) == {"3"}
