"""Where a run is kept, and what it takes from earlier ones."""

import json
import os
from dataclasses import replace
from datetime import datetime

import pytest

from trainer import config, devices
from trainer.graph import STAGES
from trainer.io import artifacts
from trainer.io.costs import Machines, Price, local_place
from trainer.runner import launch, local_run, preflight, training_work


def test_the_time_of_the_latest_run_of_the_recipe_is_expected(tmp_path):
    settings, longer = (config.resolve_run("digits", one).model_dump(mode="json") for one in ("", "distill.epochs=120"))
    for number, (name, recipe, seconds) in enumerate(
        [("old", "digits", 9.0), ("other", "grocery", 8.0), ("new", "digits", 7.0), ("damaged", "", 0.0)]
    ):
        file = tmp_path / name / "summary.json"
        file.parent.mkdir()
        content = {"recipe": recipe, "settings": settings, "stages": {"distill": {"seconds": seconds}}}
        file.write_text(json.dumps(content) if recipe else "{")
        os.utime(file, (number, number))
    assert local_run._stage_seconds("digits", settings, tmp_path / "this") == {"distill": 7.0}
    assert local_run._stage_seconds("waste", settings, tmp_path / "this") == {}
    assert local_run._stage_seconds("digits", longer, tmp_path / "this") == {}, "it has other epochs"


def test_a_first_run_is_estimated_by_operations_and_pace():
    estimate = local_run._Estimate({"pretrain": {"mae": 2.0, "finetune": 4.0}, "distill": {"distill": 3.0}})
    assert estimate.ahead("pretrain") == {"mae": 3.5, "finetune": 0.75}
    assert estimate.ahead("distill") == {"distill": 0.0}
    assert estimate.ahead("evaluate") == {}
    assert estimate.left("distill") == ""
    estimate.took("prepare", 50.0)
    estimate.took("pretrain", 60.0)
    assert estimate.left("distill") == "; about 30 s of trainings left, by their operations and the pace so far"
    assert estimate.left("evaluate") == ""


def test_work_of_trainings_is_counted_where_it_decides(tmp_path):
    with artifacts.create(str(tmp_path / "dataset"), "dataset", settings={}) as draft:
        draft.figures = {"train": 100, "unlabeled": 20}

    def work(overrides):
        settings = config.resolve_run("digits", overrides)
        return local_run._training_work(settings, [one for one in STAGES.values() if one.is_needed(settings)], tmp_path)

    full, longer = work(""), work("distill.epochs=120 pretrain.mae.epochs=0")
    assert list(full["pretrain"]) == ["mae", "finetune"]
    assert list(longer["pretrain"]) == ["finetune"]
    assert longer["distill"]["distill"] == 2 * full["distill"]["distill"]
    assert list(work("distill.teacher=recorded")) == ["pretrain", "reinforce", "distill"]
    assert work("tune.enabled=true") == {}, "its trials are limited by time"


def test_work_knows_smaller_inputs_further_teachers_and_what_is_computed_again(trained_digits):
    def work(*overrides):
        return training_work.count(config.resolve_run("digits", list(overrides)), taught=100, unlabeled=0)

    plain = work()
    student = 'distill.student={architecture="vit_tiny_patch16_224",image_size=32,args={patch_size=4,depth=2,dynamic_img_size=true}}'
    alone = [student, "distill.logit_weight=0", "distill.label_weight=1"]
    own = work(*alone)["distill"]["distill"]
    smaller = work(*alone, "distill.low_resolution={epochs=30,image_size=16}")["distill"]["distill"]
    assert smaller == pytest.approx(own * (1 - 30 / 60 * 0.75)), "as the progress of a training counts it"
    again = work("distill.activation_checkpointing=true", "pretrain.finetune.activation_checkpointing=true")
    assert again["pretrain"]["finetune"] == pytest.approx(plain["pretrain"]["finetune"] * 4 / 3)
    assert again["pretrain"]["mae"] == pytest.approx(plain["pretrain"]["mae"]), "which keeps its activations"
    more = work(f'distill.further_teachers=["{trained_digits.teacher}"]')
    assert min(more["distill"]["distill"], again["distill"]["distill"]) > plain["distill"]["distill"]


def test_an_interrupted_run_names_how_to_go_on(tmp_path, monkeypatch, caplog):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(local_run, "_run_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        local_run.run("digits", ["tracking.enabled=false"], output=str(tmp_path / "a run"), processes=1)
    assert f"give the same command with --output '{tmp_path / 'a run'}'" in caplog.text


def test_an_output_is_one_run_after_moving(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def identity(place):
        return local_run.environment(config.resolve("digits"), local_run.new_directory("digits", str(place)))[
            "TRAINER_RUN_ID"
        ]

    first = identity(tmp_path / "a" / "shelf")
    assert identity(tmp_path / "b" / "shelf") != first
    (tmp_path / "a" / "shelf").rename(tmp_path / "moved")
    assert identity(tmp_path / "moved") == first
    assert identity(tmp_path / "a" / "shelf") != first


def test_simultaneous_runs_have_their_own_directories(tmp_path, monkeypatch):
    class Stopped(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 11, 27, 3, 31, 16, tzinfo=tz)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local_run, "datetime", Stopped)
    made = [local_run.new_directory("recipes/digits.toml", None) for _ in range(3)]
    first = "20261127-033116-digits"
    assert [one.name for one in made] == [first, f"{first}-2", f"{first}-3"]
    assert (local_run.RUNS / local_run.LATEST).resolve() == made[-1].resolve()


@pytest.mark.parametrize("output", ["shelf", "runs/shelf", "elsewhere/shelf"])
def test_latest_is_the_newest_run(tmp_path, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    local_run.new_directory("digits", None)
    newest = local_run.new_directory("digits", output)
    assert (local_run.RUNS / local_run.LATEST).resolve() == newest.resolve() == tmp_path / output


def test_run_goes_on_where_latest_cannot_point_to_it(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    (local_run.RUNS / local_run.LATEST).mkdir(parents=True)
    assert local_run.new_directory("digits", "shelf").is_dir()
    assert "runs/latest does not point to this run (Is a directory); name shelf instead" in caplog.text
    assert [path.name for path in local_run.RUNS.iterdir()] == [local_run.LATEST]


@pytest.mark.parametrize(
    ("gpus", "device", "asked", "expected"),
    [(1, "auto", 0, 1), (8, "cuda", 0, 8), (0, "auto", 0, 2), (8, "cpu", 0, 2), (8, "auto", 3, 3)],
)
def test_one_process_for_each_gpu_and_two_without(monkeypatch, gpus, device, asked, expected):
    class CheckedError(Exception):
        pass

    def checked(*_, processes, **__):
        raise CheckedError(processes)

    monkeypatch.setattr(launch, "gpus", lambda: gpus)
    monkeypatch.setattr(preflight, "checked", checked)
    with pytest.raises(CheckedError, match=f"^{expected}$"):
        local_run.run("digits", [f"run.device={device}"], output=None, processes=asked)


def test_next_run_finds_checkpoints_of_interrupted_one(tmp_path, monkeypatch):
    monkeypatch.delenv("TRAINER_CHECKPOINTS", raising=False)

    def checkpoints(output, *overrides):
        directory = local_run.new_directory("digits", str(tmp_path / output))
        return local_run.environment(config.resolve("digits", overrides), directory).get("TRAINER_CHECKPOINTS")

    monkeypatch.chdir(tmp_path)
    assert checkpoints("one") == checkpoints("another") == str(tmp_path / ".checkpoints")
    assert checkpoints("one", "run.reuse=false") is None
    monkeypatch.setenv("TRAINER_CHECKPOINTS", "s3://bucket/x")
    assert checkpoints("one") is None, "what the environment names stays"


# ---------------------------------------------------------------------------------------------------------------------
# Reuse


USED = ("run.device=cpu", "distill.teacher=recorded")
SETTINGS = config.resolve("digits", USED)


@pytest.fixture
def earlier(tmp_path, monkeypatch):
    """A run with a data set, a teacher, its evidence and recorded outputs, made on a CPU."""
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    directory = tmp_path / "earlier"
    directory.mkdir()
    (directory / local_run.IDENTITY).touch()
    make(directory, "prepare")
    make(directory, "pretrain")
    make(directory, "reinforce")
    return directory


def make(directory, name, settings=SETTINGS, parents=()):
    """What a stage leaves, in small."""
    stage = STAGES[name]
    given = {spec.name: artifacts.manifest(directory / spec.folder, spec.kind).fingerprint for spec in stage.reads}
    for spec in stage.makes.values():
        section = settings.for_stage(name)
        with artifacts.create(
            directory / spec.folder, spec.kind, settings=section, parents={**given, **dict(parents)}
        ) as draft:
            (draft.path / "file").write_text(name)
            draft.device = "cpu" if stage.launched else None
            draft.source_version = local_run.class_tables.source_version(settings.data) if name == "prepare" else None


def later(earlier, *names):
    """A run beside the earlier one that has taken over the results of these stages."""
    directory = earlier.parent / "later"
    directory.mkdir(exist_ok=True)
    for name in names:
        assert reuse(directory, name)
    return directory


def reuse(directory, name, *overrides, device="", place=None):
    settings = config.resolve("digits", [*USED, *overrides])
    return local_run._reuse(STAGES[name], settings, directory, device, place or local_place(1))


def test_results_are_taken_from_other_runs(earlier):
    directory = later(earlier, "prepare", "pretrain", "reinforce")
    make(earlier, "pretrain", config.resolve("digits", [*USED, "pretrain.mae.epochs=1"]))
    (earlier / "dataset" / "file").unlink()
    assert all(reuse(directory, name) for name in ("prepare", "pretrain", "reinforce")), "they are the later run's own"
    assert {path.name for path in directory.iterdir()} == {"dataset", "teacher", "pretrain-evidence", "teacher-outputs"}


def test_results_of_the_last_version_are_kept_in_the_output(earlier, monkeypatch):
    """It recorded the settings under former names."""
    section = SETTINGS.for_stage("distill")
    softened = section.pop("logit")
    was = section | {
        "logit_loss": softened["loss"],
        "temperature": softened["temperature"],
        "standardize_logits": softened["standardize"],
        "dkd_beta": 8.0,
    }
    with monkeypatch.context() as former:
        former.setattr(config.Settings, "for_stage", lambda *_: was)
        make(
            earlier,
            "distill",
            parents=[("recorded", artifacts.manifest(earlier / "teacher-outputs", "teacher_outputs").fingerprint)],
        )
    assert reuse(earlier, "distill")
    assert not reuse(earlier, "distill", "distill.logit.temperature=3")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("reinforce", "reinforce.views=3"),
        ("pretrain", "pretrain.mae.epochs=7"),
        ("prepare", "data.image_size=16"),
        ("pretrain", "run.reuse=false"),
    ],
)
def test_nothing_is_taken_with_other_settings_or_where_reuse_is_off(earlier, name, change):
    names = ["prepare", "pretrain", "reinforce"]
    directory = later(earlier, *names[: names.index(name)])
    assert not reuse(directory, name, change)
    assert not list(directory.glob(".*"))


def test_where_decoded_images_stay_decides_no_result(earlier):
    assert reuse(earlier, "prepare", "data.keep_decoded=/decoded")
    assert reuse(later(earlier), "prepare", "data.keep_decoded=/decoded")


def test_results_of_other_code_are_not_taken(earlier, monkeypatch):
    monkeypatch.setattr(artifacts, "code_version", lambda: "another")
    directory = earlier.parent / "later"
    directory.mkdir()
    assert not reuse(directory, "prepare")
    assert reuse(earlier, "prepare")


def test_nothing_is_taken_from_another_kind_of_device(earlier, monkeypatch, caplog):
    caplog.set_level("INFO")
    directory = later(earlier, "prepare", "pretrain")
    assert not reuse(directory, "reinforce", device="cuda")
    monkeypatch.setattr(devices, "choose_device", lambda: replace(devices.HOST, kind="cuda"))
    assert not reuse(earlier, "reinforce")
    assert caplog.text.count(f"reinforce  is not kept from {earlier}: it was done on cpu") == 2


def test_what_was_measured_on_other_machines_is_measured_again(earlier, monkeypatch, caplog):
    """A forecast for one machine would let a run of eight pass its budget."""
    caplog.set_level("INFO")
    there = Machines(pool="gpu-a10g", price=Price(dollars_an_hour=1.0, date="2026-11", region="r", source="s"))
    with monkeypatch.context() as pod:
        pod.setenv("TRAINER_PLACE", there.model_dump_json(exclude_none=True))
        make(earlier, "tune")
    assert reuse(earlier, "tune", place=there)
    assert not reuse(earlier, "tune", place=there.model_copy(update={"nodes": 8}))
    assert f"tune  is not kept from {earlier}: it was done on gpu-a10g (processes a node: 1)" in caplog.text
    dearer = Price(dollars_an_hour=9.0, date="2026-11", region="r", source="s")
    assert not reuse(earlier, "tune", place=there.model_copy(update={"price": dearer}))
    assert f"tune  is not kept from {earlier}: it was done on gpu-a10g at another price" in caplog.text
    assert not reuse(earlier, "tune")
    assert reuse(earlier, "reinforce", place=there), "a training's result does not depend on it"


def test_damaged_result_is_made_again_with_warning(earlier, caplog):
    (earlier / "teacher" / "file").write_text("weirdos!")  # as long as before
    directory = later(earlier, "prepare")
    assert not reuse(directory, "pretrain")
    assert not reuse(earlier, "pretrain")
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "pretrain  is not kept from" in caplog.text
    assert "file is damaged (checksum)" in caplog.text
    assert not (directory / "teacher").exists()


def test_images_that_changed_are_prepared_again(earlier, tmp_path, monkeypatch):
    monkeypatch.setattr(local_run.class_tables, "source_version", lambda _: "changed")
    assert not reuse(earlier, "prepare")
    monkeypatch.setattr(local_run.class_tables, "source_version", lambda _: "")
    make(earlier, "prepare")
    assert not reuse(earlier, "prepare"), "their version is not known"


def test_latency_and_versions_are_never_those_of_another_run(earlier):
    for spec in [*STAGES["evaluate"].reads, *STAGES["register"].reads]:
        if not (earlier / spec.folder).exists():
            with artifacts.create(earlier / spec.folder, spec.kind, settings={}):
                pass
    directory = earlier.parent / "later"
    for name in ("evaluate", "register"):
        make(earlier, name)
        for spec in STAGES[name].reads:
            if not (directory / spec.folder).exists():
                artifacts.copy(earlier / spec.folder, directory / spec.folder, spec.kind)
        assert not reuse(directory, name)
        assert reuse(earlier, name) == STAGES[name].kept


def test_weights_that_have_changed_where_they_lie_are_taken_again(earlier, tmp_path):
    weights = str(tmp_path / "given")
    settings = config.resolve("digits", [*USED, f"pretrain.weights={weights}"])

    def give(content):
        with artifacts.create(weights, "model", settings={}) as draft:
            (draft.path / "weights").write_text(content)
        return artifacts.manifest(weights, "model").fingerprint

    make(earlier, "pretrain", settings, parents={"weights": give("one")})
    assert reuse(earlier, "pretrain", f"pretrain.weights={weights}")
    give("another")
    assert not reuse(earlier, "pretrain", f"pretrain.weights={weights}")
