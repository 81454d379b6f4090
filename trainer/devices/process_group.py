"""The group of training processes that torchrun started, the proof that it is one group, and its common end.

Every wait for the other processes has a limit, and its error names who is missing from what: `CollectiveWatchdog`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store, rendezvous  # type: ignore[attr-defined]  # public, torch documents them

from trainer.config import WAIT_VARIABLE
from trainer.devices import Device, choose_device
from trainer.io.costs import dollars_text, place_here
from trainer.io.errors import LostProcessError, SettingsError, TrainingError
from trainer.io.host import EndRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_WAIT_S = 600.0
_KEYS = "trainer/collectives"
"""Where the store keeps who has reached which collective."""
_DEVICE_PATIENCE = 2
"""NCCL's timeout, as a multiple of the host's: the host names the missing rank and exits cleanly, NCCL aborts the process."""
_EXCHANGED_BYTES = 64 * 2**20
_TCP = "Socket"
"""NCCL's own network over TCP, as its log names it; that of aws-ofi-nccl is Libfabric."""
_ROLL_CALL_S = 3.0
"""How long a process that has waited in vain waits for the others to say the same."""
_CALLS_IN_LIMIT = 10
"""How often the first process tells the others within their limit that it works."""
_STORE_S = 10.0
"""How long the store may take to say who came."""

_GAVE_UP = re.compile(r"[Tt]imed out|[Tt]imeout")
_FROM_TORCH = re.compile(r"gloo|NCCL|c10d|[Ss]tore|Connection (closed|reset)|Broken pipe")
_PLACE = re.compile(r"^\[\S+:\d+\] ")
"""Where in its source torch has failed."""


def wait_limit_s() -> float:
    """Return how long a process waits for the others, in seconds; raises `SettingsError` for a `TRAINER_WAIT_S` not above 0."""
    text = os.environ.get(WAIT_VARIABLE) or str(DEFAULT_WAIT_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise SettingsError(f"{WAIT_VARIABLE} must be a number of seconds above 0, got {text!r}")
    return seconds


@dataclass(frozen=True, kw_only=True)
class Processes:
    """This process among the others.

    The host meets over a group of its own, of gloo, whatever the devices use among themselves: so a wait ends with a message, a
    `LostProcessError`, where a process did not come within the limit or is gone. It says `what` the wait was for.
    """

    rank: int
    world_size: int
    local_rank: int
    device: Device
    local_world_size: int = 1
    """Processes on this machine."""
    host: dist.ProcessGroup | None = None
    """In which the hosts meet; none where this process is alone."""
    watchdog: CollectiveWatchdog | None = None
    """Tells who did not come to what; none where this process is alone."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def barrier(self, what: str = "a barrier of all processes") -> None:
        if self.world_size > 1:
            with self.waiting(what, is_collective=True):
                dist.barrier(group=self.host)

    def gather(self, value: T, what: str = "an exchange between all processes") -> list[T]:
        """Return the value of every process, in the order of the ranks; the same list on every process."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self.waiting(what, is_collective=True):
            dist.all_gather_object(values, value, group=self.host)
        return values

    def from_first(self, make: Callable[..., T], what: str) -> T:
        """Return what the first process makes, on every process.

        `make` gets a function `works` to call meanwhile: the others wait for its next call, not for its end, which may be far.
        """
        if self.world_size == 1:
            return make(works=lambda: None)
        if not self.is_first:
            said: list[tuple[T] | None] = self.gather(None, what)
            while (made := said[0]) is None:
                said = self.gather(None, what)
            return made[0]
        called, interval_s = time.monotonic(), wait_limit_s() / _CALLS_IN_LIMIT

        def works() -> None:
            nonlocal called
            if time.monotonic() - called >= interval_s:
                self.gather(None, what)
                called = time.monotonic()

        own = make(works=works)
        self.gather((own,), what)
        return own

    def collect(self, value: T, what: str = "an exchange with the first process") -> list[T]:
        """Return the value of every process, in the order of the ranks, to the first process, and nothing to the others."""
        if self.world_size == 1:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.is_first else None
        with self.waiting(what, is_collective=True):
            dist.gather_object(value, values, dst=0, group=self.host)
        return values or []

    def total(self, values: torch.Tensor, what: str = "a sum over all processes") -> torch.Tensor:
        """Sum over the processes, element by element; the same on every process. On a GPU the host continues meanwhile."""
        if self.world_size == 1:
            return values
        summed = values.clone()
        with self.waiting(what):
            dist.all_reduce(summed)
        return summed

    def waiting(self, what: str, *, is_collective: bool = False) -> AbstractContextManager[None]:
        """Stand around torch's own waits for the other processes: as `CollectiveWatchdog.waiting`."""
        return nullcontext() if self.watchdog is None else self.watchdog.waiting(what, is_collective=is_collective)


@contextmanager
def join_processes(*, deterministic: bool | None = False) -> Iterator[Processes]:
    """Join the group that the environment describes (torchrun's variables; without them one process alone).

    Raises:
        TrainingError: the group does not sum over all its processes.
        LostProcessError: not all processes came within `TRAINER_WAIT_S`.
        SettingsError: that limit is not a number, or the device is not there.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = choose_device(local_rank)
    with device.deterministic() if deterministic else nullcontext():
        if world_size == 1:
            yield Processes(rank=0, world_size=1, local_rank=local_rank, device=device.open())
            return
        processes = _join(device, local_rank)
        device.open()
        prove_one_group(processes, expected=world_size)
        measure_exchange(processes)
        yield processes
    # Skipped on an exception: leaving the group would make the other ranks fail first and hide the cause.
    dist.destroy_process_group()


def _join(device: Device, local_rank: int) -> Processes:
    limit_s = wait_limit_s()
    limit = timedelta(seconds=limit_s)
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=limit))
    except dist.DistError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise LostProcessError(
            f"the processes' rendezvous {place} did not answer, or not all came to it, within {limit_s:g} s "
            f"({str(error).splitlines()[0]}); look whether the first node and all processes run"
        ) from error
    store.set_timeout(limit)
    if device.kind == "cuda":
        _log_network()
    watchdog = CollectiveWatchdog(PrefixStore(_KEYS, store), rank=rank, world_size=world_size, limit_s=limit_s)
    with watchdog.waiting("the start of all processes", is_collective=True):
        dist.init_process_group(
            device.backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=limit if device.kind == "cpu" else _DEVICE_PATIENCE * limit,
            device_id=device.torch_device if device.kind == "cuda" else None,
        )
        host = dist.new_group(backend="gloo", timeout=limit)
    assert isinstance(host, dist.ProcessGroup), "every process is a member"
    return Processes(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        device=device,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        host=host,
        watchdog=watchdog,
    )


def measure_exchange(processes: Processes) -> None:
    """Log how fast GPUs of several machines sum gradients; warn where EFA was asked for (`FI_PROVIDER`) and NCCL took TCP."""
    machines = processes.world_size // processes.local_world_size
    if machines < 2 or processes.device.kind != "cuda":
        return
    values, began = torch.zeros(_EXCHANGED_BYTES // 4, device=processes.device.torch_device), 0.0
    for _ in range(2):  # the first one makes the connections
        processes.device.synchronize()
        began = time.perf_counter()
        processes.total(values, "the measurement of an all-reduce")
        processes.device.synchronize()
    # What each GPU sends and receives, as NCCL's tests count it.
    share = 2 * (processes.world_size - 1) / processes.world_size
    rate = share * _EXCHANGED_BYTES / (time.perf_counter() - began) / 1e9
    if not processes.is_first:
        return
    logger.info("gradients travel between %d machines at %.2f GB/s (all-reduce of 64 MiB)", machines, rate)
    if os.environ.get("FI_PROVIDER") == "efa" and _network_of_nccl() == _TCP:
        place = place_here()
        dollars = dollars_text(place.dollars(3600) if place else None)
        logger.warning(
            "FI_PROVIDER=efa asks for EFA, but NCCL took its network %s, so gradients travel over TCP, at %.2f GB/s%s; use an image with "
            "libfabric and aws-ofi-nccl and nodes with EFA, or a pool without EFA",
            _TCP,
            rate,
            f", on machines for {dollars} an hour" if dollars else "",
        )


def _log_network() -> None:
    """Let NCCL log into a file which network it takes, where EFA is asked for and nobody reads its log in another way."""
    if os.environ.get("FI_PROVIDER") == "efa" and "NCCL_DEBUG" not in os.environ:
        file = Path(tempfile.gettempdir(), f"nccl-{os.getpid()}.log")
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(file)}


def _network_of_nccl() -> str:
    """Return the network that NCCL's log names first; empty where there is no such line."""
    try:
        text = Path(os.environ.get("NCCL_DEBUG_FILE", "")).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"Using network (\S+)", text)
    return found[1] if found else ""


def prove_one_group(processes: Processes, *, expected: int) -> None:
    """Sum the ranks over the real group: some set-ups silently train isolated copies.

    Raises:
        TrainingError: the sum is not 1 + 2 + ... + `expected`; or the device's runtime numbers the processes otherwise.
    """
    ones = torch.tensor([float(processes.rank + 1)], device=processes.device.torch_device)
    got, wanted = int(processes.total(ones).item()), expected * (expected + 1) // 2
    if got != wanted:
        raise TrainingError(
            f"{expected} processes were started, but the sum over their ranks is {got} instead of {wanted}: they do not form one "
            f"group (backend {processes.device.backend}, world size {processes.world_size}{_place(processes)}) and would train isolated "
            "copies; check the launcher's environment"
        )
    if processes.device.place not in (None, (processes.rank, processes.world_size)):
        raise TrainingError(
            f"the launcher calls this process {processes.rank} of {processes.world_size}{_place(processes)}: their exchanges would be "
            "mixed up; check the launcher's environment"
        )


def _place(processes: Processes) -> str:
    if (place := processes.device.place) is None:
        return ""
    return f"; the runtime PJRT_DEVICE={os.environ.get('PJRT_DEVICE')} calls this process {place[0]} of {place[1]}"


class Preemption(EndRequest):
    """A request to end this training before its time, of any of its processes.

    Each process says at the end of a step whether it was asked to end, and receives at the end of the next one what the others said: the
    all-reduce runs while that step computes. So all processes know of it at the same step, two steps after the request at most.
    """

    def __init__(self, processes: Processes) -> None:
        super().__init__()
        self._processes = processes
        self._requested = torch.zeros((), dtype=torch.int32)
        self._pending: dist.Work | None = None
        self._ending = False

    def should_stop(self, what: str, *, wait: bool = False) -> bool:
        """Return whether all processes are to stop here; the same on all of them, which ask equally often.

        From the first call on a signal no longer ends the process at once, but is answered by the next call.

        Args:
            wait: whether to count every request up to now, which waits for the other processes.
        """
        self.defer()
        if self._processes.world_size == 1:
            return self.came
        self._receive(what)
        if not self._ending:
            self._requested.fill_(self.came)
            self._pending = dist.all_reduce(
                self._requested, op=dist.ReduceOp.MAX, group=self._processes.host, async_op=True
            )
            if wait:
                self._receive(what)
        return self._ending

    def _receive(self, what: str) -> None:
        if self._pending is not None:
            with self._processes.waiting(what):
                self._pending.wait()
            self._pending = None
            self._ending = bool(self._requested.item())


# ---------------------------------------------------------------------------------------------------------------------
# Who is missing


class CollectiveWatchdog:
    """The collectives of one process with all others, in their order.

    Torch ends a collective that takes too long, but says neither what it was for nor who is missing. So each process notes in the store,
    which all of them reach, which collective it has reached; those that waited in vain read who has not.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int, limit_s: float) -> None:
        self._store, self._rank, self._world_size, self._limit_s = store, rank, world_size, limit_s
        self._number = 0

    @contextmanager
    def waiting(self, what: str, *, is_collective: bool = False) -> Iterator[None]:
        """Guard a block that waits for the others: torch's error about them becomes a `LostProcessError` that says who is missing.

        That this process has reached a collective is noted before; of a wait in every step nothing is noted unless it fails.
        """
        self._number += is_collective
        try:
            if is_collective:
                self._note()
            yield
        except RuntimeError as error:
            self._number += not is_collective
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            if not isinstance(error, DistError) and not _FROM_TORCH.search(reason):
                raise
            reason = _PLACE.sub("", reason).partition(". ")[0]
            roll = _within(_STORE_S, lambda: self._missing_ranks(gave_up=bool(_GAVE_UP.search(reason))))
            raise LostProcessError(_message(what, reason, roll, self._limit_s)) from error

    def _note(self, *, gave_up: bool = False) -> None:
        self._store.set(str(self._rank), json.dumps([self._number, gave_up]))

    def _missing_ranks(self, *, gave_up: bool) -> tuple[list[int], bool]:
        """Return the ranks that have not come as far as this process, and whether somebody has waited for them to the limit.

        The others get some time to say that they have waited in vain too. Where none has, those that are missing are gone.
        """
        self._note(gave_up=gave_up)
        deadline = time.monotonic() + _ROLL_CALL_S
        while True:
            notes = [
                json.loads(self._store.get(str(rank))) if self._store.check([str(rank)]) else (0, False)
                for rank in range(self._world_size)
            ]  # the number of the last collective that each has reached, and whether it gave that up
            missing = [rank for rank, (number, _) in enumerate(notes) if number < self._number]
            if not missing or time.monotonic() > deadline:
                return missing, any(given_up for _, given_up in notes)
            time.sleep(0.1)


def _message(what: str, reason: str, roll: tuple[list[int], bool] | None, limit_s: float) -> str:
    if roll is None:
        return f"{what}: {reason}; who is missing is not known, for the processes' rendezvous does not answer either"
    missing, gave_up = roll
    if not missing:
        return f"{what}: all processes came, but lost each other ({reason}); look at the network between the machines"
    who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    if gave_up:
        return f"{who} did not come to {what} within {limit_s:g} s; the log there may say why"
    return f"{who} went away during {what} ({reason})"


def _within(seconds: float, work: Callable[[], T]) -> T | None:
    """Return the result of `work`; None where it fails for want of the store, or takes longer, and is then left to itself."""
    results: list[T] = []

    def run() -> None:
        try:
            results.append(work())
        except RuntimeError as error:
            logger.warning("the processes' rendezvous: %s", error)

    thread = threading.Thread(target=run, name="roll-call", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
