"""What the adapter adds to torch_xla."""

import time

import pytest
import torch

from trainer.devices import choose_device
from trainer.io.errors import DataError, SettingsError


@pytest.fixture
def xla(monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "xla")
    return choose_device().open()


class Held:
    """Stays on the host: torch_xla looks for tensors in what has a dictionary."""

    __slots__ = ("keys",)

    def __init__(self, keys):
        self.keys = keys


def test_tensors_are_sent_ahead_in_their_order_and_rest_stays(xla):
    items = ([[torch.full((2,), number)], Held(torch.tensor([number]))] for number in range(5))
    for number, (tensors, held) in enumerate(xla.send_ahead(items)):
        assert tensors[0].device == xla.torch_device
        assert tensors[0].cpu().tolist() == [number, number]
        assert held.keys.device.type == "cpu"
        assert held.keys.tolist() == [number]
    assert number == 4


def test_error_of_loader_comes_at_its_turn(xla):
    def items():
        yield [torch.ones(2)]
        raise DataError("image 7 cannot be decoded")

    ahead = xla.send_ahead(items())
    assert next(ahead)[0].device == xla.torch_device
    with pytest.raises(DataError, match="image 7 cannot be decoded"):
        next(ahead)


def test_who_takes_no_more_waits_for_no_thread(xla):
    ahead = xla.send_ahead([torch.ones(2)] for _ in range(1000))
    next(ahead)
    began = time.monotonic()
    ahead.close()
    assert time.monotonic() - began < 30


def test_numbers_are_no_part_of_the_graph(xla):
    import torch_xla.debug.metrics as metrics

    weight = torch.ones(3, device=xla.torch_device)
    xla.dispatch()
    for value in (0.5, 0.0, 1.0, 0.25):
        (share,) = xla.numbers([value])
        weight.lerp_(torch.zeros_like(weight), share)
        xla.dispatch()
        if value == 0.5:
            compiled = metrics.counter_value("UncachedCompile")
    assert metrics.counter_value("UncachedCompile") == compiled
    assert weight.cpu().tolist() == [0.0, 0.0, 0.0]


def test_memory_that_is_too_small_is_distinguished_from_other_errors(xla):
    assert xla.is_out_of_memory(
        RuntimeError("Bad StatusOr access: RESOURCE_EXHAUSTED: Out of memory while trying to allocate")
    )
    assert not xla.is_out_of_memory(RuntimeError("Bad StatusOr access: INVALID_ARGUMENT: shapes"))


def test_a_runtime_without_a_device_is_named(monkeypatch):
    import torch_xla

    def none():
        raise RuntimeError("Bad StatusOr access: NOT_FOUND: no device")

    monkeypatch.setattr(torch_xla, "device", none)
    monkeypatch.setenv("TRAINER_DEVICE", "xla")
    with pytest.raises(SettingsError, match=r"the runtime CPU finds no device: .*set PJRT_DEVICE=NEURON on Trainium"):
        choose_device().open()
