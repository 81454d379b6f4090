"""What the documentation names is there: paths, links, commands, settings, variables; and messages read as it says."""

import ast
import re
import runpy
import shlex
import tomllib
from pathlib import Path

import pytest

from trainer import config

ROOT = Path(__file__).parents[1]
PAGES = {
    page.relative_to(ROOT).as_posix(): page.read_text()
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "manifests").glob("*.md")]
}
SOURCES = [path for package in ("trainer", "components", "pipelines") for path in (ROOT / package).rglob("*.py")]


def section(page, title):
    """The lines below a heading, up to the next one of the same level."""
    level = title.partition(" ")[0]
    _, _, rest = page.partition(f"\n{title}\n")
    return re.split(rf"^{level} ", rest, flags=re.MULTILINE)[0]


def code(page):
    """Commands and names: indented lines, of which && joins several, and what stands in backticks."""
    page = page.replace("\\\n", " ")
    lines = re.findall(r"^ {4}(.*)", page, flags=re.MULTILINE)
    return [part for line in lines for part in line.split(" && ")] + re.findall(r"`([^`\n]+)`", page)


def first_cells(text):
    """The first column of the tables, without their heads."""
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    return [row.split(" | ")[0].removeprefix("| ") for row in rows]


# ---------------------------------------------------------------------------------------------------------------------
# Paths and links


def tree():
    """Every path of the tree in ARCHITECTURE.md."""
    folders, paths = [], []
    text = section(PAGES["ARCHITECTURE.md"], "## The tree")
    for line in re.findall(r"^ {4}( *\S.*)", text, flags=re.MULTILINE):
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.match(r"\s*((?:\S+,\s)*\S+)", line)[1].split(", ")
        paths += ["".join([*folders[:depth], name]) for name in names]
        folders[depth:] = [name for name in names if name.endswith("/")][:1]
    return paths


def test_tree():
    paths = tree()
    assert len(paths) > 60
    assert len(paths) == len(set(paths))
    assert [path for path in paths if not (ROOT / path).exists()] == []

    # Deeper folders and modules have their docstrings.
    parents = {path.parent.relative_to(ROOT) for path in SOURCES}
    folders = {f"{parent.as_posix()}/" for parent in parents if len(parent.parts) <= 2}
    modules = {path.relative_to(ROOT).as_posix() for path in SOURCES if path.stem not in ("__init__", "__main__")}
    tops = {module for module in modules if module.count("/") == 1}
    assert sorted((folders | tops) - set(tree())) == []


@pytest.mark.parametrize("parent", ["docs", "manifests", "tests"])
def test_every_folder_beside_packages_is_in_tree(parent):
    files = [path.relative_to(ROOT) for path in (ROOT / parent).rglob("*") if path.is_file() and path.suffix != ".pyc"]
    folders = {f"{parent}/{path.parts[1]}/" for path in files if len(path.parts) > 2}
    assert sorted(folders - set(tree())) == []


@pytest.mark.parametrize(("name", "most"), [("README.md", 160), ("ARCHITECTURE.md", 220), ("CONTRIBUTING.md", 180)])
def test_the_first_pages_stay_short(name, most):
    """What grows beyond it belongs into a docstring or a page of docs/."""
    assert len(PAGES[name].splitlines()) <= most


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[name]):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        page = (ROOT / name).parent / path if path else ROOT / name
        if not page.exists() or (anchor and anchor not in anchors(page.read_text())):
            broken.append(target)
    assert broken == []


def anchors(page):
    """As GitHub makes them of headings, and those that a page writes itself."""
    headings = re.findall(r"^#+ (.*)", page, flags=re.MULTILINE)
    written = re.findall(r'<a id="([\w-]+)"></a>', page)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings} | {*written}


@pytest.mark.parametrize("name", PAGES)
def test_files_in_backticks_are_there(name):
    tops = "|".join(["trainer", "components", "pipelines", "manifests", "tests", "docs", "requirements"])
    named = {text for text in code(PAGES[name]) if re.fullmatch(rf"({tops})/[\w./-]+", text)}
    tests = {text for text in code(PAGES[name]) if re.fullmatch(r"(\w+/)*test_\w+\.py", text)}
    placeholders = {path for path in named if re.search(r"[A-Z]{4}", path)}
    assert sorted(path for path in named - placeholders if not (ROOT / path).exists()) == []
    assert sorted(path for path in tests if not any((ROOT / "tests").glob(f"**/{path.removeprefix('tests/')}"))) == []


def test_the_site_has_every_page(tmp_path):
    """`make docs-site` checks its links."""
    gather = runpy.run_path(str(ROOT / "docs" / "site.py"))["gather"]
    gather(tmp_path / "pages")
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    listed = [
        page for part in nav for name in part.values() for page in ([{"": name}] if isinstance(name, str) else name)
    ]
    names = sorted(name for page in listed for name in page.values())
    assert names == sorted(page.name for page in (tmp_path / "pages").glob("*.md"))
    assert "](../" not in "".join(page.read_text() for page in (tmp_path / "pages").glob("*.md"))


# ---------------------------------------------------------------------------------------------------------------------
# Commands


def make_targets(line):
    words = shlex.split(line, comments=True)[1:]
    return {word for word in words if re.fullmatch(r"[a-z][a-z-]*", word)}


def test_targets():
    there = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    lines = [(name, text) for name, page in PAGES.items() for text in code(page) if re.match(r"make( |$)", text)]
    assert len(lines) > 50
    assert [(name, line) for name, line in lines if make_targets(line) - there] == []
    lines = [text for page in PAGES.values() for text in code(page) if text.startswith("make ")]
    assert sorted(there - {target for line in lines for target in make_targets(line)} - {"help"}) == []


def test_python_has_the_modules():
    modules = {module for page in PAGES.values() for module in re.findall(r"python -m ([\w.]+)", page)}
    ours = {module for module in modules if module.split(".")[0] in {"trainer", "components", "pipelines"}}
    paths = {module: ROOT / module.replace(".", "/") for module in ours}
    assert {"trainer", "components.launch", "pipelines.deploy"} <= ours
    assert [
        module
        for module, path in paths.items()
        if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists())
    ] == []


@pytest.mark.parametrize("name", sorted(PAGES.keys() - {"CHANGELOG.md"}))
def test_settings_are_there(name):
    """But for the changelog, which names those that were, too."""
    there = {setting for setting, *_ in config.walk(config.Settings)}
    there |= {".".join(setting.split(".")[:depth]) for setting in there for depth in range(1, setting.count(".") + 1)}
    named = rf"(?<![\w./-])(?:{'|'.join(config.Settings.model_fields)})(?:\.[a-z][a-z0-9_]*)+"
    found = {setting for text in code(PAGES[name]) for setting in re.findall(named, text)}
    assert sorted(setting for setting in found - there if not setting.endswith((".py", ".html", ".json"))) == []


# ---------------------------------------------------------------------------------------------------------------------
# Variables and messages


def texts():
    """Every text in the code, with … for what is put into it; scripts as they stand."""
    found = [path.read_text() for path in (ROOT / "manifests").rglob("*.sh")]
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
    return found


def test_variables_are_listed():
    used = {text for text in texts() if re.fullmatch(r"(TRAINER|KFP|KF)_[A-Z_]*[A-Z]", text)}
    cells = first_cells(PAGES["docs/environment.md"])
    listed = {name for cell in cells for name in re.findall(r"`([A-Z_]+)`", cell)}
    assert len(used) > 15
    assert sorted(used - listed) == []
    assert sorted(name for name in listed if name.startswith(("TRAINER_", "KFP_", "KF_")) and name not in used) == []


def stands_in(message, text):
    """Whether the parts of a message that do not differ come one after the other in a text."""
    position = 0
    for part in message.split("…"):
        found = text.find(part, position)
        if found < 0:
            return False
        position = found + len(part)
    return True


def test_messages_read_as_the_documentation_says():
    table, found = first_cells(PAGES["docs/troubleshooting.md"]), texts()
    messages = [message for cell in table for message in re.findall("`([^`]+)`", cell)]
    assert len(messages) > 50
    assert [message for message in messages if not any(stands_in(message, text) for text in found)] == []
