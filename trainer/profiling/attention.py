"""How widely attention looks: the entropy of its rows, by block.

Shapes: B images, H heads, N tokens, D features of a head, K blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from timm.layers import Attention
from torch import Tensor, nn

METRIC = "attention_entropy/"
"""What the names of the metrics begin with; the block's name follows."""


class AttentionEntropy:
    """Mean entropy of the attention rows of each block, as a share of the largest, log N: 0 looks at one token, 1 at all alike."""

    def __init__(self, model: nn.Module) -> None:
        """Of the blocks of `model` whose attention is timm's `Attention`."""
        self._model = model
        self._modules = {
            name.removesuffix(".attn"): module for name, module in model.named_modules() if type(module) is Attention
        }
        self.metrics = [f"{METRIC}{name}" for name in self._modules]
        """Name of each block's metric."""

    @torch.no_grad()
    def measure(self, forward: Callable[[], object]) -> Tensor:
        """The entropy of each block, [K], NaN where `forward` did not come: it sends some images through the model.

        The model is in evaluation mode meanwhile, so that nothing is drawn. What is compiled of it runs uncompiled, else the compiler
        would be asked for graphs of these shapes too.
        """
        rows = [_Rows(module) for module in self._modules.values()]
        training = self._model.training
        with ExitStack() as stack:
            stack.callback(self._model.train, training)
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for row in rows:
                stack.enter_context(row.listening())
            self._model.eval()
            forward()
        return torch.stack([row.entropy for row in rows])


class _Rows:
    """Hears the queries and the keys of one attention and makes its rows of them."""

    def __init__(self, attention: Attention) -> None:
        self._attention = attention
        self._heard: dict[str, Tensor] = {}
        self.entropy = torch.full((), math.nan, device=attention.proj.weight.device)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear while the block runs."""
        attention = self._attention
        handles = [
            module.register_forward_hook(partial(self._hear, name))
            for name, module in (("queries", attention.q_norm), ("keys", attention.k_norm))
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hear(self, name: str, _module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Queries come first; [B, H, N, D]."""
        self._heard[name] = output
        if name == "keys":
            queries, keys = self._heard["queries"].float(), output.float()
            logs = (queries @ keys.transpose(-2, -1) * self._attention.scale).log_softmax(-1)
            self.entropy = -(logs.exp() * logs).sum(-1).mean() / math.log(max(2, logs.shape[-1]))
            self._heard.clear()
