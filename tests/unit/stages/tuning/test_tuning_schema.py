"""Candidates, what is refused where a tuning is read, and the table of forecasts on several pools."""

from __future__ import annotations

import pytest

from trainer import cli
from trainer.config import DistillSettings
from trainer.io import artifacts
from trainer.io.costs import Machines, Price
from trainer.io.errors import EXIT_CODE, ArtifactError
from trainer.report.forecast import Measurement, WorkCount, forecast
from trainer.stages.tuning.tuning_schema import FILE, Candidate, Tuning, read_tuning, read_tunings, subject_of


def test_candidate_changes_what_it_is_about_and_nothing_else():
    settings = DistillSettings(epochs=7, logit={"temperature": 3.0})
    candidate = Candidate.of(settings)
    assert candidate.workers == "auto"
    assert candidate.applied(settings) == settings.model_copy(update={"workers": "auto"})
    larger = candidate.model_copy(update={"batch_size": 2048, "accumulation": 2})
    assert larger.applied(settings).logit.temperature == 3.0
    assert larger.held == 1024


def test_wrong_tuning_files(tmp_path, capsys):
    with artifacts.create(tmp_path / "tuning", "tuning", settings={}) as draft:
        (draft.path / FILE).write_text('{"place": "somewhere"}')
    with pytest.raises(ArtifactError, match=r"tuning.json is not one of this version"):
        read_tuning(tmp_path / "tuning")
    # What is no tuning is one message.
    assert cli.main(["forecast", str(tmp_path / "nowhere")]) == EXIT_CODE
    assert "nowhere/tuning; a run has one with tune.enabled=true" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["forecast", "x", "--efficiency", "1.5"])
    assert "must be above 0 and up to 1, got 1.5" in capsys.readouterr().err


def place(pool, nodes, dollars):
    price = Price(dollars_an_hour=dollars, date="2026-11", region="us-east-1", source="list") if dollars else None
    return Machines(pool=pool, nodes=nodes, price=price)


def write_tuning(directory, pool, step_s, *, nodes=1, dollars=None, dataset="d", epochs=100):
    settings = DistillSettings(epochs=epochs).model_dump(mode="json")
    where = place(pool, nodes, dollars)
    measurement = Measurement(
        place=where, settings=settings, batch_size=1024, step_s=step_s,
        steps=60, startup_s=0.0, validation_s=0.0, checkpoint_s=0.0,
    )  # fmt: skip
    work = WorkCount(steps=3600, validations=0, checkpoints=0)
    tuning = Tuning(
        place=where, given=settings, chosen=settings, applied=False, tried=(), untried={}, reasons=(), stopped="",
        search_s=0.0, measurement=measurement, work=work, forecast=forecast(measurement, work), alternatives={},
    )  # fmt: skip
    with artifacts.create(directory, "tuning", settings={}, parents={"dataset": dataset, "teacher": "t"}) as draft:
        (draft.path / FILE).write_text(tuning.model_dump_json())
    return str(directory)


def test_pools_stand_side_by_side_by_their_own_measurements(tmp_path, capsys):
    given = [
        write_tuning(tmp_path / "run" / "tuning", "gpu-a100", 1.0, dollars=21.96),
        write_tuning(tmp_path / "neuron", "neuron-trn1-16", 1.25, dollars=21.5),
        write_tuning(tmp_path / "spot", "gpu-a100-spot", 1.0),
    ]
    assert cli.main(["forecast", str(tmp_path / "run"), *given[1:]]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split() == ["where", "time", "dollars", "measured"]
    assert [row.split()[0] for row in rows] == ["gpu-a100", "neuron-trn1-16", "gpu-a100-spot"]
    assert rows[0].endswith("60 min   $21.96  60 steps of 1 s")
    assert "$26.88" in rows[1]
    assert "$" not in rows[2]


def test_other_numbers_of_nodes_are_measured_or_assumed(tmp_path, capsys):
    one = write_tuning(tmp_path / "one", "gpu", 1.0, dollars=10.0)
    two = write_tuning(tmp_path / "two", "gpu", 0.625, nodes=2, dollars=10.0)
    assert cli.main(["forecast", one, "--nodes", "1", "4", "--efficiency", "0.5"]) == 0
    alone = capsys.readouterr().out
    assert "4 nodes of gpu  60 min" in alone
    assert "  - 4 nodes of gpu: twice as many nodes are assumed to be 1 times as fast; only 1 node measured" in alone
    assert cli.main(["forecast", one, two, "--nodes", "4"]) == 0
    both = capsys.readouterr().out
    assert "4 nodes of gpu  23.4 min" in both
    assert "1.6 times as fast, as measured from 1 to 2 nodes, taken to hold for 4 nodes" in both


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": "other"}, "other: is of another data set; leave it out"),
        ({"dataset": "other", "epochs": 50}, "other: is of another data set and number of epochs; leave it out"),
    ],
)
def test_another_distillation_is_refused(tmp_path, capsys, changes, message):
    first = write_tuning(tmp_path / "first", "gpu", 1.0)
    other = write_tuning(tmp_path / "other", "cpu", 1.0, **changes)
    assert cli.main(["forecast", first, other]) == EXIT_CODE
    assert message in capsys.readouterr().err


def test_a_foreign_tuning_fits_its_distillation(tmp_path):
    place = write_tuning(tmp_path / "elsewhere", "gpu", 1.0)
    settings = DistillSettings().model_dump(mode="json")
    wanted = subject_of({"dataset": "d", "teacher": "t"}, settings)
    assert [one.place.pool for one in read_tunings([place], wanted)] == ["gpu"]
    another = subject_of({"dataset": "d", "teacher": "t2"}, settings)
    with pytest.raises(ArtifactError, match="elsewhere: is of another teacher"):
        read_tunings([place], another)
