"""Strikes jobs with faults drawn by chance, and prints what became of each promise.

    make soak MINUTES=60 [SEED=7]      for so long
    make test-faults [ONLY=store]      every fault once, or those whose name has a regular expression in it

Ends with 1 if a promise was broken: the message then says which, and the jobs' folders are kept.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.bench import Bench
from tests.faults.promises import Kept
from tests.faults.scenarios import SCENARIOS, Surroundings
from tests.faults.stores import WatchedStore
from tests.faults.tracking_server import TrackingServer
from tests.pathologies import train_teacher
from trainer import config
from trainer.io.errors import TrainerError
from trainer.stages import prepare


@dataclass(kw_only=True)
class Row:
    """What came of one fault, over all its turns."""

    kept: list[Kept] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    """Messages."""

    def cells(self, name: str) -> tuple[str, ...]:
        outcomes = " / ".join(dict.fromkeys(one.outcome for one in self.kept)) or "-"
        ends = _range([one.seconds for one in self.kept])
        recoveries = _range([one.recovered_s for one in self.kept if one.recovered_s is not None])
        repeated = max((one.repeated for one in self.kept if one.repeated is not None), default="-")
        times = len(self.kept) + len(self.broken)
        return name, str(times), str(len(self.broken)), ends, recoveries, str(repeated), outcomes


HEAD = ("fault", "times", "broken", "ended within (s)", "recovered within (s)", "most steps done again", "outcome")


def _range(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.1f}, at most {max(seconds):.1f}" if seconds else "-"


def main() -> int:
    """Gives the exit code."""
    options = _options()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    names = [name for name in SCENARIOS if re.search(options.only, name)]
    if not names:
        print(f"no fault has {options.only!r} in its name; there are: {', '.join(SCENARIOS)}", file=sys.stderr)
        return 2
    length = f"{options.minutes:g} minutes" if options.minutes else "each once"
    print(f"seed {seed}, {len(names)} faults, {length}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="trainer-faults-"))
    rows = {name: Row() for name in names}
    began = time.monotonic()
    try:
        with ExitStack() as stack:
            at = _surroundings(folder, stack)
            print(f"set up in {time.monotonic() - began:.0f} s", flush=True)
            for turn, name in enumerate(_turns(names, options.minutes, random.Random(seed))):
                _strike(at, name, f"{seed}/{turn}", rows[name])
    finally:
        print(_table(rows, time.monotonic() - began), flush=True)
    broken = any(row.broken for row in rows.values())
    if broken:
        print(f"promises were broken; the jobs are kept in {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    return int(broken)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0.0, help="how long; 0 (the default): each fault once")
    parser.add_argument("--seed", type=int, help="of all that is drawn; drawn and printed where not given")
    parser.add_argument("--only", default="", metavar="REGEX", help="only faults with this in their name")
    return parser.parse_args()


def _surroundings(folder: Path, stack: ExitStack) -> Surroundings:
    store = stack.enter_context(WatchedStore())
    tracking = stack.enter_context(TrackingServer(folder / "mlflow"))
    os.environ.update(store.environment | {"TRAINER_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"})
    dataset = str(folder / "dataset")
    prepare.run(config.resolve("digits").data, dataset=dataset)
    teacher = train_teacher(dataset, folder / "pretrained")
    return Surroundings(Bench(folder, dataset=dataset, teacher=teacher), store, tracking)


def _turns(names: list[str], minutes: float, chance: random.Random) -> Iterator[str]:
    """Names of faults: each once, or shuffled ones, again and again, until the time is over."""
    if not minutes:
        yield from names
        return
    end = time.monotonic() + 60 * minutes
    for _ in itertools.count():
        for name in chance.sample(names, len(names)):
            if time.monotonic() >= end:
                return
            yield name


def _strike(at: Surroundings, name: str, draw: str, row: Row) -> None:
    at.store.reset()
    at.store.watch(lambda _number: None)
    try:
        kept = SCENARIOS[name](at, random.Random(draw))
    except (AssertionError, TrainerError) as error:
        row.broken.append(f"{name} ({draw}): {error}")
        print(f"BROKEN  {row.broken[-1]}", flush=True)
        return
    row.kept.append(kept)
    recovered = f", recovered within {kept.recovered_s:.1f} s" if kept.recovered_s is not None else ""
    print(f"kept    {name}: {kept.outcome}; ended within {kept.seconds:.1f} s{recovered}", flush=True)


def _table(rows: dict[str, Row], seconds: float) -> str:
    lines = [
        HEAD,
        tuple("---" for _ in HEAD),
        *(row.cells(name) for name, row in rows.items() if row.kept or row.broken),
    ]
    struck = sum(len(row.kept) + len(row.broken) for row in rows.values())
    broken = sum(len(row.broken) for row in rows.values())
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"\n{text}\n\n{struck} faults in {seconds / 60:.1f} minutes, {broken} broken promises"


if __name__ == "__main__":
    sys.exit(main())
