"""Tables of classes: what they become, and one message for each mistake in them."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from trainer.config import RECIPES, DataSettings, resolve
from trainer.data import sources
from trainer.data.class_tables import read_tags, source_version
from trainer.data.sources import Columns, Item, SourceListing, list_source, read_file
from trainer.io import limits
from trainer.io.errors import DataError

CLASSES = ("gala", "granny", "kiwi")
ATTRIBUTES = "food,energy,allergens\nkiwi,61,\ngala,57,none\ngranny,58.5,none\n"
HIERARCHY = "class,parent\ngala,apple\ngranny,apple\nkiwi,fruit\napple,fruit\n"


def listing(*groups: str, classes: tuple[str, ...] = CLASSES) -> SourceListing:
    return SourceListing(items=Columns.of(Item, ()), classes=classes, read=read_file, groups=groups)


def written(folder: Path, text: str | bytes, name: str = "table.csv") -> str:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder / name)


def settings(**values: object) -> DataSettings:
    return DataSettings.model_validate({"source": "imagefolder:photos", **values})


def test_folders_are_groups(tmp_path):
    for folder in ("train/fruit/apple/gala", "train/fruit/apple/granny", "train/fruit/kiwi", "val/fruit/kiwi"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "1.jpg").touch()
    given = DataSettings(source=f"imagefolder:{tmp_path}", hierarchy="folders")
    tags = read_tags(given, list_source(given.source))
    assert tags is not None
    assert tags.parents == {"gala": "apple", "granny": "apple", "kiwi": "fruit", "apple": "fruit"}


def test_class_tables_are_read(tmp_path):
    text = (
        '\ufeff"food";'.replace(";", ",")
        + '"note"\r\ngala,"red, sweet"\r\n\r\n granny , sour \r\nkiwi,"a ""fruit"""\r\n'
    )
    tags = read_tags(settings(attributes=written(tmp_path, text)), listing())
    assert tags is not None
    assert tags.attributes == {"note": ("red, sweet", "sour", 'a "fruit"')}
    # Classes are compared as people read them.
    composed, decomposed = "caf\u00e9 au lait", "cafe\u0301  au lait "
    text = f"food,energy\n{decomposed},1\ngala,2\n"
    tags = read_tags(settings(attributes=written(tmp_path, text)), listing(classes=(composed, "gala")))
    assert tags is not None
    assert tags.attributes == {"energy": (1.0, 2.0)}
    with pytest.raises(DataError, match="line 3: 'caf\u00e9 au lait' has a line already, line 2"):
        read_tags(settings(attributes=written(tmp_path, f"food,energy\n{decomposed},1\n{composed},2\n")), None)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (("1.50", "2", "12345.67"), (1.5, 2.0, 12345.67)),
        (("-1", ".5", "0"), (-1.0, 0.5, 0.0)),
        (("1e-05", "0.30000000000000004", "6.02E+23"), (1e-05, 0.1 + 0.2, 6.02e23)),
        (("999999999999999", "1", ""), (999999999999999.0, 1.0, None)),
        (("0401", "0402", "4011"), "text"),
        (("1E5", "12", "34"), "text"),
        (("+4930", "12", "34"), "text"),
        (("1000000000000000", "1", "2"), "text"),
        (("0.12345678901234567890", "1", "2"), "text"),
        (("4006381333931", "96385074", "012345678905"), "text"),
        (("4006381333931", "9638507400000", "7612345678900"), "text"),
        (("1,50", "2", "3"), "text"),
        (("52", "58 kcal", "61"), "text"),
        (("5%", "6%", "7%"), "text"),
        (("A12", "1234", "none"), "text"),
        (("1e400", "2", "3"), "text"),
        (("9" * 400, "2", "3"), "text"),
    ],
)
def test_kinds_of_attributes(tmp_path, caplog, values, expected):
    lines = "".join(f'{name},"{value}"\n' for name, value in zip(CLASSES, values, strict=True))
    tags = read_tags(settings(attributes=written(tmp_path, f"food,x\n{lines}")), listing())
    assert tags is not None
    assert tags.attributes["x"] == (values if expected == "text" else expected)
    looks_like_a_number = expected == "text" and "5%" not in values
    assert ("so the column 'x' is text" in caplog.text) == looks_like_a_number


@pytest.mark.parametrize("separator", [";", "\t"])
def test_semicolons_and_tabs_are_recognized(tmp_path, separator):
    attributes = 'food|"weight, g"\ngala|1,5\ngranny|2,25\nkiwi|\n'.replace("|", separator)
    groups = HIERARCHY.replace("class,parent", " CLASS,Parent").replace(",", separator)
    given = settings(attributes=written(tmp_path, attributes), hierarchy=written(tmp_path, groups, "groups.csv"))
    tags = read_tags(given, listing())
    assert tags is not None
    assert tags.attributes == {"weight, g": ("1,5", "2,25", None)}
    assert tags.paths[0] == ("fruit", "apple", "gala")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; give a table with a line of headings"),
        ("food\ngala\n", "has one column only; the first one names the class"),
        ("food,energy\n", "has no line below its headings"),
        ("food,\ngala,1\n", "column 2 has no heading"),
        ("food,energy,energy\ngala,1,2\n", "two columns are named 'energy'"),
        ("food,answer\ngala,1\n", "an attribute is named 'answer', as another column of the predictions is"),
        ("food,top_labels\ngala,1\n", "an attribute is named 'top_labels', as another column of the predictions is"),
        ("food,top_probabilities\ngala,1\n", "an attribute is named 'top_probabilities', as another column"),
        ("food,energy\ngala,1\ngranny,2\ngala,3\nkiwi,3\n", "line 4: 'gala' has a line already, line 2; remove one"),
        ("food,energy\n,1\n", "line 2: has no class; write its name"),
        ("food,energy\ngala,1,2\n", "line 2: has 3 values, but there are 2 columns; quote a value that has commas"),
        ("food,energy\ngala,1\ngranny\n", "line 3: has 1 values, but there are 2 columns"),
        ("food,energy\ngala,57\ngranny,n/a\nkiwi,61\n", "line 3: the column 'energy' has numbers, but 'n/a' here; leave a cell empty"),
        ("food,energy\ngala,nan\ngranny,2\nkiwi,61\n", "line 2: .* but 'nan' here"),
        ("food,energy, Energy\ngala,1,2\n", "two columns are named 'energy' and 'Energy'; rename"),
        ("food,energy,fat\ngala,1,\ngranny,2,\nkiwi,3,\n", "the column 'fat' is empty; fill it, or remove it"),
        ("sep=;\nfood;energy\ngala;1\n", "column 2 has no heading"),
        ('food,energy\ngala,"1\n', "line 2: a quote is opened that nothing closes; mend its quotes"),
        ('food,energy\ngala,"1\ngranny,2\nkiwi,3"\n', "line 2: a quoted value goes on to line 4 and holds what look like lines"),
        ('food,energy\ngala,"1"2\n', "line 2: ',' expected after '\"'; mend its quotes"),
        ("food,energy\n\u200bgala,1\n", r"line 2: the name of a class has the character U\+200B ZERO WIDTH SPACE"),
        (ATTRIBUTES.encode("utf-16"), "looks like UTF-16; save it as UTF-8 text"),
        (ATTRIBUTES.encode("utf-16-le"), "looks like UTF-16"),
        (b"PK\x03\x04\x14\0", "is an Excel workbook or another zip archive, not text; export it as CSV"),
        (b"food,energy\ng\xe2la,1\n", r"line 2: is not UTF-8 \(byte 0xe2\), but probably Latin-1 .*; save it as UTF-8 text"),
        (f"food,energy\ngala,{'x' * 1001}\n", "line 2: 'x+... .* has more than 1,000 characters; shorten it"),
        (f"food,{','.join(f'a{n}' for n in range(101))}\n", "has 101 attributes, more than 100; remove some"),
    ],
)  # fmt: skip
def test_contradictory_attribute_tables_are_refused(tmp_path, text, message):
    given = settings(attributes=written(tmp_path, text))
    with pytest.raises(DataError, match=rf"^data\.attributes={re.escape(given.attributes)}.*{message}"):
        read_tags(given, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("food,energy\ngala,1\ngrany,2\nkiwi,3\n", "line 3: 'grany' is no class of the images; did you mean granny"),
        ("food,energy\ngala,1\nx,2\ny,3\n", "line 3: 'x' is no class of the images; nor are 'y'; correct the name"),
        ("food,energy\ngala,1\n", "has no line for the class 'granny', 'kiwi'; add one for each class"),
        ("food,kiwi\ngala,1\ngranny,2\nkiwi,3\n", "an attribute is named 'kiwi', as a class is; rename the column"),
    ],
)
def test_table_of_attributes_of_other_classes_is_refused(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        read_tags(settings(attributes=written(tmp_path, text)), listing())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class,group\ngala,apple\n", "its first line must be class,parent, but is 'class,group'"),
        ("class,parent\ngala,\n", "line 2: 'gala' has no parent; write the group above it"),
        ("class,parent\ngala,apple\ngala,fruit\n", "line 3: 'gala' has a line already, line 2"),
        ("class,parent\nkiwi,kiwi\n", "line 2: 'kiwi' lies in 'kiwi', which is a circle; each name stands for one"),
        ("class,parent\ngala,apple\napple,fruit\nfruit,apple\n", "line 3: 'apple' lies in 'fruit' lies in 'apple'"),
        ("class,parent\n0,1\n" + "".join(f"{n},{n + 1}\n" for n in range(1, 40)), "line 2: '0' lies below more than 31"),
    ],
)  # fmt: skip
def test_contradictory_hierarchies_are_refused(tmp_path, text, message):
    given = settings(hierarchy=written(tmp_path, text))
    with pytest.raises(DataError, match=rf"^data\.hierarchy={re.escape(given.hierarchy)}.*{message}"):
        read_tags(given, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HIERARCHY.replace("kiwi,fruit\n", ""), "has no line for the class 'kiwi'; add one for each class"),
        (f"{HIERARCHY}kiwi-gold,fruit\n", "line 6: 'kiwi-gold' is no class of the images; did you mean kiwi"),
        (HIERARCHY.replace("kiwi,fruit", "kiwi,gala"), "line 4: 'kiwi' lies in 'gala', which is a class itself"),
    ],
)
def test_a_hierarchy_of_other_classes_is_refused(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        read_tags(settings(hierarchy=written(tmp_path, text)), listing())


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (("fruit/apple", "fruit/apple", ""), "the folder of the class 'kiwi' lies in no group's"),
        (("fruit/apple", "juice/apple", "fruit"), "two groups are named 'apple', fruit/apple and juice/apple; rename"),
        (("fruit/kiwi", "fruit", "fruit"), "'kiwi' is a class and, with 'gala' in it, a group"),
    ],
)
def test_folders_that_are_no_hierarchy_are_refused(groups, message):
    with pytest.raises(DataError, match=message):
        read_tags(settings(hierarchy="folders"), listing(*groups))


def test_a_class_named_as_a_column_is_refused(tmp_path):
    with pytest.raises(DataError, match="a class is named 'answer', as a column of the predictions"):
        read_tags(settings(attributes=written(tmp_path, ATTRIBUTES)), listing(classes=("answer", "kiwi")))


def test_a_file_that_is_none_is_named(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"data\.attributes=.*nowhere\.csv: does not exist; check the path"):
        read_tags(settings(attributes=f"{tmp_path}/nowhere.csv"), None)
    with pytest.raises(DataError, match=r"data\.hierarchy=.*: cannot be read"):
        read_tags(settings(hierarchy=str(tmp_path)), None)
    monkeypatch.setattr(limits, "TABLE_BYTES", 10)
    with pytest.raises(DataError, match="has more than 10 bytes; check the path"):
        read_tags(settings(attributes=written(tmp_path, ATTRIBUTES)), None)
    with pytest.raises(DataError, match=r"brings no such table; did you mean grocery_\w+\.csv.*; it has grocery_attr"):
        read_tags(settings(attributes="bundled:grocery_attribute.csv"), None)
    with pytest.raises(DataError, match="brings no such table"):
        read_tags(settings(attributes="bundled:../../pyproject.toml"), None)


def test_the_version_is_of_the_content(tmp_path):
    def version(attributes: str = ATTRIBUTES, hierarchy: str = HIERARCHY, **values: object) -> str:
        files = {"attributes": written(tmp_path, attributes), "hierarchy": written(tmp_path, hierarchy, "groups.csv")}
        return source_version(settings(source="digits", **{**files, **values}))

    assert version() == version() != ""
    assert len({version(), version(ATTRIBUTES.replace("61", "62")), version(hierarchy=f"{HIERARCHY}\n")}) == 3
    assert source_version(settings(source="digits")) == sources.source_version("digits")
    assert version().startswith(f"{sources.source_version('digits')} ")


def test_the_column_of_several_labels_is_no_attribute(tmp_path):
    several = {"source": "manifest:photos.csv", "multi_label": True}
    table = written(tmp_path, "food,named\ngala,1\n")
    with pytest.raises(DataError, match="an attribute is named 'named', as another column of the predictions is"):
        read_tags(settings(**several, attributes=table), None)
    read_tags(settings(attributes=table), None)


def test_grocery_tables_fit_their_classes():
    given = resolve("grocery").data
    with (RECIPES / "grocery_attributes.csv").open() as table:
        classes = tuple(sorted(row["class"] for row in csv.DictReader(table)))
    tags = read_tags(given, listing(classes=classes))
    assert tags is not None
    assert len(classes) == 81
    assert [len(level.names) for level in tags.levels] == [3, 43, 81]
    assert tags.levels[0].names == ("Packages", "Fruit", "Vegetables")
    assert tags.paths[classes.index("Granny-Smith")] == ("Fruit", "Apple", "Granny-Smith")
    energy, *grams = (tags.attributes[name] for name in ("energy_kcal", "protein_g", "fat_g", "carbohydrates_g"))
    assert energy[classes.index("Avocado")] == 160.0
    # What fat, protein and carbohydrates burn to, Atwater's general factors, is near the energy of every food.
    for label, kcal, *masses in zip(classes, energy, *grams, strict=True):
        if kcal is not None:
            burnt = sum(factor * float(mass) for factor, mass in zip((4, 9, 4), masses, strict=True))
            assert float(kcal) == pytest.approx(burnt, rel=0.36), label
