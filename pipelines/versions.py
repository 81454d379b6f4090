"""The pipeline, its versions and its schedules, as Kubeflow Pipelines keeps them."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kfp_server_api

from pipelines.connection import CONFLICT, NOT_FOUND, Api, RefusedError, every
from pipelines.distillation import DESCRIPTION, NAME
from trainer import __version__
from trainer.io.errors import SettingsError

_CRON_FIELDS = (("minute", 0, 59), ("hour", 0, 23), ("day", 1, 31), ("month", 1, 12), ("weekday", 0, 6))


def name_of(text: str) -> str:
    """Name a version by the project's version and a digest of the compiled pipeline with its image: `0.2.0-0123456789ab`."""
    return f"{__version__}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def pipeline(api: Api) -> Any | None:
    """Find the pipeline; None where it was never uploaded."""
    try:
        return api.pipelines.pipeline_service_get_pipeline_by_name(NAME, **api.in_namespace)
    except RefusedError as error:
        if error.status != NOT_FOUND:
            raise
        return None


def versions(api: Api, pipeline_id: str) -> dict[str, Any]:
    """List the versions of a pipeline, by name."""
    listed = every(api.pipelines.pipeline_service_list_pipeline_versions, "pipeline_versions", pipeline_id=pipeline_id)
    return {version.name: version for version in listed}


def upload(api: Api, name: str, text: str) -> Any:
    """Upload a compiled pipeline as a version, unless it is there, and report which."""
    found: Any = pipeline(api)
    if found is None:
        body = kfp_server_api.V2beta1Pipeline(name=NAME, display_name=NAME, description=DESCRIPTION, **api.in_namespace)
        try:
            found = api.pipelines.pipeline_service_create_pipeline(body)
        except RefusedError as error:
            if error.status != CONFLICT:  # someone else was faster
                raise
            found = pipeline(api)
    version, state = versions(api, found.pipeline_id).get(name), "version already there"
    if version is None:
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / f"{NAME}.yaml"
            file.write_text(text, encoding="utf-8")
            try:
                version = api.uploads.upload_pipeline_version(
                    str(file), name=name, description=DESCRIPTION, pipelineid=found.pipeline_id
                )
                state = "uploaded"
            except RefusedError as error:
                if error.status != CONFLICT:  # someone else was faster
                    raise
                version = versions(api, found.pipeline_id)[name]
    link = api.link(f"pipelines/details/{version.pipeline_id}/version/{version.pipeline_version_id}")
    print(f"{NAME} {name}: {state}; {link}")
    return version


def cron_of(text: str) -> str:
    """Return KFP's form of a cron expression (minute, hour, day, month, weekday): with a field for seconds first.

    KFP reads five fields as seconds, minutes, hours, days, months: "0 3 * * *" would run every hour.
    """
    fields = text.split()
    if len(fields) != len(_CRON_FIELDS):
        raise SettingsError(
            f'CRON must have five fields, minute hour day month weekday, such as "0 3 * * *" for every night at three (UTC); got {text!r}'
        )
    for field, (name, low, high) in zip(fields, _CRON_FIELDS, strict=True):
        for part in field.split(","):
            match = re.fullmatch(r"(\*|(\d+)(?:-(\d+))?)(?:/([1-9]\d*))?", part)
            bounds = [int(number) for number in match.group(2, 3) if number] if match else []
            if not match or bounds != sorted(bounds) or not all(low <= bound <= high for bound in bounds):
                raise SettingsError(
                    f"CRON={text!r}: the {name} must be *, a number from {low} to {high}, a range 1-5, a step */15, or a list of "
                    f"these; got {field!r}"
                )
    return " ".join(["0", *fields])


def put_schedule(api: Api, name: str, cron: str, fields: Mapping[str, Any]) -> None:
    """Replace the schedule of this name, with KFP's form of a cron expression, by one that starts a `runs.request`."""
    wanted = kfp_server_api.V2beta1RecurringRun(
        display_name=name,
        **fields,
        trigger=kfp_server_api.V2beta1Trigger(cron_schedule=kfp_server_api.V2beta1CronSchedule(cron=cron)),
        mode=kfp_server_api.RecurringRunMode.ENABLE,
        max_concurrency="1",
        no_catchup=True,
    )

    def essence(of: Any) -> tuple[Any, ...]:
        return (
            of.experiment_id,
            of.pipeline_version_reference.pipeline_version_id,
            of.runtime_config and of.runtime_config.parameters,
            of.service_account,
            of.trigger and of.trigger.cron_schedule and of.trigger.cron_schedule.cron,
            of.max_concurrency,
            of.no_catchup,
        )

    there = [
        schedule
        for schedule in schedules(api, fields["pipeline_version_reference"].pipeline_id)
        if schedule.display_name == name
    ]
    alike = (schedule for schedule in there if schedule.status == "ENABLED" and essence(schedule) == essence(wanted))
    same = next(alike, None)
    kept = same or api.schedules.recurring_run_service_create_recurring_run(wanted)
    for schedule in there:
        if schedule is not same:
            remove_schedule(api, schedule)
    state = "already there" if same else "made"
    print(
        f"schedule {name!r} at {cron!r} (seconds first): {state}; {api.link(f'recurringrun/details/{kept.recurring_run_id}')}"
    )


def remove_schedule(api: Api, schedule: Any) -> None:
    """Remove a schedule, and say so; its runs stay."""
    api.schedules.recurring_run_service_delete_recurring_run(schedule.recurring_run_id)
    print(f"removed: schedule {schedule.display_name!r}")


def schedules(api: Api, pipeline_id: str) -> list[Any]:
    """List the schedules that start any version of a pipeline."""
    listed = every(api.schedules.recurring_run_service_list_recurring_runs, "recurring_runs", **api.in_namespace)
    return [
        schedule
        for schedule in listed
        if schedule.pipeline_version_reference and schedule.pipeline_version_reference.pipeline_id == pipeline_id
    ]
