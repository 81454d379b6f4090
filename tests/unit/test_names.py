"""A public class and a module have names of their own, so that a reader of one is never led to another."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("trainer", "components", "pipelines")


def test_no_public_class_has_the_name_of_another():
    places = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    places[node.name.lstrip("_")].append(f"{path.relative_to(ROOT)}: {node.name}")
    assert len(places) > 300
    public = {name: found for name, found in places.items() if any(f": {name}" in place for place in found)}
    assert {name: found for name, found in public.items() if len(found) > 1} == {}


def test_no_module_has_the_name_of_another():
    places = defaultdict(list)
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        if path.stem not in ("__init__", "__main__"):
            places[path.stem].append(path.relative_to(ROOT).as_posix())
    assert len(places) > 140
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
