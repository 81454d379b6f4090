"""Files that others have made are read to a limit, and what is no file is refused and not waited for."""

import os

import pytest

from trainer import config
from trainer.io import local_files
from trainer.io.errors import ObjectNotFoundError, ObjectTooLargeError, SettingsError, StorageError


def test_files_are_read_whole(tmp_path):
    file = tmp_path / "a.toml"
    file.write_bytes(b"0123456789")
    assert local_files.read_limited(file, 10) == b"0123456789"
    assert local_files.read_file(file, 2, 5) == b"234"
    with pytest.raises(ObjectTooLargeError, match="more than 9 bytes"):
        local_files.read_limited(file, 9)
    # What is no regular file is refused and not waited for.
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(StorageError, match="cannot be read"):
            local_files.read_limited(tmp_path / name, 10)
    with pytest.raises(ObjectNotFoundError, match="there is no such file"):
        local_files.read_limited(tmp_path / "none", 10)


@pytest.mark.parametrize("path", ["a\0b", "a" * 300, "a/" * 3000, "\ud800"])
def test_what_cannot_be_a_path_is_refused(path):
    with pytest.raises(StorageError, match="cannot be a path"):
        local_files.checked_path(path)


def test_recipe_that_cannot_be_read_is_users_error(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "large.toml").write_bytes(b"#" * 300_000)
    for name, message in (
        ("pipe.toml", "cannot be read"),
        ("large.toml", "has more than"),
        ("a\0.toml", "cannot be a path"),
    ):
        with pytest.raises(SettingsError, match=f"recipe .*{message}"):
            config.resolve(str(tmp_path / name))
