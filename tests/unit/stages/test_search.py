"""Searches whose trainings are a formula of their settings, which takes no time; tests/local/test_search.py has one that trains."""

import argparse
import json
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from trainer import cli, config, stages
from trainer.config.search_space import Dimension
from trainer.graph import STAGES, JobSpec
from trainer.io import artifacts, commands, storage
from trainer.io.errors import EXIT_CODE, BudgetError, LaunchError, SettingsError
from trainer.runner import local_run
from trainer.stages.searching.search_schema import PAGE, read_search
from trainer.stages.searching.study import propose

SPACE = {"distill.base_learning_rate": "log(1e-4, 1e-1)", "distill.drop_path": "uniform(0, 0.5)"}
PEAK = {"base_learning_rate": 3e-3, "drop_path": 0.1}


class Trainings:
    """Stands for the launcher: a student is the better, the nearer its settings are to `PEAK`, and the longer it is trained."""

    def __init__(self, *, noise=0.0, fails=lambda spec: False, waits=lambda spec: False):
        self.waits = waits
        self.specs, self.noise, self.fails, self.together, self.most = [], noise, fails, 0, 0
        self.lock = threading.Lock()

    def __call__(self, spec: JobSpec, stop: threading.Event):
        with self.lock:
            self.specs.append(spec)
            self.together += 1
            self.most = max(self.most, self.together)
        try:
            if self.waits(spec) and stop.wait(30):
                raise KeyboardInterrupt
            if self.fails(spec):
                raise LaunchError(f"distill: loss is not finite ({spec.part})")
            settings = spec.settings
            far = abs(settings["base_learning_rate"] / PEAK["base_learning_rate"] - 1) / 30
            far += abs(settings["drop_path"] - PEAK["drop_path"]) / 5
            depth = settings["student"]["args"].get("depth", 2)
            far += 0.02 / depth
            share = (settings.get("pause_epochs") or settings["epochs"]) / settings["epochs"]
            score = 0.5 + 0.3 * share - far + self.noise * ((settings["seed"] * 7 + 3) % 5 - 2)
            storage.write_bytes(
                self.epochs(spec), str(share * settings["epochs"]).encode()
            )  # what a checkpoint would be
            with artifacts.create(spec.outputs["student"], "model", settings=settings) as draft:
                draft.figures.update(val_top1=score, parameters=1000 * depth)
                if settings.get("latency_runs"):
                    draft.figures["latency_ms"] = 8 / depth  # as if a deeper student answered sooner
            with artifacts.create(spec.outputs["evidence"], "evidence", settings=settings):
                pass
        finally:
            with self.lock:
                self.together -= 1

    @staticmethod
    def epochs(spec):
        return storage.join(spec.environment[artifacts.CHECKPOINTS_VARIABLE], f"epochs-{spec.settings['seed']}")

    @property
    def trained(self):
        return [spec.part for spec in self.specs]


@pytest.fixture
def inputs(tmp_path):
    for name, kind in {"dataset": "dataset", "teacher": "model"}.items():
        with artifacts.create(tmp_path / name, kind, settings={}) as draft:
            draft.figures.update(val_top1=0.8, parameters=100_000)
    return {name: str(tmp_path / name) for name in ("dataset", "teacher")}


def search(inputs, output, trainings, *, in_turns=True, overrides=(), **changed):
    """Run the stage, and read what it found."""
    given = {"space": SPACE, "trials": 9, "finalists": 2, "seeds": 2, "enabled": True} | changed
    own = [f"search.{name}={text(value)}" for name, value in given.items()]
    settings = config.resolve_run("digits", [*own, *overrides])
    directories = {**inputs, "search": str(output)}
    stages.call("search", json.dumps(settings.for_stage("search")), directories, launch=trainings, in_turns=in_turns)
    return read_search(str(output))


def text(value):
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name)}={json.dumps(one)}" for name, one in value.items()) + "}"
    return json.dumps(value)


def test_the_best_settings_are_found_by_halving(inputs, tmp_path):
    trainings = Trainings()
    found = search(inputs, tmp_path / "search", trainings)
    reached = [len(one.attempts) for one in found.trials]
    # 9 begin, 3 go on to the second rung, 1 to the end; finalists and the recipe are trained to the end afterward.
    assert trainings.trained[:13] == [f"{number:03d}-0" for number in range(9)] + trainings.trained[9:13]
    assert [part.split("-")[1] for part in trainings.trained[9:13]] == ["1", "1", "1", "2"]
    assert reached[0] >= 2
    assert sum(count == 3 for count in reached) <= 3
    best = found.trials[found.best]
    assert found.best > 0
    assert found.chosen["base_learning_rate"] == best.values["distill.base_learning_rate"]
    given, chosen = (config.validate(config.DistillSettings, one) for one in (found.given, found.chosen))
    assert chosen == config.distill_with(given, best.values)
    assert "pause_epochs" not in found.chosen
    figures = artifacts.manifest(tmp_path / "search", "search").figures
    assert figures["gain"] > 0.01
    assert figures["trainings"] == pytest.approx(9 * 0.08 + 3 * 0.17 + 0.75)
    page = (tmp_path / "search" / PAGE).read_text()
    assert f"Search: trial {found.best}" in page
    assert "<script" not in page
    assert not list((tmp_path / "checkpoints").iterdir())  # nothing of the trials is left


def test_recipe_stays_unless_gain_exceeds_what_seeds_differ(inputs, tmp_path):
    found = search(inputs, tmp_path / "search", Trainings(noise=0.2))
    assert found.best == 0
    assert "which is not more than seeds differ" in found.reason or "no other settings" in found.reason
    assert found.chosen == found.given


def test_one_seed_says_nothing_about_chance(inputs, tmp_path):
    found = search(inputs, tmp_path / "search", Trainings(), seeds=1)
    assert found.best > 0
    assert "with one seed, which does not tell how much seeds differ" in found.reason


SIZES = ",".join(f'{{architecture="vit_tiny_patch16_224",args={{depth={number}}}}}' for number in (1, 2, 4))
BY_COST = {
    "space": {"distill.student": f"choice({SIZES})"},
    "sampler": "random",
    "trials": 12,
    "finalists": 4,
    "seeds": 1,
}
"""A search over students of several sizes."""


@pytest.mark.parametrize(
    ("drop", "depth"), [(0.05, 1), (0.01, 2), (0.009, 4), (0.0, 4)], ids=["loose", "exact", "tight", "none passes"]
)
def test_cheapest_student_that_passes_is_taken(inputs, tmp_path, drop, depth):
    """The teacher has 80 %, students 78, 79 and 79.5 % by their depth."""
    found = search(
        inputs,
        tmp_path / "search",
        Trainings(),
        **BY_COST,
        cost="parameters",
        overrides=[
            *(f"distill.{name}={value}" for name, value in PEAK.items()),
            f"evaluate.gate.max_accuracy_drop={drop}",
            "evaluate.gate.min_accuracy=0",
        ],
    )
    assert found.chosen["student"]["args"]["depth"] == depth
    page = (tmp_path / "search" / PAGE).read_text()
    assert "Score and cost of the finalists" in page
    assert ("is the cheapest that passes the gate" in found.reason) == (drop > 0.005)


def test_a_store_that_is_away_for_a_while_changes_nothing(inputs, tmp_path, object_store):
    def fail(spec):
        object_store.answer(503, times=3)  # each time a trial is about to write its student
        return False

    there = search(inputs, object_store.uri("search"), Trainings(fails=fail), trials=2, seeds=1)
    here = search(inputs, tmp_path / "search", Trainings(), trials=2, seeds=1)
    assert [one.values for one in there.trials] == [one.values for one in here.trials]
    assert (there.best, there.reason) == (here.best, here.reason)


def test_cost_can_be_latency(inputs, tmp_path):
    found = search(
        inputs,
        tmp_path / "search",
        Trainings(),
        **BY_COST,
        cost="latency",
        overrides=["evaluate.gate.max_accuracy_drop=1", "evaluate.gate.min_accuracy=0"],
    )
    assert found.chosen["student"]["args"]["depth"] == 4
    assert "the cheapest that passes the gate on the validation split: 4,000" not in found.reason
    assert "2.00 ms" in found.reason
    assert "latency_runs" not in found.chosen
    assert "ms for one image" in (tmp_path / "search" / PAGE).read_text()


def test_weights_that_the_student_starts_from_are_parents(inputs, tmp_path):
    """So another content of the same directory is another search, and no result is kept for it."""
    with artifacts.create(tmp_path / "started", "model", settings={}):
        pass
    search(
        inputs,
        tmp_path / "search",
        Trainings(),
        trials=2,
        finalists=1,
        overrides=[f"distill.weights={tmp_path / 'started'}"],
    )
    parents = artifacts.manifest(tmp_path / "search", "search").parents
    assert parents["weights"] == artifacts.manifest(tmp_path / "started", "model").fingerprint
    assert parents.keys() == {"dataset", "teacher", "weights"}
    settings = config.resolve("digits", ["search.enabled=true", f"distill.weights={tmp_path / 'started'}"])
    assert local_run._inputs(STAGES["search"], settings, tmp_path) == set(parents.values())


class KilledError(Exception):
    """As SIGKILL, which no handler sees."""


@pytest.mark.parametrize("at", [0, 4, 10, 13, 15])
def test_killed_search_resumes_with_the_same_trials(inputs, tmp_path, at):
    whole = Trainings()
    expected = search(inputs, tmp_path / "whole" / "search", whole)

    def dies(spec):
        if len(first.specs) > at:
            raise KilledError

    first = Trainings(fails=dies)
    with pytest.raises(KilledError):
        search(inputs, tmp_path / "killed" / "search", first)
    second = Trainings()
    found = search(inputs, tmp_path / "killed" / "search", second)
    without_times = {
        "trials": {"__all__": {"attempts": {"__all__": {"seconds"}}, "repeats": {"__all__": {"seconds"}}}},
        "seconds": True,
    }
    assert found.model_dump(exclude=without_times) == expected.model_dump(exclude=without_times)
    assert first.trained[:at] + second.trained == whole.trained


def test_trials_of_a_round_train_together_and_are_told_together(inputs, tmp_path):
    trainings = Trainings()
    found = search(inputs, tmp_path / "search", trainings, in_turns=False, parallel=3)
    assert trainings.most <= 3
    assert [one.number for one in found.trials] == list(range(9))
    again = search(inputs, tmp_path / "again" / "search", Trainings(), in_turns=False, parallel=3)
    assert [one.values for one in again.trials] == [one.values for one in found.trials]


@pytest.mark.timeout(60)
def test_interrupted_search_ends_all_its_trainings_and_resumes(inputs, tmp_path):
    def interrupts(spec):
        if spec.part == "001-0":
            signal.raise_signal(signal.SIGINT)
        return False

    trainings = Trainings(fails=interrupts, waits=lambda spec: spec.part in ("000-0", "002-0"))
    with pytest.raises(KeyboardInterrupt):
        search(inputs, tmp_path / "search", trainings, in_turns=False, parallel=3)
    deadline = time.monotonic() + 20
    while trainings.together and time.monotonic() < deadline:  # a thread that was just being started is not waited for
        time.sleep(0.05)
    assert trainings.together == 0
    again = Trainings()
    found = search(inputs, tmp_path / "search", again, in_turns=False, parallel=3)
    assert len(found.trials) == 9
    assert "001-0" not in again.trained  # it had come to its end


def test_failed_trial_is_named_and_others_go_on(inputs, tmp_path):
    found = search(inputs, tmp_path / "search", Trainings(fails=lambda spec: spec.part.startswith("002")))
    assert found.trials[2].failure == "distill: loss is not finite (002-0)"
    assert not found.trials[2].attempts
    assert found.best > 0
    assert "loss is not finite (002-0)" in (tmp_path / "search" / PAGE).read_text()
    assert artifacts.manifest(tmp_path / "search", "search").figures["failed"] == 1


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        (lambda spec: True, r"search: the recipe's own settings fail: distill: loss is not finite \(000-0\)"),
        (
            lambda spec: not spec.part.startswith("000"),
            r"search: 3 of 4 trials failed: distill: loss is not finite \(003-0\)",
        ),
    ],
    ids=["recipe", "most"],
)
def test_search_ends_where_trainings_cannot_work(inputs, tmp_path, fails, message):
    with pytest.raises(LaunchError, match=message):
        search(inputs, tmp_path / "search", Trainings(fails=fails))
    assert not artifacts.exists(tmp_path / "search")


def test_estimator_learns_from_trials(inputs, tmp_path):
    """Against random search with as many trials, summed over five seeds."""

    def best(sampler, seed):
        output = tmp_path / f"{sampler}-{seed}" / "search"
        alone = {"trials": 20, "rungs": [1.0], "finalists": 1, "seeds": 1, "sampler": sampler}
        found = search(inputs, output, Trainings(), overrides=[f"run.seed={seed}"], **alone)
        return max(one.attempts[0].score for one in found.trials)

    assert sum(best("tpe", seed) for seed in range(5)) > sum(best("random", seed) for seed in range(5))


def test_budget_begins_fewer_trials_or_refuses(inputs, tmp_path, monkeypatch):
    now = [0.0]
    trainings = Trainings()

    def takes(spec):
        epochs = spec.settings.get("pause_epochs") or spec.settings["epochs"]
        before = float(storage.read_bytes(uri)) if storage.exists(uri := trainings.epochs(spec)) else 0.0
        now[0] += 60 * (epochs - before)  # a minute an epoch, from the checkpoint on
        return False

    trainings.fails = takes
    monkeypatch.setattr("trainer.stages.search.time.monotonic", lambda: now[0])
    found = search(inputs, tmp_path / "search", trainings, budget_hours=4.8, finalists=1)
    assert 1 < len(found.trials) < 9
    assert found.seconds <= 4.8 * 3600
    with pytest.raises(BudgetError, match=r"one more trial and the finalists take 4 h .* and the budget is 60 min"):
        search(inputs, tmp_path / "refused" / "search", trainings, budget_hours=1, finalists=1)
    with pytest.raises(
        BudgetError, match=r"search.budget_usd=2 cannot be kept, since the price of this machine is not"
    ):
        search(inputs, tmp_path / "no price" / "search", trainings, budget_usd=2, finalists=1)
    unlimited = search(inputs, tmp_path / "unlimited" / "search", trainings, budget_hours=0, budget_usd=0, finalists=1)
    assert len(unlimited.trials) == 9
    price = {"dollars_an_hour": 0.5, "date": "2026-11", "region": "here", "source": "power bill"}
    monkeypatch.setenv("TRAINER_PLACE", json.dumps({"pool": "workstation", "price": price}))
    paid = search(inputs, tmp_path / "paid" / "search", trainings, budget_usd=2.4, finalists=1)
    assert len(paid.trials) == len(found.trials)
    assert sum(one.dollars for trial in paid.trials for one in trial.attempts) < 2.4


WRONG = {
    "unknown": (
        {"space": {"distill.droppath": "uniform(0, 1)"}},
        r"droppath is no setting .*did you mean distill.drop_path",
    ),
    "reversed": (
        {"space": {"distill.drop_path": "uniform(0.4, 0.1)"}},
        r"'uniform\(0.4, 0.1\)'; the lowest value has to be below",
    ),
    "beyond": (
        {"space": {"distill.drop_path": "uniform(0, 2)"}},
        r"distill.drop_path=2.0: distill.drop_path must be < 1.0, got 2.0",
    ),
    "one point": ({"space": {"distill.drop_path": "choice(0.1)"}}, r"a choice needs two different values"),
    "another stage": ({"space": {"pretrain.seed": "int(0, 5)"}}, r"pretrain.seed is no setting of the distillation"),
    "shared": (
        {"space": {"distill.epochs": "int(1, 5)"}},
        r"distill.epochs cannot be searched, since all trials share it",
    ),
    "not of a section": ({"space": {"drop_path": "uniform(0, 1)"}}, r"drop_path is no setting of the distillation"),
    "recorded": (
        {"space": {"distill.views.mixup": "uniform(0, 1)"}},
        r"distill.views.mixup cannot be searched, since .* recorded .*distill.teacher=online",
    ),
    "not together": (
        {"space": {"distill.logit.loss": "choice(kl, hard)", "distill.logit.temperature": "log(1, 8)"}},
        r"distill.logit.loss=hard with distill.logit.temperature=1.0: .*temperature is 1.0, but loss is hard, which has none",
    ),
    "no logarithm": ({"space": {"distill.drop_path": "log(0, 0.1)"}}, r"a logarithm needs values above 0"),
    "no form": ({"space": {"distill.drop_path": "0.1..0.3"}}, r"is '0.1..0.3'; write log\(1e-4, 1e-2\), uniform"),
    "no rungs": ({"rungs": [0.5, 0.25, 1]}, r"search.rungs: has to rise, and to end with 1"),
}


def test_spaces_of_the_page_pass_all_checks():
    page = (Path(__file__).parents[3] / "docs/search.md").read_text()
    (recipe, given, space), *_ = re.findall(r'make search RECIPE=(\S+) SET="(.*?)" \\\n\s+SEARCH="(.*?)"', page)
    parser = argparse.ArgumentParser()
    commands.add_run(parser)
    options = parser.parse_args([recipe, "--set", given, "--search", space])
    assert len(config.resolve_run(recipe, options.overrides).search.space) == 3
    (table,) = re.findall(r"    \[search.space\]\n((?:    .*\n)+)", page)
    words = [line.replace('"', "").replace(" ", "") for line in table.splitlines()]
    options = parser.parse_args([recipe, "--set", given, "--search", " ".join(words)])
    assert len(config.resolve_run(recipe, options.overrides).search.space) == 2


@pytest.mark.parametrize("name", WRONG)
def test_wrong_space_is_refused_before_anything_runs(name):
    changed, message = WRONG[name]
    overrides = [f"search.{key}={text(value)}" for key, value in changed.items()]
    with pytest.raises(SettingsError, match=message):
        config.resolve_run("digits", ["search.enabled=true", "distill.teacher=recorded", *overrides])


@pytest.mark.parametrize(
    ("words", "space"),
    [
        (["--search"], "auto"),
        (["--search", "auto"], "auto"),
        (["--search", "distill.drop_path=uniform(0,0.2)"], {"distill.drop_path": "uniform(0,0.2)"}),
    ],
    ids=str,
)
def test_option_of_command_enables_search(words, space):
    parser = argparse.ArgumentParser()
    commands.add_run(parser)
    settings = config.resolve_run("digits", parser.parse_args(["digits", *words]).overrides)
    assert (settings.search.enabled, settings.search.space) == (True, space)


def test_trial_of_an_optimization_job_takes_its_parameters(tmp_path, monkeypatch):
    sections = []
    monkeypatch.setattr(local_run, "run_stage", lambda stage, section, *_, **__: sections.append(section))
    monkeypatch.setenv("KUBEFLOW_TRAINER_OPT_DISTILL__DROP_PATH", "0.25")
    monkeypatch.setenv("KUBEFLOW_TRAINER_OPT_DISTILL__LOGIT__LOSS", "dist")
    places = [
        text for name in ("dataset", "teacher", "student", "evidence") for text in (f"--{name}", str(tmp_path / name))
    ]
    assert cli.main(["stage", "distill", "--recipe", "digits", *places]) == 0
    assert (sections[0]["drop_path"], sections[0]["logit"]["loss"]) == (0.25, "dist")
    monkeypatch.setenv("KUBEFLOW_TRAINER_OPT_DISTILL__DROPPATH", "0.25")
    assert cli.main(["stage", "distill", "--recipe", "digits", *places]) == EXIT_CODE


def test_own_space_lies_around_the_recipe():
    settings = config.resolve_run("digits", ["search.enabled=true", "distill.token_weight=0.5"])
    space = config.search_space(settings.search)
    assert space["distill.token_weight"] == Dimension("log", [0.125, 2.0])
    for name, dimension in space.items():
        assert dimension.holds(config.setting_of(settings.distill, name)), name


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_choice_is_the_same_number_however_it_is_written(inputs, tmp_path, sampler):
    """The recipe has 2.0, the space 2."""
    space = SPACE | {"distill.logit.temperature": "choice(1, 2, 4)"}
    own = ["distill.logit.temperature=2.0"]
    found = search(inputs, tmp_path / "search", Trainings(), space=space, sampler=sampler, overrides=own)
    assert found.trials[0].values["distill.logit.temperature"] == 2
    assert {one.values["distill.logit.temperature"] for one in found.trials} == {1, 2, 4}


def test_choices_may_be_groups_of_settings(inputs, tmp_path):
    small, large = ({"architecture": "vit_tiny_patch16_224", "args": {"depth": depth}} for depth in (1, 2))
    space = {
        "distill.student": Dimension("choice", [small, large]),
        "distill.logit.loss": Dimension("choice", ["kl", "dkd"]),
    }
    proposed = propose(space, [], 6, sampler="random", trials=6, seed=0)
    assert {json.dumps(one["distill.student"]) for one in proposed} == {json.dumps(small), json.dumps(large)}
    made = config.distill_with(
        config.resolve("digits").distill, {"distill.logit.loss": "dkd", "distill.student": large}
    )
    assert (made.logit.loss, made.student.args["depth"]) == ("dkd", 2)


@pytest.mark.parametrize(
    ("given", "space"),
    [([], "auto"), (["SEARCH=distill.drop_path=uniform(0,0.2)"], "distill.drop_path=uniform(0,0.2)")],
)
def test_target_of_make_enables_search(tmp_path, given, space):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    root = Path(__file__).parents[3]
    command = ["make", "-C", str(root), "-o", ".venv/.ready", "search", f"VENV={tmp_path}", "READY=", *given]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert shown[shown.index("--search") + 1] == space
