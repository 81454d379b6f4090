"""Samples what is learned, now and then: every tensor of weights, and the layers and the attention in a forward pass.

When it samples depends on what that costs here, so on timing, and decides nothing else: the training itself is not changed.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from timm.layers import Attention
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.config import EvidenceSettings
from trainer.devices import ReadBack
from trainer.devices.torch_private import norm_all
from trainer.profiling.evidence import ATTENTION_ENTROPY, LAYER_COLUMNS, TENSOR_COLUMNS, TensorSamples
from trainer.profiling.layer_sampler import LayerStats
from trainer.profiling.series import ThinnedTable
from trainer.profiling.timeline import RECORDER, Timeline

SAMPLED = 1024  # largest number of sampled elements of a tensor


class TensorStats:
    """Measures the weights of a model around one step of the optimizer, on their device, without waiting for it."""

    def __init__(self, model: nn.Module, *, left_out: Collection[str] = ()) -> None:
        """Measure all weights of `model` except those named in `left_out`."""
        named = {name: parameter for name, parameter in model.named_parameters() if name not in left_out}
        self.names = list(named)
        self._parameters = list(named.values())
        self._group: dist.ProcessGroup | None = None
        """The processes that share out the weights, which then measure together, each its rows."""
        if isinstance(first := self._parameters[0], DTensor):
            self._group = first.device_mesh.get_group(
                first.device_mesh.ndim - 1
            )  # the shares; other machines have the same ones
        self._weights = [_own(parameter.detach()) for parameter in self._parameters]
        self._strides = [_stride(parameter) for parameter in self._parameters]
        device = self._weights[0].device
        lengths = [
            len(range(0, weights.numel(), stride)) for weights, stride in zip(self._weights, self._strides, strict=True)
        ]
        self._lengths = torch.tensor(lengths, device=device)
        self._all_lengths = self._summed(self._lengths.clone())
        self._owners: Tensor | None = None
        """The tensor of each sampled element, [E], where the device cannot sum neighbors by their numbers."""
        if device.type == "xla":
            self._owners = torch.repeat_interleave(torch.tensor(lengths)).to(device)
        self._sizes = torch.tensor([[weights.numel(), weights.dim()] for weights in self._parameters], device=device)
        self._sampled = self._measured = torch.empty(0)

    @torch.no_grad()
    def before_update(self) -> None:
        """Measure weights and gradients; between the backward pass and the optimizer."""
        # a tensor without a gradient has as many NaN
        gradients = [
            weights.new_full((1,), math.nan).expand(weights.shape) if parameter.grad is None else _own(parameter.grad)
            for parameter, weights in zip(self._parameters, self._weights, strict=True)
        ]
        self._sampled, sampled_gradients = self._sample(self._weights), self._sample(gradients)
        flags = [~self._sampled.isfinite(), sampled_gradients == 0, ~sampled_gradients.isfinite()]
        weight_nonfinite, zeros, nonfinite = self._means(flags)
        of_weights, of_gradients = (  # norm and mean absolute value of each tensor, [T] each
            (self._norms(tensors), self._summed(norm_all(tensors, 1)) / self._sizes[:, 0])
            for tensors in (self._weights, gradients)
        )
        absent: Tensor | float = 0.0  # NaN for the tensors that have no gradient
        if any(parameter.grad is None for parameter in self._parameters):
            zero = self._lengths.new_zeros((), dtype=torch.float32)
            absent = torch.stack([zero + math.nan if each.grad is None else zero for each in self._parameters])
        columns = [
            *of_weights,
            self._at_least_one(weight_nonfinite, of_weights[1]),
            *of_gradients,
            zeros + absent,
            self._at_least_one(nonfinite, of_gradients[1]) + absent,
        ]
        self._measured = torch.stack(columns, dim=1)

    @torch.no_grad()
    def after_update(self) -> Tensor:
        """Return the measurements around the optimizer's step, `TENSOR_COLUMNS`: [T, columns], on the device."""
        now, before = self._sample(self._weights), self._sampled
        change, size, unchanged = self._means([(now - before).square(), before.square(), now == before])
        ratio = torch.where(size > 0, change / size, math.nan).sqrt()
        self._sampled = torch.empty(0)
        return torch.cat([self._sizes, self._measured, ratio[:, None], unchanged[:, None]], dim=1)

    def _sample(self, tensors: Sequence[Tensor]) -> Tensor:
        """[E]"""
        return torch.cat(
            [tensor.reshape(-1)[::stride] for tensor, stride in zip(tensors, self._strides, strict=True)]
        ).float()

    def _means(self, quantities: Sequence[Tensor]) -> Tensor:
        """Mean over each tensor's sample of every quantity [E]: [Q, T]."""
        values = torch.stack([quantity.float() for quantity in quantities], dim=1)
        if self._owners is None:
            # `unsafe` leaves out checks, which would wait for the device
            means = torch.segment_reduce(values, "mean", lengths=self._lengths, axis=0, unsafe=True).T
            if self._group is None:
                return means
            sums = torch.where(self._lengths > 0, means * self._lengths, 0.0)  # a share may be empty
            return self._summed(sums) / self._all_lengths
        sums = values.new_zeros(len(self.names), len(quantities)).index_add(0, self._owners, values)
        return (sums / self._lengths[:, None]).T

    def _norms(self, tensors: Sequence[Tensor]) -> Tensor:
        """The norm of each tensor, [T]."""
        norms = norm_all(tensors)
        return norms if self._group is None else self._summed(norms.square()).sqrt()

    def _summed(self, values: Tensor) -> Tensor:
        """The sum over the processes that share out the weights; the values themselves where none do."""
        if self._group is not None:
            dist.all_reduce(values, group=self._group)
        return values

    def _at_least_one(self, share: Tensor, mean: Tensor) -> Tensor:
        """The share of elements that are not finite, at least one where the mean over all [T] is not."""
        return torch.where(mean.isfinite(), share, share.maximum(1 / self._sizes[:, 0]))


def _own(tensor: Tensor) -> Tensor:
    """This process's rows of a tensor that is shared out, or all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _stride(weights: Tensor) -> int:
    """From one sampled element to the next; it has no divisor in common with a row's length, so all columns are met."""
    stride = math.ceil(weights.numel() / SAMPLED)
    while math.gcd(stride, weights.shape[-1] if weights.dim() else 1) > 1:
        stride += 1
    return stride


class AttentionEntropy:
    """Mean entropy of the attention rows of each block, as a share of the largest, log N: 0 looks at one token, 1 at all alike."""

    def __init__(self, model: nn.Module) -> None:
        """Measure the blocks of `model` whose attention is timm's `Attention`."""
        self._model = model
        self._modules = {
            name.removesuffix(".attn"): module for name, module in model.named_modules() if type(module) is Attention
        }
        self.metrics = [f"{ATTENTION_ENTROPY}{name}" for name in self._modules]  # name of each block's metric

    @torch.no_grad()
    def measure(self, forward: Callable[[], object]) -> Tensor:
        """Measure the entropy of each block, [K], as `forward` sends images through the model; NaN for blocks that it does not reach."""
        modules = list(self._modules.values())
        entropies = [torch.full((), math.nan, device=module.proj.weight.device) for module in modules]
        heard: dict[int, Tensor] = {}

        def hear_queries(number: int, _module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
            heard[number] = output  # [B, H, N, D]

        def hear_keys(number: int, _module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
            queries, keys = heard.pop(number).float(), output.float()
            logs = (queries @ keys.transpose(-2, -1) * modules[number].scale).log_softmax(-1)
            entropies[number] = -(logs.exp() * logs).sum(-1).mean() / math.log(max(2, logs.shape[-1]))

        with ExitStack() as stack:
            for number, module in enumerate(modules):
                for layer, hear in ((module.q_norm, hear_queries), (module.k_norm, hear_keys)):
                    stack.callback(layer.register_forward_hook(partial(hear, number)).remove)
            _show(self._model, forward)
        return torch.stack(entropies)


@torch.no_grad()
def _show(model: nn.Module, forward: Callable[[], object]) -> None:
    """Let `forward` send images through a model in evaluation mode, so that nothing is drawn.

    It runs uncompiled: the compiler would be asked for graphs of these shapes.
    """
    training = model.training
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            forward()
    finally:
        model.train(training)


TENSOR_SAMPLES_KEPT = 256  # samples that are kept; more of them are thinned evenly


@dataclass(frozen=True, kw_only=True)
class SampledModel:
    """The sampled model, and how the processes of a training agree on sampling."""

    model: nn.Module | None = None
    """What is trained, on its device, neither compiled nor wrapped: its weights, gradients and attention are sampled."""
    left_out: Collection[str] = ()  # names of weights that are not trained on purpose
    attention: bool = True  # whether to sample attention too
    layers: bool = True  # whether to sample what layers give
    agree: Callable[[bool], bool] | None = None
    """From whether this process would sample a step to whether all do; None where each may decide by itself."""


class TensorSampler:
    """Samples a model in the first step of a process and then in multiples of `tensors_every` steps, as far as the budget allows.

    With multiples, processes that decide alone mostly sample the same steps. On a lazy device a sample is part of the step's graph, which
    must be equal on all processes: they agree, and all sample attention.
    """

    def __init__(
        self,
        settings: EvidenceSettings,
        timeline: Timeline,
        metrics: Callable[[int, Mapping[str, float], float], None],
        sampled: SampledModel,
        *,
        apart: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Sample a model, if there is one, within the context `apart`; `metrics` takes step, values by name, seconds of the recording."""
        self._settings, self._timeline, self._metrics, self._apart = settings, timeline, metrics, apart
        self._tensors: TensorStats | None = None
        self._attention: AttentionEntropy | None = None
        self._layers: LayerStats | None = None
        self._listened_at: int | None = None  # step whose forward pass was heard
        self._table, self._layer_table = (ThinnedTable(["step", "seconds"], 2) for _ in range(2))
        self._sent: deque[tuple[int, float, ReadBack]] = deque()
        """Step and second of each sample on its way to the host."""
        self._last_step: int | None = None
        self._agree = sampled.agree
        self._host_s = 0.0
        self.missing: dict[str, str] = {}  # what is not sampled -> the reason
        model = sampled.model
        if model is None:
            return
        if not settings.tensors_every:
            self.missing["tensors"] = "turned off (tensors_every is 0)"
            return
        if all(name in sampled.left_out for name, _ in model.named_parameters()):
            self.missing["tensors"] = "the model has no weights to look at"
            return
        self._tensors = TensorStats(model, left_out=sampled.left_out)
        values = len(self._tensors.names) * len(TENSOR_COLUMNS)
        self._table = ThinnedTable(["step", "seconds", *map(str, range(values))], TENSOR_SAMPLES_KEPT)
        layers = LayerStats(model)
        if not sampled.layers:
            self.missing["layers"] = (
                "looked at by rank 0 only, and not on XLA, where the second look would compile another step"
            )
        elif layers:
            self._layers = layers
        else:
            self.missing["layers"] = (
                "the model has no layers of activation that are modules, and no first layer that gets images"
            )
        if not sampled.attention:
            self.missing["attention"] = "looked at by rank 0 only"
        elif (entropy := AttentionEntropy(model)).metrics:
            self._attention = entropy
        else:
            self.missing["attention"] = "the model has no attention of timm's kind"

    @property
    def spent_s(self) -> float:
        """The cost of sampling: the larger of the host's and the device's time."""
        ranges = self._timeline.ranges
        on_device = self._timeline.totals.ranges[ranges.index(RECORDER)] if RECORDER in ranges else 0.0
        return max(self._host_s, on_device)

    def around_forward(self, step: int) -> AbstractContextManager[None]:
        """The forward pass of a step, as a context, in a loop that cannot show images by itself; the first one of a step is heard.

        Not in the first step, in which a loop may compile its model: it would compile the hooks, and again when they are gone.
        """
        if self._layers is None or self._last_step is None or self._listened_at == step or not self._is_due(step):
            return nullcontext()
        self._listened_at = step
        return self._layers.listening()

    def around_update(self, step: int, forward: Callable[[], object] | None) -> AbstractContextManager[None]:
        """The optimizer's part of a step, as a context.

        `forward` sends some images through the model, to sample its layers and attention; None where the step's own pass was heard.
        """
        if self._has_arrived:
            with self._apart():
                self.take_in()
        return self._look(step, forward) if self._is_due(step) else nullcontext()

    def take_in(self) -> None:
        while self._has_arrived:
            self._keep(*self._sent.popleft())

    @property
    def _has_arrived(self) -> bool:
        return bool(self._sent) and self._sent[0][2].arrived

    def finish(self) -> None:
        """Wait for samples on their way to the host."""
        while self._sent:
            self._keep(*self._sent.popleft())

    def samples(self) -> TensorSamples:
        """Return the samples that have arrived."""
        return _samples(self._tensors.names if self._tensors else [], self._table, TENSOR_COLUMNS)

    def layer_samples(self) -> TensorSamples:
        """Return the samples of layers that have arrived."""
        return _samples(self._layers.names if self._layers else [], self._layer_table, LAYER_COLUMNS)

    def _is_due(self, step: int) -> bool:
        if self._tensors is None or self._last_step is None:
            return self._tensors is not None
        every = self._settings.tensors_every
        if step % every or step < self._last_step + every:
            return False
        affordable = self.spent_s <= self._settings.tensors_budget * self._timeline.now_s()
        return affordable if self._agree is None else self._agree(affordable)

    @contextmanager
    def _look(self, step: int, forward: Callable[[], object] | None) -> Iterator[None]:
        assert self._tensors is not None
        self._last_step = step
        with self._timed():
            self._tensors.before_update()
        yield
        with self._timed():
            measured = {"tensors": self._tensors.after_update()}
            if forward is not None:
                with self._layers.listening() if self._layers is not None else nullcontext():
                    if self._attention is not None:
                        measured["attention"] = self._attention.measure(forward)
                    elif self._layers is not None:
                        _show(self._layers.model, forward)
            if (
                self._layers is not None
                and self._layers.has_heard
                and (forward is not None or self._listened_at == step)
            ):
                measured["layers"] = self._layers.measure()
            self._sent.append((step, self._timeline.now_s(), ReadBack(measured)))

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        with self._timeline.span(RECORDER), self._apart():
            yield
        self._host_s += time.perf_counter() - start

    def _keep(self, step: int, seconds: float, sent: ReadBack) -> None:
        measured = sent.wait()
        self._table.append([step, seconds, *measured["tensors"].double().flatten().tolist()])
        if "layers" in measured:
            if not self._layer_table.appended:
                values = measured["layers"].numel()
                self._layer_table = ThinnedTable(["step", "seconds", *map(str, range(values))], TENSOR_SAMPLES_KEPT)
            self._layer_table.append([step, seconds, *measured["layers"].double().flatten().tolist()])
        if self._attention is not None:
            entropies = zip(self._attention.metrics, measured["attention"].tolist(), strict=True)
            self._metrics(step, {name: value for name, value in entropies if not math.isnan(value)}, seconds)


def _samples(names: Sequence[str], table: ThinnedTable, columns: Sequence[str]) -> TensorSamples:
    """Arrange the rows of a table, step, seconds and the columns of each name, by sample and name."""
    rows = table.array()
    count = (rows.shape[1] - 2) // len(columns)  # none before the first sample of layers
    values = rows[:, 2:].reshape(len(rows), count, len(columns))
    by_column = {name: values[:, :, index] for index, name in enumerate(columns)}
    return TensorSamples(tensors=names[:count], steps=rows[:, 0], seconds=rows[:, 1], values=by_column)
