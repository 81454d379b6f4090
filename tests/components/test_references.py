"""References between tasks: what they say, and what is noticed before anything starts."""

from __future__ import annotations

import shutil

import pytest

from components import references
from trainer.io import artifacts, storage
from trainer.io.errors import ArtifactError


@pytest.fixture
def dataset(tmp_path):
    """The reference to an artifact, in a folder whose name has a sign of its own."""
    path = tmp_path / "run #1" / "dataset"
    with artifacts.create(path, "dataset", settings={}):
        (path / "content").write_text("images")
    return references.to(str(path), "dataset")


def test_reference_holds_place_kind_and_content(dataset, tmp_path):
    path = tmp_path / "run #1" / "dataset"
    assert dataset == f"{path}#dataset={artifacts.manifest(path, 'dataset').fingerprint}"
    assert references.uri_of(dataset) == str(path)


@pytest.fixture(params=["folder", "store"])
def root(request, tmp_path):
    if request.param == "folder":
        return str(tmp_path / "root")
    return f"s3://{request.getfixturevalue('object_store').bucket}/root"


def made(root, run, content="images"):
    """The reference that a run hands on after it has made a data set."""
    uri = f"{root}/{run}/prepare/dataset"
    with artifacts.create(uri, "dataset", settings={}) as draft:
        (draft.path / "content").write_text(content)
    return references.shared(uri, "dataset", run)


def test_runs_that_make_same_hand_on_one_reference(root):
    """A later run gets either run's from KFP's cache, which must hold what was made of it."""
    first, second, other = made(root, "run-1"), made(root, "run-2"), made(root, "run-3", "other images")
    assert first.startswith(f"{root}/run-1/prepare/dataset#dataset=")
    assert second == first
    assert other.startswith(f"{root}/run-3/")


@pytest.mark.parametrize("lost", ["content", "manifest.json"])
def test_what_another_run_has_lost_is_not_handed_on(root, lost):
    first = made(root, "run-1")
    storage.remove_file(storage.join(references.uri_of(first), lost))
    second = made(root, "run-2")
    assert second.startswith(f"{root}/run-2/")
    assert made(root, "run-3") == second


@pytest.mark.parametrize("text", [b"", b"\xff", b"s3://elsewhere/run-1#model=" + b"0" * 64])
def test_a_spoilt_entry_is_written_again(root, text):
    entry = f"{root}/references/dataset-{made(root, 'run-1').rpartition('=')[2]}"
    storage.write_bytes(entry, text)
    second = made(root, "run-2")
    assert second.startswith(f"{root}/run-2/")
    assert storage.read_bytes(entry).decode() == second


def test_a_fresh_run_begins_a_generation_for_all_later_ones(root):
    """KFP's cache would go on to give the old result to every run that is not fresh itself."""

    def generation(run, *, fresh=False):
        return references.generation(f"{root}/{run}/configure/generation", run, fresh=fresh)

    assert [generation("run-1"), generation("run-2", fresh=True), generation("run-3"), generation("run-4", fresh=True)] == [
        "", "run-2", "run-2", "run-4",
    ]  # fmt: skip


def test_a_fresh_run_shares_no_reference_with_earlier_ones(root):
    """Equal data under the old reference would bring the old teacher and student out of KFP's cache."""
    first = made(root, "run-1")
    references.generation(f"{root}/run-2/configure/generation", "run-2", fresh=True)
    fresh, later = made(root, "run-2"), made(root, "run-3")
    assert first.startswith(f"{root}/run-1/")
    assert fresh.startswith(f"{root}/run-2/")
    assert later == fresh


def test_outside_of_a_runs_folder_only_a_fresh_run_is_apart(root):
    place = f"{root}/run-1/configure/generation"
    assert [references.generation(place, "run-2", fresh=fresh) for fresh in (True, False)] == ["run-2", ""]


@pytest.mark.parametrize("run", ["", "elsewhere"])
def test_outside_of_clusters_run_task_hands_on_its_own(dataset, run):
    assert references.shared(references.uri_of(dataset), "dataset", run) == dataset


def test_references_that_do_not_serve(dataset):
    # KFP's cache does not look whether it is there.
    shutil.rmtree(references.uri_of(dataset))
    with pytest.raises(ArtifactError, match=r"dataset .*/dataset is gone, .* make deploy-pipeline RUN=1 FRESH=1$"):
        references.uris({"dataset": dataset})
    # An artifact in the place of another is named.
    path = references.uri_of(dataset)
    with artifacts.create(path, "dataset", settings={"other": 1}):
        pass
    with pytest.raises(ArtifactError, match=r"has the fingerprint .* something else was written there"):
        references.uris({"dataset": dataset})
    # A text that is no reference is named.
    with pytest.raises(
        ArtifactError, match=r"'s3://bucket/dataset' is no reference to an artifact, URI#KIND=FINGERPRINT"
    ):
        references.uris({"dataset": "s3://bucket/dataset"})
