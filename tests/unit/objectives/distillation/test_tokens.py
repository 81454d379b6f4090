"""Patch tokens: where they are found in a network, how they are compared, and what a recording keeps of them."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.unit.objectives.distillation.test_recording import DESCRIPTION
from trainer.config import DistillSettings, ModelSettings
from trainer.data.batch import Batch
from trainer.devices import choose_device
from trainer.evaluation.embeddings import token_statistics
from trainer.io.errors import ModelError
from trainer.models import networks
from trainer.models.networks import EmbeddingStatistics
from trainer.objectives.distillation import recording, shards
from trainer.objectives.distillation.frozen_teacher import FrozenTeacher
from trainer.objectives.distillation.losses import TeacherOutputs
from trainer.objectives.distillation.objective import DistillObjective, MapProjection, prepared_student
from trainer.objectives.distillation.reinforcement import pack, summarize, unusable

IMAGES = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
BATCH = Batch(IMAGES, torch.tensor([0, 1, 2]), torch.arange(3), torch.zeros(3, dtype=torch.int64))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")


def classifier(seed, labels=("a", "b", "c"), *, architecture="vit_tiny_patch16_224", **changes):
    torch.manual_seed(seed)
    arguments = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2} | changes
    return networks.create(ModelSettings(architecture=architecture, args=arguments), labels).eval()


# ---------------------------------------------------------------------------------------------------------------------
# Where they are

NETWORKS = {
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 1},
    "vit_small_patch14_reg4_dinov2": {"img_size": 56, "depth": 1, "embed_dim": 24, "num_heads": 2},
    "vit_base_patch16_siglip_224": {"img_size": 64, "depth": 1, "embed_dim": 24, "num_heads": 2},
    "deit_tiny_distilled_patch16_224": {"img_size": 64, "depth": 1},
    "eva02_tiny_patch14_224": {"img_size": 56, "depth": 1},
    "swin_tiny_patch4_window7_224": {"img_size": 64, "embed_dim": 24},
    "mixer_s32_224": {"img_size": 64},
    "resnet18": {},
    "convnext_atto": {},
    "efficientnet_b0": {},
}
BEHIND_A_CONVOLUTION = {"efficientnet_b0"}
"""Networks whose last map is made of timm's last intermediate one by a further convolution."""


@pytest.mark.parametrize("architecture", NETWORKS)
def test_tokens_are_timms_last_map(architecture):
    torch.manual_seed(0)
    args = NETWORKS[architecture]
    settings = ModelSettings(architecture=architecture, args=args, image_size=args.get("img_size", 64))
    model = networks.create(settings, ("a", "b", "c")).eval()
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        logits, _, _, tokens, _ = model.outputs(images, tokens=True)
        (last,) = model.network.forward_intermediates(
            model.preprocess(images), indices=1, norm=True, intermediates_only=True
        )
        assert torch.allclose(logits, model(images), atol=1e-5)
    assert tokens.shape[1:] == networks.token_shape(model)
    assert tokens.shape[1:3] == last.shape[2:]
    if architecture not in BEHIND_A_CONVOLUTION:
        assert torch.allclose(tokens, last.permute(0, 2, 3, 1), atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "size"),
    [("pit_ti_224", 224), ("pit_ti_distilled_224", 224), ("resnet18", 32), ("volo_d1_224", 224)],
)
def test_network_without_map_of_several_places_is_refused(architecture, size):
    with torch.device("meta"):
        model = networks.create(ModelSettings(architecture=architecture, image_size=size), ("a", "b"))
    with pytest.raises(
        ModelError,
        match=rf"'{architecture}' with an input of {size} pixels has no patch tokens .* distill\.token_weight=0",
    ):
        networks.token_shape(model.to("meta"))


# ---------------------------------------------------------------------------------------------------------------------
# How they are compared


def bilinear(maps, height, width):
    """[B, h, w, S] resized to [B, height, width, S] by a triangle around each place's center, of the coarser grid's width; in float64."""

    def shares(given, wanted):
        scale = max(1.0, given / wanted)
        for place in range(wanted):
            center = (place + 0.5) * given / wanted
            weights = [max(0.0, 1 - abs((one + 0.5 - center) / scale)) for one in range(given)]
            yield [weight / sum(weights) for weight in weights]

    batch, given_height, given_width, numbers = maps.shape
    result = torch.zeros(batch, height, width, numbers, dtype=torch.float64)
    for row, down in enumerate(shares(given_height, height)):
        for column, across in enumerate(shares(given_width, width)):
            for one, vertical in enumerate(down):
                for other, horizontal in enumerate(across):
                    result[:, row, column] += vertical * horizontal * maps[:, one, other].double()
    return result


@pytest.mark.parametrize(("own", "wanted"), [(4, 4), (2, 5), (7, 16), (9, 4), (16, 7), (4, 2)])
def test_map_is_resized_to_teachers_grid_and_then_projected(own, wanted):
    torch.manual_seed(own)
    projection, maps = MapProjection((own, own, 3), (wanted, wanted, 2)), torch.randn(2, own, own, 3)
    by_hand = bilinear(maps, wanted, wanted) @ projection.linear.weight.double().T + projection.linear.bias.double()
    assert torch.allclose(projection(maps).double(), by_hand, atol=1e-6)
    assert set(projection.state_dict()) == {"linear.weight", "linear.bias"}


def token_loss(name, ours, theirs):
    """Slow and in double precision; lists [B][places][D]."""
    total = count = 0
    for own_places, their_places in zip(ours, theirs, strict=True):
        for own, their in zip(own_places, their_places, strict=True):
            dot, norms = (sum(a * b for a, b in zip(own, their, strict=True)), math.hypot(*own) * math.hypot(*their))
            squares = [(a - b) ** 2 for a, b in zip(own, their, strict=True)]
            smooth = [square / 2 if square < 1 else math.sqrt(square) - 0.5 for square in squares]
            total += {
                "cosine": 1 - dot / norms,
                "mse": sum(squares) / len(squares),
                "cosine_smooth_l1": (1 - dot / norms + sum(smooth) / len(smooth)) / 2,
            }[name]
            count += 1
    return total / count


@pytest.mark.parametrize("name", ["cosine", "mse", "cosine_smooth_l1"])
@pytest.mark.parametrize("patch", [8, 4, 16])
def test_the_token_loss_is_that_of_slow_loops(name, patch):
    """Between a teacher of 4 x 4 patches and students of as many, more and fewer."""
    teacher, settings = (
        classifier(1, embed_dim=24),
        DistillSettings(token_weight=2.0, logit_weight=0.5, feature_loss=name),
    )
    student = prepared_student(classifier(2, patch_size=patch), settings, teacher)
    own = student.classifier.network.forward_features(student.classifier.preprocess(IMAGES))[:, 1:]
    edge = math.isqrt(own.shape[1])
    linear = student.token_projection.linear
    resized = bilinear(own.unflatten(1, (edge, edge)), 4, 4).flatten(1, 2)
    ours = resized @ linear.weight.double().T + linear.bias.double()
    with torch.no_grad():
        theirs = teacher.network.forward_features(teacher.preprocess(IMAGES))[:, 1:]
    frozen = FrozenTeacher(teacher, choose_device(), precision="fp32", tokens=True)
    result = DistillObjective(student, [frozen], settings)(student, BATCH)
    values = {name: float(part.detach()) for name, part in result.items()}
    assert values["token"] == pytest.approx(token_loss(name, ours.tolist(), theirs.tolist()), rel=1e-5)
    parts = 0.5 * values["logit"] + 2 * values["token"] + 0.1 * values["label"]
    assert values["loss"] == pytest.approx(parts, rel=1e-6)
    result["loss"].backward()
    assert all(parameter.grad is not None for parameter in student.parameters())


@pytest.mark.parametrize("name", ["cosine", "mse", "cosine_smooth_l1"])
def test_the_block_loss_is_that_of_slow_loops(name):
    """Of two pairs, in an order that is not the blocks', between maps of different size."""
    blocks = {1: 0, 0: 2}
    teacher = classifier(1, embed_dim=24, depth=3)
    settings = DistillSettings(block_weight=3.0, blocks=blocks, feature_loss=name)
    student = prepared_student(classifier(2, patch_size=4), settings, teacher)
    by_hand = []
    with torch.no_grad():
        for projection, (ours, theirs) in zip(student.block_projections, blocks.items(), strict=True):
            own, taught = (
                after_block(model, block)[:, 1:] for model, block in ((student.classifier, ours), (teacher, theirs))
            )
            weight, bias = projection.linear.weight.double(), projection.linear.bias.double()
            resized = bilinear(own.unflatten(1, (8, 8)), 4, 4).flatten(1, 2) @ weight.T + bias
            by_hand.append(token_loss(name, resized.tolist(), taught.tolist()))
        frozen = FrozenTeacher(teacher, choose_device(), precision="fp32", blocks=[*blocks.values()])
        result = DistillObjective(student, [frozen], settings)(student, BATCH)
    assert float(result["block"]) == pytest.approx(sum(by_hand) / 2, rel=1e-5)
    parts = 0.9 * result["logit"] + 3 * result["block"] + 0.1 * result["label"]
    assert float(result["loss"]) == pytest.approx(float(parts), rel=1e-6)


def after_block(model, number):
    """What a block of a vision transformer gives, seen by a hook, [B, N, D]."""
    seen = []
    with model.network.blocks[number].register_forward_hook(lambda *said: seen.append(said[2])):
        model(IMAGES)
    return seen[0]


def test_blocks_of_a_hierarchical_network_are_its_stages():
    torch.manual_seed(0)
    model = networks.create(ModelSettings(architecture="convnext_atto", image_size=64), ("a", "b", "c")).eval()
    assert networks.block_shapes(model, [3, 1]) == [(2, 2, 320), (8, 8, 80)]


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("vit_tiny_patch16_224", r"has blocks 0 to 11, but distill\.blocks names 12; name one of these"),
        ("hiera_tiny_224", r"timm does not give what its blocks \[0, 2\] give .* set distill\.block_weight=0"),
    ],
)
def test_blocks_that_do_not_exist_are_refused(architecture, message):
    with torch.device("meta"):
        model = networks.create(ModelSettings(architecture=architecture), ("a", "b"))
    with pytest.raises(ModelError, match=rf"architecture '{architecture}'.*{message}"):
        networks.block_shapes(model.to("meta"), [0, 2] if architecture.startswith("hiera") else [0, 12])


def test_convolutional_student_learns_tokens_of_transformer():
    settings = DistillSettings(token_weight=1.0)
    torch.manual_seed(3)
    student = networks.create(ModelSettings(architecture="resnet10t", image_size=64), ("a", "b", "c"))
    model = prepared_student(student, settings, classifier(1))
    frozen = FrozenTeacher(classifier(1), choose_device(), precision="fp32", tokens=True)
    batch = BATCH._replace(images=torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8))
    tokens = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(8):
        optimizer.zero_grad()
        loss = DistillObjective(model, [frozen], settings)(model, batch)
        loss["loss"].backward()
        optimizer.step()
        tokens.append(float(loss["token"].detach()))
    assert tokens[-1] < 0.7 * tokens[0]


def test_statistics_standardize_tokens():
    tokens = 3 + torch.randn(5, 4, 4, 6, dtype=torch.float64) * torch.arange(1, 7)
    moments = torch.cat([tokens.mean((1, 2)), tokens.square().mean((1, 2))], 1).float().numpy()
    found, every = token_statistics(moments), tokens.reshape(-1, 6)
    assert np.allclose(found.mean, every.mean(0), atol=1e-5)
    variance = every.var(0, correction=0)
    assert np.allclose(found.std, (variance + 1e-4 * variance.mean()).sqrt(), rtol=1e-5)
    assert token_statistics(moments[:, :0]) is None
    # Tokens of a teacher without a head are standardized.
    headless = classifier(1, labels=())
    with torch.no_grad():
        expected = headless.network.forward_features(headless.preprocess(IMAGES))[:, 1:].unflatten(1, (4, 4))
    mean, std = torch.randn(16), 0.5 + torch.rand(16)
    statistics = EmbeddingStatistics(mean=tuple(mean.tolist()), std=tuple(std.tolist()))
    headless.card = replace(headless.card, tokens=statistics)
    said = FrozenTeacher(headless, choose_device(), precision="fp32", features=True, tokens=True)(IMAGES)
    assert torch.allclose(said.tokens, (expected - mean) / std, atol=1e-5)
    assert torch.allclose(said.features, headless.pooled(IMAGES), atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# What a recording keeps

TOKENS = replace(DESCRIPTION, tokens=(3, 3, 5))


def recorded(tokens, description):
    logits = torch.randn(len(tokens), description.classes)
    records = pack(summarize(TeacherOutputs(logits, None, tokens), description), description)
    return records, recording.unpack(records).restored().tokens


@pytest.mark.parametrize(("kind", "size"), [("int8", 9 * (5 + 4)), ("fp16", 9 * 5 * 2)])
def test_the_bytes_of_a_view(kind, size):
    description = replace(TOKENS, token_format=kind)
    assert description.record.itemsize == DESCRIPTION.record.itemsize + size
    assert recording._DESCRIPTION.validate_json(json.dumps(description.content()), strict=True) == description
    assert description.content().keys() - DESCRIPTION.content().keys() == {"tokens", "token_format"}


def test_int8_tokens_are_off_by_half_a_step():
    given = torch.randn(20, 3, 3, 5) * torch.logspace(-3, 3, 9).view(1, 3, 3, 1)
    given[0, 0, 0] = 0
    records, kept = recorded(given, TOKENS)
    assert not unusable(records).any()
    for own, places in zip(kept.flatten(0, 2).double().tolist(), given.flatten(0, 2).double().tolist(), strict=True):
        half_a_step = max(map(abs, places)) / 254
        assert all(abs(a - b) <= half_a_step * (1 + 1e-5) for a, b in zip(own, places, strict=True))
    assert not torch.equal(kept, given)


@pytest.mark.parametrize("kind", ["int8", "fp16"])
def test_tokens_that_are_not_finite_are_found(kind):
    given = torch.randn(3, 3, 3, 5)
    given[1, 2, 0, 4] = float("nan")
    records, _ = recorded(given, replace(TOKENS, token_format=kind))
    assert unusable(records).tolist() == [False, True, False]


def test_stored_tokens_travel_as_they_are_stored():
    records, _ = recorded(torch.randn(2, 3, 3, 5), TOKENS)
    unpacked = recording.unpack(records)
    assert unpacked.tokens.dtype == torch.int8
    assert unpacked.restored().tokens.dtype == torch.float32


def test_a_shard_of_long_records_holds_fewer_samples():
    assert shards.block_size(1_281_167, 48) == shards.block_size(1_281_167)
    long = replace(DESCRIPTION, tokens=(14, 14, 768)).record.itemsize
    assert 0.9 * shards.SHARD_BYTES < shards.block_size(1_281_167, long) * long <= shards.SHARD_BYTES
    assert shards.block_size(5, shards.SHARD_BYTES + 1) == 1
