"""The settings of a pipeline run, resolved once and cut into what each stage reads."""

from __future__ import annotations

import json
import os
import shlex
import uuid
from collections import namedtuple

from components import planning
from components.launching import Placement
from trainer import config
from trainer.data import class_tables
from trainer.graph import STAGES
from trainer.io import artifacts, storage
from trainer.io.artifacts import canonical_json
from trainer.io.errors import SettingsError, TrackingError
from trainer.io.host import environment_variables
from trainer.report import tracking
from trainer.runner import preflight

KUBEFLOW_UI = "KF_PIPELINES_UI_ENDPOINT"  # environment variable: the address of Kubeflow's UI, for links


def resolve(
    recipe: str, overrides: str = "", dataset: str = "", teacher: str = "", experiment: str = ""
) -> config.Settings:
    """Resolve the settings of a run from the pipeline's parameters, of which the named ones go before `overrides`."""
    named = {"data.source": dataset, "pretrain.weights": teacher, "tracking.experiment": experiment}
    # Each value is quoted twice: as TOML text, so that a name like `1` stays text, and for the shell's rules.
    further = [shlex.quote(f"{key}={json.dumps(value)}") for key, value in named.items() if value]
    return config.resolve_run(recipe, " ".join([overrides, *further]))


def configure(
    settings: config.Settings,
    place: Placement,
    generation: str = "",
    run_name: str = "",
    *,
    preparing: Placement | None = None,
) -> tuple[object, ...]:
    """Check what can be checked before anything expensive, and give each stage its own section.

    Args:
        settings: of the run.
        place: where its trainings run.
        generation: the run since which KFP's cached results count.
        run_name: as Kubeflow shows the run.
        preparing: where its images are prepared; None: in the task's own pod.

    Returns:
        Each stage's own section, as JSON, and for an optional stage whether it is needed; what else decides whether a cached result is
        still right: `source_version`, `teacher_weights_version`, `student_weights_version`, `device` (the kind that the trainings run on);
        and for the record `resolved`, all settings, as a recipe.

    Raises:
        SettingsError: as `Placement.check`, `Placement.check_cache` and `planning.check` say.
        TrainerError: a late stage would end, as `preflight.checked` says; or there are no images, or MLflow does not answer.
    """
    place.check(warms_up=settings.warm_up.enabled, notify=settings.run.notify)
    on_cluster, kept = "KFP_RUN_ID" in os.environ, settings.data.keep_decoded
    if kept and (on_cluster or preparing) and not storage.is_remote(kept):
        raise SettingsError(
            f"data.keep_decoded={kept}: a pod's disk ends with it; give a URI of the store, such as s3://BUCKET/FOLDER, or leave it empty"
        )
    preflight.check_budgets(settings, place.machines())
    device = place.device(settings.run.device)
    processes = place.processes(settings.run.device)
    settings = preflight.checked(settings, trains_here=not place.pool, processes=processes, device=device)
    for stage, section in (("pretrain", settings.pretrain), ("distill", settings.distill)):
        place.check_cache(stage, section, {})  # what the run itself makes is checked before each job
    source = class_tables.source_state(settings.data)
    planning.check(settings, source, place, preparing)
    # Where it cannot be known, a text of this run alone, so that no cache has a result for it.
    source_version = source.version or f"not known ({uuid.uuid4().hex})"
    resolved, tags = settings.model_dump(mode="json"), {"trainer.source_version": source_version}
    if on_cluster:  # a link from MLflow to the run of Kubeflow Pipelines
        address = os.environ.get(KUBEFLOW_UI, "").rstrip("/")
        tags[tracking.NOTE_TAG] = f"Kubeflow: [{run_name}]({address}/#/runs/details/{os.environ['KFP_RUN_ID']})"
    with environment_variables(_experiment(settings.tracking)):
        if on_cluster:  # the address is not the user's there, and a run may be started by a schedule at night
            tracking.patiently(tracking.check)
        else:
            tracking.check()
        preflight.warn_of_other_classes(settings)
        tracking.start_parent(resolved, tags, name=run_name if on_cluster else "")
    distill = settings.distill
    student = [artifacts.weights_version(distill.weights, distill.weights_file)]
    # What the student learns from beside the pipeline's teacher.
    student += [artifacts.manifest(uri, "model").fingerprint for uri in distill.further_teachers]
    student += [artifacts.manifest(uri, "teacher_outputs").fingerprint for uri in distill.further_recordings]
    outputs = {
        **{name: canonical_json(settings.for_stage(name)) for name in STAGES},
        **{f"{name}_needed": stage.is_needed(settings) for name, stage in STAGES.items() if stage.needed_if},
        "source_version": f"{source_version} {generation}".rstrip(),  # the first task that is cached reads it
        "teacher_weights_version": artifacts.weights_version(settings.pretrain.weights, settings.pretrain.weights_file),
        "student_weights_version": " ".join(filter(None, student)),
        "device": device,
        "resolved": config.recipe_of(settings),  # Argo keeps six copies of it in the run's Workflow, which has a limit
    }
    # KFP takes each output by its name from a tuple of such a class, whatever their order.
    made: tuple[object, ...] = namedtuple("Sections", outputs)(**outputs)
    return made


def _experiment(settings: config.TrackingSettings) -> dict[str, str]:
    """Return the variable that names the run's experiment, unless it was set when the run was started, as on this machine.

    A `TrackingError` if the settings ask for other tracking than the cluster's, which all tasks read from their environment.
    """
    if tracking.EXPERIMENT_NAME in os.environ or tracking.EXPERIMENT_ID in os.environ:
        return {}
    here = tracking.uri() or ""
    if here and (not settings.enabled or settings.uri not in ("", here)):
        asked = f"tracking.uri={settings.uri}" if settings.enabled else "tracking.enabled=false"
        raise TrackingError(
            f"{asked}: this cluster tracks at {tracking.shown(here)}, and every task reads that from its environment; leave the setting "
            f"out, or change {tracking.URI} in the cluster's ConfigMap"
        )
    return {tracking.EXPERIMENT_NAME: settings.experiment}
