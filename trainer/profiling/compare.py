"""Two runs or trainings side by side, before and after, as text and as a page: `python -m trainer compare A B`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from trainer.config import copied_from, with_present_names
from trainer.config.rules import RuleSettings
from trainer.io import artifacts, storage
from trainer.io.base_models import flatten, what_is_wrong
from trainer.io.costs import dollars_text
from trainer.io.errors import ArtifactError
from trainer.io.formatting import aligned, clipped, duration, ratio, short
from trainer.io.local_files import located
from trainer.profiling import findings, over_time
from trainer.profiling.evidence import TrainingEvidence
from trainer.profiling.evidence_files import read_evidence
from trainer.profiling.findings import Answer
from trainer.profiling.profile_report import stacked
from trainer.profiling.rules.outcomes import Finding, NotJudged
from trainer.profiling.training_summary import (
    SIGNALS,
    TrainingSummary,
    named_number,
    phase_label,
    summarize,
    training_label,
)
from trainer.report import pages, provenance, scores
from trainer.report.finished_run import SUMMARY
from trainer.report.pages import Block, PageSection, Paragraph, Subsection, Table

Row = tuple[str, ...]

_EVIDENCE = ("pretrain-evidence", "distill-evidence")
"""Where `python -m trainer run` keeps it below the run's directory."""
_TASKS = ("pretrain/evidence", "distill/evidence")
"""Where it lies beside the folder of the task that made the report, in a run of the pipeline."""
_CHOICE = "give the directory of a run, or of its report, or of evidence"
_MOVERS = 10
_ALIKE = 0.005  # a smaller relative change is shown as none
_SAME_BATCH = 0.01
_SIDES = ("before", "after", "change")
_KIND_COLORS = {
    "matrix product": "forward",
    "attention": "backward",
    "convolution": "teacher_forward",
    "normalization": "to_device",
    "copy": "data",
    "communication": "checkpoint",
    "optimizer": "optimizer",
    "other": "other",
}  # kind of work of an operator -> the phase or range whose color it has


# ---- Reading a side


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One side of a comparison: a run or a training."""

    name: str
    trainings: Mapping[str, TrainingSummary]
    answers: Sequence[Answer]
    evidence: Mapping[str, TrainingEvidence] = field(default_factory=dict)
    """What the trainings recorded, as far as it is at hand."""
    run: Mapping[str, Any] | None = None  # the run's `summary.json`; none where a training is compared and not a run
    dataset: str | None = None  # fingerprint of the data set; none where it was not recorded


def read_compared_run(uri: str) -> ComparedRun:
    """Read a run's directory, a report or evidence; an `ArtifactError` for anything else."""
    if artifacts.exists(uri):
        kind = _json(storage.join(uri, artifacts.MANIFEST)).get("kind")
        if kind == "report":
            return _read_report(uri)
        if kind == "registration":
            return _read_run(uri)
        if kind != "evidence":
            raise ArtifactError(f"{uri}: is a {kind}; {_CHOICE}")
        evidence = read_evidence(uri)
        return ComparedRun(
            name=uri,
            trainings={training.name: summarize(training) for training in evidence.trainings},
            answers=findings.judged(evidence, RuleSettings()),
            evidence={training.name: training for training in evidence.trainings},
            dataset=artifacts.manifest(uri, "evidence").parents.get("dataset"),
        )
    if storage.exists(storage.join(uri, SUMMARY)):
        return _read_run(uri)
    if not storage.is_remote(uri) and not Path(uri).is_dir():
        raise ArtifactError(f"{located(uri)}: no such directory; {_CHOICE}")
    raise ArtifactError(f"{uri}: holds neither {SUMMARY}, as a completed run does, nor {artifacts.MANIFEST}; {_CHOICE}")


def _read_report(uri: str) -> ComparedRun:
    report = artifacts.read(uri, "report")
    content, answers = ((report.path / name).read_bytes() for name in (SUMMARY, findings.FINDINGS))
    try:
        trainings = TypeAdapter(dict[str, TrainingSummary]).validate_json(content)
    except ValidationError as error:
        raise ArtifactError(
            f"report {uri}: its {SUMMARY} is of another version ({what_is_wrong(error)}); run the stage profile again"
        ) from error
    judged = findings.from_json(answers, f"report {uri}: {findings.FINDINGS}")
    return ComparedRun(name=uri, trainings=trainings, answers=judged, dataset=report.figures.get("dataset"))


def _read_run(uri: str) -> ComparedRun:
    content = _json(storage.join(uri, SUMMARY))
    if not {"settings", "stages", "student", "teacher", "reports"} <= content.keys():
        raise ArtifactError(f"{storage.join(uri, SUMMARY)}: is not the summary of a run; {_CHOICE}")
    page = str(content["reports"].get("profile", ""))  # the page's place at the time of the run
    reports = [storage.join(uri, "report"), *([storage.parent(page)] if page else [])]
    report = next(filter(artifacts.exists, reports), None)
    if report is None:
        raise ArtifactError(f"{uri}: its report is not at {' nor at '.join(reports)}; give the directory of the report")
    read = _read_report(report)
    tasks = storage.parent(storage.parent(report))
    places = [storage.join(above, name) for above, names in ((uri, _EVIDENCE), (tasks, _TASKS)) for name in names]
    wanted = set(artifacts.manifest(report, "report").parents.values())
    places = [place for place in places if artifacts.exists(place)]
    places = [place for place in places if artifacts.manifest(place, "evidence").fingerprint in wanted]
    recorded = [read_evidence(place).trainings for place in places]
    evidence = {training.name: training for trainings in recorded for training in trainings}
    datasets = (artifacts.manifest(place, "evidence").parents.get("dataset") for place in places)
    dataset = read.dataset or next(filter(None, datasets), None)
    return replace(read, name=uri, evidence=evidence, run=content, dataset=dataset)


def _json(path: str) -> dict[str, Any]:
    try:
        content = storage.read_json(path)
    except ValueError as error:
        raise ArtifactError(f"{path}: is not JSON ({error}); {_CHOICE}") from error
    if not isinstance(content, dict):
        raise ArtifactError(f"{path}: is not a JSON object; {_CHOICE}")
    return content


# ---- The comparison


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A training of both sides."""

    name: str
    before: TrainingSummary
    after: TrainingSummary

    @property
    def per_image(self) -> bool:
        """Whether times are given per image, because a step does not hold as many images on both sides."""
        a, b = self.before.images_a_step, self.after.images_a_step
        return bool(a and b and abs(a - b) > _SAME_BATCH * a)

    @property
    def unit(self) -> str:
        """The unit of `scaled`."""
        return "µs an image" if self.per_image else "ms a step"

    def scaled(self, one: TrainingSummary, ms: float) -> float:
        """Convert a time of a step to `unit`."""
        return 1000 * ms / one.images_a_step if self.per_image and one.images_a_step else ms

    def times(self, taken: Callable[[TrainingSummary], Mapping[str, float]]) -> list[dict[str, float]]:
        """Convert each side's times, taken by `taken` in milliseconds a step, to `unit`."""
        return [{name: self.scaled(one, ms) for name, ms in taken(one).items()} for one in (self.before, self.after)]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything that differs."""

    before: ComparedRun
    after: ComparedRun
    pairs: Sequence[Pair]
    differences: Sequence[str]
    """Why not everything can be compared, a sentence each: other data, hardware, or numbers of processes."""
    verdict: str
    general: Sequence[Table]  # tables on the whole runs
    tables: Mapping[str, Sequence[Table]]  # name of a training -> its tables


def compare(before: ComparedRun, after: ComparedRun) -> Comparison:
    """Compare two sides; an `ArtifactError` if they have no training in common."""
    names = [name for name in before.trainings if name in after.trainings]
    if not names:
        held = [", ".join(side.trainings) or "no training" for side in (before, after)]
        raise ArtifactError(
            f"{before.name} holds {held[0]} and {after.name} holds {held[1]}, so there is nothing to compare; "
            "give two that trained the same"
        )
    pairs = [Pair(name=name, before=before.trainings[name], after=after.trainings[name]) for name in names]
    counts = [side.run.get("dataset") if side.run else None for side in (before, after)]
    same_data = False if all(counts) and counts[0] != counts[1] else None  # None: unknown
    if before.dataset and after.dataset:
        same_data = before.dataset == after.dataset
    accuracy = ""
    name = _score_name(after)
    first, second = (_at(side.run, ("student", "test", name)) for side in (before, after))
    if first is not None and second is not None and same_data is not False:
        accuracy = f"; the student's test {scores.TITLES[name]}: {first:.1%} before and {second:.1%} after"
    general = [_outcome(before, after, same_data), _settings(before, after), _findings(before, after)]
    return Comparison(
        before=before,
        after=after,
        pairs=pairs,
        differences=[] if all(pair.before == pair.after for pair in pairs) else _differences(same_data, pairs),
        verdict=_verdict(pairs[-1], accuracy),
        general=[table for table in general if table.rows],
        tables={
            pair.name: [one for one in (*_tables(pair), _weights(before, after, pair.name)) if one.rows]
            for pair in pairs
            if pair.before != pair.after
        },
    )


def text(comparison: Comparison) -> str:
    """Format the comparison for a terminal."""
    parts = [*comparison.differences, comparison.verdict]
    parts += [_table_text(table.title, table) for table in comparison.general]
    for pair in comparison.pairs:
        name = training_label(pair.name)
        tables = comparison.tables.get(pair.name)
        if tables is None:
            parts.append(f"{name}: both sides are the same recording.")
        parts += [_table_text(f"{name}: {table.title}", table) for table in tables or ()]
    return "\n\n".join(parts)


def _table_text(title: str, table: Table) -> str:
    rows = [[clipped(str(cell), 60) for cell in row] for row in (table.headers, *table.rows)]
    return "\n  ".join([title, *aligned(rows, right={1, 2, 3} if len(rows[0]) == 4 else ())])


def change(before: float | None, after: float | None) -> str:
    """Format a change: `-46 %`, `+12 %`, `as before`; empty if a side is unknown."""
    if before is None or after is None:
        return ""
    if before == after or (before and abs(after / before - 1) < _ALIKE):
        return "as before"
    if not before:
        return "new"
    return f"{100 * (after / before - 1):+,.0f} %" if after < 10 * before else f"{after / before:,.0f} x"


def _differences(same_data: bool | None, pairs: Sequence[Pair]) -> list[str]:
    differences = []
    if same_data is None:
        differences.append("Whether both sides are of the same data was not recorded.")
    elif not same_data:
        differences.append("Other data: the two sides are of different data sets, so their accuracy is not compared.")
    hardware: list[str] = []
    for pair in pairs:
        facts = []
        for one in (pair.before, pair.after):
            kind, _, model = one.device.partition(" ")  # `cuda:0 (NVIDIA A100-SXM4-40GB)`, shown without its index
            device = f"{kind.partition(':')[0]} {model}".rstrip()
            facts.append((device, f"{one.cores} cores", one.processor, one.place.instance if one.place else ""))
        machines = "{} before, {} after".format(*(", ".join(filter(None, fact)) for fact in facts))
        is_alike = all(a == b or not a or not b for a, b in zip(*facts, strict=True))  # unless a side did not record it
        if not is_alike and machines not in hardware:
            hardware.append(machines)
    differences += [f"Other hardware: {machines}." for machines in hardware]
    processes = dict.fromkeys((pair.before.world_size, pair.after.world_size) for pair in pairs)
    differences += [f"Other processes: {a} before, {b} after." for a, b in processes if a != b]
    return differences


def _verdict(pair: Pair, accuracy: str) -> str:
    """Summarize the last common training: its speed-up, the phase that caused it, and the student's accuracy."""
    name = training_label(pair.name)
    if pair.before == pair.after:
        return f"{name}: both sides are the same recording."
    a, b = pair.before.step_ms, pair.after.step_ms
    if a is None or b is None:
        return f"{name}: one of the two has no steps to compare."
    first, second = pair.scaled(pair.before, a.mean), pair.scaled(pair.after, b.mean)
    speed = "as fast as before"
    if abs(second / first - 1) >= _ALIKE:
        speed = ratio(first, second, "as fast", "slower")
    before, after = pair.times(_phase_ms)
    moves = {phase: after.get(phase, 0.0) - before.get(phase, 0.0) for phase in {**before, **after}}
    moved, faster = "", second < first
    if moves:
        most = min(moves, key=lambda phase: moves[phase] if faster else -moves[phase])
        if (moves[most] < 0) == faster:
            times = [short(side.get(most, 0.0)) for side in (before, after)]
            moved = "; most of it in “{}” ({} before, {} after)".format(phase_label(most), *times)
    return f"{name}: {speed}, {short(first)} before and {short(second)} {pair.unit} after{moved}{accuracy}."


def _phase_ms(one: TrainingSummary) -> dict[str, float]:
    return {name: phase.ms.mean for name, phase in one.phases.items()}


def _kind_ms(one: TrainingSummary) -> Mapping[str, float]:
    return one.operators.categories if one.operators else {}


def _operator_ms(one: TrainingSummary) -> dict[str, float]:
    seen = one.operators
    return {each.name: seen.ms(each) for each in seen.operators} if seen else {}


def _tables(pair: Pair) -> Iterator[Table]:
    yield _overview(pair)
    yield _times("phases", pair, _phase_ms, phase_label)
    a, b = pair.before.operators, pair.after.operators
    if a and b:
        if a.clock == b.clock:
            yield _times("operators by kind of work", pair, _kind_ms)
            yield _times("operators that moved most", pair, _operator_ms, most=_MOVERS)
        else:  # what a device computes is not set against what a host hands over
            clocks = f"operators by kind of work, on the {a.clock} before and on the {b.clock} after"
            yield _times(clocks, pair, _kind_ms, changed=lambda _before, _after: "")
    used = [one.use for one in (pair.before, pair.after)]
    rows = list(_signals({**used[0], **used[1]}, *used))
    yield Table(("mean, memory: most", *_SIDES), rows, title="use of the machine")


def _overview(pair: Pair) -> Table:
    a, b = pair.before, pair.after
    facts = [
        _row("device", str, a.device, b.device),
        _row("where", str, a.place or a.host, b.place or b.host),
        _row("processes", str, a.world_size, b.world_size),
        _row("loader processes", str, a.workers, b.workers),
        _row("images a step", short, a.images_a_step, b.images_a_step),
    ]
    rows = [row for row in facts if row[1] != row[2]]
    rows += _signals([name for name, signal in SIGNALS.items() if signal.compared], a.figures, b.figures)
    return Table(("", *_SIDES), rows, title="in short")


def _signals(names: Iterable[str], before: Mapping[str, float], after: Mapping[str, float]) -> Iterator[Row]:
    """Compare numbers of `SIGNALS` that at least one side recorded."""
    for name in names:
        if name in before or name in after:
            a, b = before.get(name), after.get(name)
            shown = ["not recorded" if value is None else named_number(name, value)[1] for value in (a, b)]
            yield (named_number(name, 0.0)[0], *shown, change(a, b))


def _row(title: str, shown: Callable[[Any], str], before: Any, after: Any, changed: str = "") -> Row:
    return (title, *("not recorded" if value is None else shown(value) for value in (before, after)), changed)


def _numbers(title: str, shown: Callable[[float], str], before: float | None, after: float | None) -> list[Row]:
    """Compare a number; no row where neither side recorded it."""
    return [] if before is None and after is None else [_row(title, shown, before, after, change(before, after))]


def _weights(before: ComparedRun, after: ComparedRun, name: str) -> Table:
    """Compare the tensors of weights that both sides measured in the same steps; no row where a side's evidence is not at hand."""
    table = Table(("tensors of weights", "alike in both"), [], title="similar weights and gradients")
    if name not in before.evidence or name not in after.evidence:
        return table
    a, b = (side.evidence[name].ranks[0].tensors for side in (before, after))
    steps, in_a, in_b = np.intersect1d(a.steps, b.steps, return_indices=True)
    names = [tensor for tensor in a.tensors if tensor in set(b.tensors)]
    if not len(steps) or not names:
        return table
    of_a, of_b = ([side.tensors.index(tensor) for tensor in names] for side in (a, b))
    rows: list[Row] = []
    for words, columns in (("weights", ("weight_norm", "weight_mean_abs")), ("gradients", ("gradient_norm",))):
        pairs = [
            (a.values[column][in_a][:, of_a], b.values[column][in_b][:, of_b]) for column in columns
        ]  # [L, P] each
        alike = np.all([(one == other) | (np.isnan(one) & np.isnan(other)) for one, other in pairs], axis=0)
        differ = np.flatnonzero(~alike.all(1))
        since = f"; they differ from step {steps[differ[0]] + 1:.0f} on" if len(differ) else ""
        at = (0, -1) if len(steps) > 1 else (0,)
        for row in at:
            share = f"{alike[row].sum()} of {len(names)}{since if row == at[-1] else ''}"
            rows.append((f"{words} before step {steps[row] + 1:.0f}", share))
    return replace(table, rows=rows)


def _times(
    title: str,
    pair: Pair,
    taken: Callable[[TrainingSummary], Mapping[str, float]],
    spoken: Callable[[str], str] = str,
    changed: Callable[[float, float], str] = change,
    most: int | None = None,
) -> Table:
    """Compare times that sum to the whole, a missing one being zero; with `most`, only the largest changes."""
    rows = []
    before, after = pair.times(taken)
    names = list({**before, **after})
    if most:
        names.sort(key=lambda name: -abs(after.get(name, 0.0) - before.get(name, 0.0)))
    for name in names[:most]:
        a, b = before.get(name, 0.0), after.get(name, 0.0)
        rows.append((spoken(name), *("none" if not ms else short(ms) for ms in (a, b)), changed(a, b)))
    if most is None:
        a, b = sum(before.values()), sum(after.values())
        rows.append(("together", short(a), short(b), changed(a, b)))
    return Table((pair.unit, *_SIDES), rows, title=title)


def _score_name(side: ComparedRun) -> str:
    return next((name for name in scores.TITLES if _at(side.run, ("student", "test", name)) is not None), "top1")


def _outcome(before: ComparedRun, after: ComparedRun, same_data: bool | None) -> Table:
    """Compare accuracy, time and dollars of whole runs; accuracy has no change if the test images differ."""
    if before.run is None or after.run is None:
        return Table(("", *_SIDES), [], title="The runs")
    a, b = before.run, after.run
    rows = [_row("recipe", str, a.get("recipe", ""), b.get("recipe", ""))]
    name = _score_name(after)
    for title, keys in (
        (f"student, test {scores.TITLES[name]}", ("student", "test", name)),
        ("agrees with the teacher", ("student", "test", "agreement")),
        (f"teacher, test {scores.TITLES[name]}", ("teacher", "test", name)),
    ):
        first, second = _at(a, keys), _at(b, keys)
        points = "" if first is None or second is None else f"{100 * (second - first):+.2f} points"
        rows.append(_row(title, "{:.2%}".format, first, second, "other data" if same_data is False else points))
    seconds = [sum(stage["seconds"] for stage in run["stages"].values()) for run in (a, b)]
    rows += _numbers("all stages", duration, *seconds)
    for name in {**a["stages"], **b["stages"]}:
        taken = [run["stages"].get(name, {}).get("seconds") for run in (a, b)]
        shown = ["did not run" if value is None else duration(value) for value in taken]
        rows.append((f"  {name}", *shown, change(*taken)))
    rows += _numbers("dollars", dollars_text, _at(a, ("bill", "dollars")), _at(b, ("bill", "dollars")))
    return Table(("", *_SIDES), rows, title="The runs")


def _at(content: Mapping[str, Any] | None, keys: Sequence[str]) -> float | None:
    value: Any = content
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) else None


def _settings(before: ComparedRun, after: ComparedRun) -> Table:
    if before.run is not None and after.run is not None:
        sides = [before.run["settings"], after.run["settings"]]
    else:
        sides = [{name: one.settings for name, one in side.trainings.items()} for side in (before, after)]
    a, b = (flatten(with_present_names(settings)) for settings in sides)
    rows: list[Row] = []
    for name in {**a, **b}:
        if a.get(name) != b.get(name) and copied_from(name) not in {**a, **b}:
            rows.append((name, *(str(values[name]) if name in values else "not there" for values in (a, b))))
    return Table(("setting", "before", "after"), rows, title="Settings that differ")


def _findings(before: ComparedRun, after: ComparedRun) -> Table:
    a, b = _found(before.answers), _found(after.answers)
    judged = [
        {(one.rule, one.training) for one in side.answers if not isinstance(one.outcome, NotJudged)}
        for side in (before, after)
    ]
    rows: list[Row] = []
    for key in {**a, **b}:
        state = "still there"
        if key not in b:
            state = "gone" if key in judged[1] else "not judged after"
        elif key not in a:
            state = "new" if key in judged[0] else "not judged before"
        title, training = (a.get(key) or b[key])[0].title, training_label(key[1])
        rows.append((title, training, _saving(a.get(key)), _saving(b.get(key)), state))
    return Table(("finding", "training", "saving before", "saving after", ""), rows, title="Findings")


def _found(answers: Sequence[Answer]) -> dict[tuple[str, str], tuple[Answer, Finding]]:
    return {(one.rule, one.training): (one, one.outcome) for one in answers if isinstance(one.outcome, Finding)}


def _saving(one: tuple[Answer, Finding] | None) -> str:
    if one is None:
        return ""
    answer, finding = one
    if finding.saving is None:
        return "not known"
    return " ".join(filter(None, (duration(finding.saving.seconds), dollars_text(answer.dollars))))


def page(comparison: Comparison) -> str:
    """Build the page: self-contained HTML."""
    blocks: list[Block | None] = [Paragraph(f"Before: {comparison.before.name}. After: {comparison.after.name}.")]
    blocks += [PageSection(table.title, [table]) for table in comparison.general]
    blocks += [_training(comparison, pair) for pair in comparison.pairs]
    return pages.render(
        "Before and after", " ".join([*comparison.differences, comparison.verdict]), blocks, facts=provenance.here()
    )


def _training(comparison: Comparison, pair: Pair) -> PageSection:
    title = training_label(pair.name)
    if pair.name not in comparison.tables:
        return PageSection(title, [Paragraph("Both sides are the same recording.")])
    blocks = charts(pair)
    for table in comparison.tables[pair.name]:
        blocks.append(Subsection(f"{table.title[0].upper()}{table.title[1:]}", [table]))
    sides = {"Before": comparison.before, "After": comparison.after}
    if all(pair.name in side.evidence for side in sides.values()):  # both have their evidence at hand
        for when, side in sides.items():
            course = over_time.section(side.evidence[pair.name], side.trainings[pair.name], [])
            blocks.append(Subsection(when, [course]))
    return PageSection(title, blocks)


def charts(pair: Pair) -> list[Block]:
    """Draw phases, and operators by kind of work, before and after."""
    phases = _bars(pair, "Where a step's time goes", _phase_ms, phase_label, str)
    clocks = {one.operators.clock for one in (pair.before, pair.after) if one.operators}
    if len(clocks) > 1:  # one bar would be of the device's time and one of the host's
        return phases
    return [
        *phases,
        *_bars(pair, "Operators by kind of work", _kind_ms, str, lambda kind: _KIND_COLORS.get(kind, "named")),
    ]


def _bars(
    pair: Pair,
    title: str,
    taken: Callable[[TrainingSummary], Mapping[str, float]],
    spoken: Callable[[str], str],
    color: Callable[[str], str],
) -> list[Block]:
    """Draw a stacked bar before and one after, on one scale; nothing where neither side has a value."""
    before, after = pair.times(taken)
    rows = []
    for when, times in (("before", before), ("after", after)):
        amounts = {name: times.get(name, 0.0) for name in {**before, **after}}
        total = sum(amounts.values())
        rows.append((when, amounts, f"{short(total)} {pair.unit}" if total else "not recorded"))
    if not any(any(amounts.values()) for _, amounts, _ in rows):
        return []
    return [Subsection(title, stacked(title, pair.unit, rows, spoken=spoken, color=color))]
