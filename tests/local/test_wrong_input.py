"""Every wrong input ends in one message that names the thing and the next move, without a traceback."""

import json
import re
import shutil
import sys

import pytest
import torch
from PIL import Image

from tests import groups
from trainer import cli, config, stages
from trainer.io import artifacts, storage
from trainer.io.errors import CRASH_EXIT_CODE, EXIT_CODE, TrainerError
from trainer.models import networks


def say(capsys, *arguments):
    """Exit code and what a command says."""
    code = cli.main([str(argument) for argument in arguments])
    return code, capsys.readouterr().err


def stage(name, places):
    """A stage's command on directories that are not there."""
    return ["stage", name, *(f"--{place}=nowhere" for place in places.split())]


def assert_message(capsys, pattern, *arguments, code=EXIT_CODE):
    ended, said = say(capsys, *arguments)
    assert ended == code
    assert "Traceback" not in said
    assert re.search(rf"^error: (.*: )?{pattern}", said, flags=re.MULTILINE), said


def write_photos(folder, classes, count=4):
    generator = torch.Generator().manual_seed(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = torch.randint(0, 256, (20, 20, 3), dtype=torch.uint8, generator=generator)
            Image.fromarray(pixels.numpy()).save(folder / name / f"{number}.png")
    return folder


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (
            ["run", "digit"],
            r"unknown recipe 'digit'; did you mean digits\?; known: digits, few-labels, food101, from-scratch",
        ),
        (["run", "digits", "--set", "distill.temprature=2"], r"unknown setting distill.temprature.*distill.logit.temp"),
        (["run", "digits", "--set", "distill.logit.temperature=0"], r"distill.logit.temperature must be > 0\.0, got 0"),
        (["run", "digits", "--set", "distill"], r"override 'distill': is not key=value"),
        (
            ["run", "digits", "--set", "pretrain.finetune.epochs=0"],
            r"finetune\.epochs is 0 and weights is empty, so the teacher would never see a label",
        ),
        (["config", "nothing"], r"unknown recipe 'nothing'"),
        (["run", "photos"], r"data\.source is empty: .*photos of your own.*data\.source=imagefolder"),
        ([*stage("evaluate", "dataset teacher student evaluation"), "--settings", "{"], r"--settings '\{' is not JSON"),
        (
            [*stage("profile", "pretrain-evidence distill-evidence report"), "--settings", "[]"],
            r"--settings '\[\]' is not a",
        ),
        (
            [*stage("distill", "dataset teacher student evidence"), "--settings", '{"logit": {"temperature": -1}}'],
            r"distill.logit.temperature must be > 0",
        ),
    ],
)
def test_settings(capsys, arguments, pattern):
    assert_message(capsys, pattern, *arguments)


@pytest.mark.parametrize(
    ("classes", "source", "pattern"),
    [
        ((), "imagefolder:{}/nowhere", r".*nowhere.*"),
        ((), "imagefolder:{}", r".*no images.*"),
        (("apple",), "imagefolder:{}", r".*(one|only|single).*class.*"),
        ((), "folder:{}", r".*folder.*"),
        ((), "manifest:{}/list.csv", r".*list.csv.*"),
    ],
)
def test_images(capsys, tmp_path, classes, source, pattern):
    folder = tmp_path / "photos"
    folder.mkdir()
    write_photos(folder, classes)
    assert_message(
        capsys,
        pattern,
        "stage",
        "prepare",
        "--set",
        f"data.source={source.format(folder)}",
        "--dataset",
        tmp_path / "data",
    )
    assert not artifacts.exists(tmp_path / "data")


def evaluate(dataset, teacher, student, output):
    return [
        "stage",
        "evaluate",
        "--dataset",
        dataset,
        "--teacher",
        teacher,
        "--student",
        student,
        "--evaluation",
        output,
    ]


def test_a_corrupt_model_directory(capsys, digits, teacher, tmp_path):
    corrupt = shutil.copytree(teacher, tmp_path / "corrupt")
    weights = corrupt / networks.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    pattern = rf"model {corrupt}: the file model.safetensors is damaged \(checksum\)"
    assert_message(capsys, pattern, *evaluate(digits, corrupt, teacher, tmp_path / "out"))


def test_a_data_set_of_another_schema(capsys, digits, teacher, tmp_path):
    other = shutil.copytree(digits, tmp_path / "other")
    manifest = json.loads((other / artifacts.MANIFEST).read_text()) | {"schema_version": 0}
    (other / artifacts.MANIFEST).write_text(json.dumps(manifest))
    pattern = rf"dataset {other}: schema version 0, but this version of the project reads 1"
    assert_message(capsys, pattern, *evaluate(other, teacher, teacher, tmp_path / "out"))


def test_a_directory_of_another_kind(capsys, digits, teacher, tmp_path):
    assert_message(
        capsys, "is a model, but a dataset is needed", *evaluate(teacher, teacher, teacher, tmp_path / "out")
    )


@pytest.mark.slow
def test_labels_of_teacher_and_data_set_that_do_not_match(capsys, teacher, tmp_path):
    photos = write_photos(tmp_path / "photos", ["apple", "pear"], count=9)
    settings = [f"data.source=imagefolder:{photos}", "data.image_size=16"]
    assert say(capsys, "stage", "prepare", "--set", *settings, "--dataset", tmp_path / "data")[0] == 0
    places = [
        "--dataset",
        tmp_path / "data",
        "--teacher",
        teacher,
        "--student",
        tmp_path / "s",
        "--evidence",
        tmp_path / "e",
    ]
    with groups.forking():
        assert_message(
            capsys, rf"teacher {teacher}: has 10 classes, but the data set has 2", "stage", "distill", *places
        )


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        (
            ["distill.student.architecture=vit_tinyy"],
            r"distill\.student: architecture 'vit_tinyy': timm has no such model",
        ),
        (
            ["distill.student.args.heads=3"],
            r"distill\.student: architecture .* with the arguments .* cannot be built: .*heads",
        ),
        (
            ["distill.student.architecture=vgg11", "distill.student.args={}", "distill.drop_path=0.1"],
            r"distill\.student: .*drop_path_rate",
        ),
        (
            ["distill.student.args.img_size=48"],
            r"distill\.student asks for views of 48 pixels, .* stores images of 32.*data\.im",
        ),
        (
            ["data.image_size=16"],
            r"pretrain\.teacher asks for views of 32 pixels, but data\.image_size stores images of 16",
        ),
        (["pretrain.teacher.architecture=resnet18", "pretrain.teacher.args={}"], r"pretrain\.mae needs a timm Vi"),
        (
            ["pretrain.mae.decoder_heads=5"],
            r"pretrain\.mae: a step cannot be computed with these settings \(.*num_heads",
        ),
        (["pretrain.weights=/nowhere"], r"pretrain\.teacher: .*/nowhere"),
        (
            [
                "distill.student.architecture=volo_d1_224",
                "distill.student.args={}",
                "distill.feature_weight=1",
                "data.image_size=224",
            ],
            r"distill\.student: architecture 'volo_d1_224' cannot be compared by its features",
        ),
        (
            ["distill.teacher=recorded", "reinforce.view_size=16"],
            r"distill\.student takes images of 32 pixels, but the views of reinforce have 16.*reinforce\.view_size=32",
        ),
        (["run.device=xla"], r"run\.device is xla, but torch_xla cannot be loaded here"),
        (["run.device=cuda"], r"run\.device is cuda, but torch finds no GPU on this machine"),
        (
            ["pretrain.weights=timm:vit_tiny_patch16_224@main", "pretrain.finetune.epochs=0"],
            r"pretrain\.weights timm:vit_tiny_patch16_224@main: of the data set's 10 classes 10 are not among",
        ),
    ],
)
def test_what_a_late_stage_would_find(capsys, tmp_path, monkeypatch, settings, pattern):
    """Said before the first stage, and before anything is written."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_message(capsys, pattern, "run", "digits", "--set", *settings, "--output", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("place", ["/proc/nothing/out", "{}/file/out"])
def test_an_output_that_cannot_be_written(capsys, tmp_path, place):
    (tmp_path / "file").write_text("")
    output = place.format(tmp_path)
    assert_message(capsys, "cannot write to", "run", "digits", "--output", output)
    assert_message(capsys, "cannot write to", "stage", "prepare", "--recipe", "digits", "--dataset", output)


def test_a_full_disk(capsys, digits, teacher, tmp_path):
    """The device file /dev/full refuses every write as a full disk does."""
    output = tmp_path / "evaluation"
    output.mkdir()
    (output / artifacts.DRAFT).touch()
    (output / "metrics.json").symlink_to("/dev/full")
    assert_message(capsys, "cannot write to .*: the disk is full", *evaluate(digits, teacher, teacher, output))
    assert not artifacts.exists(output)


@pytest.mark.slow
def test_a_full_disk_in_training(distillation):
    training = distillation("full")
    folder = storage.local_path(training.outputs["student"])
    folder.mkdir(parents=True)
    (folder / artifacts.DRAFT).touch()
    (folder / networks.WEIGHTS).symlink_to("/dev/full")
    with pytest.raises(TrainerError, match=r"process 0 of 2: cannot write to .*: the disk is full"):
        training.run(processes=2)


def test_a_tracking_server_that_is_down(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)  # `runs/latest` is there
    output = tmp_path / "run"
    assert_message(capsys, ".*http://127.0.0.1:9", "run", "digits", "--output", output, code=CRASH_EXIT_CODE)
    assert not (tmp_path / "run" / "dataset").exists()


def test_debug_adds_the_traceback(capsys):
    code, said = say(capsys, "--debug", "run", "digit")
    assert code == EXIT_CODE
    assert "Traceback" in said


@pytest.mark.parametrize(
    "command", [[], ["run"], ["stage"], *(["stage", name] for name in stages.STAGES), ["config"], ["recipes"]]
)
def test_every_command_explains_itself(capsys, command):
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert "usage: python -m trainer" in said
    assert "==SUPPRESS==" not in said


def test_the_resolved_settings_are_shown_with_their_meaning(capsys):
    assert cli.main(["config", "digits", "--set", "distill.logit.temperature=7"]) == 0
    shown = capsys.readouterr().out
    assert "distill.logit.temperature = 7.0\n    Temperature T that softens" in shown
    for name, *_ in config.walk(config.resolve("digits")):
        assert (f"\n{name} = " in f"\n{shown}") is not bool(config.copied_from(name)), name
    assert cli.main(["config", "digits", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == config.resolve("digits").model_dump(mode="json")


def test_the_recipes_are_listed(capsys):
    assert cli.main(["recipes"]) == 0
    assert re.match(r"digits +Handwritten digits", capsys.readouterr().out)


def test_a_reader_that_leaves_early_is_no_error(monkeypatch):
    class Gone:
        def write(self, _text):
            raise BrokenPipeError

        def flush(self):
            raise BrokenPipeError

        def fileno(self):
            return spare.fileno()

    with open("/dev/null", "w", encoding="utf-8") as spare:  # noqa: PTH123  # a file to close in the place of the terminal
        monkeypatch.setattr(sys, "stdout", Gone())
        assert cli.main(["recipes"]) == 0
