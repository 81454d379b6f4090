# ruff: noqa: INP001  # a script of build.sh
"""Compile what Triton compiles before its first kernel; needs a C compiler, libc's headers and Python's. Loading it would need a GPU."""

import tempfile
from pathlib import Path

import triton.backends.nvidia
from triton.runtime.build import _build

backend = Path(triton.backends.nvidia.__path__[0])
with tempfile.TemporaryDirectory() as folder:
    _build("cuda_utils", str(backend / "driver.c"), folder, [], [str(backend / "include")], [], [])
