"""Look at the pages of a run in Chromium: `make check-pages [OUT=runs/latest]`.

In light and dark and 420 and 1300 pixels wide: no page asks for anything, none is wider than the window, and axe-core finds nothing against
WCAG 2.1 AA or its best practices, such as text below 4.5:1. In Chromium alone; CI has neither a browser nor npm.
"""

from __future__ import annotations

import sys
from pathlib import Path

from docs.pictures import chromium

AXE = Path(__file__).parents[2] / ".axe/node_modules/axe-core/axe.min.js"
WIDTHS = (420, 1300)


def check(run: Path) -> list[str]:
    """Return what is wrong with the pages in a folder."""
    wrong, files = [], sorted(run.glob("*.html"))
    if not files:
        return [f"{run}: has no page; name the directory of a finished run"]
    with chromium() as opened:
        for file in files:
            for width in WIDTHS:
                for scheme in ("light", "dark"):
                    where, asked = f"{file.name}, {width} px, {scheme}", list[str]()
                    page = opened.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
                    page.on("request", lambda request, asked=asked: asked.append(request.url))
                    page.goto(file.resolve().as_uri())
                    wrong += [f"{where}: asks for {url}" for url in asked if not url.startswith(("file:", "data:"))]
                    if (wide := page.evaluate("document.documentElement.scrollWidth")) > width:
                        wrong.append(f"{where}: is {wide} px wide")
                    page.evaluate(AXE.read_text(encoding="utf-8"))
                    for one in page.evaluate("axe.run()")["violations"]:
                        first = one["nodes"][0]["html"][:120]
                        wrong.append(f"{where}: {one['id']} ({one['impact']}) at {len(one['nodes'])}: {first}")
                    page.close()
    return wrong


if __name__ == "__main__":
    found = check(Path(sys.argv[1]))
    print("\n".join(found) or "nothing is wrong")
    sys.exit(bool(found))
