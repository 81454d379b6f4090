"""Inputs of a stage that do not belong together are refused before the stage begins."""

import json

import pytest

from trainer import config, stages
from trainer.io import artifacts
from trainer.io.errors import ArtifactError


@pytest.fixture
def made(tmp_path):
    """A run's artifacts without content, and another one of each kind: name -> its directory; gives that of any name."""

    def make(name, kind, *parents, folder=""):
        place = tmp_path / (folder or name)
        known = {
            parent: artifacts.manifest(tmp_path / parent, stages.STAGES["register"].all_inputs[parent]).fingerprint
            for parent in parents
        }
        with artifacts.create(place, kind, settings={"of": folder}, parents=known):
            pass

    for folder in ("", "other-"):
        make("dataset", "dataset", folder=f"{folder}dataset")
        make("teacher", "model", "dataset", folder=f"{folder}teacher")
        make("student", "model", "dataset", "teacher", folder=f"{folder}student")
        make("evaluation", "evaluation", "dataset", "teacher", "student", folder=f"{folder}evaluation")
    for name in ("pretrain_evidence", "distill_evidence"):
        make(name, "evidence", "dataset")
    make("report", "report", "pretrain_evidence", "distill_evidence")
    make("exported", "export", "dataset", "student", "evaluation")
    return tmp_path


@pytest.mark.parametrize(
    ("stage", "other", "message"),
    [
        ("evaluate", "teacher", "student {}/student: was made from another teacher"),
        ("evaluate", "dataset", "student {}/student: was made from another dataset"),
        ("export", "student", "evaluation {}/evaluation: was made from another student"),
        ("export", "dataset", "student {}/student: was made from another dataset"),
        ("register", "evaluation", "exported {}/exported: was made from another evaluation"),
        ("register", "student", "evaluation {}/evaluation: was made from another student"),
    ],
)
def test_input_that_was_made_from_another_one_is_named(made, stage, other, message):
    declared = stages.STAGES[stage]
    places = {name: str(made / name) for name in (*declared.all_inputs, *declared.outputs) if (made / name).exists()}
    places |= {other: str(made / f"other-{other}")}
    with pytest.raises(ArtifactError) as refused:
        stages.call(stage, json.dumps(config.resolve().for_stage(stage)), places)
    assert str(refused.value).startswith(message.format(made))
    assert f") than {made}/other-{other} (" in str(refused.value)


def test_a_teacher_may_have_learned_from_other_images(made):
    places = {"dataset": made / "other-dataset", "teacher": made / "teacher"}
    artifacts.check_related(places, stages.STAGES["distill"].all_inputs)
