"""References between tasks: what they say, and what is noticed before anything starts."""

from __future__ import annotations

import shutil

import pytest

from components import references
from trainer import artifacts
from trainer.errors import ArtifactError


@pytest.fixture
def dataset(tmp_path):
    """The reference to an artifact, in a folder whose name has a sign of its own."""
    path = tmp_path / "run #1" / "dataset"
    with artifacts.create(path, "dataset", settings={}):
        (path / "content").write_text("images")
    return references.to(str(path), "dataset")


def test_a_reference_holds_the_place_the_kind_and_the_content(dataset, tmp_path):
    path = tmp_path / "run #1" / "dataset"
    assert dataset == f"{path}#dataset={artifacts.manifest(path, 'dataset').fingerprint}"
    assert references.is_reference(dataset)
    assert not any(references.is_reference(text) for text in ("", "online", str(path), f"{path}#dataset=12", 3))
    assert references.uri_of(dataset) == str(path)


def test_inputs_that_are_not_given_are_left_out(dataset, tmp_path):
    assert references.uris({"dataset": dataset, "tuning": ""}) == {"dataset": str(tmp_path / "run #1" / "dataset")}


def test_an_artifact_that_is_gone_is_named_with_the_way_to_make_it_again(dataset):
    """KFP's cache does not look whether it is there."""
    shutil.rmtree(references.uri_of(dataset))
    with pytest.raises(ArtifactError, match=r"dataset .*/dataset is gone, .* make deploy-pipeline RUN=1 FRESH=1$"):
        references.uris({"dataset": dataset})


def test_an_artifact_in_the_place_of_another_is_named(dataset):
    path = references.uri_of(dataset)
    with artifacts.create(path, "dataset", settings={"other": 1}):
        pass
    with pytest.raises(ArtifactError, match=r"has the fingerprint .* something else was written there"):
        references.uris({"dataset": dataset})
    assert not references.is_whole(dataset)


def test_a_text_that_is_no_reference_is_named():
    with pytest.raises(
        ArtifactError, match=r"'s3://bucket/dataset' is no reference to an artifact, URI#KIND=FINGERPRINT"
    ):
        references.uris({"dataset": "s3://bucket/dataset"})
