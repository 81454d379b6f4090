"""What asks for much gets a message, within a limit of memory that the system enforces (tests/hostile/bombs.py)."""

import json
import os
import re
import subprocess
import sys

import pytest

TOO_LARGE = r"has more than [0-9,]+ bytes, the most that are read of such a file"
NOT_REGULAR = "it is no regular file"
EXPECTED = {
    "PNG of many pixels": "BadImageError: too many pixels",
    "PNG with a huge color profile": "BadImageError: truncated",
    "PNG with a huge text": "BadImageError: truncated",
    "PNG with too many rows": "read",
    "GIF of many pixels": "BadImageError: too many pixels",
    "WebP of many pixels": "BadImageError: too many pixels",
    "PPM of many pixels": "BadImageError: too many pixels",
    "TIFF with a tile of many pixels": "BadImageError: too many pixels: in a tile",
    "JPEG of many pixels": "BadImageError: too many pixels",
    "JPEG of many scans": "BadImageError: too many scans",
    "icon of many pixels": "BadImageError: too many pixels",
    "as large as allowed": "read",
    "stored PNG of many pixels": "BadImageError: damaged: Image size .* exceeds limit",
    "stored JPEG of many pixels": "BadImageError: 65500 x 65500 pixels instead of 16 x 16",
    "stored PostScript": "BadImageError: damaged: cannot identify image file",
    "huge image": f"ObjectTooLargeError: .*{TOO_LARGE}",
    "huge list": r"DataError: .*has more than [0-9,]+ bytes; check the path",
    "huge pools": f"SettingsError: pools .*{TOO_LARGE}",
    "huge recipe": f"SettingsError: recipe .*{TOO_LARGE}",
    "pipe image": f"PermissionError: .*{NOT_REGULAR}",
    "pipe list": f"DataError: .*{NOT_REGULAR}",
    "pipe pools": f"SettingsError: .*{NOT_REGULAR}",
    "pipe recipe": f"SettingsError: .*{NOT_REGULAR}",
    "endless image": f"PermissionError: .*{NOT_REGULAR}",
    "endless list": f"DataError: .*{NOT_REGULAR}",
    "endless pools": f"SettingsError: .*{NOT_REGULAR}",
    "many empty lists": "read",
    "deep lists": "ValueError: it is nested deeper than 32 levels",
    "deep names": "ValueError: a line has more than 1000 dots",
    "many names": "TOMLDecodeError: Cannot overwrite a value",
    "many unknown settings": r"SettingsError: unknown setting distll\.temperatur0; did you mean distill\.",
    "huge manifest": f"ObjectTooLargeError: .*{TOO_LARGE}",
    "wide model": r"ModelError: .*its shape is \(8,\) instead of \(16000,\)",
    "long header of weights": "ModelError: .*its header has 1,099,511,627,776 bytes",
}


@pytest.fixture(scope="module")
def outcomes():
    """What became of each bomb, in a process with a limit."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.bombs"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
    )
    return json.loads(done.stdout)


def test_every_bomb_is_expected(outcomes):
    assert outcomes.keys() == EXPECTED.keys()


@pytest.mark.parametrize("bomb", EXPECTED)
def test_a_bomb_gets_a_message(outcomes, bomb):
    outcome, seconds = outcomes[bomb]
    assert re.match(EXPECTED[bomb], outcome, re.DOTALL), outcome
    assert seconds < 120
