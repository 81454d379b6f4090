from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.callback import callback_handler

from trainer.profiling.clocks import HostClock
from trainer.profiling.compilation import Compilations
from trainer.profiling.timeline import Timeline


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_what_a_step_compiles_is_counted_with_its_time() -> None:
    timeline = Timeline(HostClock())
    compilations = Compilations(timeline)
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager", dynamic=False)
    timeline.start()
    compilations.start()
    for step, size in enumerate((2, 2, 3, 3, 4)):
        with timeline.step(step):
            compiled(torch.ones(size))
    compiled(torch.ones(5))
    compilations.stop()
    timeline.finish()
    compiled(torch.ones(6))
    assert [(record.step, record.graphs) for record in compilations.records] == [(0, 1), (2, 1), (4, 1)]
    assert all(record.seconds > 0 for record in compilations.records)


def test_nobody_hears_after_the_end() -> None:
    before = len(callback_handler.start_callbacks), len(callback_handler.end_callbacks)
    compilations = Compilations(Timeline(HostClock()))
    compilations.start()
    compilations.stop()
    assert (len(callback_handler.start_callbacks), len(callback_handler.end_callbacks)) == before
