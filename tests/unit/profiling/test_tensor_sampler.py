from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trainer.config import EvidenceSettings, MaeSettings, ModelSettings
from trainer.models import networks
from trainer.models.networks import Classifier
from trainer.objectives.pretraining import MaskedAutoencoder
from trainer.profiling.evidence import TENSOR_COLUMNS
from trainer.profiling.tensor_sampler import (
    TENSOR_SAMPLES_KEPT,
    AttentionEntropy,
    SampledModel,
    TensorSampler,
    TensorStats,
)
from trainer.profiling.timeline import RECORDER, HostClock, Timeline
from trainer.training.parallelize import CompileCounter, compile_blocks

SECOND = 1_000_000_000


class Watched:
    """A training whose time a test moves: looking itself takes no time but what `costs` says."""

    def __init__(
        self,
        every: int = 10,
        budget: float = 1.0,
        step_s: float = 1.0,
        *,
        attention: bool = True,
        agree: Callable[[bool], bool] | None = None,
        model: nn.Module | None = None,
    ) -> None:
        self.now = 0
        self.curves: list[tuple[int, Mapping[str, float], float]] = []
        self.timeline = Timeline(HostClock(lambda: self.now), nanoseconds=lambda: self.now)
        settings = EvidenceSettings(tensors_every=every, tensors_budget=budget)
        torch.manual_seed(0)
        args = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
        self.model = networks.create(ModelSettings(architecture="vit_tiny_patch16_224", args=args), ["a", "b"])
        self.tensor_sampler = TensorSampler(
            settings,
            self.timeline,
            lambda *point: self.curves.append(point),
            SampledModel(model=model or self.model, attention=attention, agree=agree),
        )
        self.timeline.start()
        self._step_ns = int(step_s * SECOND)

    def train(self, steps: range, show: Callable[[], object] | None = None) -> list[int]:
        """The steps in which weights were looked at."""
        image = torch.zeros(1, 3, 16, 16, dtype=torch.uint8)
        looked = []
        for step in steps:
            with self.timeline.step(step):
                self.model(image).sum().backward()
                marks = len(self.timeline._segment.owners)
                with self.tensor_sampler.around_update(step, show or (lambda: self.model(image))):
                    self.now += self._step_ns
                self.model.zero_grad()
                if len(self.timeline._segment.owners) > marks:
                    looked.append(step)
        self.tensor_sampler.finish()
        return looked


def test_first_step_and_then_every_so_manyth_is_looked_at() -> None:
    watched = Watched(every=10)
    assert watched.train(range(35)) == [0, 10, 20, 30]
    samples = watched.tensor_sampler.samples()
    assert samples.steps.tolist() == [0, 10, 20, 30]
    np.testing.assert_allclose(np.diff(samples.seconds), 10)
    assert set(samples.values) == set(TENSOR_COLUMNS)
    assert {values.shape for values in samples.values.values()} == {(4, len(samples.tensors))}
    assert np.isfinite(samples.values["weight_norm"]).all()
    assert RECORDER in watched.timeline.ranges


def test_a_resumed_training_looks_at_common_steps() -> None:
    watched = Watched(every=10)
    assert watched.train(range(17, 45)) == [17, 30, 40]


def test_processes_that_must_look_together_follow_first_one() -> None:
    """Each asks at the same steps, whatever it has spent, and the answer counts."""
    asked: list[bool] = []

    def first_says(affordable: bool) -> bool:
        asked.append(affordable)
        return len(asked) != 2

    watched = Watched(every=10, budget=0.0, agree=first_says)
    assert watched.train(range(45)) == [0, 10, 30, 40]
    assert len(asked) == 4


def test_looks_become_rarer_where_they_would_cost_too_much() -> None:
    """Looking takes real time, more than a millisecond; the training's own passes as the test says."""
    watched = Watched(every=1, budget=0.01, step_s=0.05)
    spent = []
    for step in range(400):
        before, now = watched.tensor_sampler.spent_s, watched.timeline.now_s()
        if watched.train(range(step, step + 1)):
            spent.append((before, now))
    assert 1 < len(spent) < 300
    assert all(before <= 0.01 * now for before, now in spent)


def test_looks_can_be_off() -> None:
    watched = Watched(every=0)
    assert watched.train(range(5)) == []
    assert watched.tensor_sampler.missing == {"tensors": "turned off (tensors_every is 0)"}
    assert {values.shape for values in watched.tensor_sampler.samples().values.values()} == {(0, 0)}
    # A model without weights has nothing to look at.
    watched = Watched(model=nn.ReLU())
    assert watched.train(range(11)) == []
    assert watched.tensor_sampler.missing == {"tensors": "the model has no weights to look at"}


def test_attention_becomes_curves() -> None:
    watched = Watched(every=2)
    watched.train(range(4))
    assert [step for step, _, _ in watched.curves] == [0, 2]
    assert all(0.5 < values["attention_entropy/network.blocks.0"] <= 1 for _, values, _ in watched.curves)
    # Attention that is not looked at has its reason.
    watched = Watched(attention=False)
    assert watched.tensor_sampler.missing == {"attention": "looked at by rank 0 only"}
    other = Watched(model=nn.Linear(2, 2))
    assert other.tensor_sampler.missing == {"attention": "the model has no attention of timm's kind"}


def test_first_look_is_kept_however_many_there_are() -> None:
    watched = Watched(every=1, attention=False)
    watched.train(range(3 * TENSOR_SAMPLES_KEPT))
    steps = watched.tensor_sampler.samples().steps
    assert steps[0] == 0
    assert TENSOR_SAMPLES_KEPT / 2 <= len(steps) <= TENSOR_SAMPLES_KEPT
    assert (np.diff(steps) > 0).all()
    assert steps[-1] > 2.9 * TENSOR_SAMPLES_KEPT


def make(**changes: object) -> Classifier:
    torch.manual_seed(0)
    args = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2} | changes
    return networks.create(ModelSettings(architecture="vit_tiny_patch16_224", args=args), ["a", "b"], drop_path=0.5)


def images() -> torch.Tensor:
    return torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def test_the_entropy_is_that_of_the_rows() -> None:
    model = make().train()
    heard: list[torch.Tensor] = []
    attention = model.network.blocks[1].attn
    nn.init.normal_(attention.qkv.weight)
    handle = attention.register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0]))
    entropy = AttentionEntropy(model)
    assert entropy.metrics == ["attention_entropy/network.blocks.0", "attention_entropy/network.blocks.1"]
    values = entropy.measure(lambda: model(images()))
    handle.remove()
    with torch.no_grad():
        queries, keys, _ = attention.qkv(heard[0]).reshape(3, 17, 3, 2, 8).permute(2, 0, 3, 1, 4)
        rows = (queries @ keys.transpose(-2, -1) / math.sqrt(8)).softmax(-1)
    expected = torch.distributions.Categorical(probs=rows).entropy().mean() / math.log(17)
    assert float(values[1]) == pytest.approx(float(expected), rel=1e-4)
    assert 0.01 < float(values[1]) < 0.9 < float(values[0]) <= 1


def test_looking_leaves_no_trace() -> None:
    model = make().train()
    state = torch.get_rng_state()
    entropy = AttentionEntropy(model)
    entropy.measure(lambda: model(images()))
    assert torch.equal(torch.get_rng_state(), state), "stochastic depth draws nothing"
    assert model.training
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
    assert all(weights.grad is None for weights in model.parameters())

    with pytest.raises(RuntimeError, match="size of tensor"):
        AttentionEntropy(model).measure(lambda: model(images()[:, :1].float().expand(3, 4, 16, 16)))
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


def test_blocks_that_are_asked() -> None:
    settings = MaeSettings(decoder_dim=8, decoder_depth=1, decoder_heads=2)
    autoencoder = MaskedAutoencoder(make(), settings)
    entropy = AttentionEntropy(autoencoder)
    assert entropy.metrics[-1] == "attention_entropy/decoder_blocks.0"
    values = entropy.measure(lambda: autoencoder(images(), torch.rand(3, 16)))
    assert torch.isfinite(values).all()
    # A block that no one asks is not reported.
    model = make()
    values = AttentionEntropy(model).measure(lambda: model.network.blocks[0](torch.rand(1, 17, 16)))
    assert torch.isnan(values).tolist() == [False, True]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_what_is_compiled_is_neither_asked_nor_compiled_again() -> None:
    torch._dynamo.reset()
    model, graphs = make().train(), CompileCounter("eager")
    compile_blocks(model, graphs)
    model(images()).sum().backward()
    compiled = graphs.count
    assert compiled
    entropy = AttentionEntropy(model)
    for _ in range(2):
        assert torch.isfinite(entropy.measure(lambda: model(images()[:2]))).all()
        model(images()).sum().backward()
    assert graphs.count == compiled
    torch._dynamo.reset()


def looked_at(model: nn.Module, rate: float = 0.1, **options: object) -> dict[str, dict[str, float]]:
    """One step of gradient descent, looked at: name of each tensor -> its columns."""
    statistics = TensorStats(model, **options)
    statistics.before_update()
    with torch.no_grad():
        for weights in model.parameters():
            if weights.grad is not None:
                weights.sub_(rate * weights.grad)
    values = statistics.after_update()
    assert values.shape == (len(statistics.names), len(TENSOR_COLUMNS))
    return {
        name: dict(zip(TENSOR_COLUMNS, row, strict=True))
        for name, row in zip(statistics.names, values.tolist(), strict=True)
    }


def layer(gradient: Tensor | None = None) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(100, 40)
    made.weight.grad = torch.randn(40, 100) if gradient is None else gradient
    made.bias.grad = torch.randn(40)
    return made


def test_statistics_of_a_tensor() -> None:
    model = layer()
    weights, gradient = model.weight.detach().clone(), model.weight.grad.clone()
    seen = looked_at(model)["weight"]
    assert (seen["elements"], seen["dimensions"]) == (4000, 2)
    assert seen["weight_norm"] == pytest.approx(float(weights.norm()), rel=1e-5)
    assert seen["weight_mean_abs"] == pytest.approx(float(weights.abs().mean()), rel=1e-5)
    assert seen["gradient_norm"] == pytest.approx(float(gradient.norm()), rel=1e-5)
    assert seen["gradient_mean_abs"] == pytest.approx(float(gradient.abs().mean()), rel=1e-5)
    assert seen["update_ratio"] == pytest.approx(0.1 * float(gradient.norm() / weights.norm()), rel=0.1), "of a sample"
    assert (seen["weight_nonfinite"], seen["gradient_zeros"], seen["gradient_nonfinite"], seen["unchanged"]) == (0,) * 4
    # A tensor that a step leaves alone is unchanged.
    seen = looked_at(layer(), rate=0.0)
    assert [seen[name]["unchanged"] for name in ("weight", "bias")] == [1, 1]
    assert [seen[name]["update_ratio"] for name in ("weight", "bias")] == [0, 0]
    # Zeros are counted and a change of some elements is a part.
    gradient = torch.ones(40, 100)
    gradient[:, :50] = 0
    seen = looked_at(layer(gradient))["weight"]
    assert seen["gradient_zeros"] == pytest.approx(0.5, abs=0.05)
    assert seen["unchanged"] == pytest.approx(0.5, abs=0.05)

    model.weight.grad = None
    model.weight.requires_grad_(False)
    seen = looked_at(model)
    missing = [name for name, value in seen["weight"].items() if math.isnan(value)]
    assert missing == ["gradient_norm", "gradient_mean_abs", "gradient_zeros", "gradient_nonfinite"]
    assert seen["weight"]["unchanged"] == 1
    assert not any(math.isnan(value) for value in seen["bias"].values())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [(0, 0), (17, 63), (39, 99)])
def test_single_element_that_is_not_finite_is_never_missed(value: float, place: tuple[int, int]) -> None:
    gradient = torch.ones(40, 100)
    gradient[place] = value
    model = layer(gradient)
    seen = looked_at(model)
    assert seen["weight"]["gradient_nonfinite"] >= 1 / 4000
    assert seen["bias"]["gradient_nonfinite"] == 0, "tensors do not spoil one another"
    assert looked_at(model)["weight"]["weight_nonfinite"] >= 1 / 4000


def test_measuring_leaves_no_trace() -> None:
    model = layer()
    statistics = TensorStats(model)
    before = [tensor.clone() for tensor in (model.weight, model.weight.grad)]
    state = torch.get_rng_state()
    statistics.before_update()
    statistics.after_update()
    assert all(torch.equal(*pair) for pair in zip(before, (model.weight, model.weight.grad), strict=True))
    assert torch.equal(torch.get_rng_state(), state)
