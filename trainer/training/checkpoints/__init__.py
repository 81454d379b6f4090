"""Checkpoints: what an interrupted training needs to resume.

A checkpoint is an artifact of safetensors and one JSON file: the weights, the optimiser's state, the average of the weights, each tensor
by the name of its weight, and the number of steps done. The order of samples, the views, the schedule and what the generators draw in a
step are functions of that number and of the settings, which the manifest holds with the fingerprints of the inputs; so there is no
generator and no counter to keep, and the same checkpoint serves any number of processes.

    ROOT/NAME-KEY/                      KEY: digest of the inputs and of the settings that decide what is learned (`compatible`)
        generation-003                  the third attempt at this training, which fences off the first two (`trainer.training.attempts`)
        step-00000500-g003/             a checkpoint that the third attempt has written

`training_state` takes a state apart and puts it back, `snapshots` copies it into the host's memory and writes it,
`trainer.training.writer` does so in the background, and `collection` keeps the newest and the best.
"""

from __future__ import annotations

from trainer.training.checkpoints.collection import Checkpoints, checkpoint_root, newest, root_is_shared
from trainer.training.checkpoints.training_state import TrainingState

__all__ = ["Checkpoints", "TrainingState", "checkpoint_root", "newest", "root_is_shared"]
