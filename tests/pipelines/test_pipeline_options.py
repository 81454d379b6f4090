"""The pipeline's parameters as options, on which the commands that run it agree."""

import argparse

import pytest

from pipelines import pipeline_options
from pipelines.distillation import definition
from trainer.graph import OPTIONAL_STAGES


@pytest.fixture
def parse():
    parser = argparse.ArgumentParser()
    pipeline_options.add(parser, files=True, pool="here", processes="one")
    return lambda *arguments: parser.parse_args(arguments)


def test_every_parameter_of_the_pipeline_is_an_option(parse):
    options = parse()
    place = vars(pipeline_options.place(options))
    wanted = definition(OPTIONAL_STAGES, "").component_spec.inputs
    assert {*pipeline_options.values(options), *place} == {*wanted}
    assert {**pipeline_options.values(options), **place} == {
        **dict.fromkeys(("overrides", "dataset", "teacher", "experiment", "pool"), ""),
        "recipe": "digits", "nodes": 1, "processes_per_node": 0,
    }  # fmt: skip


def test_settings_that_are_given_twice_are_one_text(parse):
    options = parse("--set", "a=1 b='x y'", "--pool", "p", "--set", "c=2", "d=3")
    assert pipeline_options.values(options)["overrides"] == "a=1 b='x y' c=2 d=3"


def test_a_pool_may_have_a_default(parse):
    assert pipeline_options.place(parse(), default_pool="cpu").pool == "cpu"
    assert pipeline_options.place(parse("--pool", "other"), default_pool="cpu").pool == "other"
