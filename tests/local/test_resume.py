"""A training that is interrupted and goes on ends as one that was never interrupted."""

import os
import signal

import pytest
import torch

from tests import groups
from tests.distillations import MIXED, QUICK, Distillation
from tests.groups import Fault
from trainer import config
from trainer.data.dataset import open_dataset
from trainer.io.errors import PREEMPTED_EXIT_CODE
from trainer.profiling.evidence_files import read_evidence
from trainer.report import tracking
from trainer.stages import reinforce

# MLflow on SQLAlchemy 2.1
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")

BASE = {"epochs": 2, "batch_size": 128, "ema_decay": 0.9, "validate_every_epochs": 1, "views": MIXED}
STEPS = 20
WAYS = {
    "accumulation, mixed views, online teacher": (1, {"accumulation": 3, "drop_path": 0.1}),
    "recorded teacher, loader processes": (1, {"teacher": "recorded", "workers": 2}),
    "two processes, sharded optimizer state": (2, {"zero": True, "accumulation": 2}),
    "two processes, sharded weights": (2, {"sharding": "fsdp"}),
}


@pytest.fixture(scope="module")
def recorded(digits, teacher, tmp_path_factory):
    """What the teacher said of both epochs' views."""
    output = str(tmp_path_factory.mktemp("recorded") / "outputs")
    settings = config.ReinforceSettings(
        views=2, top_k=10, batch_size=500, seed=3, workers=0, augmentation=config.ViewSettings(**MIXED)
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in (*(name for name in os.environ if name.startswith("TRAINER_")), tracking.URI):
            patch.delenv(name, raising=False)
        reinforce.run(settings, dataset=digits, teacher=teacher, teacher_outputs=output)
    return output


@pytest.fixture
def distill(digits, teacher, recorded, tmp_path):
    """Makes distillations with mixed views."""

    def make(name, **settings):
        made = Distillation(digits, teacher, tmp_path / name)
        section = config.validate(config.DistillSettings, {**QUICK, **BASE, **settings})
        made.settings = section.model_dump(mode="json")
        if settings.get("teacher") == "recorded":
            made.inputs["teacher_outputs"] = recorded
        return made

    return make


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_it_ends_with_same_bits_and_same_losses(distill, way):
    processes, settings = WAYS[way]
    whole, broken = distill("whole", **settings), distill("broken", **settings)
    groups.check_resumes(whole, broken, step=13, processes=processes)  # in the middle of the second epoch
    assert groups.seen(broken) == groups.seen(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "settings"),
    [pytest.param(2, 1, {}, marks=pytest.mark.long), (1, 2, {"sharding": "fsdp"}), (2, 1, {"logit": {"loss": "dist"}})],
    ids=[
        "from two to one",
        "from one to two with sharded weights",
        "from two to one, images of a micro-batch compared",
    ],
)
def test_resuming_with_other_processes_keeps_samples_and_losses(distill, digits, before, after, settings):
    epoch = len(open_dataset(digits).split("train"))
    parts = 2 * before if settings else 2  # as many where the micro-batch is a part of what is learned
    whole, broken = distill("whole", accumulation=parts, **settings), distill("broken", accumulation=2, **settings)
    assert groups.run(whole).codes == [0]
    asked = Fault(sends=signal.SIGTERM, step=7)
    assert groups.run(broken, processes=before, fault=asked).codes == [PREEMPTED_EXIT_CODE] * before
    assert groups.run(broken, processes=after).codes == [0] * after
    keys = [sorted(step) for step in groups.seen(broken)]
    assert keys == [sorted(step) for step in groups.seen(whole)]
    stream = [key for step in groups.seen(whole) for key in step]
    assert len(set(stream[:epoch])) == len(set(stream[epoch : 2 * epoch])) == epoch
    losses = broken.losses()
    assert torch.allclose(losses, whole.losses()[-len(losses) :], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_an_interrupted_validation_is_done_again(distill):
    whole, broken = distill("whole"), distill("broken")
    assert groups.run(whole).codes == [0]
    (measured,) = read_evidence(whole.outputs["evidence"]).trainings
    asked = Fault(sends=signal.SIGTERM, step=int(measured.metrics["val_top1"].steps[0]), validating=True)
    assert groups.run(broken, fault=asked).codes == [PREEMPTED_EXIT_CODE]
    assert groups.run(broken).codes == [0]
    (after,) = read_evidence(broken.outputs["evidence"]).trainings
    for name in ("val_top1", "val_loss"):
        assert after.metrics[name].steps.tolist() == measured.metrics[name].steps.tolist()
        assert after.metrics[name].values.tolist() == measured.metrics[name].values.tolist()


@pytest.mark.slow
def test_a_killed_training_continues_its_mlflow_run(distill, mlflow_uri, monkeypatch):
    monkeypatch.setenv(tracking.URI, mlflow_uri)
    store = tracking.client()
    experiment = store.create_experiment("resume")
    tracked = {tracking.URI: mlflow_uri, tracking.EXPERIMENT_ID: experiment}
    whole, broken = distill("whole", checkpoint_every=4), distill("broken", checkpoint_every=4)
    assert groups.run(whole, **tracked).codes == [0]
    killed = Fault(sends=signal.SIGKILL, step=14)
    assert groups.run(broken, fault=killed, **tracked).codes == [-signal.SIGKILL]
    assert groups.run(broken, **tracked).codes == [0]
    second, first = store.search_runs([experiment], order_by=["start_time DESC"])
    assert first.info.status == second.info.status == "FINISHED"
    names = [name for name in first.data.metrics if not name.startswith("system/")]
    assert {"distill/loss", "distill/val_top1", "distill/learning_rate"} <= {*names}
    for name in names:
        wanted, got = (_points(store, run.info.run_id, name) for run in (first, second))
        assert got == wanted, name
    assert len(_points(store, second.info.run_id, "distill/loss")) == STEPS


def _points(store, run, name):
    return sorted((point.step, point.value) for point in store.get_metric_history(run, name))
