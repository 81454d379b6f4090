"""What the teacher learns from: hidden patches of images, then labels.

The masked autoencoder (He et al. 2022, "Masked Autoencoders Are Scalable Vision Learners") stands around a timm vision transformer.

Shapes: B images, N patches of p x p pixels, n visible patches, D encoder width, E decoder width, C = 3 channels.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Collection

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from timm.models import checkpoint_seq
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torchvision.utils import make_grid

from trainer.config import FinetuneSettings, LoraSettings, MaeSettings
from trainer.data.batch import Batch, to_device
from trainer.data.sampler import uniform
from trainer.io.errors import ModelError
from trainer.models import networks
from trainer.models.networks import Classifier
from trainer.profiling.timeline import span
from trainer.training.classification import LabelLoss, cross_entropy
from trainer.training.spec import Losses, Objective

_MASK = 0x6D61736B  # keeps the masks' draws apart from all others of the same seed
_GRAY = 0.5  # of what is hidden, in the picture
_GAP = 4  # between its images, in pixels ...
_LEAST_EDGE = 96  # ... which are this large at least
_MAX_NAMES = 8  # names of layers that a message lists
_HEAD = ("head.", "fc_norm.", "attn_pool.")  # weights of the transformer that the encoder does not use


class MaskedAutoencoder(nn.Module):
    """Hides patches, encodes the visible ones with the transformer, and predicts the pixels of the hidden ones."""

    decoder_positions: Tensor

    def __init__(self, classifier: Classifier, settings: MaeSettings) -> None:
        """Build it around the network of `classifier`, whose weights are trained in place.

        Raises:
            ModelError: the network is no timm VisionTransformer with square patches.
        """
        super().__init__()
        network = classifier.network
        if not isinstance(network, VisionTransformer):
            raise ModelError(
                f"pretrain.mae needs a timm VisionTransformer, and {classifier.card.architecture} is a {type(network).__name__}; "
                "choose a vit_* teacher or switch it off with pretrain.mae.epochs=0"
            )
        self.preprocess = classifier.preprocess
        self.encoder = network
        self.patch_size = int(network.patch_embed.patch_size[0])
        self.visible = max(1, round(network.patch_embed.num_patches * (1 - settings.mask_ratio)))
        self._normalize_targets = settings.normalize_targets
        self.decoder_norm_in = (
            nn.LayerNorm(network.embed_dim) if isinstance(network.norm, nn.Identity) else nn.Identity()
        )
        self.decoder_embed = nn.Linear(network.embed_dim, settings.decoder_dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, settings.decoder_dim))
        self.decoder_blocks = nn.Sequential(
            *(Block(settings.decoder_dim, settings.decoder_heads, qkv_bias=True) for _ in range(settings.decoder_depth))
        )
        self.decoder_norm = nn.LayerNorm(settings.decoder_dim)
        self.predict = nn.Linear(settings.decoder_dim, self.patch_size**2 * 3)
        rows, columns = network.patch_embed.grid_size
        self.register_buffer("decoder_positions", sine_positions(settings.decoder_dim, rows, columns), persistent=False)
        nn.init.normal_(self.mask_token, std=0.02)

    def no_weight_decay(self) -> set[str]:
        """Name the weights that are not decayed."""
        return {f"encoder.{name}" for name in self.encoder.no_weight_decay()} | {"mask_token"}

    def forward(self, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hide the patches of images, uint8 [B, 3, H, W], that have the largest noise, [B, N], and predict them.

        Returns:
            Loss (a scalar): mean squared error over the hidden patches; predicted patches [B, N, p x p x 3]; mask [B, N], 1 where hidden.
        """
        pixels = self.preprocess(images)
        shuffle = noise.argsort(1)
        restore = shuffle.argsort(1)
        encoded = self._encode(pixels, shuffle[:, : self.visible])
        predicted = self._decode(encoded, restore).float()
        mask = (restore >= self.visible).float()
        target = patchify(pixels, self.patch_size)
        if self._normalize_targets:
            target = normalize_patches(target)
        error = (predicted - target).square().mean(2)
        return (error * mask).sum() / mask.sum(), predicted, mask

    def _encode(self, pixels: Tensor, visible: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] and indices of the visible patches [B, n] to tokens [B, prefix + n, D]."""
        encoder = self.encoder
        tokens = encoder._pos_embed(encoder.patch_embed(pixels))
        prefix, patches = tokens[:, : encoder.num_prefix_tokens], tokens[:, encoder.num_prefix_tokens :]
        patches = patches.gather(1, visible.unsqueeze(2).expand(-1, -1, patches.shape[2]))
        tokens = encoder.norm_pre(torch.cat([prefix, patches], 1))
        tokens = checkpoint_seq(encoder.blocks, tokens) if encoder.grad_checkpointing else encoder.blocks(tokens)
        encoded: Tensor = encoder.norm(tokens)
        return encoded

    def _decode(self, encoded: Tensor, restore: Tensor) -> Tensor:
        """Tokens [B, prefix + n, D] and where each patch stands in the shuffled order [B, N] to patches [B, N, p x p x 3]."""
        tokens = self.decoder_embed(self.decoder_norm_in(encoded))
        prefix, patches = tokens[:, : self.encoder.num_prefix_tokens], tokens[:, self.encoder.num_prefix_tokens :]
        hidden = self.mask_token.to(patches.dtype).expand(len(patches), restore.shape[1] - patches.shape[1], -1)
        patches = torch.cat([patches, hidden], 1)
        patches = patches.gather(1, restore.unsqueeze(2).expand(-1, -1, patches.shape[2])) + self.decoder_positions
        decoded = self.decoder_norm(self.decoder_blocks(torch.cat([prefix, patches], 1)))
        predicted: Tensor = self.predict(decoded[:, self.encoder.num_prefix_tokens :])
        return predicted


class MaeObjective(Objective):
    """Reconstruction of hidden patches."""

    def __init__(self, model: MaskedAutoencoder, seed: int) -> None:
        """Masks are drawn from `seed`, the sample's key and the number of its view."""
        self.model: nn.Module = model
        self._patches = model.encoder.patch_embed.num_patches
        self._seed = seed
        for name, parameter in model.encoder.named_parameters():
            parameter.requires_grad_(not name.startswith(_HEAD))
        self.left_out: Collection[str] = [
            f"encoder.{name}" for name, _ in model.encoder.named_parameters() if name.startswith(_HEAD)
        ]

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        """Compute the reconstruction loss of a batch."""
        noise = self._noise(batch)
        with span("forward"):
            loss, _, _ = model(batch.images, noise)
        return {"loss": loss}

    def forward_for_hooks(self, batch: Batch) -> None:
        """Do a forward pass of the autoencoder alone, of the patches that its mask leaves."""
        self.model(batch.images, self._noise(batch))

    def _noise(self, batch: Batch) -> Tensor:
        return to_device(draw_noise(batch.keys, batch.numbers, self._patches, seed=self._seed), batch.images.device)

    def release(self) -> None:
        """Let the head be trained again."""
        self.model.requires_grad_(True)


def draw_noise(keys: Tensor, numbers: Tensor, patches: int, *, seed: int) -> Tensor:
    """Draw the random numbers whose order is the mask, float32 [B, N], N = `patches`: a function of (seed, key, view number).

    All are on the CPU; keys and numbers are int64 [B].
    """
    words = keys.numpy().view(np.uint64)[:, None], numbers.numpy()[:, None]
    return torch.from_numpy(uniform(_MASK, seed, *words, np.arange(patches, dtype=np.uint64)[None])).float()


def patchify(pixels: Tensor, patch_size: int) -> Tensor:
    """Cut images [B, 3, H, W] into patches [B, N, p x p x 3], row by row; within a patch row, column, channel."""
    batch, channels, height, width = pixels.shape
    grid = pixels.reshape(batch, channels, height // patch_size, patch_size, width // patch_size, patch_size)
    return grid.permute(0, 2, 4, 3, 5, 1).reshape(batch, -1, patch_size**2 * channels)


def unpatchify(patches: Tensor, patch_size: int) -> Tensor:
    """Reverse `patchify`, for square images: [B, N, p x p x 3] to [B, 3, H, W]."""
    batch, count, values = patches.shape
    edge = round(count**0.5)
    grid = patches.reshape(batch, edge, edge, patch_size, patch_size, values // patch_size**2)
    return grid.permute(0, 5, 1, 3, 2, 4).reshape(batch, -1, edge * patch_size, edge * patch_size)


def normalize_patches(patches: Tensor) -> Tensor:
    """Each patch less its mean, over its standard deviation: (x - mean) / sqrt(var + 1e-6), var unbiased; [B, N, p x p x 3]."""
    variance, mean = torch.var_mean(patches, dim=2, keepdim=True)
    return (patches - mean) / (variance + 1e-6).sqrt()


def sine_positions(width: int, rows: int, columns: int) -> Tensor:
    """Fixed 2-D sine-cosine positions [1, rows x columns, width]: half of the width for the row, half for the column.

    Each half holds sin and cos of position / 10000^(2i / half) (Vaswani et al. 2017).

    Raises:
        ModelError: the width is no multiple of 4.
    """
    if width % 4:
        raise ModelError(f"pretrain.mae.decoder_dim must be a multiple of 4, got {width}")
    frequencies = 1 / 10_000 ** (torch.arange(width // 4, dtype=torch.float64) / (width / 4))

    def encode(positions: Tensor) -> Tensor:
        angles = positions.double().unsqueeze(1) * frequencies
        return torch.cat([angles.sin(), angles.cos()], 1)

    grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    return torch.cat([encode(grid[:, 1]), encode(grid[:, 0])], 1).float().unsqueeze(0)


# ---------------------------------------------------------------------------------------------------------------------
# A picture


@torch.no_grad()
def draw_reconstructions(model: MaskedAutoencoder, images: Tensor, keys: Tensor, *, seed: int) -> bytes:
    """Draw three rows: images, what is visible of them, and the visible patches with the predicted ones between them; gives a PNG file.

    The images are uint8 [B, 3, S, S], their keys int64 [B]; `seed` draws the masks. Predictions of normalized targets are shown with each
    patch's own mean and spread.
    """
    model.eval()
    noise = draw_noise(keys, torch.zeros_like(keys), model.encoder.patch_embed.num_patches, seed=seed)
    _, predicted, mask = model(images, noise.to(images.device))
    size = model.encoder.patch_embed.img_size[0]
    pixels = F.interpolate(images.float() / 255, size=(size, size), mode="bilinear", antialias=True)
    patches = patchify(pixels, model.patch_size)
    hidden = mask.unsqueeze(2)
    variance, mean = torch.var_mean(patches, dim=2, keepdim=True)
    predicted = predicted * variance.sqrt() + mean
    rows = [
        patches,
        torch.where(hidden > 0, torch.full_like(patches, _GRAY), patches),
        torch.lerp(patches, predicted, hidden),
    ]
    return _png([unpatchify(row, model.patch_size) for row in rows])


def _png(rows: list[Tensor]) -> bytes:
    """Rows of images in [0, 1], each [B, 3, H, H], as one picture."""
    scale = max(1, -(-_LEAST_EDGE // rows[0].shape[-1]))
    pixels = (torch.cat(rows).clamp(0, 1) * 255).byte().cpu()
    pixels = pixels.repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    grid = make_grid(pixels, nrow=len(rows[0]), padding=_GAP, pad_value=255)[:, _GAP:-_GAP, _GAP:-_GAP]
    file = io.BytesIO()
    Image.fromarray(grid.permute(1, 2, 0).numpy()).save(file, "PNG")
    return file.getvalue()


# ---------------------------------------------------------------------------------------------------------------------
# Fine-tuning


def freeze(model: Classifier, settings: FinetuneSettings) -> None:
    """Freeze what `method` does not train, in place; with `lora` linear layers learn an update, which `merge_lora` adds to them.

    Raises:
        ModelError: as `add_lora`.
    """
    if settings.method == "full":
        return
    of_head = networks.is_of_head(model.network)
    for name, parameter in model.network.named_parameters():
        parameter.requires_grad_(of_head(name))
    if settings.method == "lora":
        add_lora(model.network, settings.lora, leave=of_head)
    else:
        model.trains_head_alone = True


class LoraLinear(nn.Module):
    """y = x W^T + bias + alpha / r x (x down^T) up^T, with W and bias frozen; `up` begins at zero, so the layer does too.

    LoRA (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"), of rank r: linear layers from K to N features stay, and
    learn an update of low rank; [..., K] are any number of rows.
    """

    def __init__(self, base: nn.Linear, settings: LoraSettings) -> None:
        """Adapt `base`, which is kept and frozen."""
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(base.weight.new_empty(settings.rank, base.in_features))
        self.up = nn.Parameter(base.weight.new_zeros(base.out_features, settings.rank))
        self.scale = settings.alpha / settings.rank
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))  # as in the authors' loralib

    @property
    def weight(self) -> Tensor:
        """What the layer multiplies with, [N, K]: BEiT's and EVA's attention does it by itself."""
        return self.base.weight + self.scale * (self.up @ self.down)

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as nn.Linear names it
        """[..., K] to [..., N]."""
        output: Tensor = self.base(input)
        return output + F.linear(self.scale * F.linear(input, self.down), self.up)


def add_lora(network: nn.Module, settings: LoraSettings, *, leave: Callable[[str], bool]) -> None:
    """Replace a network's linear layers by `LoraLinear` ones, in place, but for the weights whose names `leave` tells.

    Raises:
        ModelError: it has no linear layer, or none that a name in `settings.layers` means.
    """
    linear = {
        name: module
        for name, module in network.named_modules()
        if type(module) is nn.Linear and not leave(f"{name}.weight")
    }
    if not linear:
        raise ModelError(
            f"pretrain.finetune.method is lora, but {type(network).__name__} has no linear layer beside its head; set method=full or "
            "method=head, or choose another teacher"
        )
    parts = {part for name in linear for part in name.split(".")}
    for wanted in settings.layers:
        if wanted not in parts:
            known = sorted(part for part in parts if not part.isdigit())[:_MAX_NAMES]
            raise ModelError(
                f"pretrain.finetune.lora.layers: {type(network).__name__} has no linear layer named {wanted!r}; its layers' names have "
                f"the parts {', '.join(known)}"
            )
    for name, module in linear.items():
        if not settings.layers or {*settings.layers} & {*name.split(".")}:
            network.set_submodule(name, LoraLinear(module, settings))


@torch.no_grad()
def merge_lora(network: nn.Module) -> None:
    """Add what was learned to the layers' own weights, and put the layers back, in place: the network is as if it had none."""
    for name, module in list(network.named_modules()):
        if isinstance(module, LoraLinear):
            module.base.weight.copy_(module.weight)
            network.set_submodule(name, module.base)


class FinetuneObjective(Objective):
    """Cross-entropy with the labels, softened by label smoothing and mixed by mixup and CutMix; binary where an image may have several."""

    def __init__(self, model: Classifier, *, label_smoothing: float, label_loss: LabelLoss = cross_entropy) -> None:
        """Train those weights of `model` that are not frozen; `label_smoothing` of each target is spread over all classes."""
        self.model: nn.Module = model
        self.left_out: Collection[str] = [
            name for name, parameter in model.named_parameters() if not parameter.requires_grad
        ]
        self._smoothing, self._label_loss = label_smoothing, label_loss

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        """The cross-entropy of a batch."""
        with span("forward"):
            logits = model(batch.images)
            loss = self._label_loss(logits, batch.labels, batch.mixing, self._smoothing, batch.label_weights)
        return {"loss": loss}

    def forward_for_hooks(self, batch: Batch) -> None:
        """A forward pass of the model alone."""
        self.model(batch.images)
