"""What a source lists, in every form that it may have."""

from __future__ import annotations

import io
import logging
import os
import pickle
import re
import time
from pathlib import Path

import datasets
import fsspec
import pyarrow as pa
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from trainer.data.dataset_schema import SplitName
from trainer.data.sources import Columns, SourceListing, image_manifest, list_source, source_version
from trainer.data.sources.source import Item
from trainer.io import limits, storage
from trainer.io.errors import DataError, SettingsError, StorageError


def touch(root: Path, *names: str) -> None:
    """Files whose content is their own name."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())


def found(listing: SourceListing) -> dict[str, tuple[SplitName, str]]:
    """Name -> split and class ("" for none)."""
    assert [item.name for item in listing.items] == sorted(item.name for item in listing.items)
    return {item.name: (item.split, listing.classes[item.label] if item.label >= 0 else "") for item in listing.items}


@pytest.mark.parametrize(
    "source", ["", "digit", "digits:", "digits:x", "imagefolder", "imagefolder:", "manifest:", "hub:", "folder:/x", ":"]
)
def test_what_is_no_source_is_refused(source: str) -> None:
    for function in (list_source, source_version):
        with pytest.raises(SettingsError, match=r"data\.source must be digits, imagefolder"):
            function(source)


# ---------------------------------------------------------------------------------------------------------------------
# digits


def test_digits_are_those_of_scikit_learn() -> None:
    listing, bundled = list_source("digits"), load_digits()
    assert [item.label for item in listing.items] == bundled.target.tolist()
    assert listing.classes == tuple("0123456789")
    image = Image.open(io.BytesIO(listing.read(listing.items[1234].location)))
    assert [value * 16 / 255 for value in image.tobytes()] == pytest.approx(bundled.images[1234].ravel(), abs=0.04)
    assert source_version("digits").startswith("scikit-learn ")


# ---------------------------------------------------------------------------------------------------------------------
# imagefolder


def test_a_folder_a_class(tmp_path: Path) -> None:
    touch(tmp_path, "cat/1.jpg", "cat/2.PNG", "dog/1.jpeg", "README.txt", "dog/.hidden.jpg", "__MACOSX/x/1.jpg")
    # Unlabeled beside classes without splits.
    listing = list_source(f"imagefolder:{tmp_path}")
    assert found(listing) == {
        "cat/1.jpg": ("train", "cat"),
        "cat/2.PNG": ("train", "cat"),
        "dog/1.jpeg": ("train", "dog"),
    }
    assert listing.classes == ("cat", "dog")
    assert listing.read(listing.items[1].location) == b"cat/2.PNG"
    assert listing.notes == ("Files without an image's extension, which were not looked at: 1.",)


@pytest.mark.parametrize("val", ["val", "valid", "validation", "dev", "Val", "VAL "])
def test_splits_above_the_classes(tmp_path: Path, val: str) -> None:
    touch(
        tmp_path, "train/cat/1.jpg", f"{val}/cat/1.jpg", "test/dog/1.jpg", "train/dog/2.jpg", "unlabeled/deep/er/1.jpg"
    )
    assert found(list_source(f"imagefolder:{tmp_path}")) == {
        "train/cat/1.jpg": ("train", "cat"),
        f"{val}/cat/1.jpg": ("val", "cat"),
        "test/dog/1.jpg": ("test", "dog"),
        "train/dog/2.jpg": ("train", "dog"),
        "unlabeled/deep/er/1.jpg": ("unlabeled", ""),
    }


def test_unlabeled_images_of_kinds_that_no_label_names(tmp_path: Path) -> None:
    text = "path,label,split\n1.jpg,x,\n2.jpg,x,unlabeled\n3.jpg,z,unlabeled\n4.jpg,y,unlabeled\n5.jpg,,unlabeled\n"
    (in_list,) = (text for text in list_source(manifest(tmp_path, text)).remarks if "ordered by" in text)
    assert in_list.startswith("Unlabeled images are ordered by kinds of which 2 are none of the 1 classes ('y', 'z')")
    photos = tmp_path / "photos"
    touch(photos, "cat/1.jpg", "dog/1.jpg", "unlabeled/cat/1.jpg", "unlabeled/batch 1/1.jpg", "unlabeled/12/1.jpg")
    assert not any("ordered by" in text for text in list_source(f"imagefolder:{photos}").remarks)
    touch(photos, "unlabeled/pets/horse/1.jpg")
    (in_folder,) = (text for text in list_source(f"imagefolder:{photos}").remarks if "ordered by" in text)
    assert "of which 1 are none of the 2 classes ('horse')" in in_folder


def test_nested_groups_name_classes(tmp_path: Path) -> None:
    touch(
        tmp_path, "train/Fruit/Apple/1.jpg", "train/Fruit/Red/1.jpg", "train/Pepper/Red/1.jpg", "val/Fruit/Apple/1.jpg"
    )
    listing = list_source(f"imagefolder:{tmp_path}")
    assert listing.classes == ("Apple", "Fruit/Red", "Pepper/Red")
    assert found(listing)["val/Fruit/Apple/1.jpg"] == ("val", "Apple")


def test_spaces_and_unicode_in_names(tmp_path: Path) -> None:
    touch(tmp_path, "Crème brûlée/日本 1.jpg", "a b/c d.jpg")
    listing = list_source(f"imagefolder:{tmp_path}")
    assert listing.classes == ("Crème brûlée", "a b")
    assert [listing.read(item.location).decode() for item in listing.items] == [
        "Crème brûlée/日本 1.jpg",
        "a b/c d.jpg",
    ]


def test_name_that_is_no_utf8_becomes_readable_and_its_file_is_found(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jpg", "b/1.jpg")
    (tmp_path / "a/1.jpg").rename(tmp_path / "a" / os.fsdecode(b"caf\xe9.jpg"))
    listing = list_source(f"imagefolder:{tmp_path}")
    assert [item.name for item in listing.items] == ["a/caf\ufffd.jpg", "b/1.jpg"]
    assert listing.read(listing.items[0].location) == b"a/1.jpg"
    assert source_version(f"imagefolder:{tmp_path}")


def test_links_are_followed_but_no_loops(tmp_path: Path) -> None:
    touch(tmp_path / "elsewhere", "1.jpg")
    touch(tmp_path / "root", "dog/1.jpg")
    (tmp_path / "root/cat").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root/dog/loop").symlink_to(tmp_path / "root")
    (tmp_path / "root/dog/gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    os.mkfifo(tmp_path / "root/dog/pipe.jpg")
    source = f"imagefolder:{tmp_path}/root"
    assert [item.name for item in list_source(source, outside="read").items] == [
        "cat/1.jpg",
        "dog/1.jpg",
        "dog/gone.jpg",
    ]
    assert source_version(source, outside="read")
    for function in (list_source, source_version):
        with pytest.raises(DataError, match=r"is a link to .*, which lies outside of it.*data.outside=read"):
            function(source)


def test_a_uri_is_listed_as_a_folder_is() -> None:
    memory = fsspec.filesystem("memory")
    for name in ("train/cat/1.jpg", "train/dog/1.jpg", "val/dog/2.jpg"):
        memory.pipe(f"/sources-test/{name}", name.encode())
    listing = list_source("imagefolder:memory://sources-test")
    assert found(listing) == {
        "train/cat/1.jpg": ("train", "cat"),
        "train/dog/1.jpg": ("train", "dog"),
        "val/dog/2.jpg": ("val", "dog"),
    }
    assert listing.read(listing.items[2].location) == b"val/dog/2.jpg"
    assert source_version("imagefolder:memory://sources-test") == ""
    with pytest.raises(DataError, match="folder memory://sources-none: does not exist"):
        list_source("imagefolder:memory://sources-none")


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: does not exist; check data\.source"):
        list_source(f"imagefolder:{tmp_path}/nowhere")
    with pytest.raises(DataError, match="holds no images"):
        list_source(f"imagefolder:{tmp_path}")
    touch(tmp_path, "file.jpg")
    with pytest.raises(DataError, match=r"file\.jpg: is a file"):
        list_source(f"imagefolder:{tmp_path}/file.jpg")
    with pytest.raises(DataError, match=r"1 of its 1 images lie in no class's folder, such as file\.jpg"):
        list_source(f"imagefolder:{tmp_path}")
    with pytest.raises(StorageError, match="nosuchscheme://x: Protocol not known"):
        list_source("imagefolder:nosuchscheme://x")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("cat/1 dog/1 cover", r"1 of its 3 images lie in no class's folder, such as cover\.jpg"),
        ("train/cat/1 train/dog/1 test/1 test/2", r"2 of its 4 images lie in no .*, such as test/1\.jpg"),
        ("cat/1 dog/1 test/1", r"splits \(test/\) lie beside other folders \(cat/, dog/\)"),
        (
            "chest/train/sick/1 chest/train/well/1 chest/TEST/sick/1",
            r"\(chest/TEST/, chest/train/\); give .*{root}/chest\.",
        ),
        ("a/b/train/x/1 a/b/val/x/1", r"data\.source=imagefolder:{root}/a/b\. If these are classes, rename them"),
        (
            "one/train/x/1 two/train/y/1",
            r"one of the folders that hold them, such as data\.source=imagefolder:{root}/one",
        ),
        ("cat/train/1 cat/test/1 dog/train/1 dog/test/1", r"\(cat/test/, cat/train/, dog/test/, dog/train/\)"),
        ("train/train/cat/1 test/test/cat/1", r"\(test/test/, train/train/\)"),
        ("train/cat/1 train/dog/1 train/unlabeled/1", r"\(train/unlabeled/\); let the topmost .* and unlabeled/"),
        ("seg_train/cat/1 seg_test/cat/1 seg_pred/1", r"named like splits \(seg_test/, seg_train/\); let the topmost"),
        ("TrainSet/cat/1 TestSet/cat/1", r"named like splits \(TestSet/, TrainSet/\)"),
        ("train2017/1 val2017/1", r"named like splits \(train2017/, val2017/\)"),
        (
            "cat/1 cat/2 cat/2024-05/3 dog/1",
            r"cat/ holds 2 images of its own beside folders with images \(cat/2024-05/\)",
        ),
        ("train/cat/1 val/cat/x/1", r"train/cat/ holds 1 images of its own beside folders with images \(val/cat/x/\)"),
        ("cat/batch1/1 dog/batch1/1 dog/batch2/1", r"\(cat/batch1/, dog/batch1/, dog/batch2/\); move their images up"),
        ("cat/2024-05/1 dog/2024-06/1", r"named like parts of one, .* \(cat/2024-05/, dog/2024-06/\)"),
        ("cat/1/1 dog/1/1", r"named like parts of one, .* \(cat/1/, dog/1/\)"),
        ("Session_1/cat/1 Session_2/cat/1 Session_2/dog/1", r"\(Session_1/cat/, Session_2/cat/\)"),
        ("cat/100CANON/1 dog/1", r"\(cat/100CANON/\)"),
        ("cat/1 \u00a0/1", r"a folder's name is blank"),
        ("cat/1 d\u200bog/1", r"d\u200bog: the name of a class has the character U\+200B ZERO WIDTH SPACE"),
    ],
)
def test_layout_of_folders_that_is_in_doubt_is_refused(tmp_path: Path, names: str, message: str) -> None:
    touch(tmp_path, *(f"{name}.jpg" for name in names.split(" ")))
    with pytest.raises(DataError, match=message.replace("{root}", re.escape(str(tmp_path)))):
        list_source(f"imagefolder:{tmp_path}")


@pytest.mark.parametrize(
    ("names", "classes"),
    [
        ("train/train/1 train/bus/1 test/train/1", ("bus", "train")),  # CIFAR-100
        ("vehicles/train/1 vehicles/bus/1 people/man/1", ("bus", "man", "train")),
        ("bullet_train/1 test_tube/1 cat/1", ("bullet_train", "cat", "test_tube")),
        ("digits/0/1 digits/1/1 letters/a/1", ("0", "1", "a")),
        ("0001/1 0002/1", ("0001", "0002")),
        ("2024-05/1 batch1/1", ("2024-05", "batch1")),
        ("a/b/cat/1 a/b/dog/1", ("cat", "dog")),
        ("cat/images/1 dog/images/1", ("cat/images", "dog/images")),
        ("Unlabeled/x/train/1 cat/1 dog/1", ("cat", "dog")),
    ],
)
def test_layouts_of_known_data_sets_are_read(tmp_path: Path, names: str, classes: tuple[str, ...]) -> None:
    touch(tmp_path, *(f"{name}.jpg" for name in names.split()))
    assert list_source(f"imagefolder:{tmp_path}").classes == classes


def test_system_files_are_left_out(object_store, tmp_path: Path) -> None:
    names = [
        "cat/1.jpg",
        "cat/@eaDir/1.jpg/SYNOPHOTO_THUMB_M.jpg",
        "cat/@eaDir/1.jpg/XL.jpg",
        "dog/1.jpg",
        "dog/@eaDir/1.jpg",
    ]
    names += ["#recycle/cat/2.jpg", "lost+found/1.jpg", "dog/Thumbs.db", "dog/.DS_Store", "__MACOSX/cat/._1.jpg"]
    names += ["$RECYCLE.BIN/1.jpg", "System Volume Information/x", "cat/thumbnails/1.jpg", ".ipynb_checkpoints/1.jpg"]
    touch(tmp_path, *names)
    for name in names:
        object_store.put(f"nas/{name}", name.encode())
    for source in (f"imagefolder:{tmp_path}", "imagefolder:s3://artifacts/nas"):
        listing = list_source(source)
        assert [item.name for item in listing.items] == ["cat/1.jpg", "dog/1.jpg"]
        assert listing.notes == ()
        (remark,) = listing.remarks
        assert remark.startswith(
            "Left out, since a system or a program keeps it beside the files: 2 @eaDir (such as cat/@eaDir), 2 hid"
        )
        assert "2 hidden (such as .ipynb_checkpoints), " in remark
        assert remark.endswith("1 lost+found (such as lost+found) and 1 more."), "eight kinds are named"
    before = source_version("imagefolder:s3://artifacts/nas")
    object_store.put("nas/cat/@eaDir/2.jpg", b"new")
    assert source_version("imagefolder:s3://artifacts/nas") == before


def test_files_that_are_not_read_are_named_by_their_ending(tmp_path: Path) -> None:
    touch(tmp_path, "cat/1.jpg", "dog/1.jpg", "dog/2", "dog/3", "cat/4.NEF", "notes.txt", "docs/a.txt", "docs/b.csv")
    listing = list_source(f"imagefolder:{tmp_path}")
    assert listing.notes == ("Files without an image's extension, which were not looked at: 6.",)
    read, folders = listing.remarks
    assert read.startswith(
        "Files that are not read, since they have no image's ending: 2 .txt (such as docs/a.txt), 2 without an ending (such as dog/2), "
        "1 .csv (such as docs/b.csv), 1 .nef (such as cat/4.NEF). Give photos among them an ending that fits"
    )
    assert folders == "Folders without an image that is read, which are no class: docs/."


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        ("cat/1.jpg dog/1.jpg bird/", r"bird/ \(empty\)"),
        ("cat/1.jpg dog/1.jpg bird/.DS_Store", r"bird/ \(empty\)"),
        ("cat/1.jpg dog/1.jpg bird/1.NEF bird/2.NEF bird/3", r"bird/ \(2 \.nef, 1 without an ending\)"),
        ("train/cat/1.jpg train/dog/1.jpg train/bird/1.mp4", r"train/bird/ \(1 \.mp4\)"),
        ("pets/cat/1.jpg pets/dog/1.jpg pets/fish/", r"pets/fish/ \(empty\)"),
    ],
)
def test_a_class_that_would_vanish_is_refused(tmp_path: Path, names: str, shown: str) -> None:
    for name in names.split():
        (tmp_path / name).mkdir(parents=True) if name.endswith("/") else touch(tmp_path, name)
    with pytest.raises(DataError, match=f"no image can be read in {shown}, so a class would be missing"):
        list_source(f"imagefolder:{tmp_path}")


def test_folder_without_images_that_is_no_class_is_named(tmp_path: Path) -> None:
    touch(tmp_path, "train/cat/1.jpg", "train/dog/1.jpg", "train/cat/raw/1.nef", "docs/1.nef")
    for name in ("val/cat", "test", "unlabeled", "train/cat/old"):
        (tmp_path / name).mkdir(parents=True)
    listing = list_source(f"imagefolder:{tmp_path}")
    assert listing.classes == ("cat", "dog")
    assert listing.remarks[-1] == (
        "Folders without an image that is read, which are no class: docs/, test/, unlabeled/, val/cat/."
    )


def test_folders_whose_names_read_same_are_one_class(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "train/cafe\u0301/1.jpg",
        "train/caf\xe9/2.jpg",
        "val/cafe\u0301/3.jpg",
        "train/cat /1.jpg",
        "val/cat/2.jpg",
    )
    touch(tmp_path, "valid/cat/3.jpg")
    listing = list_source(f"imagefolder:{tmp_path}")
    assert listing.classes == ("caf\xe9", "cat")
    assert [label for _, label in found(listing).values()] == ["caf\xe9", "caf\xe9", "cat", "caf\xe9", "cat", "cat"]
    assert listing.remarks == (
        r"Folders whose names read the same are one class: 'cafe\u0301' and 'caf\xe9', 'cat' and 'cat '.",
        "Folders of one split, val: val/, valid/.",
    )
    assert listing.notes == listing.remarks[:1]


def test_classes_that_differ_by_case_alone_stay_apart_and_are_named(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jpg", "A/1.jpg", "\uff42/1.jpg", "b/1.jpg", "c/1.jpg")
    listing = list_source(f"imagefolder:{tmp_path}")
    assert listing.classes == ("A", "a", "b", "c", "\uff42")
    (note,) = listing.notes
    assert note.startswith(
        "Names of classes that read alike: 'A' and 'a', 'b' and '\uff42'. Each is a class of its own"
    )


def test_groups_are_named_as_people_read_them_and_shared_names_are_shown(tmp_path: Path) -> None:
    touch(tmp_path, "Cre\u0300mes/Red/1.jpg", "Pepper /Red/1.jpg", "Pepper /Bell/1.jpg")
    listing = list_source(f"imagefolder:{tmp_path}")
    assert listing.classes == ("Bell", "Cr\xe8mes/Red", "Pepper/Red")
    assert listing.groups == ("Pepper", "Cr\xe8mes", "Pepper")
    (remark,) = listing.remarks
    assert remark.startswith(
        "Classes that are named with the folders above, since their own have the same names: Cr\xe8mes/Red, Pep"
    )


# ---------------------------------------------------------------------------------------------------------------------
# manifest


def manifest(folder: Path, text: str, encoding: str = "utf-8") -> str:
    folder.mkdir(exist_ok=True)
    (folder / "images.csv").write_text(text, encoding=encoding)
    return f"manifest:{folder}/images.csv"


def test_a_manifest_with_spaces_unicode_and_quotes(tmp_path: Path) -> None:
    touch(tmp_path, "here dir/ä b.jpg", "other/2.jpg")
    source = manifest(
        tmp_path / "here dir",
        f'path,label,split\r\nä b.jpg,"Tea, green",train\r\n../other/2.jpg, naïve ,VALID\r\n{tmp_path}/other/2.jpg,,\r\n',
        encoding="utf-8-sig",
    )
    listing = list_source(source, outside="read")
    assert listing.classes == ("Tea, green", "naïve")
    assert [(item.name, item.split, item.label) for item in listing.items] == [
        ("ä b.jpg", "train", 0),
        ("../other/2.jpg", "val", 1),
        (f"{tmp_path}/other/2.jpg", "unlabeled", -1),
    ]
    contents = [listing.read(item.location).decode() for item in listing.items]
    assert contents == ["here dir/ä b.jpg", "other/2.jpg", "other/2.jpg"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no column label and no path; its first line must be path,label,split, but is ''"),
        ("file,label\n1.jpg,x\n", "has no column path; .* but is 'file,label'"),
        ("path,label,split\n", "holds no images"),
        ("path,label,split\n1.jpg,x,train\n2.jpg,x,holdout\n", "line 3: the split 'holdout' is not known"),
        ("path,label,split\n1.jpg,,test\n", r"line 2: 1\.jpg of split test has no label"),
        ("path,label,split\n,x,test\n", "line 2: needs a path, a label and a split"),
        ("path,label,split\n1.jpg,Tea, green,train\n", "line 2: has 4 values, but there are 3 columns"),
        ("path,label,split\n1.jpg,,\n2.jpg,,train\n", "none of its 2 images has a label"),
    ],
)
def test_manifests_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list_source(manifest(tmp_path, text))


@pytest.mark.parametrize("heading", ["split", "Split", " SPLIT ", '"split"', "Subset", "which"])
def test_split_is_found_by_its_heading_or_its_values(tmp_path: Path, heading: str) -> None:
    rows = "1.jpg,x, Train \n2.jpg,x,DEV\n3.jpg,x,testing\n4.jpg,y,\n"
    listing = list_source(manifest(tmp_path, f"\ufeffPath,LABEL,{heading}\n{rows}", "utf-8-sig"))
    assert [item.split for item in listing.items] == ["train", "val", "test", "train"]
    guessed = f"The column {heading!r} of the list is its split: its values are all names of splits."
    assert listing.notes == ((guessed,) if heading in ("Subset", "which") else ())


def test_columns_and_lines_that_are_not_used_are_named(tmp_path: Path) -> None:
    text = "path,label,split,caption,subset,\n1.jpg,x,,a,test,7\n2.jpg,,,b,train,\n\n,,,,,\n3.jpg,y,unlabeled,c,,\n4.jpg,,val|,,,\n"
    with pytest.raises(DataError, match=r"line 7: the split 'val\|' is not known"):
        list_source(manifest(tmp_path, text))
    listing = list_source(manifest(tmp_path, text.replace("4.jpg,,val|,,,\n", "").replace("x,,", "x,train,")))
    assert [item.split for item in listing.items] == ["train", "unlabeled", "unlabeled"]
    assert listing.notes == (
        "Columns of the list that are not used: 'caption', 'subset', 'column 6'.",
        "Lines without a label, whose images are unlabeled: 1, first line 3.",
        "Lines of the split unlabeled whose label is not used: 1, first line 6.",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,lable\n1.jpg,x\n", "has no column label; .* but is 'path,lable'; rename the heading 'lable' to label"),
        ("file_name,label\n1.jpg,x\n", "rename the heading 'file_name' to path"),
        ("path,class\n1.jpg,x\n", "rename the heading 'class' to label"),
        ("path,label,spilt\n1.jpg,x,fold1\n", "the column 'spilt' may be meant for the split, but its values are not all"),
        ("path,label,subset\n1.jpg,x,train\n2.jpg,x,other\n", "the column 'subset' may be meant for the split"),
        ("path,label,is_valid\n1.jpg,x,True\n", "the column 'is_valid' may be meant for the split"),
        ("path,label,which\n1.jpg,x,train\n2.jpg,x,eval\n", "line 3: the split 'eval' is not known; write train, val"),
        ("path,label,a,b\n1.jpg,x,train,val\n", "the columns 'a' and 'b' both hold names of splits; name one of them"),
        ("path,label,split,usage\n1.jpg,x,,a\n", "the column 'usage' may be meant for the split"),
        ("path,label,Label\n1.jpg,x,y\n", "two columns are named 'label' and 'Label'; rename or remove one"),
        ('path,label\n1.jpg,"x\n2.jpg,y\n3.jpg,x"\n', "line 2: a quoted value goes on to line 4 and holds what look like lines"),
        ('path,label\n1.jpg,x\n2.jpg,"y\n3.jpg,x\n', "line 3: a quote is opened that nothing closes"),
        ('path,label\n1.jpg,"x\n2.jpg",y\n', "line 2: has 3 values, but there are 2 columns"),
        ('path,label,split\n"1.jpg\n2.jpg",y,\n', "line 2: a quoted value goes on in the next line"),
        ("path,label\n1.jpg,x\u200b\n", r"line 2: the name of a class has the character U\+200B ZERO WIDTH SPACE"),
        ("path;label;split\n1.jpg;x;\n2.jpg;x;trian\n", "line 3: the split 'trian' is not known"),
        ("path\tlabel\n1.jpg\tx;y\n2.jpg\tx\n3.jpg\ty\n", "line 2: 'x;y' looks like several labels, since 'x' and 'y' are labels too"),
    ],
)  # fmt: skip
def test_lists_that_could_be_read_in_two_ways(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list_source(manifest(tmp_path, text))


@pytest.mark.parametrize(
    ("cells", "classes"),
    [
        (("rice;curry", "rice"), ("curry", "rice")),
        (("rice; curry", "curry;naan"), ("curry", "naan", "rice")),
        (("Peppers, red;rice", "rice"), ("Peppers, red", "rice")),
        (("rice,curry", "rice", "curry"), ("curry", "rice")),
        (("rice|curry", "Peppers, red"), ("Peppers, red", "curry", "rice")),
        (("Peppers, red|", "Peppers, green"), ("Peppers, green", "Peppers, red")),
        (("rice;curry", "rice|", "|"), "'rice;curry' looks like several labels, but the list separates them by |"),
        (("rice;curry", "naan"), "line 2: 'rice;curry' may be one label or several; write | between the labels"),
        (("naan", "rice,curry", "rice"), r"line 3: 'rice,curry' may be one label or several; .* if it is one label, \| after it"),
        (("Peppers, red", "Peppers, green"), "line 2: 'Peppers, red' may be one label or several"),
    ],
)  # fmt: skip
def test_several_labels_are_separated_by_what_list_shows(
    tmp_path: Path, cells: tuple[str, ...], classes: tuple[str, ...] | str
) -> None:
    source = manifest(tmp_path, "path,label\n" + "".join(f'{n}.jpg,"{cell}"\n' for n, cell in enumerate(cells)))
    if isinstance(classes, str):
        with pytest.raises(DataError, match=classes):
            list_source(source, multi_label=True)
    else:
        assert list_source(source, multi_label=True).classes == classes


def test_paths_and_labels_are_compared_in_either_form(tmp_path: Path, object_store) -> None:
    composed, decomposed = "caf\u00e9/1.jpg", "cafe\u0301/1.jpg"
    for on_disk, listed in ((composed, decomposed), (decomposed, composed)):
        folder = tmp_path / f"to {len(on_disk)}"
        touch(folder, on_disk)
        object_store.put(f"{len(on_disk)}/{on_disk}", on_disk.encode())
        object_store.put(f"{len(on_disk)}/images.csv", f"path,label\n{listed},x\n".encode())
        here = manifest(folder, f"path,label\n{listed},{listed[:-6]}\n{listed}, {on_disk[:-6]} \n")
        for source in (here, f"manifest:s3://artifacts/{len(on_disk)}/images.csv"):
            listing = list_source(source)
            assert len(listing.classes) == 1
            assert listing.read(listing.items[0].location) == on_disk.encode()
            before = source_version(source)
            (folder / on_disk).write_bytes(b"other")
            object_store.put(f"{len(on_disk)}/{on_disk}", b"other")
            assert source_version(source) != before
            (folder / on_disk).write_bytes(on_disk.encode())
            object_store.put(f"{len(on_disk)}/{on_disk}", on_disk.encode())


def test_a_manifest_with_several_labels_an_image(tmp_path: Path) -> None:
    source = manifest(tmp_path, "path,label\n1.jpg,rice|curry\n2.jpg,|\n3.jpg, curry | rice \n4.jpg,rice\n5.jpg,\n")
    listing = list_source(source, multi_label=True)
    assert listing.classes == ("curry", "rice")
    assert listing.label_sets == listing.members == ((), (0, 1), (1,))
    assert [item.label for item in listing.items] == [1, 0, 1, 2, -1]
    assert [item.split for item in listing.items][-1] == "unlabeled"
    assert listing.label_names == ["no class", "curry | rice", "rice"]
    with pytest.raises(DataError, match=r"line 2: 'rice\|curry' has several labels.*data.multi_label=true"):
        list_source(source)


def test_a_manifest_with_too_many_sets_of_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LABEL_SETS", 2)
    source = manifest(tmp_path, "path,label\n1.jpg,x|y\n2.jpg,x\n3.jpg,y\n")
    with pytest.raises(DataError, match="has 3 different sets of 2 labels, more than 2"):
        list_source(source, multi_label=True)
    monkeypatch.setattr(limits, "LABEL_SETS", 100)
    monkeypatch.setattr(limits, "LABEL_CELLS", 5)
    with pytest.raises(DataError, match="has 3 different sets of 2 labels, more than 2"):
        list_source(source, multi_label=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,label\n1.jpg,|\n2.jpg,\n", "no image is of any class; add labels"),
        ("path,label\n1.jpg,named|x\n2.jpg,x\n", "a class is called 'named', as the column of a prediction is"),
    ],
)
def test_several_labels_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list_source(manifest(tmp_path, text), multi_label=True)


def test_a_manifest_that_is_missing_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"images\.csv: does not exist"):
        list_source(f"manifest:{tmp_path}/images.csv")
    (tmp_path / "images.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="looks like UTF-16"):
        list_source(f"manifest:{tmp_path}/images.csv")
    with pytest.raises(DataError, match="cannot be read"):
        list_source(f"manifest:{tmp_path}")


# ---------------------------------------------------------------------------------------------------------------------
# hub


def table(
    labels: list[int | None], *, images: str = "image", label: str = "label", names: tuple[str, ...] = ("b", "a")
) -> datasets.Dataset:
    rows = {images: [{"bytes": f"file {row}".encode(), "path": None} for row in range(len(labels))], label: labels}
    kinds = datasets.Features({images: datasets.Image(), label: datasets.ClassLabel(names=[*names])})
    return datasets.Dataset.from_dict(rows, features=kinds)


def test_a_saved_data_set_dictionary(tmp_path: Path) -> None:
    splits = {"train": table([1, 0, None]), "validation": table([0]), "test": table([-1, -1]), "extra": table([1])}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    listing = list_source(f"hub:{tmp_path}/saved")
    assert listing.classes == ("b", "a")
    assert [(item.name, item.split, item.label) for item in listing.items] == [
        ("train/0000000", "train", 1),
        ("train/0000001", "train", 0),
        ("train/0000002", "unlabeled", -1),
        ("validation/0000000", "val", 0),
        ("test/0000000", "unlabeled", -1),
        ("test/0000001", "unlabeled", -1),
    ]
    assert listing.notes == ("Split extra (1 images) is none of train, val, test and unlabeled, and was not used.",)
    sent = pickle.loads(pickle.dumps(listing.read))
    assert [sent(item.location) for item in listing.items[:2]] == [b"file 0", b"file 1"]
    datasets.DatasetDict({"all": table([1, 0])}).save_to_disk(str(tmp_path / "all"))
    with pytest.raises(DataError, match="has the splits all, but train, val, test and unlabeled are read; rename them"):
        list_source(f"hub:{tmp_path}/all")
    assert source_version(f"hub:{tmp_path}/saved") != ""


def test_a_saved_data_set_with_lists_of_labels(tmp_path: Path) -> None:
    kinds = datasets.Features(
        {"image": datasets.Image(), "labels": datasets.List(datasets.ClassLabel(names=["b", "a"]))}
    )
    rows = [[1, 0], [], None, [0, 1, 1], [1], [-1]]
    images = [{"bytes": f"file {row}".encode(), "path": None} for row in range(len(rows))]
    datasets.Dataset.from_dict({"image": images, "labels": rows}, features=kinds).save_to_disk(str(tmp_path / "saved"))
    listing = list_source(f"hub:{tmp_path}/saved", multi_label=True)
    assert listing.classes == ("b", "a")
    assert listing.label_sets == ((), (0, 1), (1,))
    assert [item.label for item in listing.items] == [1, 0, -1, 1, 2, -1], (
        "-1 is how the Hub marks what it does not know"
    )
    assert listing.label_names == ["no class", "b | a", "a"]
    assert listing.label_names is listing.label_names, "each of many near-duplicates asks for them"
    with pytest.raises(DataError, match="needs one column of kind ClassLabel"):
        list_source(f"hub:{tmp_path}/saved")
    table([1, 0]).save_to_disk(str(tmp_path / "one"))
    with pytest.raises(DataError, match="needs one column of kind lists of ClassLabel"):
        list_source(f"hub:{tmp_path}/one", multi_label=True)


def test_classes_of_a_saved_table(tmp_path: Path) -> None:
    table([1, 0], names=("cafe\u0301", " Dog")).save_to_disk(str(tmp_path / "saved"))
    assert list_source(f"hub:{tmp_path}/saved").classes == ("caf\xe9", "Dog")
    table([1, 0], names=("Cat", "cat")).save_to_disk(str(tmp_path / "case"))
    listing = list_source(f"hub:{tmp_path}/case")
    (note,) = listing.notes
    assert note.startswith("Names of classes that read alike: 'Cat' and 'cat'. Each is a class of its own")
    assert listing.remarks == listing.notes
    table([1, 0], names=("cat", "cat ")).save_to_disk(str(tmp_path / "space"))
    with pytest.raises(DataError, match="the classes 'cat' and 'cat ' read the same"):
        list_source(f"hub:{tmp_path}/space")
    table([1, 0], names=("cat\u200b", "dog")).save_to_disk(str(tmp_path / "unseen"))
    with pytest.raises(DataError, match=r"hub data set .*unseen: .*U\+200B ZERO WIDTH SPACE"):
        list_source(f"hub:{tmp_path}/unseen")


def test_single_saved_table_is_train_and_path_is_read(tmp_path: Path) -> None:
    touch(tmp_path, "there.jpg")
    kinds = datasets.Features({"photo": datasets.Image(decode=False), "kind": datasets.ClassLabel(names=["a", "b"])})
    rows = {"photo": [{"bytes": None, "path": str(tmp_path / "there.jpg")}, None], "kind": [1, 0]}
    table = datasets.Dataset.from_dict(rows, features=kinds)
    table.save_to_disk(str(tmp_path / "saved"))  # which puts the file itself into the table
    (shard,) = (tmp_path / "saved").glob("*.arrow")
    with pa.OSFile(str(shard), "wb") as sink, pa.ipc.new_stream(sink, table.data.table.schema) as writer:
        writer.write_table(table.data.table)
    listing = list_source(f"hub:{tmp_path}/saved")
    assert [(item.split, item.label) for item in listing.items] == [("train", 1), ("train", 0)]
    with pytest.raises(PermissionError, match=r"lies outside of .*saved \(data.outside\)"):
        listing.read(listing.items[0].location)
    listing = list_source(f"hub:{tmp_path}/saved", outside="read")
    assert [listing.read(item.location) for item in listing.items] == [b"there.jpg", b""]


def test_data_sets_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"hub data set .*empty: cannot be loaded"):
        list_source(f"hub:{tmp_path}/empty")
    datasets.DatasetDict({"train": table([0]), "test": table([0, None])}).save_to_disk(str(tmp_path / "gaps"))
    with pytest.raises(DataError, match=r"1 images of split test have no label"):
        list_source(f"hub:{tmp_path}/gaps")
    datasets.Dataset.from_dict({"text": ["x"]}).save_to_disk(str(tmp_path / "text"))
    with pytest.raises(DataError, match=r"needs one column of kind Image, .* but has none"):
        list_source(f"hub:{tmp_path}/text")
    two = table([0]).add_column("coarse", [0]).cast_column("coarse", datasets.ClassLabel(names=["x", "y"]))
    two.rename_column("label", "fine").save_to_disk(str(tmp_path / "two"))
    with pytest.raises(DataError, match=r"needs one column of kind ClassLabel, .* but has fine, coarse"):
        list_source(f"hub:{tmp_path}/two")


def test_splits_of_a_saved_dictionary(tmp_path: Path) -> None:
    splits = {"unlabeled": table([0]).remove_columns("label"), "train": table([1, 0])}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    listing = list_source(f"hub:{tmp_path}/saved")
    assert [(item.split, item.label) for item in listing.items] == [("unlabeled", -1), ("train", 1), ("train", 0)]
    other = {
        "order": table([1]).cast_column("label", datasets.ClassLabel(names=["a", "b"])),
        "column": table([1], label="class"),
        "image": table([1], images="photo"),
    }
    for name, test in other.items():
        datasets.DatasetDict({"train": table([1, 0]), "test": test}).save_to_disk(str(tmp_path / name))
        with pytest.raises(DataError, match="split test has other columns or classes than split train"):
            list_source(f"hub:{tmp_path}/{name}")


def written(path: Path, kinds: datasets.Features, rows: dict[str, list[object]]) -> str:
    """A saved table with rows that `datasets` itself would refuse or change."""
    datasets.Dataset.from_dict({name: [None] for name in rows}, features=kinds).save_to_disk(str(path))
    for shard in path.glob("*.arrow"):
        with pa.OSFile(str(shard), "wb") as sink, pa.ipc.new_stream(sink, kinds.arrow_schema) as writer:
            writer.write_table(pa.Table.from_pydict(rows, schema=kinds.arrow_schema))
    return f"hub:{path}"


def test_rows_of_saved_table_that_make_no_sense(tmp_path: Path) -> None:
    label = datasets.ClassLabel(names=["a", "b"])
    one = datasets.Features({"image": datasets.Image(), "label": label})
    several = datasets.Features({"image": datasets.Image(), "labels": datasets.List(label)})
    images: list[object] = [None, {"bytes": None, "path": None}, {"bytes": b"x", "path": None}]
    listing = list_source(written(tmp_path / "images", one, {"image": images, "label": [0, 1, 1]}))
    assert [listing.read(item.location) for item in listing.items] == [b"", b"", b"x"]
    with pytest.raises(DataError, match="image 1 of split train has the label 2, but there are 2 classes"):
        list_source(written(tmp_path / "one", one, {"image": images, "label": [0, 2, 1]}))
    with pytest.raises(DataError, match="image 2 of split train has the label 7, but there are 2 classes"):
        list_source(
            written(tmp_path / "several", several, {"image": images, "labels": [[0], [], [1, 7]]}), multi_label=True
        )
    gap = written(tmp_path / "gap", several, {"image": images, "labels": [[0], [None, 1], [1]]})
    assert [item.label for item in list_source(gap, multi_label=True).items] == [0, -1, 1]
    (tmp_path / "none").mkdir()
    (tmp_path / "none/dataset_dict.json").write_text('{"splits": []}')
    with pytest.raises(DataError, match=r"needs one column of kind Image, .* but has none"):
        list_source(f"hub:{tmp_path}/none")


# ---------------------------------------------------------------------------------------------------------------------
# source_version


def test_the_version_follows_every_change_of_a_folder(tmp_path: Path) -> None:
    touch(tmp_path, "cat/1.jpg", "dog/1.jpg")
    source = f"imagefolder:{tmp_path}"
    seen = [source_version(source)]
    assert source_version(source) == seen[0]
    (tmp_path / "cat/1.jpg").write_bytes(b"longer content")
    seen.append(source_version(source))
    os.utime(tmp_path / "cat/1.jpg", (1, 1))
    seen.append(source_version(source))
    (tmp_path / "cat/1.jpg").rename(tmp_path / "cat/2.jpg")
    seen.append(source_version(source))
    touch(tmp_path, "dog/2.jpg")
    seen.append(source_version(source))
    assert len(set(seen)) == 5


@pytest.mark.parametrize("kind", ["imagefolder", "manifest"])
def test_version_follows_same_size_and_mtime(tmp_path: Path, kind) -> None:
    touch(tmp_path, "cat/1.jpg", "dog/1.jpg")
    list_file = manifest(tmp_path, "path,label\ncat/1.jpg,x\ndog/1.jpg,y\n")
    source = list_file if kind == "manifest" else f"imagefolder:{tmp_path}"
    image = tmp_path / "cat/1.jpg"
    before, status = source_version(source), image.stat()
    time.sleep(0.02)  # the system's clock for files ticks every few milliseconds
    image.write_bytes(image.read_bytes()[::-1])
    os.utime(image, ns=(status.st_atime_ns, status.st_mtime_ns))  # as `cp -p` and `rsync -t` leave it
    assert source_version(source) != before


def test_version_follows_every_change_of_manifest_and_its_images(tmp_path: Path) -> None:
    touch(tmp_path, "1.jpg")
    source = manifest(tmp_path, "path,label\n1.jpg,x\n2.jpg,y\n")
    seen = [source_version(source)]
    touch(tmp_path, "2.jpg")
    seen.append(source_version(source))
    (tmp_path / "2.jpg").write_bytes(b"changed")
    seen.append(source_version(source))
    manifest(tmp_path, "path,label\n1.jpg,x\n2.jpg,z\n")
    seen.append(source_version(source))
    assert len(set(seen)) == 4
    assert source_version(source) == seen[-1]
    (tmp_path / "3.jpg").symlink_to("3.jpg")
    assert source_version(manifest(tmp_path, "path,label\n1.jpg,x\n2.jpg/2.jpg,y\n3.jpg,z\n")), "reading says why not"


def test_version_of_what_is_missing_is_error(tmp_path: Path, object_store) -> None:
    for source in (f"imagefolder:{tmp_path}/nowhere", "imagefolder:s3://artifacts/none", "manifest:memory://x/y.csv"):
        with pytest.raises(DataError, match="does not exist"):
            source_version(source)


def test_version_follows_every_change_of_bucket_in_one_listing(object_store) -> None:
    for name in ("cat/1.jpg", "dog/1.jpg", "dog/.hidden"):
        object_store.put(f"photos/{name}", b"one")
    object_store.put("photos-2/1.jpg", b"of another folder")
    object_store.put("photos/cat/", b"")
    source = "imagefolder:s3://artifacts/photos"
    object_store.clear()
    seen = [source_version(source)]
    (request,) = object_store.requests
    assert "list-type=2" in request.query
    assert source_version(source) == seen[0]
    assert source_version(f"{source}/") == seen[0]
    object_store.put("photos/cat/1.jpg", b"two")  # as long as before
    seen.append(source_version(source))
    object_store.put("photos/cat/2.jpg", b"two")
    seen.append(source_version(source))
    object_store.delete("photos/dog/1.jpg")
    seen.append(source_version(source))
    assert len(set(seen)) == 4
    object_store.put("photos-2/1.jpg", b"changed")
    object_store.put("photos/dog/.hidden", b"changed")
    assert source_version(source) == seen[-1]


def test_long_listings_are_paged_and_retried(object_store, caplog) -> None:
    caplog.set_level(logging.INFO)
    for number in range(5):
        object_store.put(f"many/{number}.jpg", b"one")
    object_store.clear()
    object_store.page = 2
    object_store.answer(503, times=2, path="continuation-token")
    source = "imagefolder:s3://artifacts/many"
    before = source_version(source)
    assert len(object_store.requests) == 5, "three pages, the second one three times"
    assert "s3://artifacts/many: 5 objects listed in" in caplog.text
    assert len(storage.files("s3://artifacts/many")) == 5
    object_store.put("many/4.jpg", b"two")
    assert source_version(source) != before


def test_version_follows_a_manifest_in_a_bucket(object_store) -> None:
    for name in ("1.jpg", "2.jpg", "unnamed.jpg"):
        object_store.put(f"data/photos/{name}", b"one")
    object_store.put("data/list.csv", b"path,label\nphotos/1.jpg,x\nphotos/2.jpg,y\nphotos/3.jpg,y\n")
    source = "manifest:s3://artifacts/data/list.csv"
    object_store.clear()
    seen = [source_version(source)]
    reading, listing = object_store.requests
    assert reading.path.endswith("list.csv")
    assert "prefix=data%2Fphotos%2F" in listing.query
    object_store.put("data/photos/unnamed.jpg", b"two")
    assert source_version(source) == seen[0]
    object_store.put("data/photos/2.jpg", b"two")
    seen.append(source_version(source))
    object_store.put("data/photos/3.jpg", b"one")
    seen.append(source_version(source))
    object_store.put("data/list.csv", b"path,label\nphotos/1.jpg,x\nphotos/2.jpg,y\nphotos/3.jpg,z\n")
    seen.append(source_version(source))
    assert len(set(seen)) == 4


def test_version_follows_what_manifest_here_names_elsewhere(object_store, tmp_path: Path) -> None:
    object_store.make_bucket("more")
    object_store.put("1.jpg", b"one")
    object_store.forward("PUT", "/more/2.jpg", b"one")
    touch(tmp_path, "3.jpg")
    source = manifest(tmp_path, "path,label\ns3://artifacts/1.jpg,x\ns3://more/2.jpg,y\n3.jpg,y\n")
    seen = [source_version(source, outside="read")]
    assert source_version(source, outside="read") == seen[0]
    object_store.put("1.jpg", b"two")
    seen.append(source_version(source, outside="read"))
    object_store.forward("PUT", "/more/2.jpg", b"two")
    seen.append(source_version(source, outside="read"))
    (tmp_path / "3.jpg").write_bytes(b"changed")
    seen.append(source_version(source, outside="read"))
    assert len(set(seen)) == 4


def test_version_of_hub_data_set_is_its_commit(model_hub) -> None:
    model_hub.revisions["datasets/some/photos"] = "a" * 40
    assert source_version("hub:some/photos:config") == "a" * 40
    model_hub.revisions["datasets/some/photos"] = "b" * 40
    assert source_version("hub:some/photos:config") == "b" * 40


def test_an_unknown_version_is_empty_and_logged(object_store, model_hub, monkeypatch, caplog, tmp_path) -> None:
    fsspec.filesystem("memory").pipe("/versions-test/cat/1.jpg", b"1")
    object_store.put("list.csv", b"path,label\n1.jpg,x\n2.jpg,y\n")
    for name in ("1.jpg", "2.jpg", "3.jpg", "4.jpg"):
        object_store.put(name, b"1")
    monkeypatch.setattr(image_manifest, "LISTED_AT_LEAST", 3)
    monkeypatch.setattr(image_manifest, "LISTED_PER_IMAGE", 1)
    reasons = {
        "imagefolder:memory://versions-test": r"the store says nothing of memory://versions-test/cat/1\.jpg",
        "hub:some/photos": "neither the Hub nor this machine's cache gives its revision",
        "manifest:s3://artifacts/list.csv": "s3://artifacts holds many more objects than the 2 images",
        manifest(tmp_path, "path,label\nhttp://127.0.0.1:9/1.jpg,x\n"): "web servers list nothing",
    }
    for source, reason in reasons.items():
        caplog.clear()
        assert source_version(source, outside="read") == ""
        assert re.search(rf"data\.source={re.escape(source)}: .*{reason}", caplog.text)


def test_a_store_is_read_like_a_folder(object_store) -> None:
    names = [
        "train/cat/1.jpg",
        "train/dog/2.jpg",
        "val/dog/3.jpg",
        "unlabeled/4.jpg",
        "train/.hidden.jpg",
        "train/notes.txt",
    ]
    for name in names:
        object_store.put(f"photos/{name}", name.encode())
    object_store.answer(503, times=2)
    listing = list_source("imagefolder:s3://artifacts/photos")
    assert [item.name for item in listing.items] == sorted(names[:4])
    assert listing.classes == ("cat", "dog")
    object_store.answer(500, times=1)
    object_store.cut(4, times=1)
    assert [listing.read(item.location) for item in listing.items] == sorted(name.encode() for name in names[:4])

    object_store.put(
        "list.csv", b"path,label\nphotos/train/cat/1.jpg,cat\ns3://artifacts/gone.jpg,dog\nempty.jpg,dog\n"
    )
    object_store.put("empty.jpg", b"")
    listing = list_source("manifest:s3://artifacts/list.csv")
    here, gone, empty = (item.location for item in listing.items)
    assert listing.read(empty) == b""
    assert listing.read(here) == b"train/cat/1.jpg"
    with pytest.raises(FileNotFoundError, match=r"s3://artifacts/gone.jpg: there is no such object"):
        listing.read(gone)
    with pytest.raises(DataError, match=r"manifest s3://artifacts/none.csv: does not exist"):
        list_source("manifest:s3://artifacts/none.csv")
    with pytest.raises(DataError, match=r"folder s3://artifacts/none: does not exist"):
        list_source("imagefolder:s3://artifacts/none")

    object_store.answer(403)
    with pytest.raises(StorageError, match="refuses"):
        listing.read(here)


# ---------------------------------------------------------------------------------------------------------------------
# The recipe that fits


def counted(labels: int, unlabeled: int, **others: int) -> SourceListing:
    """So many labeled images of each of two classes, so many without a label, and images of other splits."""
    items = [Item(name="", location="", label=label, split="train") for label in (0, 1) for _ in range(labels)]
    items += [Item(name="", location="", label=-1, split="unlabeled")] * unlabeled
    items += [Item(name="", location="", label=0, split="val")] * others.get("val", 0)
    return SourceListing(items=Columns.of(Item, items), classes=("a", "b"), read=str.encode)


def test_few_labels_beside_many_photos_without_one_have_recipe() -> None:
    assert counted(10, 20, val=100).fitting_recipe() == (
        "20 labeled images, 10 a class in the median, and 20 without labels: data for the recipe few-labels."
    )
