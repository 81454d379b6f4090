"""Folders that many tests read and no test may write to: what one leaves there, another one takes for a part of the data."""

from __future__ import annotations

from pathlib import Path

Listing = dict[Path, tuple[int, int]]
"""Each file below -> its size in bytes, and when it was last written, in nanoseconds."""

_MADE: dict[Path, Listing] = {}


def share(folder: str | Path) -> None:
    """Remember what lies in a folder that a fixture has made for all tests."""
    _MADE[Path(folder)] = _listing(Path(folder))


def changes() -> list[str]:
    """Files added, removed or written in shared folders since they were made, or since this was last asked."""
    found = []
    for folder, before in _MADE.items():
        now = _MADE[folder] = _listing(folder)
        found += [str(path) for path in sorted(before.keys() | now.keys()) if before.get(path) != now.get(path)]
    return found


def _listing(folder: Path) -> Listing:
    stats = {path: path.lstat() for path in folder.rglob("*") if not path.is_dir()}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}
