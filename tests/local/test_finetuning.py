"""Fine-tuning of the head alone and by LoRA, as a stage: interrupted, on several processes, and judged by the rules."""

import signal

import pytest
import torch

from tests import groups
from tests.distillations import QUICK, TINY
from tests.groups import Fault
from tests.pathologies import findings
from trainer import config
from trainer.io.errors import PREEMPTED_EXIT_CODE
from trainer.models import networks
from trainer.profiling.evidence_files import read_evidence

QUICKLY = {name: value for name, value in QUICK.items() if name in config.FinetuneSettings.model_fields} | {
    "epochs": 2,
    "warmup_epochs": 0.5,
    "validate_every_epochs": 1,
    "views": {"min_scale": 0.5, "flip": False, "mixup": 0.4},
}
STEPS = 20
WAYS = {
    "lora, two processes, sharded weights, activations computed again": (
        2,
        {"method": "lora", "sharding": "fsdp", "layer_decay": 1.0, "activation_checkpointing": True},
    ),
    "the head alone": (1, {"method": "head"}),
}
LONG = {
    "lora, with an average of the weights": (1, {"method": "lora", "ema_decay": 0.9, "accumulation": 3}),
    "the head alone, three processes, sharded optimizer state": (3, {"method": "head", "zero": True}),
}


class Finetuning:
    """A fine-tuning of given weights."""

    def __init__(self, dataset, weights, output, **finetune):
        self.inputs = {"dataset": dataset}
        self.outputs = {"teacher": str(output / "teacher"), "evidence": str(output / "evidence")}
        section = {
            "weights": weights,
            "teacher": {"architecture": "vit_tiny_patch16_224", "args": TINY | {"embed_dim": 32}},
            "seed": 3,
            "workers": 0,
            "mae": {"epochs": 0},
            "finetune": QUICKLY | finetune,
        }
        self.settings = config.validate(config.PretrainSettings, section).model_dump(mode="json")

    def run(self, processes=1, fault=None):
        """Train; gives the processes' exit codes."""
        ended = groups.run(self, processes=processes, fault=fault, stage="pretrain")
        return ended.codes

    @property
    def training(self):
        return read_evidence(self.outputs["evidence"]).trainings[0]

    def losses(self):
        return torch.tensor(self.training.metrics["loss"].values)

    def weights(self):
        return networks.load(self.outputs["teacher"]).network.state_dict()


@pytest.fixture
def finetuning(digits, teacher, tmp_path):
    """Makes fine-tunings of a teacher."""
    return lambda name, **finetune: Finetuning(digits, teacher, tmp_path / name, **finetune)


@pytest.mark.slow
@pytest.mark.parametrize("way", [*WAYS, *(pytest.param(way, marks=pytest.mark.long) for way in LONG)])
def test_an_interrupted_one_ends_with_the_same_bits(finetuning, teacher, way):
    processes, settings = (WAYS | LONG)[way]
    whole, broken = finetuning("whole", **settings), finetuning("broken", **settings)
    assert whole.run(processes) == [0] * processes
    asked = Fault(sends=signal.SIGTERM, step=13, rank=processes - 1)
    assert broken.run(processes, asked) == [PREEMPTED_EXIT_CODE] * processes
    assert broken.run(processes) == [0] * processes
    weights, before = broken.weights(), networks.load(teacher).network.state_dict()
    assert list(weights) == list(before), "an ordinary model directory"
    for name, value in whole.weights().items():
        assert torch.equal(weights[name], value), name
    after = broken.losses()
    assert 3 <= len(after) <= STEPS - 13
    assert torch.equal(after, whole.losses()[-len(after) :])
    changed = {name for name, value in weights.items() if not torch.equal(value, before[name])}
    of_head = {"head.weight", "head.bias"}
    assert of_head <= changed
    assert (changed == of_head) == (settings["method"] == "head")
    assert not {
        name
        for name in changed - of_head
        if not name.endswith(("qkv.weight", "proj.weight", "fc1.weight", "fc2.weight"))
    }


@pytest.mark.slow
@pytest.mark.parametrize("method", [pytest.param("head", marks=pytest.mark.long), "lora"])
def test_two_processes_learn_what_one_learns(finetuning, method):
    looks = {"evidence": {"operators_steps": 0, "tensors_every": 1, "tensors_budget": 1.0}}
    one, two = finetuning("one", method=method, drop_path=0.0, **looks), finetuning("two", method=method, drop_path=0.0)
    assert one.run() == [0]
    assert two.run(2) == [0, 0]
    assert torch.allclose(two.losses(), one.losses(), rtol=1e-4)
    for name, value in one.weights().items():
        assert torch.allclose(two.weights()[name], value, atol=2e-4), name
    assert set(findings(one.training)) <= {"loss_not_falling"}, "an untrained frozen network may not learn"
    looked_at = one.training.ranks[0].tensors.tensors
    assert len(looked_at) == (2 if method == "head" else 2 + 2 * 4 * 2), "what is frozen is not judged"
