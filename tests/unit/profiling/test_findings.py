from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.profiling.rules.synthetic import rank_of
from trainer.config.rules import RuleSettings
from trainer.io.costs import Machines, Price
from trainer.io.errors import ArtifactError
from trainer.profiling.evidence import Evidence, TrainingEvidence
from trainer.profiling.evidence_files import read_evidence
from trainer.profiling.findings import Answer, from_json, judged, ranked_findings, to_json, verdict
from trainer.profiling.rules.outcomes import Finding, Healthy, NotJudged, Saving
from trainer.profiling.training_summary import TrainingSummary, summarize

PRICE = Price(dollars_an_hour=36.0, date="2026-11", region="here", source="the list")
SLOW = Finding(
    severity="warning",
    confidence=0.8,
    text="Steps wait.",
    advice="Set distill.workers=2.",
    saving=Saving(seconds=30.0, reason="the time that steps wait"),
    numbers={"waiting_share": 0.5},
    window_s=(1.0, 2.0),
    steps=(3, 4),
)


def answer(rule: str, outcome: Finding | Healthy | NotJudged) -> Answer:
    return Answer(
        rule=rule, title=rule.replace("_", " ").capitalize(), kind="system", training="distill", outcome=outcome
    )


@pytest.fixture
def summary(evidence: Path) -> TrainingSummary:
    return replace(summarize(read_evidence(evidence).trainings[1]), recorded_s=120.0)


def test_findings_stand_by_their_saving_and_severe_ones_first() -> None:
    given = [
        answer("healthy", Healthy(text="fine")),
        answer("small", replace(SLOW, saving=Saving(seconds=1.0, reason=""))),
        answer("nothing_to_save", replace(SLOW, saving=None)),
        answer("large", SLOW),
        answer("ruined", replace(SLOW, severity="severe", saving=None)),
        answer("surer", replace(SLOW, confidence=0.9)),
    ]
    assert [answer.rule for answer, _ in ranked_findings(given)] == [
        "ruined",
        "surer",
        "large",
        "small",
        "nothing_to_save",
    ]


def test_verdict(summary: TrainingSummary) -> None:
    priced = replace(answer("loader_workers", SLOW), dollars=0.3)
    assert verdict([priced, answer("other", replace(SLOW, saving=None))], [summary]).text == (
        "Distillation: “Loader workers” costs the most; curing it would save about 30 s (25 % of the training, $0.30); "
        "1 more finding."
    )
    # The verdict on a spoiled training says so.
    ruined = answer("exploding_gradients", replace(SLOW, severity="severe"))
    assert verdict([answer("loader_workers", SLOW), ruined], [summary]).text.startswith(
        "Distillation: “Exploding gradients”, so continuing it is of no use"
    )
    # The verdict counts rules and not answers.
    given = [answer("a", Healthy(text="")), answer("a", Healthy(text="")), answer("b", NotJudged(reason=""))]
    assert "1 rule looked and found nothing, 1 rule could not judge" in verdict(given, [summary]).text
    assert "no rule could judge it" in verdict(given[2:], [summary]).text
    assert "Nothing was trained" in verdict([], []).text
    # A note is advice and no finding.
    note = answer("recorded_outputs", replace(SLOW, severity="note", saving=Saving(seconds=1000.0, reason="")))
    result = verdict([*healthy_and_short(20, 0), note], [summary])
    assert result.outcome == "healthy"
    assert result.text.endswith("20 rules looked and found nothing, 8 rules could not judge; 1 note.")
    assert [answer.rule for answer, _ in ranked_findings([note, answer("small", SLOW)])] == [
        "small",
        "recorded_outputs",
    ]


def healthy_and_short(healthy: int, short: int, unfit: int = 8) -> list[Answer]:
    """Answers of rules that saw nothing, that needed a longer training, and that do not apply."""
    outcomes = [Healthy(text="fine")] * healthy + [NotJudged(reason="only 6 steps", too_short=True)] * short
    outcomes += [NotJudged(reason="no GPU")] * unfit
    return [answer(f"rule_{number}", outcome) for number, outcome in enumerate(outcomes)]


@pytest.mark.parametrize(
    ("healthy", "short", "outcome"), [(15, 5, "healthy"), (14, 5, "too_short"), (0, 1, "too_short")]
)
def test_too_many_rules_without_enough_to_judge(
    summary: TrainingSummary, healthy: int, short: int, outcome: str
) -> None:
    assert verdict(healthy_and_short(healthy, short), [summary]).outcome == outcome


def test_verdict_on_short_trainings(summary: TrainingSummary, evidence: Path) -> None:
    assert verdict(healthy_and_short(8, 11), [summary]).text == (
        "Too short to judge: 11 of 27 rules on Distillation (40 steps); train longer (distill.epochs) before you trust "
        "that nothing was found."
    )
    # Each of two trainings is long enough or not by itself.
    other = replace(summary, name="finetune", steps=6)
    given = [*healthy_and_short(20, 0), *(replace(one, training="finetune") for one in healthy_and_short(5, 15))]
    result = verdict(given, [other, summary])
    assert result.outcome == "too_short"
    assert "15 of 28 rules on Fine-tuning (6 steps); train longer (pretrain.finetune.epochs)" in result.text
    assert "Distillation" not in result.text

    # A real recording of three steps: no rule finds anything, and most had too little to look at.
    recorded = read_evidence(evidence)
    first = replace(recorded, trainings=recorded.trainings[:1])
    result = verdict(judged(first, RuleSettings()), [summarize(one) for one in first.trainings])
    assert result.outcome == "too_short", result
    assert "rules on Masked autoencoder (3 steps); train longer (pretrain.mae.epochs)" in result.text


def test_dollars_are_those_of_place_where_training_ran() -> None:
    """Twenty minutes of fetching, which need not be, on two nodes at 36 dollars an hour."""

    def start_up(seconds: float, place: Machines | None) -> Answer:
        rank = rank_of(startup={"fetch": seconds}, first_step_s=seconds, place=place)
        trainings = [TrainingEvidence(name="distill", ranks=[rank], metrics={})]
        given = judged(Evidence(path=Path(), fingerprint="", trainings=trainings), RuleSettings())
        return next(one for one in given if one.rule == "start_up")

    place = Machines(pool="pool", nodes=2, price=PRICE)
    assert start_up(1200.0, place).dollars == pytest.approx(24.0)
    assert start_up(1200.0, None).dollars is None
    assert isinstance(start_up(1.0, place).outcome, Healthy)
    assert start_up(1.0, place).dollars is None


def test_answers_are_kept_as_they_are_also_with_infinite_numbers() -> None:
    given = [
        replace(answer("a", replace(SLOW, numbers={"growth": float("inf")})), dollars=0.25),
        answer("b", Healthy(text="fine")),
        answer("c", NotJudged(reason="turned off")),
        answer("d", NotJudged(reason="only 6 steps", too_short=True)),
    ]
    assert from_json(to_json(given), "findings.json") == given


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '[{"outcome": "Guess"}]', json.dumps([{"outcome": "Finding", "reported": {}}])]
)
def test_other_content_is_refused(text: str) -> None:
    with pytest.raises(ArtifactError, match="run the stage profile again"):
        from_json(text, "report/findings.json")
