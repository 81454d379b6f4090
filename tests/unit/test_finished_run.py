"""A run's front page: what it says and where it leads."""

import re

from PIL import Image

from tests.unit.test_summary import STUDENT, TEACHER, built
from trainer import finished_run
from trainer.summary import Registered


def reports(folder):
    """Where the stages have left their pages and a picture."""
    (folder / "stages").mkdir()
    made = {name: folder / "stages" / f"of_{name}.html" for name in ("data", "profile", "evaluation")}
    for name, file in made.items():
        file.write_text(f"the page {name}")
    Image.new("RGB", (3, 3)).save(folder / "stages" / "seen.png")
    return {name: str(file) for name, file in made.items()} | {"reconstructions": str(folder / "stages" / "seen.png")}


def test_it_leads_to_copies_of_the_pages_and_says_what_came_out(tmp_path):
    run = tmp_path / "one <run>"
    run.mkdir()
    content = built(reports=reports(tmp_path))
    assert finished_run.write_front_page(run, content) == run / "index.html"
    page = (run / "index.html").read_text()
    assert re.findall('href="([^"]*)"', page) == ["evaluation.html", "profile.html", "data.html"]
    for name in ("evaluation", "profile", "data"):
        assert (run / f"{name}.html").read_text() == f"the page {name}"
    for said in (
        "one &lt;run&gt;",
        "the student passed",
        TEACHER["title"],
        STUDENT["title"],
        "-3.50 points",
        "14.2x smaller",
        "nothing slows it",
        "data:image/png;base64,",
        "sqlite:///x.db, run abc, vit-student version 3",
    ):
        assert said in page, said


def test_a_run_that_did_not_pass_and_is_not_tracked(tmp_path):
    verdict = {"passed": False, "reasons": ["accuracy: below <0.9>", "latency: too long"]}
    evaluation = {"teacher": TEACHER, "student": STUDENT, "verdict": verdict}
    finished_run.write_front_page(tmp_path, built(evaluation=evaluation, registered=Registered(), reports={}))
    page = (tmp_path / "index.html").read_text()
    assert "the student did not pass" in page
    assert "<li>accuracy: below &lt;0.9&gt;</li><li>latency: too long</li>" in page
    assert "MLflow" not in page
    assert "Pictures" not in page
    assert "None" not in page
