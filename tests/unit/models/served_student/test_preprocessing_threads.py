"""Photos are decoded at the same time where they have one limit, and never under another's."""

import io
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from trainer.models.served_student.preprocessing import BadImageError, _PillowLimits, decode


def test_one_limit_is_shared_and_put_back():
    limits, before = _PillowLimits(), (Image.MAX_IMAGE_PIXELS, list(warnings.filters))
    together = threading.Barrier(3, timeout=10)

    def use():
        with limits.at_most(1000):
            together.wait()
            assert Image.MAX_IMAGE_PIXELS == 1000

    with ThreadPoolExecutor(3) as pool:
        for used in [pool.submit(use) for _ in range(3)]:
            used.result()
    assert (Image.MAX_IMAGE_PIXELS, list(warnings.filters)) == before


def test_another_limit_waits_and_gets_its_turn():
    limits, inside, go_on, order = _PillowLimits(), threading.Event(), threading.Event(), []

    def use(name, max_pixels, *, held=False):
        with limits.at_most(max_pixels):
            assert max_pixels == Image.MAX_IMAGE_PIXELS
            order.append(name)
            if held:
                inside.set()
                assert go_on.wait(10)

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(use, "first", 1000, held=True)
        assert inside.wait(10)
        other = pool.submit(use, "other", 2000)
        while not limits._waiting:
            time.sleep(0.001)
        late = pool.submit(use, "late", 1000)
        time.sleep(0.05)
        assert order == ["first"], "one waits for the limit, the other behind it"
        go_on.set()
        for used in (first, other, late):
            used.result()
    assert sorted(order) == ["first", "late", "other"]


def test_many_threads_with_two_limits_get_what_each_one_allows():
    buffer = io.BytesIO()
    Image.new("RGB", (40, 40), "red").save(buffer, "PNG")

    def decoded(number):
        if number % 2:
            return decode(buffer.getvalue(), max_pixels=1600).size == (40, 40)
        with pytest.raises(BadImageError, match="too many pixels"):
            decode(buffer.getvalue(), max_pixels=1000)
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(decoded, range(400)))
