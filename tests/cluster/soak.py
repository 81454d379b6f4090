"""Trains on a cluster while faults drawn by chance strike, and prints what became of each promise of docs/cluster.md.

    make soak-cluster MINUTES=30 [SEED=7 EVERY=5 EPOCHS=2000 CONTEXT=kubeconfig's]

One run of `digits` after the other, each with a student that learns for about 20 minutes (EPOCHS); every five minutes of that (EVERY)
something goes wrong. A run must end well, with one version in the registry, and with the student that the first one has made, bit for
bit. After a fault that ends processes the next step must come within two minutes, at others the steps must go on; and a fault may cost 30 s
of training on average, so that one every five minutes leaves 90 % for steps that count. Ends with 1 where one of that is not so.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tests.cluster import conftest
from tests.cluster.faults import FAULTS, STOP_TRAINING, Watch, registered
from tests.cluster.progress import Recovery, Seen, goodput, recovery
from trainer.training.metric_logger import LINE_INTERVAL_S

STAGE = "distill"
NEXT_STEP_S = 120.0
PAUSE_S = LINE_INTERVAL_S + 15.0
"""Longest time between two lines of a training that goes on."""
COST_S = 30.0
"""What a fault may cost: 90 % of the time are steps that count where one strikes every five minutes."""
HEAD = (
    "fault",
    "times",
    f"longest time without a line, of one each {LINE_INTERVAL_S:g} s (s)",
    "most steps done again",
)


@dataclass(frozen=True)
class Strike:
    """A fault that struck."""

    fault: str
    at: float
    """Unix time."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a run."""

    strikes: list[Strike]
    lines: list[Seen]
    student: str
    """Fingerprint."""
    broken: list[str]
    """Promises, as messages."""


def main() -> int:
    """Gives the exit code."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left on the cluster
    chance = random.Random(options.seed)
    print(f"seed {options.seed}, {options.minutes:g} minutes, a fault every {options.every:g} minutes", flush=True)
    began = time.monotonic()
    faults = _drawn(chance)
    outcomes: list[Outcome] = []
    with conftest.context(options.context):
        while not outcomes or time.monotonic() - began < 60 * options.minutes:
            outcomes.append(_run(options, faults))
            print(f"run {len(outcomes)}: {'; '.join(outcomes[-1].broken) or 'well'}", flush=True)
    students = {one.student for one in outcomes if one.student}
    broken = [text for one in outcomes for text in one.broken]
    if len(students) > 1:
        broken.append(f"the same settings and seed gave {len(students)} different students: {', '.join(students)}")
    print(_table(outcomes))
    print(f"\n{len(outcomes)} runs in {(time.monotonic() - began) / 60:.0f} minutes, {len(broken)} broken promises")
    print("\n".join(broken))
    return int(bool(broken))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", required=True, help="kubeconfig's, of the cluster")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long runs are begun (default: %(default)g)")
    parser.add_argument("--every", type=float, default=5.0, help="minutes from fault to fault (default: %(default)g)")
    parser.add_argument(
        "--epochs", type=int, default=2000, help="of a student, about 20 minutes (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: %(default)s)")
    return parser.parse_args()


def _drawn(chance: random.Random) -> Iterator[str]:
    """Names of faults without end, each as often as the others."""
    while True:
        yield from chance.sample(sorted(FAULTS), len(FAULTS))


def _run(options: argparse.Namespace, faults: Iterator[str]) -> Outcome:
    settings = f"{conftest.SHORT} distill.epochs={options.epochs} distill.checkpoint_every=100 run.seed={options.seed}"
    with conftest.pool(retries=50) as pool:
        run = conftest.deploy(settings, wait=False, pool=pool)
        try:
            strikes, lines = _strike(run, 60 * options.every, faults)
            run.wait()
        finally:
            if run.phase() in {"Pending", "Running"}:
                run.stop()
    broken = [] if run.exit_code == 0 else [f"run {run.id} did not end well: {run.output[-2000:]}"]
    students = registered(conftest.ask_mlflow, run)
    if not broken and len(students) != 1:
        broken.append(f"run {run.id} registered {len(students)} students")
    for strike, seen in _recoveries(strikes, lines):
        limit = NEXT_STEP_S if strike.fault in STOP_TRAINING else PAUSE_S
        if seen.next_step_s > limit:
            broken.append(f"{strike.fault}: {seen.next_step_s:.0f} s without a step, {limit:g} at most are promised")
    if not broken and not strikes:
        broken.append(
            f"run {run.id}: nothing struck; its training was shorter than {options.every:g} minutes, or its log was not understood"
        )
    if strikes and (cost := (1 - goodput(lines)) * (lines[-1].at - lines[0].at) / len(strikes)) > COST_S:
        broken.append(
            f"run {run.id}: a fault cost {cost:.0f} s of training on average, {COST_S:g} at most are promised"
        )
    return Outcome(strikes=strikes, lines=lines, student="".join(students), broken=broken)


def _strike(run: conftest.Run, every_s: float, faults: Iterator[str]) -> tuple[list[Strike], list[Seen]]:
    """Follow a run to its end, and strike its training now and then; gives what struck, and the steps that were seen."""
    strikes: list[Strike] = []
    over = 0.0
    with Watch(run, STAGE) as watch:
        while run.phase() in {"Pending", "Running"}:
            time.sleep(5)
            if not watch.lines or watch.lines[-1].share > 0.95:  # a training that is about to end is left alone
                continue
            if time.time() - max(watch.lines[0].at, over) > every_s:
                strikes.append(Strike(next(faults), time.time()))
                print(f"step {watch.lines[-1].step} of {watch.lines[-1].total}: {strikes[-1].fault}", flush=True)
                FAULTS[strikes[-1].fault](run, STAGE)
                over = time.time()
    return strikes, watch.lines


def _recoveries(strikes: list[Strike], lines: list[Seen]) -> Iterator[tuple[Strike, Recovery]]:
    ends = [strike.at for strike in strikes[1:]] + [lines[-1].at if lines else 0.0]
    for strike, end in zip(strikes, ends, strict=bool(strikes)):
        yield strike, recovery(lines, strike.at, end)


def _table(outcomes: list[Outcome]) -> str:
    rows: dict[str, list[Recovery]] = {}
    for one in outcomes:
        for strike, seen in _recoveries(one.strikes, one.lines):
            rows.setdefault(strike.fault, []).append(seen)
    lines = [HEAD, tuple("---" for _ in HEAD)]
    for fault, seen in sorted(rows.items()):
        seconds = [one.next_step_s for one in seen]
        times = f"{statistics.median(seconds):.0f}, at most {max(seconds):.0f}"
        lines.append((fault, str(len(seen)), times, str(max(one.repeated for one in seen))))
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    shares = ", ".join(
        f"{goodput(one.lines):.1%} of {(one.lines[-1].at - one.lines[0].at) / 60:.0f} minutes with {len(one.strikes)} faults"
        for one in outcomes
        if one.lines
    )
    return f"\n{text}\n\nGoodput of the trainings: {shares or 'none has trained'}"


if __name__ == "__main__":
    sys.exit(main())
