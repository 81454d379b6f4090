"""The faults, each with what is promised then; where it strikes is drawn by chance."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.faults import damage
from tests.faults.bench import Bench
from tests.faults.inside import Fault
from tests.faults.jobs import Job
from tests.faults.promises import Kept, goes_on, goes_through, stops, stops_and_goes_on
from tests.faults.stores import WatchedStore
from tests.faults.tracking_server import TrackingServer
from trainer.io import artifacts
from trainer.io.errors import CRASH_EXIT_CODE, EXIT_CODE, PREEMPTED_EXIT_CODE

KINDS = ("distillation", "pretraining", "recording", "preparation", "tuning", "profiling", "evaluation", "registration")
"""Of jobs: as `Bench` names them."""
WAIT_S = 30
"""How long processes wait for one another where one of them hangs."""
GRACE_S = 30
"""How long Kubernetes waits after SIGTERM."""


class Surroundings:
    """What a scenario needs: jobs, an object store, an MLflow server."""

    def __init__(self, bench: Bench, store: WatchedStore, tracking: TrackingServer) -> None:
        self.bench, self.store, self.tracking = bench, store, tracking


Scenario = Callable[[Surroundings, random.Random], Kept]


# ---------------------------------------------------------------------------------------------------------------------
# Processes


def one_process_is_ended(signal_name: str, at: Surroundings, chance: random.Random) -> Kept:
    """One of two processes is killed, or crashes, at some step."""
    whole, rank = at.bench.whole_pair, chance.randrange(2)
    fault = Fault(does=signal_name, rank=rank, step=chance.randrange(whole.steps))
    message = f"process {rank} of 2: was ended by {signal_name}"
    return stops_and_goes_on(at.bench.pair(), whole.result, fault, code=EXIT_CODE, message=message)


def one_process_hangs(at: Surroundings, chance: random.Random) -> Kept:
    """One of two processes is stopped: the other one waits no longer than the limit, and names it."""
    whole, rank, job = at.bench.whole_pair, chance.randrange(2), at.bench.pair()
    job.environment = {"TRAINER_WAIT_S": str(WAIT_S)}
    fault = Fault(does="SIGSTOP", rank=rank, step=chance.randrange(1, whole.steps))
    message = rf"process {1 - rank} of 2: rank {rank} did not come to .* within {WAIT_S} s"
    return stops_and_goes_on(job, whole.result, fault, code=EXIT_CODE, message=message)


def loader_hangs(at: Surroundings, chance: random.Random) -> Kept:
    """A loader process hangs: the training process waits no longer than the limit."""
    whole, job = at.bench.whole_pair, at.bench.pair(workers=1)
    job.environment = {"TRAINER_WAIT_S": str(WAIT_S)}
    load = chance.randrange(whole.steps * job.settings["batch_size"] // 2)
    fault = Fault(does="sleep", seconds=3600, rank=chance.randrange(2), load=load)
    message = rf"process {fault.rank} of 2: none of 1 loader processes had a batch within {WAIT_S / 2:g} s"
    return stops_and_goes_on(job, whole.result, fault, code=EXIT_CODE, message=message)


def asked_to_end(who: str, does: str, at: Surroundings, chance: random.Random) -> Kept:
    """SIGTERM, once or twice, to all processes or to one of two: they agree on a step, write a checkpoint, and end."""
    whole, job = at.bench.whole_pair, at.bench.pair()
    to = {"all": -1, "one": 0}[who]
    fault = Fault(does=does, to=to, rank=chance.randrange(2), step=chance.randrange(whole.steps // 2))
    message = "and the same command continues from there"
    kept = stops_and_goes_on(job, whole.result, fault, code=PREEMPTED_EXIT_CODE, message=message)
    assert kept.seconds < GRACE_S, f"took {kept.seconds:.0f} s to end"
    assert does != "SIGTERM" or fault.step == 0 or not kept.repeated, f"{kept.repeated} steps were lost after {fault}"
    return kept


def comes_back(at: Surroundings, chance: random.Random) -> Kept:
    """A training that everybody thinks dead, and that another try has replaced, comes back: it changes nothing any more."""
    whole, job = at.bench.whole("distillation"), at.bench.distillation()
    other = dataclasses.replace(job, scratch=job.scratch / "other")
    notes, step = job.upcoming, chance.randrange(1, whole.steps - 5)
    with ThreadPoolExecutor(1) as pool:
        stale = pool.submit(job.fork, Fault(does="SIGSTOP", step=step), limit_s=300)
        while notes.fired is None and not stale.done():
            time.sleep(0.05)
        try:
            ending = other.fork()
        finally:
            os.kill(job.process, signal.SIGCONT)
        first = stale.result()  # which may be stopped within a write: what it leaves is looked for when it has ended
    goes_through(other, whole.result, ending)
    assert first.code == EXIT_CODE, f"the old one ended with {first.code}: {first.said[-2000:]}"
    assert "superseded" in first.said, first.said[-2000:]
    assert job.result() == whole.result, "the old one changed the result"
    return Kept(outcome="the old one ended with its message, the same result", seconds=first.seconds)


def not_a_number(at: Surroundings, chance: random.Random) -> Kept:
    """A weight of one of two processes is no number any more."""
    whole, rank = at.bench.whole_pair, chance.randrange(2)
    fault = Fault(does="poison", rank=rank, step=chance.randrange(whole.steps))
    message = rf"the loss is not finite at step {fault.step + 1} \(process {rank};"
    return stops_and_goes_on(at.bench.pair(), whole.result, fault, code=EXIT_CODE, message=message)


def slow_process(at: Surroundings, chance: random.Random) -> Kept:
    """One of two processes takes seconds for a step."""
    whole = at.bench.whole_pair
    fault = Fault(does="sleep", seconds=3, rank=chance.randrange(2), step=chance.randrange(whole.steps))
    return goes_on(at.bench.pair(), whole.result, fault)


def clock_jumps(at: Surroundings, chance: random.Random) -> Kept:
    """The clock of one of two processes is set by up to a month."""
    whole = at.bench.whole_pair
    seconds = chance.choice([-1, 1]) * chance.randrange(60, 30 * 86400)
    fault = Fault(does="clock", seconds=seconds, rank=chance.randrange(2), step=chance.randrange(whole.steps))
    return goes_on(at.bench.pair(), whole.result, fault)


def launcher_is_killed(at: Surroundings, chance: random.Random) -> Kept:
    """The process that launches is killed, and all others with it, as when a container or a machine ends."""
    whole = at.bench.whole_pair
    fault = Fault(does="SIGKILL", to=-1, rank=chance.randrange(2), step=chance.randrange(whole.steps))
    return stops_and_goes_on(at.bench.pair(), whole.result, fault, code=-signal.SIGKILL)


def ended_at_any_moment(does: str, at: Surroundings, chance: random.Random) -> Kept:
    """The launcher is asked to end, or killed with all others, at a moment by the clock: while they start, train, validate or write."""
    whole, job = at.bench.whole_pair, at.bench.pair()
    delay_s, over = chance.uniform(0.0, whole.seconds), threading.Event()
    notes = job.upcoming

    def strike() -> None:
        while not job.process and not over.wait(0.01):
            pass
        if not over.wait(delay_s) and notes.fire():
            (os.kill if does == "SIGTERM" else os.killpg)(job.process, signal.Signals[does])

    with ThreadPoolExecutor(1) as pool:
        striking = pool.submit(strike)
        try:
            broken = job.run()
        finally:
            over.set()
        striking.result()
    struck = f"{does} after {delay_s:.1f} of {whole.seconds:.1f} s"
    if broken.code == 0:
        goes_through(job, whole.result, broken)
        return Kept(outcome="done before, the same result", seconds=0.0)
    # Before Python has come to ask for it, SIGTERM ends a process by itself.
    ends = {"SIGTERM": (PREEMPTED_EXIT_CODE, -signal.SIGTERM), "SIGKILL": (-signal.SIGKILL,)}
    assert broken.code in ends[does], f"{struck}: ended with {broken.code}: {broken.said[-2000:]}"
    assert "Traceback" not in broken.said, f"{struck}: {broken.said[-3000:]}"
    assert broken.fired is not None
    seconds = broken.ended - broken.fired
    assert seconds < GRACE_S, f"{struck}: took {seconds:.0f} s to end"
    job.believed()
    again = job.run()
    goes_through(job, whole.result, again)
    return Kept(
        outcome="stopped, then the same result",
        seconds=seconds,
        recovered_s=again.recovered(broken),
        repeated=again.repeats(broken),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Files


def killed_before_a_write(kind: str, does: str, at: Surroundings, chance: random.Random) -> Kept:
    """Killed between any two writes, or in the middle of one."""
    whole, job = at.bench.whole(kind), at.bench.job(kind)
    last = len(whole.writes) if does == "SIGKILL" else last_long_write(whole.writes)
    fault = Fault(does=does, folder=job.folder, write=chance.randint(1, last))
    code = -(signal.SIGKILL if does == "SIGKILL" else signal.SIGXFSZ)
    return stops_and_goes_on(job, whole.result, fault, code=code, start=Job.fork)


def last_long_write(writes: list[str]) -> int:
    """The number of the last file that is opened to be written."""
    return max(number for number, write in enumerate(writes, 1) if write.startswith("open "))


def disk_refuses(kind: str, error: str, at: Surroundings, chance: random.Random) -> Kept:
    """From some write on the disk is full, or read-only; later it is not any more."""
    whole, job = at.bench.whole(kind), at.bench.job(kind)
    fault = Fault(does=error, folder=job.folder, write=chance.randint(1, last_long_write(whole.writes)))
    message = {
        "ENOSPC": "cannot write to .*: the disk is full",
        "EROFS": "cannot write to .*: the file system is read-only",
    }
    return stops_and_goes_on(job, whole.result, fault, code=EXIT_CODE, message=message[error], start=Job.fork)


def checkpoint_is_damaged(way: str, at: Surroundings, chance: random.Random) -> Kept:
    """After a crash a file of the newest checkpoint is damaged: an older one serves."""
    whole, job = at.bench.whole("distillation"), at.bench.distillation()
    fault = Fault(does="SIGKILL", step=chance.randrange(12, whole.steps))  # two checkpoints are complete by then
    broken = job.fork(fault)
    assert broken.code == -signal.SIGKILL, broken.said
    newest = max(Path(job.checkpoints).glob("*/step-*/manifest.json")).parent
    file = chance.choice(damage.files_of(newest, way))
    what = damage.WAYS[way](file, chance)
    again = job.fork()
    goes_through(job, whole.result, again)
    gone = file.name == artifacts.MANIFEST and way == "removal"
    assert gone or newest.name in again.said, f"{what}, and {newest.name} was not named: {again.said[-2000:]}"
    assert "resuming after step" in again.said, again.said[-2000:]
    assert broken.fired is not None
    return Kept(
        outcome="an older one served, the same result",
        seconds=broken.ended - broken.fired,
        recovered_s=again.recovered(broken),
        repeated=again.repeats(broken),
    )


def input_is_damaged(way: str, at: Surroundings, chance: random.Random) -> Kept:
    """A file of an input is damaged: the job stops before it learns from it, and names the file."""
    bench = at.bench
    readers = {
        "distillation": bench.distillation,
        "distillation from recorded outputs": partial(bench.distillation, teacher="recorded"),
        "profile": bench.profiling,
        "evaluate": bench.evaluation,
    }
    job = readers[chance.choice(sorted(readers))]()
    read = job.inputs.keys() - ({"teacher"} if "teacher_outputs" in job.inputs else set())  # of that only the manifest
    keyword = chance.choice(sorted(read))
    copy = Path(shutil.copytree(job.inputs[keyword], job.scratch / keyword))
    # Of a data set a stage reads the splits that it needs; each of these reads the validation images.
    file = chance.choice(damage.files_of(copy / "val" if keyword == "dataset" else copy, way))
    damage.WAYS[way](file, chance)
    job.inputs = {**job.inputs, keyword: str(copy)}
    return stops(job, code=EXIT_CODE, message=rf"{re.escape(str(copy))}.*{re.escape(file.name)}", start=Job.fork)


# ---------------------------------------------------------------------------------------------------------------------
# The object store


def stored(at: Surroundings, job: Callable[..., Job], chance: random.Random) -> Job:
    at.store.reset()
    made = job(place=at.store.uri(f"job-{chance.randrange(10**9)}"))
    made.environment = {**at.store.environment, "TRAINER_CACHE": str(made.scratch / "cache")}
    return made


def store_client_is_killed(kind: str, at: Surroundings, chance: random.Random) -> Kept:
    """Killed before a request that changes something in the store."""
    whole = at.bench.whole(kind)
    job = stored(at, getattr(at.bench, kind), chance)
    number = chance.randint(1, {"distillation": 30, "recording": 8}[kind])

    def strike(count: int) -> None:
        if count == number and job.upcoming.fire():
            os.kill(job.process, signal.SIGKILL)

    at.store.watch(strike)
    return stops_and_goes_on(job, whole.result, code=-signal.SIGKILL, start=Job.fork)


def store_hesitates(how: str, at: Surroundings, chance: random.Random) -> Kept:
    """From some request on the store fails for a while: that is waited for."""
    whole, job = at.bench.whole("distillation"), stored(at, at.bench.distillation, chance)
    number = chance.randint(1, 30)
    ways = {
        "503": lambda: at.store.answer(503, times=3),
        "slow": lambda: at.store.delay(2, times=2),
        "cut": lambda: at.store.cut(after=chance.randrange(200), times=2, method="PUT"),
        "answer lost": lambda: at.store.lose_answer(times=2),
    }

    def strike(count: int) -> None:
        if count == number and job.upcoming.fire():
            ways[how]()

    at.store.watch(strike)
    return goes_on(job, whole.result, start=Job.fork)


def store_refuses(at: Surroundings, chance: random.Random) -> Kept:
    """From some request on the store refuses everything (403); later it does not any more."""
    whole, job = at.bench.whole("distillation"), stored(at, at.bench.distillation, chance)
    number = chance.randint(1, 30)

    def strike(count: int) -> None:
        if count == number and job.upcoming.fire():
            at.store.answer(403)

    at.store.watch(strike)
    message = "refuses .*403 AccessDenied"
    return stops_and_goes_on(job, whole.result, code=EXIT_CODE, message=message, start=Job.fork, mend=at.store.clear)


# ---------------------------------------------------------------------------------------------------------------------
# MLflow


def tracking_is_away_at_the_start(at: Surroundings, chance: random.Random) -> Kept:
    """MLflow does not answer when a stage starts: it ends at once."""
    job = at.bench.distillation()
    job.environment = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}
    return stops(job, code=CRASH_EXIT_CODE, message="MLflow at http://127.0.0.1:9: does not answer", start=Job.fork)


def tracking_goes_away(when: str, at: Surroundings, chance: random.Random) -> Kept:
    """The MLflow server hangs from some step on, or from the last one, to the end and after it."""
    whole, job = at.bench.whole("distillation"), at.bench.distillation()
    with at.tracking.answering() as server:
        job.environment = {"MLFLOW_TRACKING_URI": server.uri}
        step = whole.steps - 1 if when == "the last step" else chance.randrange(whole.steps - 1)
        fault = Fault(does="SIGSTOP", to=-server.group, step=step)
        return goes_on(job, whole.result, fault, message="MLflow run", start=Job.fork)


SCENARIOS: Mapping[str, Scenario] = {
    **{f"{name} of one process": partial(one_process_is_ended, name) for name in ("SIGKILL", "SIGSEGV", "SIGABRT")},
    "SIGSTOP of one process": one_process_hangs,
    "loader process hangs": loader_hangs,
    **{f"SIGTERM of {who}": partial(asked_to_end, who, "SIGTERM") for who in ("all", "one")},
    "SIGTERM of all, twice": partial(asked_to_end, "all", "SIGTERM twice"),
    "launcher killed": launcher_is_killed,
    **{f"{does} at any moment": partial(ended_at_any_moment, does) for does in ("SIGTERM", "SIGKILL")},
    "old try comes back": comes_back,
    "NaN in one process": not_a_number,
    "slow process": slow_process,
    "clock set": clock_jumps,
    **{
        f"{kind}: {what}": partial(killed_before_a_write, kind, does)
        for kind in KINDS
        for what, does in {"killed before a write": "SIGKILL", "killed in a write": "tear"}.items()
    },
    **{
        f"{kind}: {what}": partial(disk_refuses, kind, error)
        for kind in KINDS
        for what, error in {"disk full": "ENOSPC", "disk read-only": "EROFS"}.items()
    },
    **{f"checkpoint: {way}": partial(checkpoint_is_damaged, way) for way in damage.WAYS},
    **{f"input: {way}": partial(input_is_damaged, way) for way in damage.WAYS},
    **{
        f"store: {kind} killed before a request": partial(store_client_is_killed, kind)
        for kind in ("distillation", "recording")
    },
    **{f"store: {how}": partial(store_hesitates, how) for how in ("503", "slow", "cut", "answer lost")},
    "store: 403": store_refuses,
    "MLflow away at the start": tracking_is_away_at_the_start,
    **{f"MLflow goes away in {when}": partial(tracking_goes_away, when) for when in ("some step", "the last step")},
}
"""Name -> what is done and checked."""
