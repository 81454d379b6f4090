from __future__ import annotations

import pytest

from trainer.io import formatting


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (formatting.short(0.01234), "0.0123"),
        (formatting.short(17.0), "17"),
        (formatting.short(1234.4), "1,234"),
        (formatting.short(1.23456e9), "1.23e+09"),
        (formatting.exact(12345.67), "12345.67"),
        (formatting.exact(2.0), "2"),
        (formatting.exact(999999999999999.0), "999999999999999"),
        (formatting.exact("0401"), "0401"),
        (formatting.percent(0.0), "0 %"),
        (formatting.percent(0.0001), "< 0.1 %"),
        (formatting.percent(0.034), "3.4 %"),
        (formatting.percent(0.62), "62 %"),
        (formatting.milliseconds(17.5), "17.5 ms"),
        (formatting.milliseconds(12_345.0), "12.3 s"),
        (formatting.size(0), "0 MB"),
        (formatting.size(3200), "3.2 kB"),
        (formatting.size(17e6), "17 MB"),
        (formatting.size(1.06e9), "1.06 GB"),
        (formatting.duration(0.012), "12 ms"),
        (formatting.duration(59.6), "59.6 s"),
        (formatting.duration(119), "119 s"),
        (formatting.duration(120), "2 min"),
        (formatting.duration(4000), "66.7 min"),
        (formatting.duration(11_100), "3.08 h"),
        (formatting.clipped("a" * 91), "a" * 89 + "…"),
        (formatting.listed(["a", "b"], 2), "a, b"),
        (formatting.listed(["a", "b", "c"], 1), "a and 2 more"),
        (
            formatting.listed([f"a{number} was 0" for number in range(4)], 2, last=", and "),
            "a0 was 0, a1 was 0, and 2 more",
        ),
        (formatting.listed(["a", "b", "c"], 2, between="; ", last="; and "), "a; b; and 1 more"),
    ],
)
def test_numbers_are_written_with_their_units(shown: str, expected: str) -> None:
    assert shown == expected


@pytest.mark.parametrize(
    ("text", "columns"),
    [("cat", 3), ("猫の", 4), ("é", 1), ("e\u0301", 1), ("Wo", 2.7), ("Cat", 3.2), ("fill", 2.8), ("", 0)],
)
def test_wide_characters_count_two_columns_and_combining_marks_none(text: str, columns: float) -> None:
    assert formatting.columns(text) == pytest.approx(columns)


@pytest.mark.parametrize(
    ("name", "isolated"), [("cat", "cat"), ("猫", "猫"), ("قطة", "\u2068قطة\u2069"), ("حجر 2", "\u2068حجر 2\u2069")]
)
def test_only_name_that_is_read_from_right_is_isolated(name: str, isolated: str) -> None:
    assert formatting.isolated(name) == isolated
