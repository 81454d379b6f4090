"""Activations that are computed again in the backward pass instead of being kept."""

import pytest
import torch
from torch import nn

from trainer import config
from trainer.config import FinetuneSettings, MaeSettings, ModelSettings
from trainer.io.errors import ModelError
from trainer.models import networks
from trainer.objectives.pretraining import MaskedAutoencoder, freeze
from trainer.runner import preflight
from trainer.training.parallelize import CompileCounter, compile_blocks

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2}
IMAGES = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
NOISE = torch.rand(4, 16, generator=torch.Generator().manual_seed(0))

# The tracer looks at inner tensors too.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def classifier(**args):
    torch.manual_seed(0)
    settings = ModelSettings(architecture="vit_tiny_patch16_224", args=TINY | args)
    return networks.create(settings, ["a", "b", "c"], drop_path=0.3)


def adapted():
    model = classifier()
    freeze(model, FinetuneSettings(method="lora"))
    return model


def autoencoder():
    return MaskedAutoencoder(classifier(), MaeSettings(decoder_dim=16, decoder_depth=1, decoder_heads=2))


def gradients(model):
    """Of a step; and the number of forward passes of the first block's attention, in the step and in a validation."""
    passes = []
    network = model.encoder if isinstance(model, MaskedAutoencoder) else model.network
    network.blocks[0].attn.register_forward_hook(lambda *_: passes.append(1))
    inputs = (IMAGES, NOISE) if isinstance(model, MaskedAutoencoder) else (IMAGES,)
    torch.manual_seed(1)
    output = model.train()(*inputs)
    loss = output[0] if isinstance(output, tuple) else output.square().mean()
    loss.backward()
    after = torch.rand(2)
    in_step = len(passes)
    with torch.inference_mode():
        model.eval()(*inputs)
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return found | {"the loss": loss.detach(), "the next random numbers": after}, in_step, len(passes) - in_step


@pytest.mark.parametrize("make", [classifier, adapted, autoencoder, lambda: classifier(patch_drop_rate=0.5)])
def test_losses_and_gradients_are_the_same_bits_with_stochastic_depth_too(make):
    plain, checkpointed = make(), make()
    networks.checkpoint_activations(checkpointed)
    expected, once, validated = gradients(plain)
    found, twice, as_well = gradients(checkpointed)
    assert (once, twice, validated, as_well) == (1, 2, 1, 1)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_compiled_blocks_do_so_too():
    torch.compiler.reset()
    compiled, graphs = classifier(), CompileCounter("aot_eager")
    networks.checkpoint_activations(compiled)
    compile_blocks(compiled, graphs)
    expected, *_ = gradients(classifier())
    found, *_ = gradients(compiled)
    torch.compiler.reset()
    assert graphs.count
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_networks_that_cannot_do_so_are_refused():
    for name, reason in (("resnet10t", "ResNet has batch norm"), ("coat_tiny", "CoaT cannot do so in timm")):
        with torch.device("meta"):
            model = networks.create(ModelSettings(architecture=name), ["a", "b"])
        with pytest.raises(ModelError, match=f"activation_checkpointing is true, but {reason}"):
            networks.checkpoint_activations(model)
    with pytest.raises(ModelError, match="but Linear cannot do so"):
        networks.checkpoint_activations(nn.Linear(1, 1))


@pytest.mark.parametrize("section", ["distill", "pretrain.mae", "pretrain.finetune"])
def test_before_the_first_stage(section):
    def checked(*overrides):
        settings = config.resolve_run("digits", ["run.device=cpu", *overrides])
        return preflight.checked(settings, trains_here=True)

    on = f"{section}.activation_checkpointing=true"
    checked(on)
    model = "distill.student" if section == "distill" else "pretrain.teacher"
    if section != "pretrain.mae":  # which wants a vision transformer
        other = [
            f"{model}.architecture=resnet10t",
            f"{model}.args={{}}",
            "data.image_size=176",
            "pretrain.mae.epochs=0",
        ]
        with pytest.raises(
            ModelError, match=rf"^{section.replace('distill', model)}: activation_checkpointing is true"
        ):
            checked(on, *other)
