from __future__ import annotations

import pytest

from trainer.profiling import labels


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("waiting_share", 0.4, ("waiting share", "40 %")),
        ("busy_percent", 99.0, ("busy", "99 %")),
        ("longest_ms", 12_345.0, ("longest", "12.3 s")),
        ("wait_s", 4000.0, ("wait", "66 min 40 s")),
        ("disk_read_bytes_per_s", 2.5e6, ("disk, read", "2.5 MB/s")),
        ("disk_read_bytes_per_s", 100.0, ("disk, read", "0.1 kB/s")),
        ("process_rss_bytes", 1.06e9, ("memory of the process", "1.06 GB")),
        ("growth", float("inf"), ("growth", "inf")),
        ("steps", 0.0, ("steps", "0")),
        ("parameters", 86e6, ("parameters", "86,000,000")),
    ],
)
def test_a_number_has_the_unit_of_its_name(name: str, value: float, expected: tuple[str, str]) -> None:
    assert labels.named_number(name, value) == expected
