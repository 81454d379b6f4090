"""What is accepted of JSON, TOML and names."""

import json
import logging
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.io import limits
from trainer.io.errors import SettingsError
from trainer.io.limits import NESTING, parse_json, parse_toml, printable, printable_name

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(derandomize=True, max_examples=50, deadline=None)
@given(VALUES)
def test_an_ordinary_value_is_read_as_it_is(value):
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting"),
        ("[" * 100_000, "nested deeper than 32"),
        ('{"a":' * (NESTING + 1) + "1" + "}" * (NESTING + 1), "nested deeper than 32"),
        ("NaN", "NaN is not a JSON number"),
        ('{"a": [-Infinity]}', "-Infinity is not a JSON number"),
        ("[1e999]", "not finite"),
        ("[18446744073709551616]", "more than 64 bits"),
        ("9" * 5000, "4300"),
        ('{"\\ud800": 1}', "surrogates"),
        ('["\\udfff"]', "surrogates"),
    ],
)
def test_what_json_may_not_be(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_json(text)


def test_as_deep_as_allowed():
    assert parse_json("[" * NESTING + "1" + "]" * NESTING)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a = ", "Invalid value"),
        (f"a = {'[' * 5000}", "nested deeper than 32"),
        (f"{'a.' * 40}b = 1", "nested deeper than 32"),
        (f"{'a.' * 100_000}b = 1", "a line has more than 1000 dots"),
        ("a = 18446744073709551616", "more than 64 bits"),
        (f"a = {'9' * 5000}", "4300"),
        ("a = 1\na = 2", "Cannot overwrite"),
        ("a = {b = 1}\na.b = 2", "Cannot mutate"),
    ],
)
def test_what_toml_may_not_be(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_toml(text)


def test_other_toml_is_read_as_pythons_reader_does():
    text = 'a.b = inf\n[c]\nd = [1, 2.5, "x", 2026-11-21]\n'
    assert parse_toml(text) == tomllib.loads(text)


def test_text_keeps_its_lines_and_name_has_one():
    assert printable("naïve\tTea\n饺子 🍵") == "naïve\tTea\n饺子 🍵"
    assert printable("\x1b[2Ja\rb\x00\x9b\u202e\ud800") == "\\x1b[2Ja\\rb\\x00\\x9b\\u202e\\ud800"
    assert printable_name("a\nerror: b\tc") == "a\\nerror: b\\tc"


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.text())
def test_what_is_printable_can_be_written_and_stays_so(text):
    shown = printable_name(text)
    assert shown.encode().decode() == shown
    assert printable_name(shown) == shown
    assert len(shown.splitlines()) <= 1


def test_messages_cannot_steer_a_terminal(caplog):
    assert str(SettingsError("\x1b]0;title\x07")) == "\\x1b]0;title\\x07"
    assert len(str(SettingsError("x" * 10**6))) < limits.MESSAGE_CHARACTERS + 100
    record = logging.LogRecord("a", logging.INFO, "a.py", 1, "found %s", ("\x1b[31m.jpg",), None)
    assert limits.PrintableFormatter("%(message)s").format(record) == "found \\x1b[31m.jpg"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Crème brûlée/日本", "Crème brûlée/日本"),
        ("cafe\u0301", "caf\xe9"),
        (" cat\u00a0\u3000dog \n", "cat dog"),
        ("\u2003", ""),
        ("\u0645\u06cc\u200c\u062e", "\u0645\u06cc\u200c\u062e"),
        ("\U0001f469\u200d\U0001f33e \u2764\ufe0f", "\U0001f469\u200d\U0001f33e \u2764\ufe0f"),
        ("cat\x1b[2J", "cat\\x1b[2J"),
    ],
)
def test_name_of_class_is_what_people_read(text, name):
    assert limits.class_name(text) == name
    assert limits.class_name(name) == name


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("cat\u200b", r"U\+200B ZERO WIDTH SPACE, which cannot be seen: 'cat\\u200b'; rename it"),
        ("\ufeffcat", r"U\+FEFF .* which cannot be seen: '\\ufeffcat'"),
        ("c\u200dat", r"U\+200D ZERO WIDTH JOINER"),
        ("cat\u200e", r"U\+200E LEFT-TO-RIGHT MARK"),
        ("c\xadat", r"U\+00AD SOFT HYPHEN, .*: 'c\\xadat'"),
        ("\u3164", r"U\+3164 HANGUL FILLER"),
        ("caf\ufffd", r"U\+FFFD REPLACEMENT CHARACTER, which stands for one that was lost: 'caf\\ufffd'"),
    ],
)
def test_character_of_class_name_that_nobody_sees_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        limits.class_name(text)


def test_names_that_differ_by_case_or_compatibility_forms_alone_are_found():
    alike = [
        ["Cat", "cat", "\uff23\uff21\uff34"],
        ["Straße", "STRASSE"],
        ["İ", "i\u0307"],
        ["\ufb01sh", "fish"],
        ["x²", "x2"],
    ]
    names = [name for group in alike for name in group]
    assert limits.look_alikes([*names, "I", "\u0131", "dog", "do g", "café", "cafe"]) == [*alike]
