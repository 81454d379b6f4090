"""Model directories that someone has made who wants to be loaded: manifest and checksums fit."""

import json
import pickle
import struct

import pytest
import safetensors.torch
import torch

from tests.hostile.targets import SIZE, sign
from trainer.config import ModelSettings
from trainer.io import limits
from trainer.io.errors import ModelError
from trainer.models import networks

ARGS = {"img_size": SIZE, "patch_size": 8, "embed_dim": 8, "depth": 1, "num_heads": 1}


class Opened:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return open, (str(self.trace), "w")


@pytest.fixture
def directory(tmp_path):
    networks.save(networks.create(ModelSettings(architecture="vit_tiny_patch16_224", args=ARGS), ["a", "b"]), tmp_path)
    return tmp_path


def describe(directory, **changes):
    """Change the description, and sign it."""
    file = directory / networks.CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    sign(directory, "model")
    return directory


def test_checkpoint_that_description_names_is_not_unpickled(directory, tmp_path):
    (tmp_path / "evil.pth").write_bytes(pickle.dumps(Opened(tmp_path / "trace")))
    for name in ("checkpoint_path", "pretrained_cfg", "cache_dir"):
        describe(directory, args=ARGS | {name: str(tmp_path / "evil.pth")})
        with pytest.raises(ModelError, match=f"the argument {name} is not for models; leave it out"):
            networks.load(directory)
    assert not (tmp_path / "trace").exists()


def test_loading_draws_no_random_number(directory):
    sign(directory, "model")
    before = torch.get_rng_state()
    networks.load(directory)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "value"), [("embed_dim", 10**9), ("depth", 2**62), ("mlp_ratio", 1e300), ("depth", -(10**9))]
)
def test_absurd_argument_is_refused_before_anything_is_built(directory, name, value):
    with pytest.raises(
        ModelError, match=f"the argument {name} must be at most 16,384, got {value}".replace("+", r"\+")
    ):
        networks.load(describe(directory, args=ARGS | {name: value}))


@pytest.mark.parametrize(
    "changes",
    [
        *({"labels": "ab"}, {"labels": [1, 2]}, {"labels": None}, {"mean": [0.5]}, {"mean": ["x"] * 3}, {"std": []}),
        *(
            {"args": []},
            {"args": {"depth": [1]}},
            {"args": {"depth": None}},
            {"image_size": "large"},
            {"image_size": 0},
            {"temperature": 0},
            {"temperature": -1.0},
            {"temperature": "warm"},
            {"image_size": 10**9},
            {"interpolation": "nearest"},
            {"architecture": 3},
        ),
    ],
)
def test_a_description_of_another_form_is_refused(directory, changes):
    with pytest.raises(ModelError, match=r"config.json is not the description of a model"):
        networks.load(describe(directory, **changes))


SQUARE = {"fit": "crop", "size": 24, "interpolation": "bicubic", "max_pixels": 99}


@pytest.mark.parametrize(
    "square",
    [
        *("crop", [], {}, {"fit": "crop"}, SQUARE | {"fit": "pad"}, SQUARE | {"fit": None}, SQUARE | {"size": 0}),
        *(SQUARE | {"size": 2049}, SQUARE | {"size": 2**62}, SQUARE | {"size": "large"}),
        *(SQUARE | {"interpolation": "nearest"}, SQUARE | {"interpolation": 3}),
        *(SQUARE | {"max_pixels": 0}, SQUARE | {"max_pixels": -1}, SQUARE | {"max_pixels": None}),
    ],
)
def test_a_square_that_cannot_be_is_refused(directory, square):
    assert networks.load(describe(directory, square=SQUARE)).card.square is not None
    with pytest.raises(ModelError, match=r"(?s)config.json is not the description of a model .*square"):
        networks.load(describe(directory, square=square))


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"{}", "header"),
        (b'{"a": {"dtype": "F32", "shape": [18446744073709551615, 4], "data_offsets": [0, 4]}}', "header"),
        (b'{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}', "header"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 99999999]}}', "header"),
        (b"[" * 10_000, "header"),
        (b"\xff\xfe", "header"),
    ],
)
def test_header_of_weights_that_does_not_fit_is_refused(directory, header, reason):
    (directory / networks.WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    sign(directory, "model")
    with pytest.raises(ModelError, match=rf"model.safetensors does not fit .*{reason}"):
        networks.load(directory)


def test_another_shape_is_named(directory):
    weights = safetensors.torch.load_file(directory / networks.WEIGHTS)
    weights["head.bias"] = torch.zeros(3)
    safetensors.torch.save_file(weights, directory / networks.WEIGHTS)
    sign(directory, "model")
    with pytest.raises(ModelError, match=r"head.bias: its shape is \(3,\) instead of \(2,\)"):
        networks.load(directory)


def test_the_largest_argument_is_that_of_the_limits():
    with pytest.raises(ModelError, match=f"at most {limits.MODEL_ARGUMENT:,}"):
        networks.create(
            ModelSettings(architecture="vit_tiny_patch16_224", args={"depth": limits.MODEL_ARGUMENT + 1}), ["a"]
        )
