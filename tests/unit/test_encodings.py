"""Text files are UTF-8 on every machine, and so is what other programs print, whatever the locale says.

Ruff's rule PLW1514 sees only calls on what is plainly a path.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_METHODS = {"read_text": 1, "write_text": 2, "FileHandler": 3, "TextIOWrapper": 2}
"""What reads or writes text -> positional arguments with which the encoding is one of them."""
_PROCESSES = {"run", "Popen", "check_output", "check_call", "call"}


def _has_no_encoding(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if "encoding" in given:
        return False
    if name in _PROCESSES:
        return bool({"text", "universal_newlines"} & given.keys())
    modes = [given.get("mode"), *call.args[:2]] if name in ("open", "fdopen") else []
    texts = [mode.value for mode in modes if isinstance(mode, ast.Constant) and isinstance(mode.value, str)]
    is_text = any(mode and "b" not in mode and set(mode) <= set("rwaxt+") for mode in texts)
    return is_text or len(call.args) < _METHODS.get(name, 0)


@pytest.mark.parametrize("package", ["trainer", "components", "pipelines", "docs"])
def test_every_text_file_has_an_encoding(package: str) -> None:
    without = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:100]}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and _has_no_encoding(node)
    ]
    assert without == []


def test_calls_without_an_encoding_are_seen() -> None:
    wrong = [
        "p.read_text()",
        "p.write_text(t)",
        "p.open('w')",
        "open(p, 'a')",
        "os.fdopen(d, 'w')",
        "run(c, text=True)",
    ]
    right = ["p.read_text('utf-8')", "p.open('rb')", "p.open('w', encoding='utf-8')", "run(c)", "Image.open(p)"]
    calls = [ast.parse(code, mode="eval").body for code in (*wrong, *right)]
    assert [_has_no_encoding(call) for call in calls] == [True] * len(wrong) + [False] * len(right)
