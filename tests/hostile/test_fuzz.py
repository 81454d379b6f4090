"""The fuzzer finds what is wrong."""

import json
import subprocess
import sys

PLANTED = """
import json, sys
from pathlib import Path
from tests.hostile.fuzz import fuzz
from tests.hostile.targets import Target

def read(content, folder):
    if content.startswith(b"large"):
        bytes(8 * 2**30)
    raise KeyError(content)

print(json.dumps(fuzz(Target(lambda: [b"large", b"unforeseen"], read), "planted", 3, 0, Path(sys.argv[1]))))
"""


def test_a_planted_fault_is_kept_once(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PLANTED, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    found = json.loads(done.stdout)
    memory, *others = found["findings"]
    assert memory.startswith("MemoryError at <string>:9 (")
    assert [kind.split(" (")[0] for kind in others] == ["KeyError at <string>:10"]
    assert {path.read_bytes() for path in tmp_path.glob("planted-*")} == {b"large", b"unforeseen"}
    assert "Traceback" in done.stderr
