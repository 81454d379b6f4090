"""The frozen teacher says what its model says; balanced features (PHI-S) vary alike, and nothing of them is lost."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from timm.models.volo import VOLO
from torch import nn

from trainer.config import ModelSettings
from trainer.devices import choose_device
from trainer.devices import device as device_module
from trainer.io.errors import ModelError
from trainer.models import networks
from trainer.models.networks import Classifier, EmbeddingStatistics
from trainer.objectives.distillation.frozen_teacher import Balance, FrozenTeacher, hadamard

TINY = {"img_size": 32, "patch_size": 4, "embed_dim": 96, "depth": 3, "num_heads": 3}


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    monkeypatch.setattr(device_module, "has_bf16_instructions", lambda: True)
    return choose_device()


@pytest.fixture(scope="module")
def model():
    """A model whose logits are some units apart."""
    torch.manual_seed(0)
    model = networks.create(ModelSettings(architecture="vit_tiny_patch16_224", args=TINY), [str(n) for n in range(12)])
    nn.init.normal_(model.network.head.weight, std=0.3)
    return model.eval()


@pytest.fixture(scope="module")
def images():
    return torch.randint(0, 256, (10, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def expected(model, images):
    """Logits and pooled features in float32."""
    with torch.inference_mode():
        outputs = model.outputs(images, features=True)
        return outputs.logits, outputs.features


def freeze(model, device, **changes):
    return FrozenTeacher(copy.deepcopy(model), device, **{"precision": "fp32", "features": True} | changes)


@pytest.mark.parametrize("batch_size", [0, 1, 3, 5, 10, 64])
def test_outputs_are_those_of_model_whatever_parts(model, device, images, expected, batch_size):
    outputs = freeze(model, device, batch_size=batch_size)(images)
    torch.testing.assert_close(outputs.logits, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(outputs.features, expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("batch_size", "shapes"), [(0, [10]), (3, [3, 3, 3, 3]), (4, [4, 4, 4]), (10, [10]), (64, [10])]
)
def test_all_passes_have_one_shape(model, device, images, monkeypatch, batch_size, shapes):
    seen = []
    outputs = Classifier.outputs
    monkeypatch.setattr(
        Classifier, "outputs", lambda self, part, **asked: (seen.append(len(part)), outputs(self, part, **asked))[1]
    )
    frozen = freeze(model, device, batch_size=batch_size)
    seen.clear()  # it looked at one image to see how the network ends
    frozen(images)
    assert seen == shapes


def test_convolutional_network_gets_as_many_in_bf16_too(device):
    network = networks.create(ModelSettings(architecture="tf_efficientnet_lite0", image_size=56), ["a", "b"])
    frozen = freeze(network, device, precision="bf16")
    assert frozen._limit == 8 * 4**2
    assert frozen._model.preprocess.memory_format is torch.channels_last


def test_bf16_teacher(model, device, images, expected):
    # Nearer to float32 than autocast is, whose head rounds too; and as near as autocast in the features.
    outputs = freeze(model, device, precision="bf16")(images)
    assert outputs.logits.dtype == outputs.features.dtype == torch.float32
    with torch.inference_mode(), device.autocast("bf16"):
        outputs_then = model.outputs(images, features=True)
        rounded = [outputs_then.logits.float(), outputs_then.features.float()]

    def error(ours, theirs):
        return float((ours - theirs).square().mean().sqrt())

    spread = float(expected[0].std())
    assert 0 < error(outputs.logits, expected[0]) < 0.01 * spread
    assert error(outputs.logits, expected[0]) < error(rounded[0], expected[0])
    assert error(outputs.features, expected[1]) < 1.2 * error(rounded[1], expected[1])
    assert torch.equal(outputs.logits.argmax(1), expected[0].argmax(1))
    # The head stays in float32 within a training in bf16.
    frozen = freeze(model, device)
    alone = frozen(images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = frozen(images)
    assert torch.equal(within.logits, alone.logits)
    # In bf16 all weights but the heads are bf16.
    frozen = freeze(model, device, precision="bf16")._model
    kinds = {name: weight.dtype for name, weight in frozen.named_parameters()}
    assert kinds["network.patch_embed.proj.weight"] == kinds["network.blocks.0.attn.qkv.weight"] == torch.bfloat16
    assert kinds["network.head.weight"] == kinds["network.norm.weight"] == kinds["network.pos_embed"] == torch.float32
    assert not any(weight.requires_grad for weight in frozen.parameters())
    # Autograd may keep what it says.
    outputs = freeze(model, device)(images)
    student = torch.ones_like(outputs.logits, requires_grad=True)
    (student * outputs.logits).sum().backward()
    assert torch.equal(student.grad, outputs.logits)
    assert not outputs.logits.is_inference()


def test_network_that_ends_in_another_way_speaks_for_itself(device):
    """VOLO adds a second head's logits, so its head and its pooled features do not make them."""
    torch.manual_seed(0)
    network = VOLO((1, 1, 1, 1), img_size=32, num_classes=2, embed_dims=(16, 32, 32, 32), num_heads=(2, 2, 2, 2))
    card = networks.ModelCard(
        architecture="volo_d1_224", args={}, labels=("a", "b"), image_size=32, mean=(0.5,) * 3, std=(0.5,) * 3
    )
    model = networks.Classifier(network, card).eval()
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    with torch.inference_mode():
        expected = model(images)
    outputs = FrozenTeacher(model, device, precision="fp32")(images)
    torch.testing.assert_close(outputs.logits, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(
        ModelError, match=r"'volo_d1_224' cannot be compared by its features: .*reinforce\.features=false"
    ):
        networks.feature_size(model)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("architecture", ["levit_128s", "repvit_m0_9", "efficientvit_b0"])
def test_heads_of_other_kinds_give_features_beside_their_logits(device, architecture, precision):
    """LeViT and RepViT have two heads that begin with a normalization; EfficientViT's has a hidden layer."""
    torch.manual_seed(0)
    model = networks.create(ModelSettings(architecture=architecture), ["a", "b"]).eval()
    for part in model.network.modules():
        if isinstance(part, torch.nn.BatchNorm1d):
            part.running_mean.normal_()
    images = torch.randint(0, 256, (2, 3, 224, 224), dtype=torch.uint8)
    with torch.inference_mode():
        expected, pooled = model(images), model.pooled(images)
    outputs = FrozenTeacher(model, device, precision=precision, features=True)(images)
    close = {"rtol": 1e-4, "atol": 1e-4} if precision == "fp32" else {"rtol": 0.1, "atol": 0.1}
    torch.testing.assert_close(outputs.logits, expected, **close)
    torch.testing.assert_close(outputs.features, pooled, **close)


@pytest.mark.parametrize(
    "architecture", ["resnetv2_18", "dla46x_c", "crossvit_tiny_240", "efficientvim_m1", "sequencer2d_s"]
)
def test_heads_that_read_no_pooled_features_speak_for_themselves(device, architecture):
    """Heads that read a map, or several modules that are called in a way of their own."""
    torch.manual_seed(0)
    model = networks.create(ModelSettings(architecture=architecture), ["a", "b"]).eval()
    images = torch.randint(0, 256, (1, 3, 224, 224), dtype=torch.uint8)
    with torch.inference_mode():
        expected = model(images)
    outputs = FrozenTeacher(model, device, precision="fp32")(images)
    torch.testing.assert_close(outputs.logits, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ModelError, match=f"'{architecture}' cannot be compared by its features: "):
        networks.feature_size(model)


@pytest.mark.parametrize("batch_size", [0, 3])
def test_teacher_without_head_says_its_standardized_embedding_alone(model, device, images, expected, batch_size):
    headless = networks.with_labels(model, ()).eval()
    plain = freeze(headless, device, batch_size=batch_size)(images)
    torch.testing.assert_close(plain.features, expected[1], rtol=1e-4, atol=1e-4)
    assert plain.logits.shape == (len(images), 0)
    generator = torch.Generator().manual_seed(2)
    mean, std = torch.randn(96, generator=generator), 0.5 + torch.rand(96, generator=generator)
    headless.card = replace(
        headless.card, embedding=EmbeddingStatistics(mean=tuple(mean.tolist()), std=tuple(std.tolist()))
    )
    by_hand = [
        [(value - m) / s for value, m, s in zip(row, mean.tolist(), std.tolist(), strict=True)]
        for row in expected[1].tolist()
    ]
    found = freeze(headless, device, batch_size=batch_size)(images).features
    torch.testing.assert_close(found, torch.tensor(by_hand), rtol=1e-3, atol=1e-3)


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


def test_embeddings_of_any_teacher():
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
    # Teachers of any size have equal sway over a squared error.
    small, large = correlated(2000, 12, seed=1) * 1e-3, correlated(2000, 96, seed=2) * 1e3
    for features in (small, large):
        balanced = Balance(features)(torch.tensor(features))
        assert float(balanced.square().mean()) == pytest.approx(1, rel=1e-3)


def test_features_that_do_not_vary_are_one_message():
    with pytest.raises(ModelError, match="the same for all training images"):
        Balance(np.ones((10, 4)))
