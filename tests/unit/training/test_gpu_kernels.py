from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.stand_ins.gpu import DEVICE
from trainer.config import ModelSettings, TrainingSettings
from trainer.devices import HOST
from trainer.devices.process_group import Processes
from trainer.models import networks
from trainer.training.gpu_kernels import PatchProduct, use_gpu_kernels
from trainer.training.parallelize import parallelize_model

GPU = replace(DEVICE, torch_device=torch.device("cpu"))  # the tensors stay on the CPU
TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 10, "num_heads": 2}


def make(architecture="vit_tiny_patch16_224", **changes):
    torch.manual_seed(0)
    settings = ModelSettings(architecture=architecture, args=TINY | changes)
    return networks.create(settings, ["a", "b", "c"])


def images():
    return torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_on_a_gpu_in_bf16_the_stream_is_bf16_and_in_fp32_nothing_changes():
    plain, changed = (make(depth=3, init_values=0.1) for _ in range(2))
    processes = Processes(rank=0, world_size=1, local_rank=0, device=GPU)
    parallelize_model(changed, TrainingSettings(precision="auto"), processes)
    assert list(changed.state_dict()) == list(plain.state_dict())
    assert torch.allclose(changed(images()), plain(images()), atol=1e-6), "as evaluation sees it"
    kinds = {plain: [], changed: []}
    for model, seen in kinds.items():
        for block in model.network.blocks:
            block.register_forward_hook(lambda _, __, output, seen=seen: seen.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = [model(images()).float() for model in kinds]
    assert kinds == {plain: [torch.float32] * 3, changed: [torch.bfloat16] * 3}
    assert torch.allclose(*outputs, atol=0.02)
    for device, precision in ((GPU, "fp32"), (HOST, "bf16")):
        alone = make(depth=3, init_values=0.1)
        processes = Processes(rank=0, world_size=1, local_rank=0, device=device)
        parallelize_model(alone, TrainingSettings(precision=precision, compile="off"), processes)
        hooks = [one for module in alone.modules() for one in (module._forward_pre_hooks, module._forward_hooks) if one]
        assert not hooks, f"{device.kind} in {precision}"


@pytest.mark.parametrize("size", [(32, 48), (37, 49)], ids=["whole patches", "and parts of some"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_patch_embedding_is_a_product_with_the_weights_of_the_convolution(size, bias):
    torch.manual_seed(0)
    convolution, pictures = nn.Conv2d(3, 12, (16, 8), (16, 8), bias=bias), torch.randn(2, 3, *size)
    product = PatchProduct(convolution)
    assert product.weight is convolution.weight
    gradients, outputs = [], []
    for module in (convolution, product):
        outputs.append(module(pictures))
        outputs[-1].square().sum().backward()
        gradients.append(convolution.weight.grad.clone())
        convolution.zero_grad()
    assert torch.allclose(*outputs, atol=1e-5)
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-3)


def test_only_the_convolution_that_cuts_patches_is_replaced_and_only_on_a_gpu():
    for device, wanted in ((HOST, 0), (GPU, 1)):
        model = make()
        use_gpu_kernels(model, device, "fp32")
        assert sum(isinstance(module, PatchProduct) for module in model.modules()) == wanted
        assert list(model.state_dict()) == list(make().state_dict())
    overlapping = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 4, 2), nn.Conv2d(4, 4, 2, 2))
    use_gpu_kernels(overlapping, GPU, "fp32")
    assert all(type(module) is nn.Conv2d for module in overlapping)
