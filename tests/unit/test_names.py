"""Names: a public class or module has one of its own, so that a reader of one is never led to another; and all is spelled in American."""

import ast
import re
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


# The stems that are long enough to be no part of another word.
BRITISH = re.compile(
    r"labell(ed|ing)|colour|neighbour|licence|behaviour|flavour|favour|centr(e|ed|ing)\b|travell|judgement|learnt|artefact|catalogue|grey|"
    r"(optim|normal|standard|initial|regular|util|quant|synchron|vector|serial|recogn|minim|maxim|author|organ|summar|general|random)is"
    r"(e|ed|es|er|ers|ing|ation|ations)\b|\bdistil(s|\b)|towards|analys(e|ed|ing)\b",
    re.IGNORECASE,
)
FORMER = (
    "grey_bits",
    "poor_initialisation",
    "normalisation",
    "optimiser",
    "unlabelled",
)  # names in files that are still read


def test_all_is_spelled_in_american():
    ours = [path for path in ROOT.iterdir() if path.name != "runs" and not path.name.startswith(".")]
    files = [path for top in ours for path in ([top] if top.is_file() else sorted(top.rglob("*")))]
    texts = [
        path for path in files if path.suffix in {".py", ".md", ".toml", ".yaml", ".jinja"} and path != Path(__file__)
    ]
    assert len(texts) > 500
    for path in texts:
        text = path.read_text(encoding="utf-8")
        for former in FORMER:
            text = re.sub(rf"\b{former}\b", "", text)
        assert not (found := BRITISH.search(text)), f"{path.relative_to(ROOT)}: {found[0]}"
