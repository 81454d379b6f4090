"""The environment is the one that was locked, and PyTorch/XLA computes in it what torch does."""

import importlib
import importlib.metadata
import pkgutil
from pathlib import Path

import timm
import torch
from packaging.requirements import Requirement

import trainer
from tests.distillations import TINY

LOCK = Path(__file__).parents[2] / "requirements" / "xla.txt"


def locked():
    """Name -> version, of what the lock has for this machine."""
    lines = [line for line in LOCK.read_text().splitlines() if line[:1].isalpha()]
    requirements = [Requirement(line.removesuffix(" \\")) for line in lines]
    return {
        requirement.name: str(requirement.specifier).removeprefix("==")
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate()
    }


def test_what_is_installed_is_what_is_locked():
    installed = {one.name.lower().replace("_", "-"): one.version for one in importlib.metadata.distributions()}
    assert installed == {name.replace("_", "-").replace(".", "-"): version for name, version in locked().items()}


def test_the_device_is_that_of_xla():
    import torch_xla

    device = torch_xla.device()
    assert (device.type, torch_xla.runtime.device_type()) == ("xla", "CPU")
    assert torch.ones(2, device=device).sum().item() == 2


def test_every_module_of_the_trainer_can_be_imported():
    """Without kfp and kubernetes, which are not in this environment, and but for the server, whose extra is not either."""
    modules = [module.name for module in pkgutil.walk_packages(trainer.__path__, "trainer.")]
    assert len(modules) > 100
    for name in modules:
        if not name.endswith("__main__") and not name.startswith("trainer.predict.serving."):
            importlib.import_module(name)


def test_a_vision_transformer_agrees_with_the_cpu():
    import torch_xla

    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, **TINY).eval()
    images = torch.randn(4, 3, TINY["img_size"], TINY["img_size"])
    with torch.inference_mode():
        expected = model(images)
        device = torch_xla.device()
        actual = model.to(device)(images.to(device))
    assert actual.device == device
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-5)
