import pytest
import torch

from trainer.training.zero_redundancy import rows_of


@pytest.mark.parametrize("shape", [(5,), (4, 3), (1, 2, 2), (7, 1)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_rows_are_dealt_evenly_and_all(shape, world_size):
    tensor = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    parts = [rows_of(tensor, rank, world_size) for rank in range(world_size)]
    assert len({part.shape for part in parts}) == 1
    assert len(parts[0]) == -(-shape[0] // world_size)
    joined = torch.cat(parts)
    assert torch.equal(joined[: shape[0]], tensor)
    assert not joined[shape[0] :].any()
