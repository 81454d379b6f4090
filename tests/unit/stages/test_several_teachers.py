"""A student of several teachers: online and recorded one by one, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.distillations import QUICK
from tests.trained_digits import write_model
from trainer import config
from trainer.config import DistillSettings, ReinforceSettings
from trainer.data.dataset import open_dataset
from trainer.devices import choose_device
from trainer.evaluation import embeddings
from trainer.io import artifacts
from trainer.io.errors import ArtifactError, ModelError, SettingsError
from trainer.models import networks
from trainer.objectives.distillation.recording import open_recording
from trainer.profiling.evidence_files import read_evidence
from trainer.runner import preflight
from trainer.stages import distill, reinforce

VIEWS = QUICK["views"]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A second teacher of the digits, of another width."""
    path = tmp_path_factory.mktemp("other") / "teacher"
    write_model(path, dim=32, depth=1, steps=60)
    return path


@pytest.fixture(scope="module")
def headless(other, trained_digits, tmp_path_factory):
    """The second one without its head, as a backbone from elsewhere is."""
    path = tmp_path_factory.mktemp("headless") / "teacher"
    model = networks.with_labels(networks.load(other), ())
    train = open_dataset(trained_digits.dataset).split("train")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRAINER_DEVICE", "cpu")
        found = embeddings.embed(model, train, range(len(train)), choose_device().open(), 250)
    model.card = replace(model.card, embedding=embeddings.statistics(found))
    with artifacts.create(path, "model", settings={}) as draft:
        networks.save(model, draft.path)
    return path


@pytest.fixture(scope="module")
def record(trained_digits, tmp_path_factory):
    def run(teacher, **settings):
        outputs = tmp_path_factory.mktemp("recorded") / "outputs"
        quick = {"views": 2, "seed": 3, "workers": 0, "batch_size": 250, "augmentation": VIEWS, "features": True}
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("TRAINER_DEVICE", "cpu")
            section = config.validate(ReinforceSettings, quick | {"top_k": 10} | settings)
            reinforce.run(section, dataset=trained_digits.dataset, teacher=teacher, teacher_outputs=outputs)
        return outputs

    return run


@pytest.fixture(scope="module")
def first(record, trained_digits):
    return record(trained_digits.teacher)


@pytest.fixture
def distilled(trained_digits, tmp_path):
    def run(name, teacher_outputs=None, **settings):
        section = config.validate(DistillSettings, QUICK | {"epochs": 2, "batch_size": 204} | settings)
        folder = tmp_path / name
        given = {"dataset": trained_digits.dataset, "teacher": trained_digits.teacher}
        made = {"student": folder / "student", "evidence": folder / "evidence"}
        distill.run(section, **given, **made, teacher_outputs=teacher_outputs)
        (training,) = read_evidence(folder / "evidence").trainings
        curves = {name: torch.tensor(series.values) for name, series in training.metrics.items()}
        return curves, artifacts.manifest(folder / "student", "model").parents

    return run


def test_each_teacher_costs_one_recording(distilled, first, record, other, headless, trained_digits):
    before = {file: file.stat().st_mtime_ns for file in first.rglob("*")}
    several = {"further_teachers": [str(other), str(headless)], "teacher_weights": [1, 2, 3], "feature_weight": 0.5}
    places = [record(other), record(headless)]
    assert {file: file.stat().st_mtime_ns for file in first.rglob("*")} == before
    recordings = {"teacher": "recorded", "further_recordings": [str(place) for place in places]}
    online, with_teachers = distilled("online", **several)
    recorded, from_outputs = distilled("recorded", first, **recordings, **several)
    assert online.keys() == recorded.keys() >= {"logit", "feature", "label", "agreement"}
    # What differs is that logits and features were rounded to half precision.
    assert torch.allclose(online["loss"], recorded["loss"], rtol=2e-3)
    assert not torch.equal(online["loss"], recorded["loss"])
    assert online["feature"][-1] < online["feature"][0]
    fingerprints = {
        artifacts.manifest(place, "model").fingerprint for place in (trained_digits.teacher, other, headless)
    }
    assert fingerprints <= set(with_teachers.values())
    outputs = {artifacts.manifest(place, "teacher_outputs").fingerprint for place in (first, *places)}
    assert fingerprints | outputs <= set(from_outputs.values())


def test_weights_decide_whom_the_student_follows(distilled, other):
    alone, _ = distilled("alone")
    mostly, _ = distilled("mostly", further_teachers=[str(other)], teacher_weights=[1, 1e-6])
    equal, _ = distilled("equal", further_teachers=[str(other)])
    assert torch.allclose(mostly["loss"], alone["loss"], rtol=1e-4)
    assert not torch.allclose(equal["loss"], alone["loss"], rtol=1e-2)


def test_the_views_must_be_the_same_for_all(distilled, first, record, other):
    given = {"teacher": "recorded", "further_teachers": [str(other)]}
    for settings, message in (
        ({"views": 3}, r"views is 3, but 2 in .*record it again with the same reinforce\.views"),
        ({"seed": 4}, r"seed"),
    ):
        wrong = record(other, **settings)
        with pytest.raises(ArtifactError, match=message):
            distilled("wrong", first, further_recordings=[str(wrong)], **given)
    with pytest.raises(ArtifactError, match="they were recorded from another teacher"):
        distilled("first twice", first, further_recordings=[str(first)], **given)


def test_a_recording_that_lacks_the_features_is_refused(distilled, first, record, other):
    bare = record(other, features=False)
    with pytest.raises(SettingsError, match=r"feature_weight is 1, but .* holds no features"):
        distilled(
            "bare",
            first,
            teacher="recorded",
            further_teachers=[str(other)],
            further_recordings=[str(bare)],
            feature_weight=1.0,
        )


def test_teachers_that_do_not_fit_are_refused(distilled, trained_digits, headless, tmp_path):
    animals = tmp_path / "animals"
    model = networks.load(trained_digits.teacher)
    model.card = replace(model.card, labels=tuple(f"animal {index}" for index in range(10)))
    with artifacts.create(animals, "model", settings={}) as draft:
        networks.save(model, draft.path)
    with pytest.raises(ModelError, match=f"teacher {animals}"):
        distilled("animals", further_teachers=[str(animals)])
    missing = str(tmp_path / "none")
    with pytest.raises(ArtifactError, match=f"model {missing}: no such directory"):
        distilled("missing", further_teachers=[missing])
    settings = config.resolve("digits", [f"distill.further_teachers=['{missing}']"])
    with pytest.raises(ArtifactError, match=f"model {missing}: no such directory"):
        preflight.checked(settings, trains_here=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"teacher_weights": [1, 2]}, r"teacher_weights has 2 weights for 1 teachers"),
        ({"further_teachers": ["a"], "teacher_weights": [1]}, r"teacher_weights has 1 weights for 2 teachers"),
        ({"further_teachers": ["a"], "teacher_weights": [1, 0]}, r"teacher_weights.*> 0"),
        ({"further_teachers": ["a"], "teacher": "recorded"}, r"further_recordings has 0 entries, but teacher is recorded with 1"),
        ({"further_teachers": ["a"], "further_recordings": ["b"]}, r"further_recordings has 1 entries, but teacher is online"),
        ({"further_teachers": ["a"], "token_weight": 1}, r"token_weight is 1, but several teachers share only"),
        ({"further_teachers": ["a"], "similarity_weight": 1}, r"similarity_weight is 1, but several teachers share only"),
        ({"further_teachers": ["a"], "logit_weight": 0}, r"but no loss compares with a teacher"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_together_are_one_message(settings, message):
    with pytest.raises(SettingsError, match=message):
        config.validate(DistillSettings, settings)


def test_what_tries_a_distillation_beforehand_refuses_several_teachers():
    for stage in ("tune", "warm_up"):
        with pytest.raises(
            SettingsError, match=rf"{stage} tries a distillation .* names 1 more; set {stage}\.enabled=false"
        ):
            config.resolve_run("digits", [f"{stage}.enabled=true", "distill.further_teachers=['a']"])


def test_joined_recordings_read_all_of_them(first, record, other):
    second = record(other)
    one, two = open_recording(first), open_recording(second)
    rows, numbers = np.array([3, 0, 7]), np.array([1, 0, 1])
    said = open_recording(first, second).read(rows, numbers)
    assert torch.equal(said.logits, one.read(rows, numbers).logits)
    (further,) = said.further
    assert torch.equal(further.features, two.read(rows, numbers).features)
