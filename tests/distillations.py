"""Distillations that take seconds."""

TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
"""A vision transformer for the digits."""
QUICK = {
    "epochs": 1,
    "batch_size": 128,
    "base_learning_rate": 8e-3,
    "warmup_epochs": 0,
    "log_every": 1,
    "checkpoint_every": 0,
    "workers": 0,
    "seed": 3,
    "student": {"architecture": "vit_tiny_patch16_224", "args": TINY},
    "evidence": {"operators_steps": 0},
    "views": {"min_scale": 0.5, "flip": False},
}
"""A distillation of ten steps."""
