"""What the jobs of the fault tests work on, and what comes out where nothing disturbs them."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from tests import mlflow_store
from tests.distillations import QUICK
from tests.faults.inside import Fault
from tests.faults.jobs import Job
from trainer import config
from trainer.io import storage
from trainer.report import tracking

SMALL = QUICK | {"epochs": 2, "checkpoint_every": 4, "ema_decay": 0.9}
"""A distillation of some twenty steps, with a checkpoint after every fourth."""
LONGER = {"epochs": 6, "checkpoint_every": 8}
"""What takes long enough to be asked to end."""
TRAINED = {name: value for name, value in SMALL.items() if name in config.TrainingSettings.model_fields}
PRETRAINING = {
    "teacher": SMALL["student"],
    "mae": TRAINED | {"epochs": 1, "decoder_dim": 8, "decoder_depth": 1, "decoder_heads": 1},
    "finetune": TRAINED | {"epochs": 1},
    "workers": 0,
}
"""A masked autoencoder and then a classifier, of some ten steps each."""
RECORDING = {"views": 4, "top_k": 3, "batch_size": 400, "seed": 2, "workers": 0, "augmentation": QUICK["views"]}
"""Four shards."""
TUNING = {
    "enabled": True,
    "minutes": 0.02,
    "fewest_steps": 1,
    "distill": QUICK | {"batch_size": 8, "epochs": 30},
    "reinforce": {**RECORDING, "views": 2},
}
"""A few trials."""
PHOTOS = {"image_size": 16, "encoding": "png", "test_fraction": 0.2, "workers": 0}


@dataclass(frozen=True, kw_only=True)
class Whole:
    """What a job comes to where nothing disturbs it."""

    result: Mapping[str, str]
    """File -> checksum."""
    steps: int
    writes: list[str]
    """What it does to the file system below its folder; of jobs on one process only."""
    seconds: float
    """How long it takes."""


class Bench:
    """Makes jobs, each with outputs of its own, and knows what they should come to."""

    def __init__(self, folder: Path, *, dataset: str, teacher: str) -> None:
        self.folder, self.dataset, self.teacher = folder, dataset, teacher
        self._made = 0
        self._wholes: dict[str, Whole] = {}

    def distillation(self, *, place: str = "", processes: int = 1, from_teacher: str = "", **settings: Any) -> Job:
        """A distillation that writes below `place`, or below a folder of its own, from another teacher if it is named."""
        section = config.validate(config.DistillSettings, SMALL | settings).model_dump(mode="json")
        inputs = {"dataset": self.dataset, "teacher": from_teacher or self.teacher}
        if settings.get("teacher") == "recorded":
            inputs["teacher_outputs"] = self.teacher_outputs
        return self._job("distill", section, inputs, ("student", "evidence"), place, processes)

    def pair(self, **settings: Any) -> Job:
        """A distillation of some sixty steps on two processes."""
        return self.distillation(processes=2, **(LONGER | settings))

    def pretraining(self, *, place: str = "") -> Job:
        section = config.validate(config.PretrainSettings, PRETRAINING).model_dump(mode="json")
        return self._job("pretrain", section, {"dataset": self.dataset}, ("teacher", "evidence"), place, 1)

    def profiling(self) -> Job:
        """The report on two trainings."""
        section = config.ProfileSettings().model_dump(mode="json")
        inputs = {f"{stage}_evidence": made["evidence"] for stage, made in self.trained.items()}
        return self._job("profile", section, inputs, ("report",), "", 1)

    def evaluation(self) -> Job:
        """The comparison of a student with its teacher."""
        section = config.EvaluateSettings().model_dump(mode="json")
        made = self.trained
        inputs = {
            "dataset": self.dataset,
            "teacher": made["pretrain"]["teacher"],
            "student": made["distill"]["student"],
        }
        return self._job("evaluate", section, inputs, ("evaluation",), "", 1)

    def tuning(self) -> Job:
        """A search of a few trials, whose settings are not applied."""
        section = config.validate(config.TuneSettings, TUNING).model_dump(mode="json")
        return self._job("tune", section, {"dataset": self.dataset, "teacher": self.teacher}, ("tuning",), "", 1)

    def registration(self) -> Job:
        """The registration of a student, in an MLflow database of its own."""
        inputs = {"dataset": self.dataset, **self.reported}
        inputs |= {f"{stage}_evidence": made["evidence"] for stage, made in self.trained.items()}
        inputs |= {"teacher": self.trained["pretrain"]["teacher"], "student": self.trained["distill"]["student"]}
        section = config.RegisterSettings().model_dump(mode="json")
        job = self._job("register", section, inputs, ("registration",), "", 1)
        Path(job.folder).mkdir()
        shutil.copy(self.mlflow, tracking.local_store(Path(job.folder)))
        job.environment = tracking.environment(config.TrackingSettings(), directory=Path(job.folder), run="run")
        return job

    def recording(self, *, place: str = "") -> Job:
        """A recording of the teacher's outputs."""
        section = config.validate(config.ReinforceSettings, RECORDING).model_dump(mode="json")
        inputs = {"dataset": self.dataset, "teacher": self.teacher}
        return self._job("reinforce", section, inputs, ("teacher_outputs",), place, 1)

    def preparation(self, *, place: str = "") -> Job:
        """The preparation of a data set from a folder of photos."""
        section = config.validate(config.DataSettings, PHOTOS | {"source": f"imagefolder:{self.photos}"})
        return self._job("prepare", section.model_dump(mode="json"), {}, ("dataset",), place, 1)

    def _job(
        self,
        stage: str,
        section: Mapping[str, Any],
        inputs: Mapping[str, str],
        outputs: tuple[str, ...],
        place: str,
        processes: int,
    ) -> Job:
        self._made += 1
        scratch = self.folder / f"job-{self._made:04d}"
        scratch.mkdir(parents=True)
        return Job(
            stage=stage,
            settings=section,
            inputs=inputs,
            outputs={name: storage.join(place or str(scratch / "out"), name) for name in outputs},
            scratch=scratch,
            processes=processes,
        )

    @functools.cached_property
    def teacher_outputs(self) -> str:
        return finished(self.recording())["teacher_outputs"]

    @functools.cached_property
    def trained(self) -> dict[str, dict[str, str]]:
        """Stage -> its outputs, of a pretraining and a distillation from its teacher."""
        pretrained = finished(self.pretraining())
        return {"pretrain": pretrained, "distill": finished(self.distillation(from_teacher=pretrained["teacher"]))}

    @functools.cached_property
    def reported(self) -> dict[str, str]:
        """The report on these trainings, and the evaluation of their student."""
        return finished(self.profiling()) | finished(self.evaluation())

    @functools.cached_property
    def mlflow(self) -> Path:
        """An empty MLflow database, which takes long to make."""
        return mlflow_store.make(self.folder / "empty.db")

    @functools.cached_property
    def photos(self) -> Path:
        """A hundred and twenty photos of two kinds."""
        generator, folder = torch.Generator().manual_seed(0), self.folder / "photos"
        for kind in ("apple", "pear"):
            (folder / kind).mkdir(parents=True)
            for number in range(60):
                pixels = torch.randint(0, 256, (20, 20, 3), dtype=torch.uint8, generator=generator)
                Image.fromarray(pixels.numpy()).save(folder / kind / f"{number}.png")
        return folder

    @functools.cached_property
    def whole_pair(self) -> Whole:
        """What `pair` comes to."""
        job = self.pair()
        ending = job.run()
        assert ending.code == 0, ending.said
        return Whole(result=job.result(), steps=ending.last_step + 1, writes=[], seconds=ending.seconds)

    def whole(self, kind: str) -> Whole:
        """What a job on one process comes to, such as `distillation`."""
        if kind not in self._wholes:
            self._wholes[kind] = undisturbed(self.job(kind))
        return self._wholes[kind]

    def job(self, kind: str) -> Job:
        """A job as the method of this name makes it."""
        made: Job = getattr(self, kind)()
        return made


def finished(job: Job) -> dict[str, str]:
    """The outputs of a job that is done here and now."""
    ending = job.fork()
    assert ending.code == 0, ending.said
    return dict(job.outputs)


def undisturbed(job: Job) -> Whole:
    """What a job on one process comes to, and what it writes."""
    ending = job.fork(Fault(does="nothing", folder=job.folder))
    assert ending.code == 0, ending.said
    return Whole(result=job.result(), steps=ending.last_step + 1, writes=ending.writes, seconds=ending.seconds)
