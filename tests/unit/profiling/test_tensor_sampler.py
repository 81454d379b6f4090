from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import nn

from trainer import models
from trainer.config import EvidenceSettings, MaeSettings, ModelSettings
from trainer.models import Classifier
from trainer.pretraining.masked_autoencoder import MaskedAutoencoder
from trainer.profiling.evidence_schema import TENSOR_COLUMNS
from trainer.profiling.tensor_sampler import TENSOR_SAMPLES_KEPT, AttentionEntropy, TensorSampler
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
        self.model = models.create(ModelSettings(architecture="vit_tiny_patch16_224", args=args), ["a", "b"])
        self.tensor_sampler = TensorSampler(
            settings,
            self.timeline,
            lambda *point: self.curves.append(point),
            model or self.model,
            attention=attention,
            agree=agree,
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


def test_the_first_step_and_then_every_so_manyth_is_looked_at() -> None:
    watched = Watched(every=10)
    assert watched.train(range(35)) == [0, 10, 20, 30]
    moments, values = watched.tensor_sampler.table()
    assert moments[:, 0].tolist() == [0, 10, 20, 30]
    np.testing.assert_allclose(np.diff(moments[:, 1]), 10)
    assert values.shape == (4, len(watched.tensor_sampler.tensors), len(TENSOR_COLUMNS))
    assert np.isfinite(values[..., TENSOR_COLUMNS.index("weight_norm")]).all()
    assert RECORDER in watched.timeline.ranges


def test_a_training_that_goes_on_looks_first_and_then_at_the_steps_that_others_look_at() -> None:
    watched = Watched(every=10)
    assert watched.train(range(17, 45)) == [17, 30, 40]


def test_processes_that_must_look_together_follow_the_first_one() -> None:
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


def test_looks_can_be_turned_off() -> None:
    watched = Watched(every=0)
    assert watched.train(range(5)) == []
    assert watched.tensor_sampler.missing == {"tensors": "turned off (tensors_every is 0)"}
    assert watched.tensor_sampler.table()[1].shape == (0, 0, len(TENSOR_COLUMNS))


def test_attention_becomes_curves() -> None:
    watched = Watched(every=2)
    watched.train(range(4))
    assert [step for step, _, _ in watched.curves] == [0, 2]
    assert all(0.5 < values["attention_entropy/network.blocks.0"] <= 1 for _, values, _ in watched.curves)


def test_attention_that_is_not_looked_at_has_its_reason() -> None:
    watched = Watched(attention=False)
    assert watched.tensor_sampler.missing == {"attention": "looked at by rank 0 only"}
    other = Watched(model=nn.Linear(2, 2))
    assert other.tensor_sampler.missing == {"attention": "the model has no attention of timm's kind"}


def test_the_first_look_is_kept_however_many_there_are() -> None:
    watched = Watched(every=1, attention=False)
    watched.train(range(3 * TENSOR_SAMPLES_KEPT))
    steps = watched.tensor_sampler.table()[0][:, 0]
    assert steps[0] == 0
    assert TENSOR_SAMPLES_KEPT / 2 <= len(steps) - 1 <= TENSOR_SAMPLES_KEPT
    assert (np.diff(steps) > 0).all()
    assert steps[-1] > 2.9 * TENSOR_SAMPLES_KEPT


def make(**changes: object) -> Classifier:
    torch.manual_seed(0)
    args = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2} | changes
    return models.create(ModelSettings(architecture="vit_tiny_patch16_224", args=args), ["a", "b"], drop_path=0.5)


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


def test_attention_to_one_token_has_none() -> None:
    model = make(embed_dim=32)
    for block in model.network.blocks:
        nn.init.normal_(block.attn.qkv.weight, std=30)
    assert (AttentionEntropy(model).measure(lambda: model(images())) < 0.05).all()


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


def test_an_exception_leaves_no_trace_either() -> None:
    model = make().train()
    with pytest.raises(RuntimeError, match="size of tensor"):
        AttentionEntropy(model).measure(lambda: model(images()[:, :1].float().expand(3, 4, 16, 16)))
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


def test_both_networks_of_an_autoencoder_are_seen() -> None:
    settings = MaeSettings(decoder_dim=8, decoder_depth=1, decoder_heads=2)
    autoencoder = MaskedAutoencoder(make(), settings)
    entropy = AttentionEntropy(autoencoder)
    assert entropy.metrics[-1] == "attention_entropy/decoder_blocks.0"
    values = entropy.measure(lambda: autoencoder(images(), torch.rand(3, 16)))
    assert torch.isfinite(values).all()


def test_a_block_that_nobody_asks_is_not_told() -> None:
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
