"""How near the forecast is to what a distillation takes: `python tests/benchmarks/bench_forecast.py [RECIPE] [--set KEY=VALUE ...]`.

A whole run of the recipe, with `tune` measuring the given settings before the distillation (`tune.search=false`); then its forecast and the
bill of the stages that it was of, launch and start-up and all. The machine should do nothing else meanwhile.

    python tests/benchmarks/bench_forecast.py digits
    python tests/benchmarks/bench_forecast.py grocery --set data.source=imagefolder:/photos
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

from trainer.io.formatting import aligned, duration
from trainer.report.billing import Bill
from trainer.report.finished_run import bill_table
from trainer.runner import local_run


def main() -> None:
    """Run, and print forecast, actual and their ratio."""
    parser = argparse.ArgumentParser(description="Compare a forecast with what the distillation then takes.")
    parser.add_argument("recipe", nargs="?", default="digits", help="default: %(default)s")
    parser.add_argument("--set", dest="overrides", action="extend", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--processes", type=int, default=1, help="how many train (default: %(default)s)")
    parser.add_argument("--output", metavar="DIR", help="keep the run there (default: it is thrown away)")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s  %(message)s", datefmt="%H:%M:%S")
    with tempfile.TemporaryDirectory(prefix="forecast-") as folder:
        local_run.RUNS = Path(folder, "runs")  # the user's `runs/latest` stays where it is
        bill = measured(options.recipe, options.overrides, options.output or folder, options.processes)
    print("\n".join(["", *bill_table(bill), "", *comparison(bill)]))


def measured(recipe: str, overrides: Sequence[str], output: str, processes: int) -> Bill:
    """The bill of a run that was forecast."""
    given = ["run.reuse=false", "tune.enabled=true", "tune.search=false", "tracking.enabled=false", *overrides]
    summary, _ = local_run.run(recipe, given, output=str(Path(output).resolve()), processes=processes)
    return Bill.model_validate(summary["bill"])


def comparison(bill: Bill) -> list[str]:
    """Forecast against actual."""
    expected, actual = bill.forecast, bill.actual_hours
    assert expected is not None, "the run had a stage tune"
    row = (duration(3600 * expected.hours), duration(3600 * actual), f"{expected.hours / actual:.3f}")
    return aligned([("forecast", "actual", "forecast/actual"), row], right=range(3))


if __name__ == "__main__":
    main()
