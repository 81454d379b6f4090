"""`configure`: the pipeline's parameters become one section a stage."""

from __future__ import annotations

import json

import fsspec
import pytest
import torch

from components import sections
from components.launching import Placement
from tests.distillations import blank_teacher
from trainer import config
from trainer.graph import STAGES
from trainer.io import artifacts
from trainer.io.errors import DataError, SettingsError, TrackingError
from trainer.report import tracking
from trainer.report.tracking.stage_runs import stage_run


@pytest.fixture(autouse=True)
def _untracked(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")


HERE = Placement()


def configured(*parameters, place=HERE, **named):
    return sections.configure(sections.resolve(*parameters, **named), place)


def test_each_stage_gets_its_own_section_only():
    made = configured("digits")._asdict()
    for name, stage in STAGES.items():
        own = json.loads(made[name])
        whole = config.resolve("digits").model_dump(mode="json")[stage.section]
        assert own.items() <= whole.items()
        within = {
            "profile",
            "evaluate",
            "pretrain",
            "distill",
            "reinforce",
            "search",
        }  # names of settings of other sections, too
        assert not set(own) & (set(config.Settings.model_fields) - within)


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        ("distill.logit.temperature=3.5", {"tune", "distill"}),
        ("distill.teacher=recorded", {"tune", "distill", "reinforce_needed"}),
        ("distill.views.flip=true", {"reinforce", "tune", "distill"}),
        ("reinforce.views=7", {"reinforce", "tune", "profile"}),
        ("run.seed=7", {"pretrain", "reinforce", "tune", "distill"}),
        ("data.workers=1", {"pretrain", "reinforce", "tune", "distill"}),
        ("pretrain.finetune.epochs=3", {"pretrain"}),
        ("data.image_size=64", {"prepare"}),
        ("evaluate.gate.max_accuracy_drop=0.5", {"evaluate"}),
        ("export.int8=false", {"export"}),
        ("tracking.experiment=other", set()),
        ("run.device=cpu", {"device"}),
        ("warm_up.enabled=true", {"warm_up", "warm_up_needed"}),
        ("warm_up.enabled=true distill.logit.temperature=3.5", {"warm_up", "warm_up_needed", "tune", "distill"}),
    ],
)
def test_a_setting_changes_only_sections_that_read_it(monkeypatch, overrides, changed):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = configured("digits")._asdict()
    after = configured("digits", overrides)._asdict()
    assert {name for name in before if before[name] != after[name]} == changed | {"resolved"}


def test_changed_class_table_makes_new_data_set(tmp_path, monkeypatch):
    table = tmp_path / "table.csv"
    table.write_text("class,value\n10,10\n")
    with pytest.raises(DataError, match="line 2: '10' is no class of the images"):
        configured("digits", f"data.attributes={table}")

    def version(nine):
        table.write_text("class,value\n" + "".join(f"{digit},{digit}\n" for digit in range(9)) + f"9,{nine}\n")
        return configured("digits", f"data.attributes={table}").source_version

    monkeypatch.setattr(sections.preflight, "checked", lambda settings, **_: settings)  # which takes seconds
    assert version("9") == version("9") != version("10")
    assert version("9").startswith(f"{configured('digits').source_version} ")


def test_device_of_trainings(monkeypatch):
    def device(overrides="", place=HERE):
        return configured("digits", overrides, place=place).device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (device(), device("run.device=cpu"), HERE.device("xla")) == ("cpu", "cpu", "xla")
    assert device(place=Placement(pool="gpu-a100")) == "cuda"
    assert device("run.device=cpu", place=Placement(pool="neuron-trn1")) == "xla"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device() == "cuda"


def test_warm_up(monkeypatch):
    made = configured("digits", "warm_up.enabled=true distill.teacher=recorded run.seed=3")
    own = json.loads(made.warm_up)
    assert {name: own[name] for name in ("pretrain", "reinforce", "distill")} == {
        name: json.loads(getattr(made, name)) for name in ("pretrain", "reinforce", "distill")
    }
    # A warm up that would be lost is refused before anything starts.
    neuron = Placement(pool="neuron-trn1")
    configured("digits", place=neuron)
    with pytest.raises(SettingsError, match=r"NEURON_COMPILE_CACHE_URL=/cache/neuron lies in the pods"):
        configured("digits", "warm_up.enabled=true", place=neuron)
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", "s3://bucket/neuron-cache")
    configured("digits", "warm_up.enabled=true", place=neuron)


def test_a_distillation_reads_the_recorded_views():
    def augmentation(overrides):
        return json.loads(configured("digits", overrides).reinforce)["augmentation"]

    assert augmentation("")["min_scale"] == config.resolve("digits").distill.views.min_scale
    assert augmentation("distill.views.min_scale=0.9")["min_scale"] == 0.9
    assert augmentation("distill.views.min_scale=0.9 reinforce.augmentation.min_scale=0.5")["min_scale"] == 0.5


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "distill.feature_weight=1",
            r"distill\.feature_weight is 1, but reinforce\.features is false.*reinforce\.features",
        ),
        (
            "reinforce.augmentation.min_scale=0.5 reinforce.augmentation.flip=false",
            r"reinforce\.augmentation differs from distill\.views in min_scale \(0\.5, not 0\.6\), so",
        ),
    ],
)
def test_what_distill_would_refuse_is_refused_before_anything_starts(overrides, message):
    sections.resolve("digits", overrides)
    with pytest.raises(SettingsError, match=message):
        sections.resolve("digits", f"{overrides} distill.teacher=recorded")


def test_named_parameters_go_before_the_overrides():
    settings = sections.resolve(
        "digits", "data.source=digits", dataset="imagefolder:/some photos/it's", teacher="/models/1", experiment="2"
    )
    assert settings.data.source == "imagefolder:/some photos/it's"
    assert settings.pretrain.weights == "/models/1"
    assert settings.tracking.experiment == "2"


def test_images_are_found_and_versioned(tmp_path):
    with pytest.raises(DataError, match="missing"):
        configured("digits", dataset=f"imagefolder:{tmp_path / 'missing'}")
    # Changed images change the version.
    photo = tmp_path / "a" / "1.png"
    photo.parent.mkdir()
    photo.write_bytes(b"one")
    first = configured("digits", dataset=f"imagefolder:{tmp_path}")
    photo.write_bytes(b"another")
    second = configured("digits", dataset=f"imagefolder:{tmp_path}")
    assert first.source_version != second.source_version
    assert first.prepare == second.prepare
    # An unknown setting is named.
    with pytest.raises(SettingsError, match=r"distill\.temprature.*did you mean distill\.logit\.temperature"):
        sections.resolve("digits", "distill.temprature=3")


def test_unknown_images_have_a_version_per_run():
    fsspec.filesystem("memory").pipe("/sections-test/cat/1.jpg", b"1")
    first, second = (configured("digits", dataset="imagefolder:memory://sections-test") for _ in range(2))
    assert first.source_version != second.source_version
    assert first.prepare == second.prepare


def test_given_weights_that_change_change_their_version_alone(tmp_path):
    versions = []
    for content in ("one", "another"):
        blank_teacher(tmp_path / "teacher")
        with artifacts.create(tmp_path / "teacher", "model", settings={"content": content}):
            pass
        versions.append(configured("digits", teacher=str(tmp_path / "teacher")))
    changed = {name for name, value in versions[0]._asdict().items() if getattr(versions[1], name) != value}
    assert changed == {"teacher_weights_version"}
    assert all(version.teacher_weights_version for version in versions)


def test_the_section_names_the_revision_of_timms_weights(tmp_path, monkeypatch):
    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    reference = tmp_path / f"models--timm--{name}" / "refs" / "main"
    reference.parent.mkdir(parents=True)
    made = []
    for commit in ("a" * 40, "b" * 40):
        reference.write_text(commit)
        made.append(configured("digits", teacher=f"timm:{name}"))
        assert json.loads(made[-1].pretrain)["weights"] == f"timm:{name}@{commit}"
    changed = {field for field, value in made[0]._asdict().items() if getattr(made[1], field) != value}
    assert changed == {"pretrain", "resolved"}


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
def test_a_cluster_has_one_place_to_track_in(mlflow_uri, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_uri)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    monkeypatch.setenv("TRAINER_RUN", "run-1")
    configured("digits", experiment="fruit")
    with stage_run("prepare", {}) as tracker:  # a later task, which does not know the experiment
        made = tracking.client().get_run(tracker.run_id)
    assert tracking.client().get_experiment(made.info.experiment_id).name == "fruit"
    for override in ("tracking.enabled=false", "tracking.uri=http://elsewhere:5000"):
        with pytest.raises(TrackingError, match=rf"{override}: this cluster tracks at {mlflow_uri}"):
            configured("digits", override)


def test_new_generation_makes_first_cached_task_another_one():
    before, after = (
        sections.configure(sections.resolve("digits"), Placement(), generation=generation)
        for generation in ("", "20260131t120000z")
    )
    assert after.source_version != before.source_version
    assert after._replace(source_version=before.source_version) == before


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
def test_mlflow_names_run_as_kubeflow_does_and_links_to_it(mlflow_uri, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_uri)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    for name in ("TRAINER_RUN", "KFP_RUN_ID"):
        monkeypatch.setenv(name, "0b8e1f")
    monkeypatch.setenv(sections.KUBEFLOW_UI, "https://kubeflow.example.com/pipeline/")
    sections.configure(sections.resolve("digits"), Placement(pool="cpu"), run_name="digits 2026-01-31 12:00:00 UTC")
    parent = tracking.client().get_run(tracking.start_parent({}, {}))
    assert parent.info.run_name == "digits 2026-01-31 12:00:00 UTC"
    assert parent.data.tags[tracking.RUN_TAG] == "0b8e1f"
    link = "https://kubeflow.example.com/pipeline/#/runs/details/0b8e1f"
    assert parent.data.tags[tracking.NOTE_TAG] == f"Kubeflow: [digits 2026-01-31 12:00:00 UTC]({link})"


def test_images_that_a_pods_disk_would_keep_are_refused(monkeypatch):
    settings = sections.resolve("digits", "data.keep_decoded=/decoded")
    sections.configure(settings, Placement())
    monkeypatch.setenv("KFP_RUN_ID", "0b8e1f")
    with pytest.raises(SettingsError, match=r"data\.keep_decoded=/decoded: a pod's disk ends with it; give a URI"):
        sections.configure(settings, Placement(pool="cpu"))


def test_receivers_that_no_task_of_a_cluster_would_know_are_refused(monkeypatch):
    address = "alertmanager+http://alerts:9093"
    settings = sections.resolve("digits", f"run.notify={address}")
    sections.configure(settings, Placement())
    for name in ("TRAINER_RUN", "KFP_RUN_ID"):
        monkeypatch.setenv(name, "0b8e1f")
    with pytest.raises(
        SettingsError, match=r"run\.notify=alertmanager.* put them into the Secret vit-distillation-notify"
    ):
        sections.configure(settings, Placement(pool="cpu"))
    monkeypatch.setenv("TRAINER_NOTIFY", address)  # which the Secret gives the task
    sections.configure(settings, Placement(pool="cpu"))
