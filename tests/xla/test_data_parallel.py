"""Two devices share a step: its losses are those of one device.

The CPU runtime has several devices in one process only, where one program is dealt to all of them (SPMD). So what is shown here is that the
mathematics of the step is that of data-parallel training; processes that exchange gradients need an accelerator.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, os, sys
import numpy as np
import torch_xla
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime as runtime

runtime.use_spmd()
mesh = spmd.Mesh(np.arange(2), (2,), ("data",))
assert runtime.global_runtime_device_count() == 2

from trainer.training.prefetch import ThreadedPrefetcher
from trainer import config
from trainer.stages import distill

plain = ThreadedPrefetcher.next

def take(self):
    batch = plain(self)
    for tensor in (batch.images, batch.labels):
        spmd.mark_sharding(tensor, mesh, ("data", *[None] * (tensor.dim() - 1)))
    assert torch_xla._XLAC._get_xla_sharding_spec(batch.images).startswith("{devices=[2,")
    return batch

ThreadedPrefetcher.next = take
settings, places = json.loads(sys.argv[1])
distill.run(config.validate(config.DistillSettings, settings), **places)
"""


def test_step_dealt_to_two_devices_is_that_of_one(distillation):
    dealt, alone = (distillation(name, epochs=2, ema_decay=0.9, validate_every_epochs=9) for name in ("dealt", "alone"))
    alone.train(TRAINER_DEVICE="xla")
    subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([dealt.settings, dealt.inputs | dealt.outputs])],
        env=os.environ | {"CPU_NUM_DEVICES": "2", "TRAINER_DEVICE": "xla", "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=300,
    )
    assert len(dealt.losses()) == 20
    torch.testing.assert_close(dealt.losses(), alone.losses(), rtol=1e-4, atol=1e-6)
    for name, value in alone.weights().items():
        torch.testing.assert_close(dealt.weights()[name], value, rtol=1e-3, atol=1e-4)
