from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trainer.pages import Figure
from trainer.profiling.evidence import TENSOR_COLUMNS, TensorSamples, TrainingEvidence
from trainer.profiling.report.layers import by_layer, section


def looks(names: list[str], steps: int = 2, **columns: list[float]) -> TensorSamples:
    shape, order = (steps, len(names)), np.arange(steps) * 50.0
    usual = {name: np.zeros(shape) if name.endswith("nonfinite") else np.ones(shape) for name in TENSOR_COLUMNS}
    given = {name: np.asarray(values, dtype=float).reshape(shape) for name, values in columns.items()}
    return TensorSamples(tensors=names, steps=order, seconds=order / 10, values=usual | given)


def test_a_layers_norm_is_that_of_all_its_tensors() -> None:
    layers = by_layer(looks(["blocks.0.a.weight", "blocks.0.a.bias", "head.weight"], gradient_norm=[3, 4, 1, 6, 8, 2]))
    assert layers.names == ["blocks.0", "head"]
    assert layers.steps.tolist() == [0, 50]
    assert layers.values["gradient_norm"].tolist() == [[5, 10], [1, 2]]


def test_a_layers_update_is_against_all_its_weights() -> None:
    layers = by_layer(looks(["blocks.0.w", "blocks.0.b"], steps=1, weight_norm=[3, 4], update_ratio=[1, 0]))
    assert layers.values["update_ratio"].tolist() == [[pytest.approx(3 / 5)]]


def test_what_is_not_known_of_a_frozen_layer_stays_unknown() -> None:
    layers = by_layer(looks(["frozen.weight", "head.weight"], steps=1, gradient_norm=[np.nan, 1]))
    assert np.isnan(layers.values["gradient_norm"][0, 0])
    assert layers.values["gradient_norm"][1, 0] == 1


def test_a_layer_is_broken_where_one_of_its_tensors_is_not_finite() -> None:
    given = looks(["blocks.0.w", "blocks.0.b"], gradient_nonfinite=[0, 0, 0, 0.5], gradient_norm=[1, 1, 1, np.inf])
    assert by_layer(given).broken.tolist() == [[False, True]]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([f"stages.{i}.blocks.{j}.w" for i in range(4) for j in range(9)], 36),
        ([f"stages.{i}.blocks.{j}.w" for i in range(4) for j in range(20)], 4),
        ([f"layer{i}.weight" for i in range(100)], 34),
    ],
    ids=["to the last number", "to the first number", "neighbours together"],
)
def test_many_layers_are_brought_together(names: list[str], expected: int) -> None:
    assert len(by_layer(looks(names)).names) == expected


def test_nothing_is_drawn_where_nothing_was_looked_at(plain: list[TrainingEvidence]) -> None:
    first = replace(plain[0].ranks[0], tensors=looks([], steps=0))
    assert section(replace(plain[0], ranks=[first], metrics={})) is None


def test_weights_that_are_all_zero_have_no_map_of_their_norm(plain: list[TrainingEvidence]) -> None:
    zeros = looks(["head.weight"], weight_norm=[0, 0], update_ratio=[np.nan, np.nan])
    shown = section(replace(plain[0], ranks=[replace(plain[0].ranks[0], tensors=zeros)]))
    assert shown is not None
    [figure] = [block for block in shown.blocks if isinstance(block, Figure)]
    assert "Norm of the gradient" in figure.caption
