"""Folders and lists of images that someone has made who wants to read, or to show, what is not theirs."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from trainer.data.sources import list_source
from trainer.io import limits
from trainer.io.errors import DataError


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of photos beside a secret one."""
    touch(tmp_path / "secret" / "1.jpg")
    touch(tmp_path / "photos" / "cat" / "1.jpg")
    return tmp_path / "photos"


def test_links_within_the_folder_are_followed(photos: Path) -> None:
    (photos / "dog").symlink_to(photos / "cat")
    (photos / "cat" / "2.jpg").symlink_to("1.jpg")
    names = [item.name for item in list_source(f"imagefolder:{photos}").items]
    assert names == ["cat/1.jpg", "cat/2.jpg", "dog/1.jpg", "dog/2.jpg"]
    (photos.parent / "linked").symlink_to(photos)
    assert len(list_source(f"imagefolder:{photos.parent}/linked").items) == 4


def test_a_link_to_itself_is_named(photos: Path) -> None:
    (photos / "cat" / "2.jpg").symlink_to("2.jpg")
    for outside in ("refuse", "read"):
        with pytest.raises(DataError, match=r"cannot be listed \(.*Too many levels of symbolic links: .*cat/2.jpg'\)"):
            list_source(f"imagefolder:{photos}", outside=outside)


def test_file_that_links_out_is_refused_and_hidden_one_is_passed_by(photos: Path) -> None:
    (photos / ".git").symlink_to(photos.parent / "secret")
    touch(photos / ".cache" / "/".join("a" * (limits.FOLDER_DEPTH + 1)) / "1.jpg")
    assert len(list_source(f"imagefolder:{photos}").items) == 1
    (photos / "cat" / "2.jpg").symlink_to(photos.parent / "secret" / "1.jpg")
    with pytest.raises(DataError, match=r"cat/2.jpg is a link to .*secret/1.jpg, which lies outside"):
        list_source(f"imagefolder:{photos}")


@pytest.mark.parametrize("target", ["../secret", "/", "..", "dog/../../secret"])
def test_a_folder_that_links_out_is_refused(photos: Path, target: str) -> None:
    (photos / "dog").symlink_to(target)
    with pytest.raises(DataError, match=r"dog is a link to /.*, which lies outside of it.*data.outside=read"):
        list_source(f"imagefolder:{photos}")


def test_names_that_steer_terminal_are_shown_as_escapes(photos: Path) -> None:
    touch(photos / "cat\x1b[2J" / "1\n error: gone.jpg")
    listing = list_source(f"imagefolder:{photos}")
    assert listing.classes == ("cat", "cat\\x1b[2J")
    assert listing.items[-1].name == "cat\\x1b[2J/1\\n error: gone.jpg"
    assert listing.read(listing.items[-1].location) == b"x"


def test_limits(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(photos.joinpath(*["a"] * (limits.FOLDER_DEPTH + 1)) / "1.jpg")
    with pytest.raises(DataError, match=r"a/a/a.* lies deeper than 32 folders"):
        list_source(f"imagefolder:{photos}")
    # Links that multiply folders have a limit.
    monkeypatch.setattr(limits, "FOLDERS", 500)
    for one in range(8):
        touch(photos / str(one) / "1.jpg")
        for other in range(8):
            (photos / str(one) / f"to {other}").symlink_to(photos / str(other))
    with pytest.raises(DataError, match="holds more than 500 folders, counted as often as links lead to them"):
        list_source(f"imagefolder:{photos}")
    # More images than the limit are refused.
    monkeypatch.setattr(limits, "SOURCE_IMAGES", 3)
    for number in range(4):
        touch(photos / "dog" / f"{number}.jpg")
    with pytest.raises(DataError, match="holds more than 3 files; give a part of it"):
        list_source(f"imagefolder:{photos}")
    with pytest.raises(DataError, match="lists more than 3 images; give a part of it"):
        list_source(f"manifest:{written(photos, *['cat/1.jpg'] * 4)}")


def written(folder: Path, *paths: str, label: str = "cat") -> Path:
    """A list of these images."""
    (folder / "list.csv").write_text("path,label\n" + "".join(f'"{path}",{label}\n' for path in paths))
    return folder / "list.csv"


@pytest.mark.parametrize(
    "path",
    [
        *(
            "../secret/1.jpg",
            "/etc/passwd",
            "cat/../../secret/1.jpg",
            "s3://elsewhere/1.jpg",
            "http://169.254.169.254/latest",
        ),
        *("linked/1.jpg", "cat/linked.jpg", ".."),
    ],
)
def test_line_that_leads_out_is_refused_with_its_number(photos: Path, path: str) -> None:
    (photos / "linked").symlink_to(photos.parent / "secret")
    (photos / "cat" / "linked.jpg").symlink_to(photos.parent / "secret" / "1.jpg")
    with pytest.raises(DataError, match=r"list.csv, line 3: '.*' lies outside of .*photos.*data.outside=read"):
        list_source(f"manifest:{written(photos, 'cat/1.jpg', path)}")


@pytest.mark.parametrize("path", ["../1.jpg", "%2e%2e/1.jpg", "cat/.%2E/%2e./1.jpg", "cat/..%2f../1.jpg"])
def test_line_that_leads_out_of_store_is_refused(path: str) -> None:
    fsspec.filesystem("memory").pipe("/lists/list.csv", f"path,label\n%2e%2ecat/1.jpg,cat\n{path},cat\n".encode())
    with pytest.raises(DataError, match=r"line 3: '.*1.jpg' lies outside of memory://lists"):
        list_source("manifest:memory://lists/list.csv")


def test_list_in_store_names_no_file_of_this_machine(photos: Path) -> None:
    fsspec.filesystem("memory").pipe("/lists/list.csv", f"path,label\n{photos}/cat/1.jpg,cat\n".encode())
    with pytest.raises(DataError, match=r"line 2: '.*cat/1.jpg' lies outside of memory://lists"):
        list_source("manifest:memory://lists/list.csv")
    assert len(list_source("manifest:memory://lists/list.csv", outside="read").items) == 1


def test_lines_within_folder_are_read_however_they_are_written(photos: Path) -> None:
    listing = list_source(f"manifest:{written(photos, 'cat/1.jpg', 'cat/../cat/1.jpg', f'{photos}/cat/1.jpg')}")
    assert [listing.read(item.location) for item in listing.items] == [b"x"] * 3


def test_impossible_paths_and_names_are_refused(photos: Path) -> None:
    with pytest.raises(DataError, match=r"line 2: .* cannot be a path: it has a NUL character, or more bytes"):
        list_source(f"manifest:{written(photos, 'x' * 5000)}")
    with pytest.raises(DataError, match=r"the name of a class has 5,000 characters, more than 200: 'yyyy"):
        list_source(f"manifest:{written(photos, 'cat/1.jpg', label='y' * 5000)}")
    with pytest.raises(DataError, match="field larger than field limit"):
        list_source(f"manifest:{written(photos, 'x' * 200_000)}")
    (photos / "list.csv").write_text("x" * 200_000)
    with pytest.raises(DataError, match="field larger than field limit"):
        list_source(f"manifest:{photos}/list.csv")
