"""Scheduled runs: what `CRON=` makes, and undeploying removes."""

from __future__ import annotations

import re
from typing import Any

import kfp_server_api

from pipelines import runs
from pipelines.connection import Api, every
from trainer.errors import SettingsError

_FIELDS = (("minute", 0, 59), ("hour", 0, 23), ("day", 1, 31), ("month", 1, 12), ("weekday", 0, 6))


def cron_of(text: str) -> str:
    """KFP's form of a cron expression: it has a field for seconds before the usual five.

    KFP takes five fields too, and reads them as seconds, minutes, hours, days, months: "0 3 * * *" would run every hour.

    Args:
        text: minute, hour, day, month, weekday.

    Raises:
        SettingsError: it is none.
    """
    fields = text.split()
    if len(fields) != len(_FIELDS):
        raise SettingsError(
            f'CRON must have five fields, minute hour day month weekday, such as "0 3 * * *" for every night at three (UTC); got {text!r}'
        )
    for field, (name, low, high) in zip(fields, _FIELDS, strict=True):
        if not all(_is_part(part, low, high) for part in field.split(",")):
            raise SettingsError(
                f"CRON={text!r}: the {name} must be *, a number from {low} to {high}, a range 1-5, a step */15, or a list of "
                f"these; got {field!r}"
            )
    return " ".join(["0", *fields])


def _is_part(part: str, low: int, high: int) -> bool:
    match = re.fullmatch(r"(\*|(\d+)(?:-(\d+))?)(?:/([1-9]\d*))?", part)
    if not match:
        return False
    numbers = [int(number) for number in match.group(2, 3) if number]
    return all(low <= number <= high for number in numbers) and numbers == sorted(numbers)


def name_of(recipe: str) -> str:
    """A schedule's name; there is one a recipe."""
    return f"scheduled {recipe}"


def put(api: Api, name: str, cron: str, job: runs.RunRequest) -> None:
    """Have one schedule of this name, as it is given here: KFP cannot change one, so another is made and the old one removed.

    Args:
        api: the API.
        name: the schedule's.
        cron: when, in KFP's form.
        job: what it starts.

    Raises:
        DeployError: the API refuses.
    """
    wanted = kfp_server_api.V2beta1RecurringRun(
        display_name=name,
        **job.fields(),
        trigger=kfp_server_api.V2beta1Trigger(cron_schedule=kfp_server_api.V2beta1CronSchedule(cron=cron)),
        mode=kfp_server_api.RecurringRunMode.ENABLE,
        max_concurrency="1",
        no_catchup=True,
    )
    there = [schedule for schedule in of_pipeline(api, job.version.pipeline_id) if schedule.display_name == name]
    same = next((schedule for schedule in there if _same(schedule, wanted)), None)
    kept = same or api.schedules.recurring_run_service_create_recurring_run(wanted)
    for schedule in there:
        if schedule is not same:
            remove(api, schedule)
    state = "already there" if same else "made"
    print(
        f"schedule {name!r} at {cron!r} (seconds first): {state}; {api.link(f'recurringrun/details/{kept.recurring_run_id}')}"
    )


def remove(api: Api, schedule: Any) -> None:
    """Remove a schedule, and say so; its runs stay."""
    api.schedules.recurring_run_service_delete_recurring_run(schedule.recurring_run_id)
    print(f"removed: schedule {schedule.display_name!r}")


def of_pipeline(api: Api, pipeline_id: str) -> list[Any]:
    """The schedules that start any version of a pipeline."""
    listed = every(api.schedules.recurring_run_service_list_recurring_runs, "recurring_runs", **api.in_namespace)
    return [
        schedule
        for schedule in listed
        if schedule.pipeline_version_reference and schedule.pipeline_version_reference.pipeline_id == pipeline_id
    ]


def _same(schedule: Any, wanted: Any) -> bool:
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

    return schedule.status == "ENABLED" and essence(schedule) == essence(wanted)
