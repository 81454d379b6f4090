"""Gather the pages of the documentation site in a folder: `python docs/site.py FOLDER`.

The site has the pages of docs/ and those of `OUTSIDE`, whose links are made to lead to one another there.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "manifests/README.md": "manifests.md",
}
"""Page outside of docs/ -> its name in the site."""
_LINK = re.compile(r"(?P<text>!?\[[^\]]*\])\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)|src=\"(?P<source>[^\":]+)\"")


def gather(folder: Path) -> None:
    """Write all pages and pictures of the site into a folder, which is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    pages = {path: folder / name for path, name in OUTSIDE.items()}
    pages |= {f"docs/{page.name}": folder / page.name for page in (ROOT / "docs").glob("*.md")}
    for path, target in pages.items():
        source = ROOT / path
        target.write_text(_with_links(source.read_text(encoding="utf-8"), source.parent), encoding="utf-8")


def _with_links(text: str, folder: Path) -> str:
    """Return the text of a page in this folder with the links of the site; a link to a file that is no page of it becomes plain text."""

    def linked(match: re.Match[str]) -> str:
        target = match["target"] or match["source"]
        path = (folder / target).resolve()
        if "://" in target or not path.is_relative_to(ROOT):
            return match[0]
        name = path.relative_to(ROOT).as_posix()
        in_site = OUTSIDE.get(name, name.removeprefix("docs/") if name.startswith("docs/") else None)
        if match["source"]:
            return match[0] if in_site is None else f'src="{in_site}"'
        return match["text"][1:-1] if in_site is None else f"{match['text']}({in_site}{match['anchor'] or ''})"

    return _LINK.sub(linked, text)


if __name__ == "__main__":
    gather(Path(sys.argv[1]))
