"""The stand-in for a GPU notices what a GPU would not forgive."""

import pytest
import torch
from torch import nn

from tests.stand_ins.gpu import Gpu, StreamError


@pytest.fixture
def gpu():
    with Gpu() as gpu:
        yield gpu


def test_places_are_kept_and_mixing_them_is_refused(gpu):
    model = nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 2)).to("cuda")
    images = torch.ones(5, 4)
    loss = model(images.to("cuda")).square().mean()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert [gradient.shape for gradient in gradients] == [(3, 4), (3,), (2, 3), (2,)]
    assert {gradient.device for gradient in gradients} == {torch.device("cuda", 0)}
    assert images.sum().item() == 20  # the host's numbers are real
    with pytest.raises(RuntimeError, match="on the same device"):
        model(images)


def test_copies_and_waits_are_noted(gpu):
    pinned = torch.ones(2).pin_memory()
    assert pinned.is_pinned()
    pinned.to("cuda", non_blocking=True)
    on_gpu = torch.tensor([1, 2, 3], device="cuda")
    assert [(copy.shape, copy.pinned, copy.non_blocking) for copy in gpu.copies] == [
        ((2,), True, True),
        ((3,), False, False),
    ]
    torch.empty(3, dtype=torch.int64, pin_memory=True).copy_(on_gpu, non_blocking=True)
    assert gpu.waits == []
    on_gpu.sum().item()
    on_gpu.cpu()
    assert len(gpu.waits) == 2


def test_another_stream_has_to_wait_and_to_keep_memory(gpu):
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        tensor = torch.zeros(3, device="cuda")
        tensor += 1
    with pytest.raises(StreamError, match="does not wait"):
        tensor.sum()
    main.wait_stream(side)
    with pytest.raises(StreamError, match="record_stream"):
        tensor.sum()
    tensor.record_stream(main)
    tensor.sum()
    with torch.cuda.stream(side):
        tensor += 1
    with pytest.raises(StreamError, match="does not wait"):
        tensor.sum()
