import json
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from torch import nn

from trainer.config import ModelSettings
from trainer.io import artifacts
from trainer.io.errors import ArtifactError, ModelError
from trainer.models import networks
from trainer.models.served_student.preprocessing import Square

TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
SETTINGS = ModelSettings(architecture="vit_tiny_patch16_224", args=TINY)
IMAGES = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return networks.create(SETTINGS, ["ä", "b"]).eval()


def saved(model, path):
    with artifacts.create(path, "model", settings={}) as draft:
        networks.save(model, draft.path)
    return path


def reseal(path):
    """Write the manifest anew, as one would who passes on an altered directory."""
    with artifacts.create(path, "model", settings={}):
        pass


def test_a_model_comes_back_from_its_directory(model, tmp_path):
    loaded = networks.load(saved(model, tmp_path / "model"))
    assert loaded.card == model.card
    assert not loaded.training
    assert torch.equal(loaded(IMAGES), model(IMAGES))


SMALL = {"img_size": 32, "embed_dim": 32, "num_heads": 2, "depth": 2, "patch_size": 8}
ARCHITECTURES = {
    "vit_tiny_patch16_224": SMALL,
    "vit_small_patch16_dinov3": SMALL,
    "eva02_tiny_patch14_224": SMALL,
    "beit_base_patch16_224": SMALL,
    "swin_tiny_patch4_window7_224": {"img_size": 32, "embed_dim": 16, "window_size": 4},
    "swinv2_tiny_window8_256": {"img_size": 32, "embed_dim": 24, "window_size": 4},
    "convnext_atto": {},
    "levit_128s": {},
    "resnetblur18": {},
}
"""Architectures, many with buffers that are not kept with the weights -> arguments that make them small."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_built_without_memory_computes_the_same(architecture, tmp_path):
    torch.manual_seed(0)
    model = networks.create(ModelSettings(architecture=architecture, args=ARCHITECTURES[architecture]), ["a", "b"])
    network = model.network
    for buffer in network.state_dict().values():  # running statistics too are none that a new model has
        if buffer.is_floating_point():
            buffer.add_(0.01 * torch.rand_like(buffer))
    loaded = networks.load(saved(model, tmp_path / "model"))
    tensors, wanted = (dict([*one.named_parameters(), *one.named_buffers()]) for one in (loaded.network, network))
    assert list(tensors) == list(wanted)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, wanted[name]), name
        assert tensor.requires_grad == wanted[name].requires_grad, name
    edge = model.card.image_size
    images = torch.randint(0, 256, (2, 3, edge, edge), dtype=torch.uint8)
    torch.testing.assert_close(loaded(images), model.eval()(images))


def test_what_is_loaded_may_be_trained_and_its_file_stays(model, tmp_path):
    path = saved(model, tmp_path / "model")
    loaded, content = networks.load(path), (path / networks.WEIGHTS).read_bytes()
    with torch.no_grad():
        for weight in loaded.parameters():
            weight.add_(1)
    assert (path / networks.WEIGHTS).read_bytes() == content
    assert torch.equal(networks.load(path)(IMAGES), model(IMAGES))


def test_weights_in_half_precision_become_those_of_architecture(model, tmp_path):
    with artifacts.create(tmp_path / "model", "model", settings={}) as draft:
        networks.save(model, draft.path)
        halves = {name: value.half() for name, value in model.network.state_dict().items()}
        safetensors.torch.save_file(halves, draft.path / networks.WEIGHTS)
    loaded = networks.load(tmp_path / "model")
    assert {weight.dtype for weight in loaded.parameters()} == {torch.float32}
    torch.testing.assert_close(loaded(IMAGES), model(IMAGES), rtol=0, atol=1e-2)


def test_card_of_older_directory_says_nothing_of_photos(model, tmp_path):
    square = Square(fit="stretch", size=24, max_pixels=99)
    model.card = replace(model.card, square=square)
    path = saved(model, tmp_path / "model")
    assert networks.load(path).card.square == square
    config = json.loads((path / "config.json").read_text())
    assert config.pop("square") == {
        "fit": "stretch",
        "size": 24,
        "interpolation": "bicubic",
        "max_pixels": 99,
        "gray_bits": 16,
    }
    assert config.pop("interpolation") == "bilinear"
    (path / "config.json").write_text(json.dumps(config))
    reseal(path)
    older = networks.load(path)
    assert older.card == replace(model.card, square=None)
    assert torch.equal(older(IMAGES), model(IMAGES))


def test_images_are_normalized_as_the_network_wants_it(model):
    mean, std = torch.tensor(model.card.mean), torch.tensor(model.card.std)
    expected = (IMAGES.double() / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    assert torch.allclose(model.preprocess(IMAGES).double(), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "further", "args"),
    [
        ("resnet10t", {}, {}),
        ("tf_efficientnet_lite0", {}, {}),
        ("vit_tiny_patch16_224", {"patch_size": 8, "depth": 1}, {"patch_size": 8, "depth": 1, "img_size": 64}),
    ],
)
def test_model_takes_images_of_size_that_it_is_given(tmp_path, architecture, further, args):
    settings = ModelSettings(architecture=architecture, args=further, image_size=64)
    model = networks.with_labels(networks.create(settings, ["a", "b"]), ["x", "y", "z"]).eval()
    assert (model.card.image_size, model.card.args) == (64, args)
    assert model.preprocess(IMAGES).shape == (2, 3, 64, 64)
    loaded = networks.load(saved(model, tmp_path / "model"))
    assert loaded.card == model.card
    assert torch.equal(loaded(IMAGES), model(IMAGES))


def test_labels_give_a_head(model):
    other = networks.with_labels(model, ["x", "y", "z"]).eval()
    assert other.card.labels == ("x", "y", "z")
    assert other(IMAGES).shape == (2, 3)
    for name, value in model.network.state_dict().items():
        if not name.startswith("head."):
            assert torch.equal(value, other.network.state_dict()[name])
    # A copy that is to be trained has no temperature or threshold of the weights that it starts from.
    model.card = replace(model.card, temperature=2.5, threshold=0.2)
    other = networks.with_labels(model, model.card.labels)
    assert (other.card.temperature, other.card.threshold) == (None, None)


def test_wrong_architectures():
    with pytest.raises(ModelError, match=r"'vit_tinyy': timm has no such model"):
        networks.create(ModelSettings(architecture="vit_tinyy"), ["a", "b"])
    # A wrong argument is named.
    with pytest.raises(ModelError, match=r"\{'heads': 3\} cannot be built.*heads"):
        networks.create(ModelSettings(architecture="vit_tiny_patch16_224", args={"heads": 3}), ["a", "b"])
    # A network without a head is refused.
    args = {"depth": 1, "embed_dim": 64, "num_heads": 1}
    with pytest.raises(ModelError, match="'qwen3_vit_88m_enc': has no head for classes"):
        networks.create(ModelSettings(architecture="qwen3_vit_88m_enc", args=args), ["a", "b"])
    # Two sizes of one model are refused.
    settings = ModelSettings(architecture="vit_tiny_patch16_224", args={"img_size": 32}, image_size=64)
    with pytest.raises(ModelError, match=r"image_size is 64, but args\.img_size is 32"):
        networks.create(settings, ["a", "b"])


def test_labels_that_do_not_fit_are_named(model):
    with pytest.raises(ModelError, match="has 2 classes, but the data set has 3"):
        networks.check_labels(model, ["ä", "b", "c"], "teacher", several=False)
    with pytest.raises(ModelError, match=r"its class 1 is 'b', but the data set's is 'c'"):
        networks.check_labels(model, ["ä", "c"], "teacher", several=False)
    networks.check_labels(model, ["ä", "b"], "teacher", several=False)
    with pytest.raises(
        ModelError, match="teacher: chooses one of its classes, but the data set's images may have several labels"
    ):
        networks.check_labels(model, ["ä", "b"], "teacher", several=True)
    model.card = replace(model.card, threshold=0.5)
    networks.check_labels(model, ["ä", "b"], "teacher", several=True)
    with pytest.raises(
        ModelError, match=r"teacher: says of each class by itself .*, but the data set's images have one label each"
    ):
        networks.check_labels(model, ["ä", "b"], "teacher", several=False)


DAMAGES = {
    "no config": (lambda path: (path / "config.json").unlink(), "not the description of a model"),
    "config without labels": (lambda path: (path / "config.json").write_text("{}"), "not the description of a model"),
    "weights of nothing": (lambda path: (path / "model.safetensors").write_bytes(b"xx"), "does not fit"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "does not fit"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_is_refused_by_its_checksums(model, tmp_path, damage):
    DAMAGES[damage][0](saved(model, tmp_path / "model"))
    with pytest.raises(ArtifactError, match=r"missing|bytes instead of"):
        networks.load(tmp_path / "model")


@pytest.mark.parametrize("damage", DAMAGES)
def test_nonsense_with_right_checksums_is_refused(model, tmp_path, damage):
    act, message = DAMAGES[damage]
    act(saved(model, tmp_path / "model"))
    reseal(tmp_path / "model")
    with pytest.raises(ModelError, match=message):
        networks.load(tmp_path / "model")


def test_weights_of_another_network_are_refused(model, tmp_path):
    path = saved(model, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    config["args"]["embed_dim"] = 32
    (path / "config.json").write_text(json.dumps(config))
    reseal(path)
    with pytest.raises(ModelError, match="does not fit vit_tiny_patch16_224"):
        networks.load(path)


# ---------------------------------------------------------------------------------------------------------------------
# Without a head


def test_without_labels_a_model_gives_its_embedding(model, tmp_path):
    headless = networks.with_labels(model, ()).eval()
    assert headless.card.labels == ()
    assert torch.equal(headless(IMAGES), model.pooled(IMAGES))
    assert torch.equal(headless.pooled(IMAGES), model.pooled(IMAGES))
    assert networks.feature_size(headless) == networks.feature_size(model) == TINY["embed_dim"]
    loaded = networks.load(saved(headless, tmp_path / "model"))
    assert torch.equal(loaded(IMAGES), headless(IMAGES))


def test_head_with_normalization_comes_off_and_on(tmp_path):
    model = networks.create(ModelSettings(architecture="levit_128s"), ("a", "b")).eval()
    images = torch.randint(0, 256, (1, 3, 224, 224), dtype=torch.uint8)
    headless = networks.with_labels(model, ()).eval()
    assert torch.equal(headless(images), model.pooled(images))
    again = networks.with_labels(headless, ("a", "b", "c")).eval()
    assert again(images).shape == (1, 3)
    assert torch.equal(again.pooled(images), model.pooled(images))
    with pytest.raises(ModelError, match="'levit_128s' cannot take a linear probe as its head"):
        networks.with_head(headless, ["a", "b"], torch.zeros(2, 384), torch.zeros(2))


def test_head_that_is_put_on_reads_embedding(model):
    headless = networks.with_labels(model, ()).eval()
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(3, TINY["embed_dim"], generator=generator), torch.randn(3, generator=generator)
    headed = networks.with_head(headless, ["a", "b", "c"], weight, bias).eval()
    assert headed.card.labels == ("a", "b", "c")
    assert torch.allclose(headed(IMAGES), headless(IMAGES) @ weight.T + bias, atol=1e-5)


def test_head_of_which_timm_names_but_part_is_refused():
    model = networks.create(ModelSettings(architecture="efficientvit_m0"), ("a", "b"))
    with pytest.raises(ModelError, match="'efficientvit_m0' cannot be taken without its head: timm"):
        networks.with_labels(model, ())


def test_statistics_of_an_embedding_are_in_the_card(model, tmp_path):
    statistics = networks.EmbeddingStatistics(mean=(0.5,) * 16, std=(2.0,) * 16)
    headless = networks.with_labels(model, ())
    headless.card = replace(headless.card, embedding=statistics)
    path = saved(headless, tmp_path / "headless")
    assert networks.load(path).card == headless.card
    assert networks.with_labels(headless, ["a"]).card.embedding is None
    headless.card = replace(headless.card, embedding=networks.EmbeddingStatistics(mean=(0.5,) * 3, std=(2.0,) * 3))
    with pytest.raises(ModelError, match=r"does not fit .* \(its embedding has 16 numbers, and statistics of 3\)"):
        networks.load(saved(headless, tmp_path / "other"))
    assert "embedding" not in json.loads((saved(model, tmp_path / "model") / "config.json").read_text())


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ([0.0], [1.0, 1.0], "1 means and 2 standard deviations"),
        ([0.0], [0.0], "positive standard deviations"),
        ([float("nan")], [1.0], "finite means"),
    ],
)
def test_statistics_by_which_nothing_can_be_divided_are_refused(mean, std, message):
    with pytest.raises(ValueError, match=message):
        networks.EmbeddingStatistics(mean=tuple(mean), std=tuple(std))


def test_batch_normalizations_are_known_by_their_kind():
    kinds = [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.SyncBatchNorm(2)]
    assert networks.batch_norms(nn.Sequential(*kinds, nn.LayerNorm(2))) == kinds
