"""The teacher's part of a step; evidence is synthetic."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.profiling.rules.synthetic import STEPS, case_of, rank_of, steps_of
from trainer import config
from trainer.profiling.evidence_schema import ContextRecord
from trainer.profiling.rules.gpu import teacher_share
from trainer.profiling.rules.outcomes import Finding, Healthy, NotJudged
from trainer.profiling.training_summary import summarize
from trainer.thresholds import RuleSettings, TeacherShare


def judged(teacher_ms: float, *, epochs: int = 60, live: bool = False, **given: Any) -> Any:
    """Of a step that takes ten milliseconds with the teacher's."""
    settings = {"teacher": given.pop("teacher", "online"), "epochs": epochs}
    context = ContextRecord(settings=settings | given.pop("settings", {}), total_steps=given.pop("total_steps", None))
    rules = given.pop("rules", RuleSettings())
    table = steps_of(given.pop("steps", STEPS), teacher_forward=teacher_ms, forward=6 - teacher_ms)
    return teacher_share.judge(case_of(rank_of(table, context=context, **given), live=live, rules=rules))


@pytest.mark.parametrize(("teacher_ms", "kind"), [(2.4, Healthy), (2.6, Finding), (4.2, Finding)])
def test_a_teacher_that_takes_more_than_a_quarter_of_a_step_is_noted(teacher_ms: float, kind: type) -> None:
    assert isinstance(judged(teacher_ms), kind)


def test_the_note_says_what_recorded_outputs_would_bring() -> None:
    note = judged(4.2)
    assert note.severity == "note"
    assert note.text.startswith(
        "The teacher's forward pass takes 42 % of a step: from recorded outputs a step would be up to 1.7 times"
    )
    assert "it pays in one distillation already, because 60 epochs are more than 30 views" in note.advice
    assert note.saving.seconds == pytest.approx(STEPS * 4.2e-3 / 2), (
        "half of the teacher's passes are made to record 30 views"
    )


def test_the_saving_is_that_of_the_views_which_would_be_recorded() -> None:
    given = config.resolve("", ["reinforce.views=15"])
    note = judged(4.2, rules=config.ProfileSettings.model_validate(given.for_stage("profile")).rules)
    assert "the teacher sees each image 15 times (reinforce.views)" in note.text
    assert note.saving.seconds == pytest.approx(STEPS * 4.2e-3 * 3 / 4)
    assert given.for_stage("distill") == config.resolve("", []).for_stage("distill"), "no training depends on it"


@pytest.mark.parametrize(("epochs", "distillations"), [(30, 2), (20, 2), (15, 3), (4, 8)])
def test_where_one_distillation_asks_the_teacher_less_the_note_says_how_many_pay(
    epochs: int, distillations: int
) -> None:
    note = judged(4.2, epochs=epochs)
    assert note.saving is None
    assert f"it pays where there are at least {distillations} distillations of {epochs} epochs, or" in note.advice
    assert distillations * epochs > 30 >= (distillations - 1) * epochs


def test_while_it_runs_the_saving_is_of_the_whole_training() -> None:
    whole, half = judged(4.2, total_steps=2 * STEPS, live=True), judged(4.2)
    assert whole.saving.seconds == pytest.approx(2 * half.saving.seconds)


def test_features_have_to_be_recorded_too() -> None:
    assert "reinforce.features=true" in judged(4.2, settings={"feature_weight": 1.0}).advice
    assert "features" not in judged(4.2).advice


def test_the_share_is_that_of_the_page() -> None:
    settings = {"teacher": "online", "epochs": 60}
    case = case_of(
        rank_of(steps_of(teacher_forward=4.2, recorder=1.3), context=ContextRecord(settings=settings)),
        rules=RuleSettings(teacher_share=TeacherShare(share=0.1)),
    )
    note = teacher_share.judge(case)
    assert isinstance(note, Finding)
    assert note.numbers["teacher_share"] == summarize(case.training).phases["teacher_forward"].share


@pytest.mark.parametrize("given", [{"teacher": "recorded"}, {"device": "xla:0 (a Trainium)"}, {"steps": 30}])
def test_where_no_teacher_runs_or_too_little_is_known_it_is_not_judged(given: dict[str, Any]) -> None:
    assert isinstance(judged(4.2, **given), NotJudged)
