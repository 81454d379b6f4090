"""The graph of a student: the answers of torch, for any batch, and the operator that ONNX lacks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import openvino
import pytest
import torch
from torch import nn

from trainer.config import ModelSettings
from trainer.io.errors import ModelError
from trainer.models import networks
from trainer.models.onnx_student import OnnxStudent
from trainer.models.served_student.onnx_network import INPUT
from trainer.stages.onnx_export import int8, onnx_graph, variants

onnx = pytest.importorskip("onnx", reason="needs the extra `export`")


def classifier(architecture="vit_tiny_patch16_224", **args):
    torch.manual_seed(0)
    model = networks.create(ModelSettings(architecture=architecture, args=args), ["a", "b", "c"])
    for parameter in model.parameters():  # so that the classes differ
        nn.init.normal_(parameter, std=0.05)
    return model.eval()


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(0).integers(0, 256, (20, 40, 40, 3), dtype=np.uint8)


VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}


@pytest.mark.parametrize(("architecture", "args"), [("vit_tiny_patch16_224", VIT), ("resnet10t", {})])
def test_graph_gives_logits_of_torch_for_any_batch(architecture, args, images, tmp_path):
    """Its squares are larger than the network's input, so that the resizing inside is part of it."""
    model = classifier(architecture, **args)
    model = networks.Classifier(model.network, replace(model.card, image_size=32)).eval()
    onnx_graph.write(model, 40, tmp_path / "model.onnx")
    expected = variants.answering(model)(images)
    student = OnnxStudent(tmp_path / "model.onnx", threads=1)
    for count in (1, 2, 20):
        np.testing.assert_allclose(student.logits(images[:count]), expected[:count], atol=1e-4)
    assert np.ptp(expected, axis=1).min() > 1e-2
    onnx.checker.check_model(onnx.load(tmp_path / "model.onnx"), full_check=True)


def test_another_runtime_gives_the_same_logits(images, tmp_path):
    """OpenVINO, which resizes without antialiasing where ONNX's Resize asks for it."""
    model = classifier(**VIT)
    onnx_graph.write(model, 40, tmp_path / "model.onnx")
    compiled = openvino.compile_model(
        str(tmp_path / "model.onnx"), "CPU", {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    )
    for count in (1, 20):
        (logits,) = compiled({INPUT: images[:count]}).values()
        np.testing.assert_allclose(logits, variants.answering(model)(images[:count]), atol=1e-4)
    assert "Resize" not in {node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node}


class _Bessel(nn.Module):
    def forward(self, images):
        return torch.special.bessel_j0(images).mean((2, 3))


class _Branching(nn.Module):
    def forward(self, images):
        return images.mean((2, 3)) if images.sum() > 0 else images.amax((2, 3))


class _Silent(nn.Module):
    def forward(self, images):
        raise NotImplementedError  # an exception without a text, which has to be named by its type


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (_Bessel(), r"its operator (aten\.special|prims\.)_?bessel_j0\S* cannot be expressed in ONNX \(opset 20\)"),
        (_Branching(), "torch.export cannot follow its code"),
        (_Silent(), r"torch.export cannot follow its code \(NotImplementedError\); choose another student"),
    ],
)
def test_what_onnx_cannot_express_is_named(network, message, tmp_path):
    model = networks.Classifier(network, replace(classifier(**VIT).card, image_size=32)).eval()
    with pytest.raises(ModelError, match=f"architecture 'vit_tiny_patch16_224': {message}"):
        onnx_graph.write(model, 32, tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


def test_int8_keeps_chosen_layers_float(images, tmp_path):
    onnx_graph.write(classifier(**VIT), 40, tmp_path / "fp32.onnx")
    layers = int8.weighted_layers(tmp_path / "fp32.onnx")
    assert len(layers) == 2 + 4 * 2, "patches, head, and four matrices a block"
    for name, kept in (("all", frozenset()), ("some", frozenset({layers[0], layers[-1]}))):
        int8.quantize(tmp_path / "fp32.onnx", tmp_path / f"{name}.onnx", images, kept=kept)
    quantized = {name: eight_bit(tmp_path / f"{name}.onnx") for name in ("fp32", "all", "some")}
    assert quantized == {"fp32": 0, "all": len(layers), "some": len(layers) - 2}
    own = OnnxStudent(tmp_path / "fp32.onnx").logits(images)
    far = {name: np.abs(OnnxStudent(tmp_path / f"{name}.onnx").logits(images) - own).max() for name in ("all", "some")}
    assert 0 < far["some"] < far["all"] < 0.5


def test_what_onnx_runtime_refuses_is_one_message(images, tmp_path):
    onnx_graph.write(classifier(**VIT), 40, tmp_path / "fp32.onnx")
    with pytest.raises(ModelError, match=r"ONNX Runtime cannot quantize this student \(.*export.int8=false"):
        int8.quantize(tmp_path / "fp32.onnx", tmp_path / "int8.onnx", images[:, :20])
    (tmp_path / "damaged.onnx").write_bytes(b"no graph")
    with pytest.raises(ModelError, match=r"damaged\.onnx: ONNX Runtime does not take it \("):
        OnnxStudent(tmp_path / "damaged.onnx")


def eight_bit(file):
    """How many matrices of weights are int8."""
    return sum(
        one.data_type == onnx.TensorProto.INT8 and len(one.dims) > 1 for one in onnx.load(file).graph.initializer
    )
