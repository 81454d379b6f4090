"""Batch normalisation on several processes, each of which sees its own images."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import safetensors.torch

TRAINED = """
import json, sys
from pathlib import Path
import timm, torch
from tests.distillations import QUICK
from trainer import config, models
from trainer.config import EvidenceSettings, FinetuneSettings
from trainer.data.dataset import open_dataset
from trainer.data.loader import Samples
from trainer.models import Classifier, ModelCard
from trainer.pretraining.finetuning import FinetuneObjective
from trainer.tracking.stage_runs import stage_run
from trainer.training.checkpoints import Checkpoints
from trainer.devices import Device
from trainer.training.loop import Trainer
from trainer.training.process_group import join_processes
from trainer.training.spec import TrainingSpec

folder, digits = Path(sys.argv[1]), sys.argv[2]
asked = {name: QUICK[name] for name in ("epochs", "warmup_epochs", "log_every", "checkpoint_every", "evidence")}
settings = config.validate(FinetuneSettings, asked | {"batch_size": 720, "accumulation": 2, "ema_decay": 0.5})
settings = settings.model_copy(update={"evidence": EvidenceSettings(operators_steps=0, tensors_every=0)})
torch.manual_seed(0)
network = timm.create_model("resnet10t", num_classes=10, stem_width=8, channels=(8, 8, 16, 16))
card = ModelCard(
    architecture="resnet10t", args={}, labels=tuple(map(str, range(10))), image_size=16, mean=(0.5,) * 3, std=(0.25,) * 3
)
before = []
average = Device.average

def noted(device, tensors, *, world_size):
    before.append(torch.cat([tensor.flatten() for tensor in tensors]).tolist())
    average(device, tensors, world_size=world_size)

Device.average = noted
with join_processes() as processes:
    training = TrainingSpec(
        name="finetune", objective=FinetuneObjective(Classifier(network, card), label_smoothing=0.0),
        samples=Samples([open_dataset(digits).split("train")]), view_size=16, settings=settings, seed=0, workers=0,
        processes=processes, checkpoints=Checkpoints(folder, "finetune", settings={}, parents={}),
    )
    with stage_run("pretrain", {}, active=False) as tracker:
        trained = Trainer(training).train(tracker)
    models.save(trained, folder)
    held = {name: buffer.tolist() for name, buffer in trained.network.named_buffers()}
    print(json.dumps([before, held, {name: part.tolist() for name, part in network.named_buffers()}]))
"""


def test_statistics_are_averaged_over_the_processes_and_kept(digits, tmp_path):
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = str(listener.getsockname()[1])
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    common |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3]), "TRAINER_DEVICE": "cpu"}
    folders = [tmp_path / str(rank) for rank in range(2)]
    started = []
    for rank, folder in enumerate(folders):
        folder.mkdir()
        environment = os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-c", TRAINED, str(folder), digits]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))
    (first, averaged, plain), second = [json.loads(process.communicate(timeout=300)[0]) for process in started]
    assert len(first) == len(second[0]) == 2, "once a step"
    assert first[-1] != second[0][-1], "the processes have seen other images"
    assert [averaged, plain] == second[1:]
    statistics = [name for name in plain if not name.endswith("num_batches_tracked")]
    expected = [(one + other) / 2 for one, other in zip(first[-1], second[0][-1], strict=True)]
    got = [number for name in statistics for number in plain[name]]
    assert max(abs(one - other) for one, other in zip(got, expected, strict=True)) < 1e-6
    assert averaged == plain, "the moving average of the weights has the same statistics"
    assert plain["bn1.num_batches_tracked"] == 4, "a step has two micro-batches"
    saved = [safetensors.torch.load_file(folder / "model.safetensors") for folder in folders]
    assert all(saved[0][name].tolist() == saved[1][name].tolist() == plain[name] for name in statistics)
