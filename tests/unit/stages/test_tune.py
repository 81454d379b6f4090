"""The stage tune on real digits: real trials of a distillation, what it leaves, and what it refuses."""

from __future__ import annotations

import io
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.distillations import QUICK, TINY
from tests.forks import Program
from trainer import config
from trainer.config import DistillSettings, TuneSettings
from trainer.data.dataset import open_dataset
from trainer.data.loader import MicroBatches
from trainer.data.views.rendering import make_views
from trainer.devices import choose_device
from trainer.devices.process_group import Processes
from trainer.io import artifacts, storage
from trainer.io.costs import PLACE_VARIABLE
from trainer.io.errors import BudgetError, SettingsError
from trainer.models import networks
from trainer.profiling.recorder import Startup
from trainer.stages import tune
from trainer.stages.tuning import trials as trials_module
from trainer.stages.tuning.ladder import LEAST_GAIN
from trainer.stages.tuning.trials import Trials
from trainer.stages.tuning.tuning_schema import Candidate, Trial, read_tuning
from trainer.training import loop, parallelize, prefetch
from trainer.training.parallelize import CompileCounter

VIEWS = QUICK["views"]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    for name, value in {"LEAST_S": 0.05, "LONGEST_S": 0.2, "THOROUGHNESS": 1.0, "LAP_S": 0.02}.items():
        monkeypatch.setattr(trials_module, name, value)
    for name in ("MLFLOW_TRACKING_URI", "TRAINER_CHECKPOINTS", PLACE_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def section(distill=None, **settings):
    """The stage's settings."""
    fixed = {
        "enabled": True,
        "fewest_steps": 1,
        "distill": QUICK | {"checkpoint_every": 5} | (distill or {}),
        "reinforce": {"views": 2, "seed": 3, "workers": 0, "augmentation": VIEWS},
    }
    return fixed | settings


@pytest.fixture
def tuned(trained_digits, tmp_path):
    """Runs the stage with settings of tune and of the distillation."""

    def run(distill=None, teacher_outputs=None, **settings):
        tune.run(
            config.validate(TuneSettings, section(distill, **settings)),
            dataset=trained_digits.dataset,
            teacher=trained_digits.teacher,
            tuning=tmp_path / "tuning",
            teacher_outputs=teacher_outputs,
        )
        return read_tuning(tmp_path / "tuning")

    return run


def test_a_measurement_without_a_search(tuned, tmp_path):
    made = tuned(search=False)
    assert made.tried == ()
    assert made.settings == made.given == made.chosen
    assert made.work.model_dump() == {"steps": 8, "validations": 1, "checkpoints": 2, "windows": 0}
    measured = made.measurement
    assert measured.settings == made.given
    assert measured.step_s > 0
    assert measured.steps >= 4
    assert min(measured.startup_s, measured.validation_s, measured.checkpoint_s) > 0
    assert measured.recording_s is None
    assert 3600 * made.forecast.hours > measured.startup_s + 8 * measured.step_s
    manifest = artifacts.read(tmp_path / "tuning", "tuning")
    assert set(manifest.parents) == {"dataset", "teacher"}
    assert manifest.figures["hours"] == made.forecast.hours
    assert manifest.figures["images_per_second"] > 0
    assert list((tmp_path / "checkpoints").glob("**/step-*")) == []


def test_ladder_measures_and_takes_what_it_found_better(tuned, tmp_path):
    """What holds at any speed; what is found depends on the machine."""
    made = tuned({"batch_size": 2, "epochs": 100, "workers": None}, minutes=0.1, apply=True)
    first, second = (tried.trial for tried in made.tried[:2])
    assert [first.loads, second.loads] == [False, True]
    assert first.candidate == second.candidate == Candidate.of(DistillSettings.model_validate(made.given))
    assert first.candidate.workers == "auto"
    assert min(first.images_per_second, first.loading_s, first.memory_bytes, second.images_per_second) > 0
    taken = [tried for tried in made.tried if tried.taken]
    assert all(tried.gain >= LEAST_GAIN for tried in taken[2:])
    kept = [tried.trial for tried in taken if tried.trial.loads][-1]
    assert made.chosen["batch_size"] == kept.candidate.batch_size
    assert made.settings == made.measurement.settings == made.chosen
    assert {"compile", "workers"} & set(made.untried)
    assert made.stopped
    assert artifacts.manifest(tmp_path / "tuning", "tuning").figures["gain"] == pytest.approx(made.gain)


@pytest.fixture
def step_rate(monkeypatch):
    """Gives trials a rate in images a second by their candidate, so that the result is the same on any machine."""

    def give(rate):
        def measure(_, candidate, *, loads=False):
            value = float(rate(candidate))
            given = {"images_per_second": value, "low": 0.99 * value, "high": 1.01 * value, "loads": loads}
            workers = 0 if candidate.workers == "auto" else candidate.workers
            given |= {"workers": workers, "steps": 10, "startup_s": 0.1, "seconds": 0.5}
            return Trial(candidate=candidate, ended="measured", **given)

        monkeypatch.setattr(Trials, "measure", measure)

    return give


def test_settings_that_are_found_are_applied_with_their_reasons(tuned, step_rate):
    """A step takes as long with seven images as with two; fewer than 5,000 steps are left beyond that."""
    step_rate(lambda candidate: 100 * candidate.batch_size)
    made = tuned({"batch_size": 2, "epochs": 35, "workers": None}, apply=True, fewest_steps=5_000)
    steps = [tried.trial for tried in made.tried if tried.taken and not tried.trial.loads]
    assert [trial.candidate.batch_size for trial in steps] == [2, 4, 7]
    assert made.settings == made.measurement.settings == made.chosen
    assert (made.chosen["batch_size"], made.measurement.batch_size, made.chosen["workers"]) == (7, 7, None)
    assert made.gain == pytest.approx(3.5, rel=0.01)
    assert any("from 2 to 7 images: 3.5 times fewer steps" in text for text in made.reasons)
    assert made.untried["batch_size=8"] == "fewer than 5,000 steps would be left (tune.fewest_steps)"


def test_without_apply_given_settings_are_what_is_forecast(tuned, step_rate):
    step_rate(lambda candidate: 1 if candidate.batch_size == 2 else 1e9)
    made = tuned({"batch_size": 2, "epochs": 60})
    assert made.settings == made.given
    assert made.measurement.batch_size == 2
    assert made.chosen["batch_size"] > 2
    assert made.alternatives["tune.apply=true"].hours < made.forecast.hours


@pytest.fixture
def opened(trained_digits, tmp_path):
    """Opens what the trials of a section share, in one process."""

    def open_subject(settings):
        return tune.open_subject(
            config.validate(TuneSettings, settings),
            open_dataset(trained_digits.dataset),
            Processes(rank=0, world_size=1, local_rank=0, device=choose_device()),
            Startup(),
            tmp_path,
            dataset=trained_digits.dataset,
            teacher=trained_digits.teacher,
            teacher_outputs=None,
        )

    return open_subject


@pytest.mark.parametrize("decode_on", ["cpu", "cuda"])
def test_a_recording_includes_the_devices_decoding(opened, monkeypatch, decode_on):
    batch_s, made = 0.1, []

    def slow(make):
        def made_slowly(*arguments):
            time.sleep(batch_s)
            made.append(make.__name__)
            return make(*arguments)

        return made_slowly

    def decoded(joined, lengths, device):  # as nvJPEG on a GPU
        squares = [Image.open(io.BytesIO(file.numpy().tobytes())) for file in joined.split(lengths.tolist())]
        return torch.stack([torch.from_numpy(np.array(one.convert("RGB"))).permute(2, 0, 1) for one in squares])

    monkeypatch.setattr("trainer.data.dataset.IN_MEMORY_BYTES", 0)
    monkeypatch.setattr("trainer.data.loader.check_gpu_decoding", lambda *_, **__: None)
    monkeypatch.setattr(prefetch, "decode_jpegs", slow(decoded) if decode_on == "cuda" else None)
    if decode_on == "cpu":
        monkeypatch.setattr(prefetch.rendering, "make_views", slow(make_views))
    settings = section()
    settings["reinforce"] |= {"views_on": "device", "decode_on": decode_on}
    subject = opened(settings)
    assert set(made) == {"decoded" if decode_on == "cuda" else "make_views"}
    assert subject.recording_s >= batch_s / tune._TEACHER_IMAGES["cpu"] * 2 * len(subject.samples)


def test_recorded_outputs_are_measured_before_there_are_any(tuned):
    made = tuned({"teacher": "recorded"}, search=False)
    assert made.measurement.recording_s > 0
    assert made.forecast.stages == ("reinforce", "distill")
    assert made.reads_recording


def test_epochs_and_recording_are_counted_over_images_that_are_read(tuned):
    """1,000 images with a label, and 20 more of which outputs are recorded, but not learned from."""
    distilled = {"teacher": "recorded", "unlabeled": False, "batch_size": 100, "epochs": 3}
    made = tuned(distilled, search=False, reinforce={"views": 2, "augmentation": VIEWS, "unlabeled": True})
    assert made.work.steps == 30
    assert tuned({"batch_size": 100, "epochs": 3}, search=False).work.steps == 31


@pytest.mark.parametrize(
    ("distill", "reason"),
    [
        ({"logit_weight": 0.0}, "no loss compares with the teacher"),
        ({"feature_weight": 1.0}, r"reinforce\.features is false"),
        ({"blocks": {"0": 0}, "block_weight": 1.0}, r"what the teacher's blocks give is not recorded"),
        ({"logit": {"loss": "dkd"}}, r"logits of all 10 classes, .*; set reinforce\.top_k=all"),
        ({"views": {"flip": True}}, r"reinforce\.augmentation differs from distill\.views"),
    ],
)
def test_what_cannot_learn_from_recorded_outputs_is_not_tried_with_them(tuned, distill, reason):
    made = tuned(distill, minutes=0.001, reinforce={"views": 2, "top_k": 3, "augmentation": VIEWS})
    assert re.search(reason, made.untried["teacher=recorded"])


def test_distillation_that_cannot_learn_from_its_recorded_outputs_is_refused(tuned):
    with pytest.raises(SettingsError, match=r"distill\.teacher is recorded, but .*reinforce\.features"):
        tuned({"teacher": "recorded", "feature_weight": 1.0})


def test_a_batch_beyond_the_data_is_clamped(tuned, caplog):
    made = tuned({"batch_size": 5000, "epochs": 3}, minutes=0.001)
    assert sum("distill.batch_size = 5000 is larger than the 1020 images" in line for line in caplog.messages) == 1
    assert made.given["batch_size"] == made.measurement.batch_size == 1020
    assert {tried.trial.candidate.batch_size for tried in made.tried} == {1020}
    assert made.work.steps == 3
    assert made.untried["batch_size=1083"] == "more than 1020 is not allowed: there are no more images to train on"


def test_a_batch_that_cannot_be_dealt_is_refused(tuned):
    with pytest.raises(SettingsError, match=r"batch_size = 3 cannot be divided among 1 processes x 4 micro-batches"):
        tuned({"batch_size": 3, "accumulation": 4})


# ---------------------------------------------------------------------------------------------------------------------
# The budget


def test_a_forecast_over_the_budget_ends_the_run(tuned, tmp_path):
    with pytest.raises(BudgetError, match=r"run\.budget_hours=0\.02.*distill\.epochs=\d+"):
        tuned({"epochs": 60_000}, search=False, budget_hours=0.02)
    assert not artifacts.exists(tmp_path / "tuning")


def test_dollars_without_price_are_refused_before_anything_is_measured(tuned):
    with pytest.raises(BudgetError, match=r"the price of this machine is not known"):
        tuned(search=False, budget_usd=5.0)


def test_priced_pool_is_forecast_in_dollars_also_with_more_nodes(tuned, monkeypatch):
    price = {"dollars_an_hour": 36.0, "date": "2026-11", "region": "here", "source": "the test"}
    place = {"pool": "gold", "nodes": 1, "processes_per_node": 1, "price": price}
    monkeypatch.setenv(PLACE_VARIABLE, json.dumps(place))
    made = tuned(search=False, budget_usd=100.0)
    assert made.place.pool == "gold"
    assert made.forecast.dollars == pytest.approx(36 * made.forecast.hours)
    more = made.alternatives["nodes=2"]
    assert any("assumed" in assumption for assumption in more.assumptions)


# ---------------------------------------------------------------------------------------------------------------------
# Trials


@pytest.fixture
def trials(opened, tmp_path):
    """Measures candidates of a distillation."""

    def make(**settings):
        subject = opened(section(settings))
        return Trials(subject.training, subject.settings, subject.processes)

    return make


class SlowBatches(MicroBatches):
    """Micro-batches that take longer to load than a step."""

    def __getitem__(self, position):
        time.sleep(0.16)
        return super().__getitem__(position)


def test_a_slow_loader_is_measured_without_its_stock(trials, monkeypatch):
    def step(self, number, batches):
        batches.next()
        if not number:
            time.sleep(1)  # as if it compiled; meanwhile the processes fill their queue
        batches.preload()
        return {}

    monkeypatch.setattr(loop, "MicroBatches", SlowBatches)
    monkeypatch.setattr(loop.Trainer, "train_step", step)
    candidate = Candidate.of(config.validate(DistillSettings, QUICK | {"batch_size": 8, "workers": 2}))
    measured = trials(batch_size=8, workers=2)
    trial = measured.measure(candidate, loads=True)
    assert 0.7 * 8 / 0.08 < trial.images_per_second < 1.05 * 8 / 0.08
    monkeypatch.undo()


# ---------------------------------------------------------------------------------------------------------------------
# Compiled


@pytest.mark.long
def test_each_of_ten_trials_is_compiled_for_its_own_batch(trials, monkeypatch):
    """Torch compiles one code at most eight times, and for any size from the second size on."""
    made = []

    class Shapes(CompileCounter):
        def __init__(self, options):
            super().__init__("eager", options)
            self.sizes = []
            made.append(self)

        def __call__(self, graph, inputs):
            if torch.is_grad_enabled():
                self.sizes += [one.shape[0] for one in inputs if one.dtype == torch.uint8]
            return super().__call__(graph, inputs)

    monkeypatch.setattr(parallelize, "CompileCounter", Shapes)
    monkeypatch.setattr(trials_module, "LEAST_S", 0.0)
    monkeypatch.setattr(trials_module, "LONGEST_S", 0.0)
    student = QUICK["student"] | {"args": TINY | {"depth": 1}}
    measured = trials(compile="on", logit_weight=0.0, student=student)
    given = Candidate.of(measured._settings)
    batches = range(4, 14)
    for size in batches:
        trial = measured.measure(given.model_copy(update={"batch_size": size}))
        assert trial.ended == "measured"
    assert [(graphs.count, graphs.sizes) for graphs in made] == [(1, [size]) for size in batches]
    assert all(type(size) is int for graphs in made for size in graphs.sizes)


def test_trial_that_compiles_nothing_where_it_should_fails(trials):
    measured = trials(compile="on", logit_weight=0.0)
    with torch.compiler.set_stance("force_eager"):
        trial = measured.measure(Candidate.of(measured._settings))
    assert (trial.ended, trial.images_per_second) == ("not compiled", 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def test_out_of_memory_is_a_limit(tuned, monkeypatch):
    """Steps of more than four images fail as they do on a GPU that is too small."""
    made_objective = tune.distill.make_objective

    def limited(*arguments):
        objective = made_objective(*arguments)
        ask = objective._ask

        def fails(batch):
            if len(batch.images) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return ask(batch)

        objective._ask = fails
        return objective

    monkeypatch.setattr(tune.distill, "make_objective", limited)
    made = tuned({"batch_size": 8, "epochs": 30}, apply=True)
    assert [tried.trial.ended for tried in made.tried[:3]] == ["out of memory", "measured", "measured"]
    assert made.tried[0].run_s is None
    assert made.chosen["batch_size"] // made.chosen["accumulation"] <= 4
    assert made.measurement.settings == made.chosen


# ---------------------------------------------------------------------------------------------------------------------
# Interrupted

SEARCH = {"distill": {"batch_size": 8, "epochs": 300}, "minutes": 0.02}
"""A search of a few trials."""


def noted(folder):
    """The trials that a tuning which is not complete has kept."""
    files = list(Path(folder).glob("checkpoints/trials-*/trials.jsonl"))
    return [trial for file in files for trial in json.loads(storage.read_checksummed(file))["trials"]]


def trials_of(made):
    return [tried.trial.model_dump(mode="json") for tried in made.tried]


TUNE = """
import json, sys
from trainer import config
from trainer.stages import tune
from trainer.stages.tuning import trials
trials.LEAST_S, trials.LONGEST_S = 0.05, 0.2
tune.run(config.validate(config.TuneSettings, json.loads(sys.argv[1])), **json.loads(sys.argv[2]))
"""


def test_tuning_that_is_killed_measures_only_what_it_has_not(tuned, trained_digits, tmp_path):
    places = {"dataset": str(trained_digits.dataset), "teacher": str(trained_digits.teacher)}
    places["tuning"] = str(tmp_path / "tuning")
    tuning = Program(TUNE, json.dumps(section(**SEARCH)), json.dumps(places), folder=tmp_path)
    while tuning.is_running() and not noted(tmp_path):
        time.sleep(0.01)
    tuning.kill()
    before = noted(tmp_path)
    assert before
    made = tuned(**SEARCH)
    assert trials_of(made)[: len(before)] == before
    assert made.search_s == pytest.approx(sum(trial["seconds"] for trial in trials_of(made)))
    assert noted(tmp_path) == []


def test_trials_are_repeated_for_another_distillation_but_not_for_another_budget(tuned, tmp_path):
    def refused(**changes):
        with pytest.raises(BudgetError):
            tuned(changes | SEARCH["distill"], minutes=0.01, budget_hours=1e-9)
        return noted(tmp_path)

    before = refused()
    both = refused(logit={"temperature": 3.0})
    assert before[0] in both
    assert len(both) > len(before)
    assert trials_of(tuned(SEARCH["distill"], minutes=0.01, budget_hours=1e9)) == before


def test_damaged_notes_are_not_believed(tuned, tmp_path, caplog):
    with pytest.raises(BudgetError):
        tuned(SEARCH["distill"], minutes=0.01, budget_hours=1e-9)
    (file,) = tmp_path.glob("checkpoints/trials-*/trials.jsonl")
    before = noted(tmp_path)
    file.write_bytes(file.read_bytes().replace(b'"seconds":', b'"seconds":1'))
    assert trials_of(tuned(SEARCH["distill"], minutes=0.01))[0] != before[0]
    assert f"{file}: is damaged (checksum); measuring again" in caplog.messages


def test_a_headless_teacher_is_tuned_for(trained_digits, tmp_path):
    model = networks.with_labels(networks.load(trained_digits.teacher), ())
    size = networks.feature_size(model)
    model.card = replace(model.card, embedding=networks.EmbeddingStatistics(mean=(0.0,) * size, std=(2.0,) * size))
    with artifacts.create(tmp_path / "teacher", "model", settings={}) as draft:
        networks.save(model, draft.path)
    learns = {"head": "probe", "logit_weight": 0, "label_weight": 0, "feature_weight": 1}

    def tuned(distill):
        settings = config.validate(TuneSettings, section(distill, search=False))
        places = {"dataset": trained_digits.dataset, "teacher": tmp_path / "teacher", "tuning": tmp_path / "tuning"}
        tune.run(settings, **places)

    with pytest.raises(SettingsError, match=r"logit_weight is 0\.9, but teacher .* has no head"):
        tuned({})
    tuned(learns)
    assert read_tuning(tmp_path / "tuning").measurement.step_s > 0
