"""tune: measure the distillation on the machines where it will run; faster settings, and a forecast of hours and dollars."""

from __future__ import annotations

import copy
import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import count, repeat
from pathlib import Path

import torch

from trainer.config import DistillSettings, ReinforceSettings, TuneSettings
from trainer.config.conflicts import Facts, conflicts
from trainer.data.dataset import PreparedDataset, open_dataset
from trainer.data.loader import MicroBatches, Samples
from trainer.data.sampler import StatelessSampler
from trainer.data.views.rendering import mixes
from trainer.devices.process_group import Processes, join_processes
from trainer.io import artifacts, storage
from trainer.io.errors import SettingsError
from trainer.io.host import usable_cores
from trainer.models.networks import Classifier
from trainer.objectives.distillation.frozen_teacher import FrozenTeacher
from trainer.objectives.distillation.recording import (
    Recording,
    RecordingDescription,
    check_fits,
    open_recording,
    placeholder_recording,
)
from trainer.profiling.recorder import Startup
from trainer.report import forecast, tracking
from trainer.report.forecast import Forecast, Measurement
from trainer.report.tracking.stage_runs import Tracker, stage_run
from trainer.stages import distill, reinforce
from trainer.stages.tuning.ladder import Ladder, Workload
from trainer.stages.tuning.trials import TrialLog, Trials, measure_training, place_of
from trainer.stages.tuning.tuning_schema import (
    FILE,
    Candidate,
    Trial,
    Tuning,
    forecast_table,
    from_trial,
    read_tunings,
    subject_of,
)
from trainer.training.checkpoints import Checkpoints
from trainer.training.loader_workers import measure_loading
from trainer.training.prefetch import make_prefetcher
from trainer.training.session import shared_artifact
from trainer.training.spec import TrainingSpec, fit_batch, smallest_micro_batch, why_micro_batches_count

logger = logging.getLogger(__name__)

NAME = "tune"  # of the trials, in the log, among the metrics and beside the checkpoints
_TIMED, _MOST_TIMED, _TIMED_S = 3, 50, 0.5
"""Batches of a recording that are timed, at least, and at most if they take less than so many seconds; the fastest counts."""
_TEACHER_IMAGES = {"cpu": 8, "cuda": 256, "xla": 256}  # images of each
_BESIDE_THE_TRIALS = {
    "enabled", "search", "apply", "minutes", "assumed_efficiency", "elsewhere", "budget_usd", "budget_hours",
}  # fmt: skip
"""Settings that change neither a trial nor which one follows another."""


def run(
    settings: TuneSettings,
    *,
    dataset: str | Path,
    teacher: str | Path,
    tuning: str | Path,
    teacher_outputs: str | Path | None = None,
) -> None:
    """Measure, climb, forecast; runs in every process of the job. Recorded outputs are given if they exist already.

    Raises:
        BudgetError: the distillation exceeds `budget_usd` or `budget_hours`, or its price is not known.
        SettingsError: the batch cannot be dealt to the processes, or fits into no memory.
    """
    startup = Startup()
    data = open_dataset(dataset, settings.splits)
    parents = {"dataset": data.fingerprint, "teacher": artifacts.manifest(teacher, "model").fingerprint}
    if teacher_outputs is not None:
        parents["teacher_outputs"] = artifacts.manifest(teacher_outputs, "teacher_outputs").fingerprint
    values = settings.model_dump(mode="json")
    distilled = settings.distill or DistillSettings()
    elsewhere = read_tunings(settings.elsewhere, subject_of(parents, distilled.model_dump(mode="json")))
    with ExitStack() as stack:
        processes = stack.enter_context(join_processes(deterministic=distilled.deterministic))
        tracker = stack.enter_context(stage_run(NAME, values, active=processes.is_first))
        forecast.check_budget(place_of(processes), settings.budget_usd)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tune-")))
        gpu = torch.cuda.get_device_name() if processes.device.kind == "cuda" else ""
        # The trials are kept in a place that is named by all that they depend on, and their order.
        depends_on = {
            "settings": settings.model_dump(mode="json", exclude=_BESIDE_THE_TRIALS),
            "parents": dict(parents),
            "place": place_of(processes).model_dump(mode="json"),
            "machine": [gpu, usable_cores(), torch.__version__],
        }
        trial_log = TrialLog(
            storage.join(artifacts.unfinished(tuning), f"trials-{artifacts.digest(depends_on)[:16]}"), processes
        )
        subject = open_subject(
            settings,
            data,
            processes,
            startup,
            folder,
            dataset=dataset,
            teacher=teacher,
            teacher_outputs=teacher_outputs,
            known_s=trial_log.recording_s,
        )
        if trial_log.recording_s is None:
            trial_log.note_recording(subject.recording_s)
        draft = stack.enter_context(shared_artifact(processes, tuning, "tuning", settings=values, parents=parents))
        made = _tune(subject, settings, trial_log, tracker, artifacts.unfinished(tuning), elsewhere)
        if processes.is_first:
            (draft.path / FILE).write_text(made.model_dump_json(indent=2) + "\n", encoding="utf-8")
            draft.figures.update(
                hours=made.forecast.hours,
                dollars=made.forecast.dollars,
                images_per_second=made.measurement.batch_size / made.measurement.step_s,
                gain=made.gain,
                trials=len(made.tried),
                search_seconds=made.search_s,
            )
            tracker.metrics(0, tracking.numbers(draft.figures))
            _tell(made)
        # Before the artifact is complete: a run that is started again must not find it and go on.
        forecast.refuse_over_budget(
            made.forecast, made.alternatives, budget_usd=settings.budget_usd, budget_hours=settings.budget_hours
        )
    trial_log.remove()


# ---- The distillation


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The distillation that is tuned, on one of its processes."""

    settings: DistillSettings
    data: PreparedDataset
    samples: Samples
    processes: Processes
    student: Classifier  # as every trial begins with it
    teacher: Classifier | None  # None where no loss compares with it
    recording: Recording | None  # recorded outputs, or blank ones; none where the distillation could not learn from any
    no_recording: str  # why it could not
    recording_s: float  # seconds that recording them takes; 0 where they are recorded already
    ready_s: float  # from the start of this process until the first trial could begin

    def training(self, settings: DistillSettings, processes: Processes) -> TrainingSpec:
        """Make the distillation from its beginning, with other settings."""
        recording = self.recording if settings.reads_recording else None
        teachers = [copy.deepcopy(self.teacher)] if self.teacher and recording is None else []
        student = copy.deepcopy(self.student)
        return TrainingSpec(
            name=NAME,
            objective=distill.make_objective(
                settings, student, teachers, recording, processes.device, self.data.targets
            ),
            samples=self.samples,
            view_size=distill.view_size(student, teachers, recording),
            settings=settings,
            loading=settings,
            processes=processes,
            teacher_outputs=recording,
            labeled_share=settings.labeled_share,
            val_split=self.data.split("val") if settings.head == "trained" else None,
        )

    def recording_s_of(self, settings: DistillSettings) -> float | None:
        """Return the seconds that a forecast counts for recording; none where nothing has to be recorded."""
        return self.recording_s if settings.reads_recording and self.recording_s else None

    def job(self, tuned: TuneSettings, memory_limit: float) -> Workload:
        """Return the fixed part of the tuning; a process may use `memory_limit` bytes."""
        settings, processes = self.settings, self.processes
        images = settings.epochs * len(self.samples)
        limits = {
            f"tune.largest_batch_growth is {tuned.largest_batch_growth:g}": int(
                settings.batch_size * tuned.largest_batch_growth
            ),
            f"fewer than {tuned.fewest_steps:,} steps would be left (tune.fewest_steps)": images // tuned.fewest_steps,
            "there are no more images to train on": len(self.samples),
        }
        tightest = min(limits, key=limits.__getitem__)
        return Workload(
            images=images,
            largest_batch=max(limits[tightest], settings.batch_size),
            largest_batch_why=tightest,
            device=processes.device,
            world_size=processes.world_size,
            most_workers=max(1, usable_cores() // processes.local_world_size),
            memory_limit=memory_limit,
            recording_s=self.recording_s,
            no_recording=self.no_recording,
            least_part=smallest_micro_batch(self.student),
            why_parts_count=why_micro_batches_count(settings, self.student),
        )


def open_subject(
    tuned: TuneSettings,
    data: PreparedDataset,
    processes: Processes,
    startup: Startup,
    folder: Path,
    *,
    dataset: str | Path,
    teacher: str | Path,
    teacher_outputs: str | Path | None,
    known_s: float | None = None,
) -> Subject:
    """Open what all trials share; blank recorded outputs are made in `folder`. The time of a recording is measured unless it is known."""
    settings, recorder = tuned.distill or DistillSettings(), tuned.reinforce or ReinforceSettings()
    student, _ = distill.start(settings, data)
    model = distill.load_teachers(settings, teacher, data)[0] if settings.needs_teacher else None
    samples = distill.open_samples(settings, data)
    settings = fit_batch("distill", settings, len(samples), processes)
    ready_s = sum(startup.until(time.time()).values())
    recording, hindrance = None, "no loss compares with the teacher"
    recording_s = 0.0
    if model is not None and teacher_outputs is not None:
        check_fits(teacher_outputs, settings, data=data, dataset=dataset, teacher=teacher)
        recording, hindrance = open_recording(teacher_outputs), ""
    elif model is not None:
        is_same = settings.reads_unlabeled == recorder.records_unlabeled
        recorded = samples if is_same else reinforce.open_samples(recorder, data)
        described = reinforce.describe(recorder, data, dataset, model, recorded, processes.device)
        hindrance = _hindrance(settings, recorder, student, described)
        recording = None if hindrance else placeholder_recording(folder, described)
        recording_s = _recording_s(model, recorded, recorder, described, processes) if known_s is None else known_s
    if settings.reads_recording and hindrance:
        raise SettingsError(f"distill.teacher is recorded, but {hindrance}")
    return Subject(
        settings=settings,
        data=data,
        samples=samples,
        processes=processes,
        student=student,
        teacher=model,
        recording=recording,
        no_recording=hindrance,
        recording_s=recording_s,
        ready_s=max(processes.gather(ready_s)),
    )


def _hindrance(
    settings: DistillSettings, recorder: ReinforceSettings, student: Classifier, described: RecordingDescription
) -> str:
    """Return why the distillation could not learn from recorded outputs; empty if it could."""
    facts = Facts(
        distill=settings,
        reinforce=recorder,
        recorded=[described.kept()],
        student_size=student.card.image_size,
    )
    return "; ".join(filter(None, [*conflicts(facts), reinforce.too_large(recorder, described)]))


def _recording_s(
    model: Classifier,
    samples: Samples,
    recorder: ReinforceSettings,
    described: RecordingDescription,
    processes: Processes,
) -> float:
    """Measure the seconds of a recording: a GPU's loaders work beside the device, a CPU does all.

    The device runs the teacher's forward pass, and makes the views that the loader leaves to it.
    """
    device = processes.device
    batch = min(_TEACHER_IMAGES[device.kind], recorder.batch_size)
    frozen = FrozenTeacher(
        copy.deepcopy(model),
        device,
        precision=recorder.precision,
        features=recorder.features,
        tokens=recorder.tokens,
        compile="off",
    )
    views = reinforce.open_views(recorder, described, samples, device)
    order = StatelessSampler(
        len(samples), described.seed, views=described.views, paired=mixes(views.settings), labeled=samples.labeled
    )
    batches = MicroBatches(views, order, count=batch)
    loading_s = measure_loading(batches, count(0, batch)).seconds
    times: list[float] = []
    with closing(make_prefetcher(repeat(batches[0]), views, device)) as prefetcher:
        while len(times) <= _TIMED or (len(times) <= _MOST_TIMED and sum(times) < _TIMED_S):
            began = time.perf_counter()
            frozen(prefetcher.next().images)
            prefetcher.preload()  # as in a recording: the next images are decoded while the teacher computes
            device.synchronize()
            times.append(time.perf_counter() - began)
    device_s = min(times[1:])  # the first one may compile
    loaders = max(1, usable_cores() // processes.local_world_size - 1)
    batch_s = device_s + loading_s if device.kind == "cpu" else max(device_s, loading_s / loaders)
    return max(processes.gather(batch_s)) / batch / processes.world_size * described.samples * described.views


# ---- The result


def _tune(
    subject: Subject,
    settings: TuneSettings,
    trial_log: TrialLog,
    tracker: Tracker,
    root: str,
    elsewhere: Sequence[Tuning],
) -> Tuning:
    """Climb the ladder, and measure the chosen settings; the same on every process."""
    given, chosen = subject.settings, subject.settings
    ladder: Ladder | None = None
    if settings.search:
        trials = Trials(subject.training, given, subject.processes)

        def measure(candidate: Candidate, *, loads: bool = False) -> Trial:
            known = trial_log.trial(candidate, loads=loads)
            trial = known or trials.measure(candidate, loads=loads)
            if known is None:
                trial_log.note(trial)
            return trial

        ladder = Ladder(job=subject.job(settings, trials.memory_limit), measure=measure, limit_s=60 * settings.minutes)
        ladder.climb(Candidate.of(given))
        best = ladder.whole.candidate
        chosen = best.applied(given)
        if best.workers == ladder.given.candidate.workers:  # the given value stays, also `auto`
            chosen = chosen.model_copy(update={"workers": given.workers})
    uses = chosen if settings.apply else given
    measured = measure_training(
        subject.training,
        uses,
        subject.processes,
        tracker,
        Checkpoints(root, NAME, settings={}, parents={"dataset": subject.data.fingerprint}),
        ready_s=subject.ready_s,
        recording_s=subject.recording_s_of(uses),
    )
    work = forecast.work_of(uses, len(subject.samples))
    return Tuning(
        place=measured.place,
        given=given.model_dump(mode="json"),
        chosen=chosen.model_dump(mode="json"),
        applied=settings.apply,
        tried=tuple(ladder.tried) if ladder else (),
        untried=ladder.untried if ladder else {},
        reasons=tuple(ladder.reasons) if ladder else (),
        stopped=ladder.stopped if ladder else "nothing was searched for (tune.search=false)",
        search_s=ladder.seconds if ladder else 0.0,
        measurement=measured,
        work=work,
        forecast=forecast.forecast(measured, work),
        alternatives=dict(
            _alternatives(subject, settings, measured, uses, chosen, ladder.whole if ladder else None, elsewhere)
        ),
    )


def _alternatives(
    subject: Subject,
    settings: TuneSettings,
    measured: Measurement,
    uses: DistillSettings,
    chosen: DistillSettings,
    best: Trial | None,
    elsewhere: Sequence[Tuning],
) -> Iterator[tuple[str, Forecast]]:
    """Yield alternatives and their forecasts."""
    samples = len(subject.samples)
    if best and chosen not in (uses, subject.settings):
        tuned = from_trial(measured, best, chosen, subject.recording_s_of(chosen))
        yield "tune.apply=true", forecast.forecast(tuned, forecast.work_of(chosen, samples))
    if measured.place.price is not None:
        # On more nodes of this pool: as fast as was measured where somebody has, or else as is assumed.
        same = (measured.place.pool, measured.batch_size)
        known = [one.measurement for one in elsewhere if (one.place.pool, one.measurement.batch_size) == same]
        work, efficiency = forecast.work_of(uses, samples), settings.assumed_efficiency
        for nodes in (2 * measured.place.nodes, 4 * measured.place.nodes):
            there = forecast.on_nodes([*known, measured], work, nodes, assumed_efficiency=efficiency)
            yield f"nodes={nodes}", there
    others = [one for one in elsewhere if one.place.pool != measured.place.pool]
    for one in forecast_table(others, [], assumed_efficiency=settings.assumed_efficiency):
        yield f"pool={one.place.pool}" + f" nodes={one.place.nodes}" * (one.place.nodes > 1), one
    budgets = {"budget_usd": settings.budget_usd, "budget_hours": settings.budget_hours}
    epochs = forecast.epochs_that_fit(measured, uses, samples, **budgets)
    if 0 < epochs < uses.epochs:
        shorter = uses.model_copy(update={"epochs": epochs})
        yield f"distill.epochs={epochs}", forecast.forecast(measured, forecast.work_of(shorter, samples))


def _tell(made: Tuning) -> None:
    for tried in made.tried:
        rate = f"{tried.trial.images_per_second:,.1f} images/s" if tried.run_s else tried.trial.ended
        logger.info("tune  %s  %s  (%s)", rate, tried.idea, tried.verdict)
    for what, why in made.untried.items():
        logger.info("tune  not tried: %s (%s)", what, why)
    logger.info("tune  the search ended after %.0f s: %s", made.search_s, made.stopped)
    logger.info("tune  the distillation will take %s", made.forecast)
