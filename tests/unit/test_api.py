"""The public API, by the very lines that the README shows, and what they promise."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainer
from tests.distillations import QUICK, TINY
from trainer import config
from trainer.data.dataset import open_dataset
from trainer.io import artifacts
from trainer.io.errors import ArtifactError, ModelError, OutputError, SettingsError
from trainer.models import networks
from trainer.models.served_student.preprocessing import BadImageError, to_square
from trainer.predict import photo_classifier
from trainer.profiling.compare import read_compared_run
from trainer.profiling.evidence_files import read_evidence

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def square(digits):
    return open_dataset(digits).square


@pytest.fixture
def model_directory(square, tmp_path):
    """Writes a model of the digits that has not learned anything."""

    def write(place, **changed):
        torch.manual_seed(0)
        settings = config.ModelSettings(architecture="vit_tiny_patch16_224", args=TINY)
        model = networks.create(settings, [str(digit) for digit in range(10)])
        nn.init.normal_(model.network.head.weight)  # so that the classes differ
        model.card = replace(model.card, **{"square": square} | changed)
        with artifacts.create(tmp_path / place, "model", settings={}) as draft:
            networks.save(model, draft.path)
        return tmp_path / place

    return write


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "photo.jpg"
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, quality=95)
    return path


@pytest.fixture
def loop():
    """A model, its loader of twelve batches, its loss and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 16), nn.ReLU(), nn.Linear(16, 4))
    data = TensorDataset(torch.randn(96, 3, 8, 8), torch.randint(4, (96,)))
    return {
        "model": model,
        "loader": DataLoader(data, batch_size=8),
        "criterion": F.cross_entropy,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }


def lines_of_the_readme():
    section = (ROOT / "README.md").read_text().partition("\n## From Python\n")[2].partition("\n## ")[0]
    return [line.removeprefix("    ") for line in section.splitlines() if line.startswith("    ")]


def test_the_lines_of_the_readme_run(model_directory, photo, loop, tmp_path, monkeypatch, capsys):
    model_directory("runs/latest/student")
    monkeypatch.chdir(tmp_path)
    lines = lines_of_the_readme()
    assert len(lines) <= 10
    before = [parameter.clone() for parameter in loop["model"].parameters()]
    exec(compile("\n".join(lines), "README.md", "exec"), loop)
    predicted, verdict = capsys.readouterr().out.splitlines()[-2:]
    assert sorted(json.loads(predicted.replace("'", '"'))) == [str(digit) for digit in range(10)]
    assert loop["recording"].verdict == verdict != ""
    assert open_dataset(tmp_path / "prepared").classes == tuple("0123456789")
    assert verdict.removesuffix(".") in (tmp_path / "profile" / "report" / "report.html").read_text()
    assert not any(map(torch.equal, before, loop["model"].parameters()))


def test_package_names():
    heavy = "{'torch', 'timm', 'pandas', 'mlflow'}"
    code = f"import sys, trainer; trainer.load_model, trainer.run_stage; sys.exit(bool({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0
    code = "import sys, trainer; sys.exit(bool([name for name in sys.modules if name.startswith('trainer.')]))"
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0
    # The package has its names.
    assert {"load_model", "record", "run_stage"} <= {*trainer.__all__} <= {*dir(trainer)}
    assert trainer.load_model is photo_classifier.load_model
    with pytest.raises(AttributeError, match="module 'trainer' has no attribute 'train'"):
        trainer.train  # noqa: B018


# ---------------------------------------------------------------------------------------------------------------------
# Models


def test_a_photo_gets_the_answer_of_the_model(model_directory, photo, square):
    place = model_directory("model")
    predicted = trainer.load_model(place).predict(str(photo))
    with Image.open(photo) as opened:
        stored = np.asarray(to_square(opened.convert("RGB"), square))
    with torch.inference_mode():
        expected = networks.load(place)(torch.from_numpy(stored.copy()).permute(2, 0, 1)[None]).softmax(1)[0]
    assert list(predicted.values()) == pytest.approx(sorted(expected.tolist(), reverse=True), abs=1e-6)
    assert [int(label) for label in predicted] == expected.argsort(descending=True).tolist()


def test_a_photo_may_be_given_in_several_ways(model_directory, photo):
    model = trainer.load_model(str(model_directory("model")))
    with Image.open(photo) as opened:
        array = np.asarray(opened)
    table = model.probabilities([str(photo), photo, photo.read_bytes(), array])
    assert table.shape == (4, 10)
    assert tuple(table.columns) == tuple(model.labels)
    assert table.drop_duplicates().shape == (1, 10)
    with pytest.raises(BadImageError, match=r"image 1 \(no-such\.jpg\): No such file"):
        model.probabilities([photo, "no-such.jpg"])


def test_student_of_a_run(model_directory, tmp_path, digits):
    model_directory("run/student")
    assert trainer.load_model(tmp_path / "run").labels == tuple("0123456789")

    with pytest.raises(ArtifactError, match=r"no-run: no student at .*no-run/student"):
        trainer.load_model(tmp_path / "no-run")
    # What is no run and no model is refused.
    with pytest.raises(ArtifactError, match="is a dataset, but a model is needed here"):
        trainer.load_model(digits)
    with pytest.raises(ModelError, match=r"model .*older: config\.json does not say how a photo becomes its input"):
        trainer.load_model(model_directory("older", square=None))


# ---------------------------------------------------------------------------------------------------------------------
# Stages


@pytest.mark.parametrize(
    ("name", "directories", "message"),
    [
        ("destill", {}, r"stage 'destill': there is none of this name; choose from prepare, .*distill"),
        ("evaluate", {"dataset": "d"}, r"stage evaluate: needs the directory teacher"),
        ("prepare", {"dataset": "d", "teacher": "t"}, r"stage prepare: has no directory teacher; it takes dataset$"),
        ("prepare", {"dataset": "d", "overrides": "data.image_size=-1"}, r"data\.image_size"),
        ("prepare", {"dataset": "d", "recipe": "digit"}, r"unknown recipe 'digit'"),
    ],
)
def test_what_does_not_fit_a_stage_is_named(name, directories, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=message):
        trainer.run_stage(name, **directories)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_stage_that_trains_is_launched(digits, teacher, tmp_path, monkeypatch):
    monkeypatch.delenv("TRAINER_DEVICE", raising=False)
    (tmp_path / "quick.toml").write_text(
        "[distill]\nepochs = 1\nbatch_size = 512\nwarmup_epochs = 0\nworkers = 0\nstudent.args = "
        + str(TINY).replace("'", "").replace(": ", " = ")
    )
    made = trainer.run_stage(
        "distill",
        recipe=str(tmp_path / "quick.toml"),
        overrides="run.device=cpu distill.evidence.operators_steps=0",
        processes=1,
        dataset=digits,
        teacher=teacher,
        student=tmp_path / "student",
        evidence=tmp_path / "evidence",
    )
    assert made.keys() == {"student", "evidence"}
    assert made["student"].settings["batch_size"] == 512 != QUICK["batch_size"]
    assert made["student"].device == "cpu"
    assert trainer.load_model(tmp_path / "student").labels == tuple("0123456789")


# ---------------------------------------------------------------------------------------------------------------------
# Recording


def train(recording, loop, *, batches=None):
    for images, labels in recording.steps(loop["loader"] if batches is None else batches):
        with recording.span("forward"):
            loss = loop["criterion"](loop["model"](images), labels)
        with recording.span("backward"):
            loss.backward()
        with recording.span("optimizer"):
            loop["optimizer"].step()
            loop["optimizer"].zero_grad()
        recording.log(loss=loss.item())


def test_a_loop_is_recorded(loop, tmp_path):
    with trainer.record("mine", tmp_path / "profile", model=loop["model"]) as recording:
        for epoch in range(2):
            train(recording, loop)
            with recording.span("evaluate"):
                recording.log(top1=epoch)
    [training] = read_evidence(tmp_path / "profile" / "evidence").trainings
    [rank] = training.ranks
    assert rank.steps["step"].tolist() == list(range(24))
    assert rank.record.steps.images == 2 * 96
    assert rank.record.outside["evaluate"].count == 2
    assert "interrupted" not in rank.record.outside
    for name in ("data", "forward", "backward", "optimizer"):
        assert (rank.steps[name] > 0).all()
    assert training.metrics["loss"].steps.tolist() == list(range(24))
    assert training.metrics["top1"].steps.tolist() == [11, 23]
    assert set(rank.tensors.tensors) == {name for name, _ in loop["model"].named_parameters()}
    assert (rank.tensors.values["gradient_norm"] > 0).all()
    side = read_compared_run(str(tmp_path / "profile" / "report"))  # so two of them can be compared
    assert side.trainings["mine"].steps == 24
    assert recording.report == tmp_path / "profile" / "report" / "report.html"
    assert "mine" in recording.report.read_text()


def test_the_loader_processes_of_a_loop_are_watched(loop, tmp_path):
    loader = DataLoader(loop["loader"].dataset, batch_size=8, num_workers=1, prefetch_factor=3)
    with trainer.record("mine", tmp_path) as recording:
        train(recording, loop, batches=loader)
    [training] = read_evidence(tmp_path / "evidence").trainings
    assert training.ranks[0].record.workers == 1
    assert np.isfinite(training.ranks[0].steps["queued"]).all()


def test_a_model_without_weights_is_recorded_too(loop, tmp_path):
    with trainer.record("mine", tmp_path, model=nn.ReLU()) as recording:
        train(recording, loop)
    [training] = read_evidence(tmp_path / "evidence").trainings
    assert training.ranks[0].record.missing["tensors"] == "the model has no weights to look at"


def test_what_spoils_a_loop_is_found(loop, tmp_path):
    for parameter in loop["model"].parameters():
        parameter.data.mul_(1e3)
    with trainer.record("mine", tmp_path, model=loop["model"]) as recording:
        for _ in range(20):
            train(recording, loop)
    assert "mine: “Poor initialization”" in recording.verdict


def test_losses_that_are_no_numbers_make_report_that_says_so(loop, tmp_path):
    with trainer.record("mine", tmp_path, model=loop["model"]) as recording:
        for step, images in enumerate(recording.steps([torch.ones(2, 3)] * 40)):
            with recording.span("optimizer"):
                loop["optimizer"].step()
            lost = float("inf") if step >= 30 else float("nan") if step == 3 else 3.0 - step / 20
            recording.log(loss=lost * float(images.mean()), top1=lost, val_loss=None if step % 2 else float("nan"))
            if step == 19:
                with recording.span("checkpoint"):
                    pass
    assert recording.verdict.startswith("mine: “Loss not finite”, so continuing it is of no use")
    report = recording.report.parent
    [told] = [one for one in _json(report / "findings.json") if one["rule"] == "loss_not_finite"]
    assert told["told"]["text"] == "The loss is not finite from step 31 on; the last finite one was 1.55 at step 30."
    assert "continue from the checkpoint written after step 20" in told["told"]["advice"]
    last = _json(report / "summary.json")["mine"]["last"]
    assert (last["loss"], "val_loss" in last) == (1.55, False)
    read_compared_run(str(report))


def _json(file):
    return json.loads(file.read_text(), parse_constant=pytest.fail)  # which is called for NaN and Infinity


def test_loop_without_length_ends_with_its_last_batch(loop, tmp_path):
    batches = list(loop["loader"])
    with trainer.record("mine", tmp_path) as recording:
        train(recording, loop, batches=iter(batches))
        train(recording, loop, batches=iter(batches[:2]))
    [training] = read_evidence(tmp_path / "evidence").trainings
    assert training.ranks[0].steps["step"].tolist() == list(range(14))
    assert training.ranks[0].record.steps.images == 0  # the loop did not say how many a batch has


def test_steps_of_ones_own_have_their_images(loop, tmp_path):
    with trainer.record("mine", tmp_path) as recording:
        for _ in range(3):
            with recording.step(images=5), recording.span("tokenize"):
                pass
        train(recording, loop, batches=[next(iter(loop["loader"]))])
        for _ in recording.steps([1, 2], images=7):
            pass
    [training] = read_evidence(tmp_path / "evidence").trainings
    assert training.ranks[0].steps["images"].tolist() == [5, 5, 5, 0, 7, 7]
    assert "tokenize" in training.ranks[0].ranges


def test_loop_that_is_left_early_goes_on_with_next(loop, tmp_path):
    with trainer.record("mine", tmp_path) as recording:
        for index, _ in enumerate(recording.steps(loop["loader"])):
            if index == 2:
                break
        train(recording, loop)
    [training] = read_evidence(tmp_path / "evidence").trainings
    assert training.ranks[0].record.outside["interrupted"].count == 1
    assert training.ranks[0].steps["step"].tolist() == list(range(14))


def fail(recording, loop):
    for index, _ in enumerate(recording.steps(loop["loader"])):
        if index == 3:
            raise ZeroDivisionError("the fourth batch")


def test_loops_that_fail(loop, tmp_path, caplog):
    with pytest.raises(ZeroDivisionError, match="fourth batch"), trainer.record("mine", tmp_path) as recording:
        fail(recording, loop)
    [training] = read_evidence(tmp_path / "evidence").trainings
    assert training.ranks[0].record.failed == "the fourth batch"
    assert training.ranks[0].record.steps.count == 3
    assert "the fourth batch" in recording.report.read_text()
    # A report that cannot be written hides no failure of the loop.
    (tmp_path / "file").touch()
    with pytest.raises(OutputError), trainer.record("mine", tmp_path / "file" / "profile") as recording:
        train(recording, loop)
    with pytest.raises(ZeroDivisionError), trainer.record("mine", tmp_path / "file" / "profile") as recording:
        fail(recording, loop)
    assert "mine  the recording could not be written: " in caplog.text


@pytest.mark.parametrize("name", ["", "a/b", "..", "x" * 65])
def test_a_name_that_is_no_files_is_refused(name, tmp_path):
    with pytest.raises(SettingsError, match=f"record: the name {name!r} must be of letters, digits, dots and dashes"):
        trainer.record(name, tmp_path)
