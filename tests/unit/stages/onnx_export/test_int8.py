"""Fine-tuning for int8: what is imitated is the rounding of the int8 variant, and a student learns to live with it."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from torch import nn

from trainer.data.dataset import open_dataset
from trainer.models import networks
from trainer.models.onnx_student import OnnxStudent
from trainer.stages.onnx_export import int8, onnx_graph, variants

pytest.importorskip("onnx", reason="needs the extra `export`")


def rounded(values, scale, zero, lowest, highest):
    """Each number by itself, in double precision."""
    result = np.empty_like(values, dtype=np.float64)
    for index, value in np.ndenumerate(values):
        step = min(max(round(value / scale) + zero, lowest), highest)
        result[index] = (step - zero) * scale
    return result


def test_a_layer_computes_with_rounded_inputs_and_weights():
    generator = torch.Generator().manual_seed(0)
    layer, inputs = nn.Linear(6, 4), 3 * torch.rand(5, 6, generator=generator) - 1
    weight, bias = layer.weight.detach().numpy().copy(), layer.bias.detach().numpy()
    lowest, highest = min(0.0, float(inputs.min())), max(0.0, float(inputs.max()))
    scale = (highest - lowest) / 255
    expected_inputs = rounded(inputs.numpy(), scale, round(-lowest / scale), 0, 255)
    expected_weight = np.stack([rounded(row, np.abs(row).max() / 127, 0, -127, 127) for row in weight])
    names = set(layer.state_dict())
    with int8.rounding(layer):
        outputs = layer(inputs)
    np.testing.assert_allclose(outputs.detach().numpy(), expected_inputs @ expected_weight.T + bias, atol=1e-5)
    assert np.abs(outputs.detach().numpy() - (inputs.numpy() @ weight.T + bias)).max() > 1e-4
    assert set(layer.state_dict()) == names
    np.testing.assert_array_equal(layer.weight.detach().numpy(), weight)
    assert not layer._forward_pre_hooks


@pytest.fixture
def model(trained_digits):
    """The digits' student, with one number in front of a layer three hundred times as large, for which the layer's weights make up."""
    model = networks.load(trained_digits.student)
    block = model.network.blocks[0]
    with torch.no_grad():
        block.norm2.weight[0] *= 300
        block.norm2.bias[0] *= 300
        block.mlp.fc1.weight[:, 0] /= 300
    return model


def test_int8_answers_are_exact_without_vnni_too(trained_digits, tmp_path):
    """As those of the unfused graph, which rounds where the int8 file says and multiplies in float32."""
    import onnxruntime

    model, data = networks.load(trained_digits.student), open_dataset(trained_digits.dataset)
    onnx_graph.write(model, data.image_size, tmp_path / "fp32.onnx")
    int8.quantize(tmp_path / "fp32.onnx", tmp_path / "int8.onnx", variants.squares(data.split("train"), range(64)))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    unfused = onnxruntime.InferenceSession(tmp_path / "int8.onnx", options, providers=["CPUExecutionProvider"])
    images = variants.squares(data.split("test"), range(200))
    (expected,) = unfused.run(None, {"images": images})
    np.testing.assert_allclose(OnnxStudent(tmp_path / "int8.onnx", threads=1).logits(images), expected, atol=0.2)


def test_student_learns_to_answer_in_int8_as_it_did(model, trained_digits, caplog, tmp_path):
    caplog.set_level(logging.INFO)
    data = open_dataset(trained_digits.dataset)
    before = {name: value.clone() for name, value in model.network.state_dict().items()}
    tuned, again = (int8.finetune(model, data.split("train"), steps=60) for _ in range(2))
    for name, value in model.network.state_dict().items():
        assert torch.equal(value, before[name]), name
        assert torch.equal(tuned.network.state_dict()[name], again.network.state_dict()[name]), name
    test, indices = data.split("test"), range(200)
    images = variants.squares(data.split("train"), range(64))
    own, shifts = variants.predict(variants.answering(model), test, indices), {}
    for name, one in (("plain", model), ("tuned", tuned)):
        onnx_graph.write(one, data.image_size, tmp_path / "fp32.onnx")
        int8.quantize(tmp_path / "fp32.onnx", tmp_path / f"{name}.onnx", images)
        found = variants.predict(OnnxStudent(tmp_path / f"{name}.onnx", threads=1).logits, test, indices)
        shifts[name] = variants.Scoring(labels=np.zeros(len(own), dtype=np.int64), temperature=1.0).shift(own, found)
    assert "quantization-aware fine-tuning: KL" in caplog.text
    assert 0 < shifts["tuned"] < shifts["plain"] / 2, shifts
