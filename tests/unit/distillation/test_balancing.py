"""PHI-S: every number of the balanced features varies alike, nothing is lost, and the matrices are Hadamard's."""

import numpy as np
import pytest
import torch

from trainer.distillation.balancing import Balance, hadamard
from trainer.errors import ModelError


@pytest.mark.parametrize("size", [1, 2, 4, 12, 20, 28, 36, 192, 320, 384, 768, 1024, 1152, 1280, 2048])
def test_a_hadamard_matrix_has_orthogonal_columns_of_ones(size):
    matrix = hadamard(size)
    assert matrix.shape == (size, size)
    assert set(np.unique(matrix)) <= {-1.0, 1.0}
    assert np.array_equal(matrix.T @ matrix, size * np.eye(size))


@pytest.mark.parametrize("size", [3, 6, 30, 92, 1000 + 1])
def test_other_sizes_are_one_message(size):
    with pytest.raises(ModelError, match=rf"features of length {size}, for which no Hadamard matrix is built here"):
        hadamard(size)


def correlated(count, size, seed):
    generator = np.random.default_rng(seed)
    mixing = generator.normal(size=(size, size)) * np.geomspace(0.01, 10, size)
    return generator.normal(size=(count, size)) @ mixing + 5


def test_every_number_varies_alike_and_nothing_is_stretched():
    features = correlated(3000, 48, seed=0)
    balanced = Balance(features)(torch.tensor(features)).double()
    assert balanced.mean(0).abs().max() < 1e-4
    assert torch.allclose(balanced.var(0, correction=0), torch.ones(48, dtype=torch.float64), atol=1e-4)
    # A rotation and one factor: all distances are the same but for that factor, which is the root mean variance.
    factor = np.sqrt(features.var(0).mean())
    before, after = (
        np.linalg.norm(features[1:] - features[0], axis=1),
        torch.linalg.norm(balanced[1:] - balanced[0], dim=1),
    )
    assert np.allclose(before / factor, after.numpy(), rtol=1e-4)


def test_teachers_of_any_size_have_equal_sway_over_a_squared_error():
    small, large = correlated(2000, 12, seed=1) * 1e-3, correlated(2000, 96, seed=2) * 1e3
    for features in (small, large):
        balanced = Balance(features)(torch.tensor(features))
        assert float(balanced.square().mean()) == pytest.approx(1, rel=1e-3)


def test_features_that_do_not_vary_are_one_message():
    with pytest.raises(ModelError, match="the same for all training images"):
        Balance(np.ones((10, 4)))
