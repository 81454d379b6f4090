"""Throw changed inputs at everything that reads what others have made: `make fuzz MINUTES=5 [SEED=0] [TARGET="image"]`.

Guided by coverage: an input by which lines run that none has run before becomes the base of further ones. It is a small loop rather than a
fuzzing engine, because the readers are Python above libraries that are fuzzed by themselves, and it needs nothing that is not installed.

Each target runs in a process of its own with a limit of memory and of time for an input, so a crash, a hang and a bomb are findings like
an exception that is no message. Findings are kept as files in OUT; the exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile.mutation import mutate
from tests.hostile.targets import TARGETS, Target, try_out

LONGEST_S = 20
"""For one input."""
MEMORY_BYTES = 2 * 2**30
"""That one input may take."""
FOLLOWED = ("/trainer/", "/components/", "/PIL/", "/tomllib/", "/json/", "/safetensors/", "/csv.py")
"""Parts of the names of files whose lines count."""

Line = tuple[types.CodeType, int]


def main() -> int:
    options = _options()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    if options.inside:
        print(json.dumps(fuzz(TARGETS[options.target], options.target, options.minutes * 60, options.seed, out)))
        return 0
    names = [options.target] if options.target else list(TARGETS)
    print(f"seed {options.seed}")
    print(f"{'target':<20}{'inputs':>9}{'read':>8}{'refused':>9}{'lines':>7}{'slowest':>9}  findings")
    findings = 0
    for name in names:
        row = run(name, options.minutes * 60 / len(names), options.seed, out)
        findings += len(row["findings"])
        numbers = (
            f"{row['inputs']:>9,}{row['read']:>8,}{row['refused']:>9,}{row['lines']:>7,}{row['slowest_s']:>7.2f} s"
        )
        print(f"{name:<20}{numbers}  {', '.join(row['findings']) or 'none'}", flush=True)
    return int(findings > 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes",
        type=float,
        default=5.0,
        help="for all targets together, besides the start of their processes (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=TARGETS)
    parser.add_argument(
        "--out", default="runs/.fuzz", metavar="DIR", help="where findings are kept (default: %(default)s)"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def run(name: str, seconds: float, seed: int, out: Path) -> dict[str, Any]:
    """Fuzz a target in a process of its own; one that dies is a finding, and another goes on."""
    total: dict[str, Any] = {"inputs": 0, "read": 0, "refused": 0, "lines": 0, "slowest_s": 0.0, "findings": []}
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        command = [sys.executable, "-m", "tests.hostile.fuzz", "--inside", "--target", name, "--out", str(out)]
        done = subprocess.run(
            [*command, "--seed", str(seed), "--minutes", str(left / 60)], stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode == 0:
            found = json.loads(done.stdout)
            return {
                key: max(value, found[key]) if key in ("lines", "slowest_s") else value + found[key]
                for key, value in total.items()
            }
        total["findings"].append(_keep(_current(out).read_bytes(), name, out, f"ended with {done.returncode}"))
        seed += 1
    return total


def fuzz(target: Target, name: str, seconds: float, seed: int, out: Path) -> dict[str, Any]:
    """Change inputs until the time is up."""
    warnings.simplefilter("ignore")
    seeds = list(target.seeds())
    limit = _memory_in_use() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    corpus, seen, kinds, dice = list(seeds), set[Line](), set[str](), random.Random(f"{seed} {name}")
    total: dict[str, Any] = {"inputs": 0, "read": 0, "refused": 0, "lines": 0, "slowest_s": 0.0, "findings": []}
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < end:
            content = (
                mutate(dice, dice.choice(corpus), corpus) if total["inputs"] >= len(seeds) else seeds[total["inputs"]]
            )
            _current(out).write_bytes(content)
            start, lines = time.monotonic(), set[Line]()
            try:
                refused = _followed(lambda content=content: try_out(target, content, Path(folder)), lines)
                total["refused" if refused else "read"] += 1
            except Exception as error:  # noqa: BLE001  # each is a finding, and kept
                _note(error, content, name, out, kinds, total)
            total["slowest_s"] = max(total["slowest_s"], time.monotonic() - start)
            total["inputs"] += 1
            if not lines <= seen:
                seen |= lines
                corpus.append(content)
    return total | {"lines": len(seen)}


def _note(error: Exception, content: bytes, name: str, out: Path, kinds: set[str], total: dict[str, Any]) -> None:
    """Keep a finding unless one like it is known."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    kind = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
    if kind not in kinds:
        kinds.add(kind)
        traceback.print_exception(error)
        total["findings"].append(_keep(content, name, out, kind))


def _followed(work: Callable[[], str], lines: set[Line]) -> str:
    """The result of some work, which may take only so long; the lines that it runs are added to a set."""

    def local(frame: types.FrameType, event: str, _argument: object) -> Any:
        if event == "line":
            lines.add((frame.f_code, frame.f_lineno))
        return local

    def begin(frame: types.FrameType, _event: str, _argument: object) -> Any:
        return local if any(part in frame.f_code.co_filename for part in FOLLOWED) else None

    faulthandler.dump_traceback_later(LONGEST_S, exit=True)
    sys.settrace(begin)
    try:
        return work()
    finally:
        sys.settrace(None)
        faulthandler.cancel_dump_traceback_later()


def _memory_in_use() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()


def _current(out: Path) -> Path:
    """The input at hand, for whoever asks what has killed the process."""
    return out / "current"


def _keep(content: bytes, name: str, out: Path, kind: str) -> str:
    file = out / f"{name.replace(' ', '-')}-{hashlib.sha256(content).hexdigest()[:12]}"
    file.write_bytes(content)
    return f"{kind} ({file})"


if __name__ == "__main__":
    sys.exit(main())
