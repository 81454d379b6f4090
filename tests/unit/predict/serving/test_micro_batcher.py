"""Rows that come together are computed together, each gets its own, and none waits longer than it must."""

import asyncio
import threading
import time

import numpy as np
import pytest

from trainer.predict.serving.micro_batcher import MicroBatcher


def doubled(rows):
    return rows.astype(np.float64) * 2


def answers(work, compute=doubled, **arguments):
    """Run `work(batcher)` beside the batcher; returns what it returned, and the sizes of the batches."""
    sizes = []

    async def both():
        batcher = MicroBatcher(
            compute, **{"most": 4, "wait_s": 0.05, "coming": lambda: 4, "observed": sizes.append, **arguments}
        )
        running = asyncio.create_task(batcher.run())
        await asyncio.sleep(0)  # it is idle now
        try:
            return await work(batcher)
        finally:
            running.cancel()

    return asyncio.run(both()), sizes


def row(number):
    return np.full((2,), number, dtype=np.uint8)


async def all_of(batcher, count):
    return await asyncio.gather(*(batcher.submit(row(number)) for number in range(count)), return_exceptions=True)


def test_batches():
    found, sizes = answers(lambda batcher: all_of(batcher, 10))
    assert [one.tolist() for one in found] == [[2 * number] * 2 for number in range(10)]
    assert sizes == [4, 4, 2]

    # One alone waits for others only so long.
    async def alone(batcher):
        start = time.monotonic()
        await batcher.submit(row(1))
        return time.monotonic() - start

    waited, sizes = answers(alone, wait_s=0.2)
    assert 0.19 < waited < 2
    assert sizes == [1]
    assert answers(alone, wait_s=0.0)[0] < 0.15
    assert answers(alone, wait_s=0.2, coming=lambda: 1)[0] < 0.15, "no other one is on its way"


def test_arrivals_form_the_next_batch():
    begun, go_on = threading.Event(), threading.Event()

    def slow(rows):
        begun.set()
        assert go_on.wait(10)
        return doubled(rows)

    async def work(batcher):
        first = asyncio.create_task(batcher.submit(row(0)))
        await asyncio.to_thread(begun.wait, 10)
        others = [asyncio.create_task(batcher.submit(row(number))) for number in (1, 2, 3)]
        await asyncio.sleep(0)
        go_on.set()
        start = time.monotonic()
        await asyncio.gather(first, *others)
        return time.monotonic() - start

    took, sizes = answers(work, compute=slow, wait_s=0.0)
    assert sizes == [1, 3]
    assert took < 5


def test_a_failing_batch_fails_alone():
    def picky(rows):
        if (rows == 1).any():
            raise ValueError("no ones")
        return doubled(rows)

    async def work(batcher):
        failed = await all_of(batcher, 4)
        return failed, await batcher.submit(row(7))

    (failed, later), _ = answers(work, compute=picky)
    assert [str(one) for one in failed] == ["no ones"] * 4
    assert later.tolist() == [14, 14]


def test_who_stops_waiting_leaves_no_work_behind():
    begun, go_on = threading.Event(), threading.Event()
    computed = []

    def slow(rows):
        computed.extend(rows[:, 0].tolist())
        begun.set()
        assert go_on.wait(10)
        return doubled(rows)

    async def work(batcher):
        first = asyncio.create_task(batcher.submit(row(0)))
        await asyncio.to_thread(begun.wait, 10)
        gone, stays = (asyncio.create_task(batcher.submit(row(number))) for number in (1, 2))
        await asyncio.sleep(0)
        gone.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await gone
        return await asyncio.gather(first, stays)

    (first, stays), _ = answers(work, compute=slow, wait_s=0.0)
    assert (first.tolist(), stays.tolist()) == ([0, 0], [4, 4])
    assert computed == [0, 2]
