"""`vit-distill drift`: what counts as drift and what does not, on predictions of a trained student, and what is refused."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from scipy import stats

from tests.trained_digits import IMAGES, pixels, png
from trainer import cli, load_model
from trainer.io import artifacts
from trainer.io.errors import EXIT_CODE
from trainer.predict import batch_prediction, drift


def predicted(judged_run, folder: Path, images) -> str:
    """Predict images as `predict --output` does; returns where the predictions are."""
    photos, output = folder / "photos", folder / "predictions"
    photos.mkdir(parents=True)
    for index, image in enumerate(images):
        (photos / f"{index:04}.png").write_bytes(image)
    batch_prediction.predict_folder(load_model(judged_run), str(photos), str(output))
    return str(output)


@pytest.fixture(scope="module")
def like(judged_run, tmp_path_factory):
    """Predictions of 240 other digits, and of a file that is no photo."""
    images = [png(image) for image in pixels(range(1500, 1740))]
    return predicted(judged_run, tmp_path_factory.mktemp("like"), [*images, b"no image"])


def test_drift(judged_run, like, capsys, trained_digits, tmp_path):
    assert cli.main(["drift", str(judged_run), like]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "240 photos against 300 test photos"
    assert printed[-1] == "no drift"
    assert drift.compare(str(judged_run), like, limit=0.1).unreadable == 1
    # Other classes and other pictures have drifted.
    test = IMAGES["test"]
    few = [png(image) for image, label in zip(pixels(test), trained_digits.labels, strict=True) if label < 3]
    page = tmp_path / "page.html"
    assert (
        cli.main(["drift", str(judged_run), predicted(judged_run, tmp_path / "few", few), "--output", str(page)]) == 0
    )
    printed = capsys.readouterr().out
    assert "drifted: predicted classes differ by " in printed
    assert "which chance gives less than once in 10,000" in printed
    assert "Drifted: predicted classes differ by" in page.read_text()
    noise = np.random.default_rng(0).integers(0, 256, (200, 16, 16), dtype=np.uint8)
    found = drift.compare(str(judged_run), predicted(judged_run, tmp_path / "noise", map(gray, noise)), limit=0.1)
    assert any(reason.startswith("confidences differ by") for reason in found.reasons)
    allowed = drift.compare(str(judged_run), str(tmp_path / "noise" / "predictions"), limit=1.0)
    assert not allowed.reasons, "a distance below the limit is none"


def gray(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def test_chance_is_that_of_an_exact_test():
    # Of two classes the distance orders the tables as Fisher's exact test with fixed margins nearly does.
    before, now = np.array([60, 40]), np.array([45, 55])
    found = drift.shift("ab", before, now)
    assert found.distance == pytest.approx(0.15)
    assert found.chance == pytest.approx(stats.barnard_exact([before, now]).pvalue, abs=0.01)
    generator = np.random.default_rng(1)
    shares = generator.dirichlet(np.ones(30))
    chances = [drift.shift(range(30), *generator.multinomial(200, shares, size=2)).chance for _ in range(40)]
    assert stats.kstest(chances, "uniform").pvalue > 0.01, "without a difference every p-value is as likely"


def test_log_of_predictions_is_read_like_files(judged_run, like, tmp_path):
    (file,) = Path(like).glob("*.parquet")
    rows = pq.read_table(file, columns=["label", "probability"]).to_pylist()
    log = tmp_path / "predictions.log"
    written = "".join(f"{json.dumps(row | {'time': 'now'})}\n" for row in rows)
    # As `kubectl logs` has it, and a server that was killed in the midst of a line.
    log.write_text(f'12:00:00  POST /predict 200  3 ms\n7\n{{"level": "info"}}\n{written}{{"label": "1", "proba')
    of_log, of_files = (drift.compare(str(judged_run), place, limit=0.1) for place in (str(log), like))
    assert (of_log.labels.now == of_files.labels.now).all()
    assert (of_log.confidence.now == of_files.confidence.now).all()
    assert of_log.labels.chance == of_files.labels.chance


def test_predictions_of_another_student_are_left_out_and_counted(judged_run, like, tmp_path, capsys):
    own = load_model(judged_run).student
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (file,) = Path(like).glob("*.parquet")
    table = pq.read_table(file)
    assert table.schema.metadata[b"student"].decode() == own
    assert json.loads((Path(like) / batch_prediction.SUMMARY).read_text())["student"] == own
    pq.write_table(table, mixed / "own.parquet")
    pq.write_table(table.replace_schema_metadata({"student": "b" * 64}), mixed / "other.parquet")
    row = {"label": "no class of this student", "probability": 0.5}
    (mixed / "served.jsonl").write_text(f"{json.dumps(row | {'student': 'c' * 64})}\n" * 7)
    assert cli.main(["drift", str(judged_run), str(mixed), "--output", str(tmp_path / "page.html")]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == [
        "240 photos against 300 test photos",
        f"left out, because they are of another student: 241 of {'b' * 12}, 7 of {'c' * 12}",
    ]
    assert "of another student: 241 of bbbbbbbbbbbb, 7 of cccccccccccc" in (tmp_path / "page.html").read_text()

    older = tmp_path / "older"
    older.mkdir()
    pq.write_table(table.replace_schema_metadata(), older / "part.parquet")
    assert cli.main(["drift", str(judged_run), str(older)]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "241 do not say of which student they are"
    (older / batch_prediction.SUMMARY).write_text(json.dumps({"model": own}))
    assert cli.main(["drift", str(judged_run), str(older)]) == 0
    assert "which student" not in capsys.readouterr().out
    (older / batch_prediction.SUMMARY).write_text(json.dumps({"model": "d" * 64}))
    assert cli.main(["drift", str(judged_run), str(older)]) == EXIT_CODE
    left = f"left out, because they are of another student: 241 of {'d' * 12}"
    message = (
        f"{older}: holds 0 predictions of the student of {judged_run} ({left}), too few to compare; give at least 50"
    )
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("metrics.json", lambda content: {"teacher": {}}, "it has no 'student'"),
        ("metrics.json", lambda content: {"student": {}}, "it has no 'calibration'"),
        ("metrics.json", lambda content: [], "list indices must be integers or slices, not str"),
        (
            "metrics.json",
            lambda content: {"student": {"calibration": {"counts": [[1]]}}},
            "its counts are not one for each bin",
        ),
        (
            "confusion.json",
            lambda content: content | {"labels": ["1"]},
            "a pair has a class that is not among its labels",
        ),
        ("confusion.json", lambda content: content | {"pairs": [[0, -1, 1]]}, "a pair has a class that is not among"),
        ("confusion.json", lambda content: content | {"labels": list(range(10))}, "a label is no text"),
        ("confusion.json", lambda content: {}, "it has no 'labels'"),
    ],
)
def test_an_evaluation_that_is_none_is_one_message(judged_run, like, tmp_path, capsys, name, change, message):
    def changed(folder):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(change(content)))

    run = with_evaluation(judged_run, tmp_path / "run", changed)
    assert cli.main(["drift", run, like]) == EXIT_CODE
    said = capsys.readouterr().err
    assert said.startswith(f"error: {run}/evaluation/{name}: is not what evaluate writes ({message}")
    assert said.endswith("); evaluate the student again\n")


def with_evaluation(judged_run, run: Path, change) -> str:
    """Copy a run and change the files of its evaluation; returns where the copy is."""
    run.mkdir()
    (run / "student").symlink_to(judged_run / "student")
    before = artifacts.read(judged_run / "evaluation", "evaluation")
    with artifacts.create(run / "evaluation", "evaluation", settings={}, parents=before.parents) as draft:
        for name in before.files:
            shutil.copyfile(before.path / name, draft.path / name)
        change(draft.path)
    return str(run)


def test_what_cannot_be_compared_is_one_message(judged_run, like, tmp_path, capsys):
    def table(name, **columns):
        pq.write_table(pa.table(columns), tmp_path / name)
        return str(tmp_path / name)

    (tmp_path / "few.jsonl").write_text('{"label": "1", "probability": 0.5}\n')
    (tmp_path / "broken.jsonl").write_text("{")
    (tmp_path / "nested.jsonl").write_text('{"label": ["1"], "probability": 0.5}\n')
    (tmp_path / "empty").mkdir()
    unjudged = tmp_path / "unjudged"
    shutil.copytree(judged_run / "student", unjudged / "student")
    for arguments, message in (
        ([judged_run, tmp_path / "few.jsonl"], "holds 1 predictions, too few to compare; give at least 50"),
        ([judged_run, tmp_path / "empty"], "holds 0 predictions"),
        ([judged_run, tmp_path / "nowhere"], "nowhere: no such file or folder; give what `predict --output`"),
        ([judged_run, tmp_path / "broken.jsonl"], "broken.jsonl: holds no predictions ("),
        ([judged_run, tmp_path / "none.parquet"], "none.parquet"),
        (
            [judged_run, table("cats.parquet", label=["cat"], probability=[0.5])],
            "predicts 'cat', which is no class of ",
        ),
        (
            [judged_run, table("two.parquet", label=["1"], probability=[2.0])],
            "has the probability 2.0, which is not from 0 to 1",
        ),
        ([judged_run, tmp_path / "nested.jsonl"], "nested.jsonl: predicts ['1'], which is no class of "),
        ([judged_run, table("other.parquet", labels=["1"])], "other.parquet: holds no predictions ("),
        ([unjudged, like], "its student was not judged"),
        ([tmp_path / "nothing", like], "no student at "),
        ([judged_run, like, "--output", tmp_path], "is a directory; give the name of a file"),
    ):
        assert cli.main(["drift", *map(str, arguments)]) == EXIT_CODE
        printed = capsys.readouterr().err
        assert message in printed
        assert printed.count("\n") == 1
    for limit in ("0", "1.5", "much"):
        with pytest.raises(SystemExit):
            cli.main(["drift", str(judged_run), like, "--limit", limit])
        assert "--limit" in capsys.readouterr().err
