"""Inputs a little different from others: what a fuzzer does to the bytes that it has."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

NUMBERS = (b"0", b"-1", b"1e999", b"NaN", b"255", b"65536", b"4294967296", b"9223372036854775808", b"9" * 5000)
TOKENS = (
    *(
        b"\0",
        b"\n",
        b'"',
        b"'",
        b",",
        b"=",
        b".",
        b"..",
        b"/",
        b"../",
        b"::",
        b"\\",
        b"\x1b[2J",
        b"\xff\xfe",
        b"\xe2\x80\xae",
    ),
    *(
        b"[" * 2000,
        b'{"a":' * 2000,
        b"null",
        b"true",
        b'"\\ud800"',
        b"<script>",
        b"$\\frac",
        b"%00",
        b"\xff\xda",
        b"s3://",
    ),
)
LARGEST = 200_000
"""Bytes of an input."""


def mutate(random: Random, content: bytes, others: Sequence[bytes]) -> bytes:
    """The content with one to four changes; `others` are inputs that it may take parts from."""
    changed = bytearray(content)
    for _ in range(random.randint(1, 4)):
        _CHANGES[random.randrange(len(_CHANGES))](random, changed, others)
    return bytes(changed[:LARGEST])


def _place(random: Random, content: bytearray) -> int:
    return random.randrange(len(content) + 1)


def _flip(random: Random, content: bytearray, others: Sequence[bytes]) -> None:
    if content:
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)


def _overwrite(random: Random, content: bytearray, others: Sequence[bytes]) -> None:
    place = _place(random, content)
    value = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
    content[place : place + random.choice((1, 2, 4, 8))] = bytes([value]) * random.choice((1, 2, 4, 8))


def _insert(random: Random, content: bytearray, others: Sequence[bytes]) -> None:
    place = _place(random, content)
    content[place:place] = random.choice(TOKENS)


def _remove(random: Random, content: bytearray, others: Sequence[bytes]) -> None:
    place = _place(random, content)
    del content[place : place + random.choice((1, 4, 16, 256))]


def _repeat(random: Random, content: bytearray, others: Sequence[bytes]) -> None:
    place = _place(random, content)
    part = content[place : place + random.choice((4, 32, 256))]
    content[place:place] = part * random.choice((1, 2, 50))


def _cut(random: Random, content: bytearray, others: Sequence[bytes]) -> None:
    del content[_place(random, content) :]


def _splice(random: Random, content: bytearray, others: Sequence[bytes]) -> None:
    other = random.choice(others)
    place, start = _place(random, content), random.randrange(len(other) + 1)
    content[place:] = other[start:]


def _number(random: Random, content: bytearray, others: Sequence[bytes]) -> None:
    """Another number where one stands."""
    digits = [place for place, byte in enumerate(content) if chr(byte).isdigit()]
    if digits:
        place = end = random.choice(digits)
        while end < len(content) and chr(content[end]).isdigit():
            end += 1
        content[place:end] = random.choice(NUMBERS)


_CHANGES = (_flip, _flip, _overwrite, _insert, _remove, _repeat, _cut, _splice, _number, _number)
