"""Samples what the layers of a network give in a forward pass: the functions of activation, and the images that the first layer gets.

Shapes: N images, P positions, C units or channels, K rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.profiling.evidence import INPUT, LAYER_COLUMNS

_IMAGES = 16  # images of a batch that are looked at
_POSITIONS = 16  # positions of each that are looked at, in a layer
_PIXELS = 1024  # the same in the input
_LOOKS = 8
"""A unit that is needed for few images is none that is never needed: it has to be flat in as many looks in a row."""
_FLAT = 1e-6  # slope below which a bounded function passes next to nothing back
_MOST_CHANNELS = 16  # more of them are no image
_CLIPPED = {"relu", "relu6"}  # names of classes, in small letters: functions that give 0 to all that is negative
_BOUNDED = {"sigmoid", "tanh", "hardsigmoid", "hardtanh", "softsign"}
_OTHERS = {"gelu", "gelutanh", "gelu_tanh", "quickgelu", "silu", "swish", "mish", "hardswish", "hardmish", "leakyrelu"}
_OTHERS |= {"elu", "celu", "selu", "prelu", "softplus", "geluactivation", "quickgeluactivation", "newgeluactivation"}


class LayerStats:
    """Measures the layers of a model in a forward pass that it listens to, on their device, without waiting for it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._layers = {
            name: kind
            for name, module in model.named_modules()
            if (kind := type(module).__name__.lower()) in _CLIPPED | _BOUNDED | _OTHERS
        }
        self._modules = {name: module for name, module in model.named_modules() if name in self._layers}
        leaves = (module for module in model.modules() if next(module.children(), None) is None)
        first = next((module for module in leaves if next(module.parameters(recurse=False), None) is not None), None)
        self._first = first if isinstance(first, nn.Conv2d | nn.Linear) else None
        self._heard: dict[str, Tensor] = {}
        """Of each call in the pass its sample, [N, P, C]."""
        self._flat: dict[str, Tensor] = {}
        """In how many looks, up to now, each unit of a layer was flat, [C]."""
        self._looks: Tensor | None = None
        self.names: list[str] = []
        """Of the rows, from the first look on: channels of the input, then layers in the order of their calls."""

    def __bool__(self) -> bool:
        """Whether there is something to listen to."""
        return bool(self._modules) or self._first is not None

    @property
    def has_heard(self) -> bool:
        """Whether a forward pass was heard that was not measured yet."""
        return bool(self._heard)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to the forward passes in the block, in place of what was heard before."""
        self._heard = {}
        with ExitStack() as stack:
            for name, module in self._modules.items():
                stack.callback(module.register_forward_hook(partial(self._hear, name)).remove)
            if self._first is not None:
                stack.callback(self._first.register_forward_pre_hook(self._hear_input).remove)
            yield

    def _hear(self, name: str, _module: nn.Module, _inputs: object, output: object) -> None:
        # Hooks that are compiled hear nothing. What has no places is a gate of squeeze-and-excitation, which may well rest.
        if torch.compiler.is_compiling() or not _is_plain(output) or output.shape[2:] == (1, 1):
            return
        calls = 2
        key = name
        while key in self._heard:  # one module may serve several times
            key, calls = f"{name} ({calls})", calls + 1
        self._heard[key] = _sample(output, _POSITIONS)

    def _hear_input(self, module: nn.Module, inputs: tuple[object, ...]) -> None:
        if torch.compiler.is_compiling() or not inputs or not _is_plain(image := inputs[0]) or INPUT in self._heard:
            return
        if image.dim() == 4 and isinstance(module, nn.Conv2d) and image.shape[1] <= _MOST_CHANNELS:
            self._heard = {INPUT: _sample(image, _PIXELS, channels=1), **self._heard}
        elif image.dim() == 2 and isinstance(module, nn.Linear):
            self._heard = {INPUT: _sample(image.unsqueeze(2), _PIXELS), **self._heard}

    @torch.no_grad()
    def measure(self) -> Tensor:
        """Measure what was heard, `LAYER_COLUMNS`: [K, columns], on the device; a row is NaN where its layer was not reached this time."""
        rows: dict[str, Tensor] = {}
        looks = None
        for key, sample in self._heard.items():
            if looks is None:
                looks = self._looks = sample.new_ones(()) if self._looks is None else self._looks + 1
            if key == INPUT:
                rows |= {f"{INPUT}{channel}": row for channel, row in enumerate(_of_channels(sample))}
                continue
            kind, absent = self._layers[key.partition(" (")[0]], sample.new_full((), math.nan)
            share = absent
            if kind in _CLIPPED | _BOUNDED:
                flat = (sample == 0 if kind in _CLIPPED else _slopes(kind, sample) < _FLAT).flatten(0, 1).all(0)
                known = self._flat.get(key)
                count = flat.float() if known is None or known.shape != flat.shape else (known + 1) * flat
                self._flat[key] = count
                share = (count >= looks.clamp(max=_LOOKS)).float().mean()
            clipped, bounded = kind in _CLIPPED, kind in _BOUNDED
            rows[key] = torch.stack(
                [*_basics(sample), absent, share if clipped else absent, share if bounded else absent]
            )
        self._heard = {}
        self.names = self.names or list(rows)
        absent = next(iter(rows.values())).new_full((len(LAYER_COLUMNS),), math.nan)
        return torch.stack([rows.get(name, absent) for name in self.names])


def _is_plain(value: object) -> TypeGuard[Tensor]:
    return (
        isinstance(value, Tensor)
        and not isinstance(value, DTensor)
        and value.is_floating_point()
        and value.dim() >= 2
        and value.numel() > 0
    )


def _sample(output: Tensor, most: int, channels: int | None = None) -> Tensor:
    """Some images and positions of an output, float32 [N, P, C]; units are the last dimension, or the channels of a picture."""
    values = output.detach()[:_IMAGES]
    if channels is None:
        shape = values.shape
        is_picture = values.dim() == 4 and not (shape[1] == shape[2] != shape[3])  # or its channels come last
        channels = 1 if is_picture else -1
    values = values.movedim(channels, -1).flatten(1, -2) if values.dim() > 2 else values.unsqueeze(1)
    stride = math.ceil(values.shape[1] / most)
    while stride > 1 and math.gcd(stride, output.shape[-1]) > 1:  # so that all columns of a picture are met
        stride += 1
    return values[:, ::stride].to(torch.float32, copy=True)


def _basics(sample: Tensor) -> list[Tensor]:
    """Images, mean, standard deviation, smallest and largest value."""
    mean = sample.mean()
    deviation = (sample - mean).square().mean().sqrt()  # `std` of all elements reads the mean back
    # Not `amin` and `amax`, which PyTorch/XLA does not reduce over all dimensions unless they are named.
    return [sample.new_full((), len(sample)), mean, deviation, sample.min(), sample.max()]


def _of_channels(sample: Tensor) -> list[Tensor]:
    """The row of each channel of the input."""
    absent = sample.new_full((), math.nan)
    blank = (sample.amax(1) == sample.amin(1)).float().mean(0)  # [C]
    return [
        torch.stack([*_basics(sample[..., channel]), blank[channel], absent, absent])
        for channel in range(sample.shape[2])
    ]


def _slopes(kind: str, outputs: Tensor) -> Tensor:
    """The derivative of a bounded function where it gives these outputs."""
    if kind == "sigmoid":
        return outputs * (1 - outputs)
    if kind == "tanh":
        return 1 - outputs.square()
    if kind == "softsign":
        return (1 - outputs.abs()).square()
    low = 0.0 if kind == "hardsigmoid" else -1.0
    return ((outputs > low) & (outputs < 1)).float()
