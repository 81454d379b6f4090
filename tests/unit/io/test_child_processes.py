"""A script without a guard of its main module can call what starts processes."""

import subprocess
import sys
from pathlib import Path

from trainer.io.child_processes import SPAWNED

SCRIPT = """
print("begins")
from concurrent.futures import ProcessPoolExecutor
from trainer.io.child_processes import SPAWNED
with ProcessPoolExecutor(2, SPAWNED) as pool:
    print(sum(pool.map(abs, range(-3, 0))))
import __main__
assert __main__.SPAWNED is SPAWNED
"""


def test_a_plain_script_runs_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.returncode) == ("begins\n6\n", 0), ended.stderr


def test_definitions_in_main_are_refused(tmp_path: Path) -> None:
    script = """
from trainer.io.child_processes import SPAWNED
def work(): pass
SPAWNED.Process(target=work).start()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "work" in ended.stderr.splitlines()[-1]
    assert SPAWNED.get_start_method() == "spawn"
