"""Take the picture of a run in Kubeflow's UI: `python docs/kubeflow_picture.py http://localhost:8080 RUN_ID` writes docs/pictures/run.png.

Needs Playwright and Chromium, which the project itself does not: `pip install playwright`, and the system's Chromium, or
`playwright install chromium`.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

PICTURE = Path(__file__).parent / "pictures" / "run.png"
SETTLED_MS = 4000
"""The UI draws a graph some time after its last request."""


def main() -> None:
    """Take it."""
    from playwright.sync_api import sync_playwright  # type: ignore[import-not-found]  # not among our requirements: for this picture only

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ui", metavar="URL", help="of Kubeflow Pipelines' UI")
    parser.add_argument("run", metavar="RUN_ID", help="of a run that has ended")
    options = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1500, "height": 900})
        page.goto(f"{options.ui}/#/runs/details/{options.run}", wait_until="networkidle")

        def click(text: str) -> None:
            page.get_by_text(text, exact=True).first.click()
            page.wait_for_timeout(SETTLED_MS)

        page.wait_for_timeout(SETTLED_MS)
        click("Distillation")
        click("Open Sub-DAG")
        page.locator(".react-flow__controls-fitview").click()
        page.wait_for_timeout(SETTLED_MS)
        page.add_style_tag(content=".react-flow__minimap, .react-flow__controls {display: none}")
        page.screenshot(path=PICTURE, clip={"x": 218, "y": 0, "width": 1282, "height": 800})
        browser.close()


if __name__ == "__main__":
    main()
