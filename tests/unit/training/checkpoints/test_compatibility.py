import pytest

from trainer import config
from trainer.base_models import Section
from trainer.training.checkpoints.compatibility import FREE, compatible, differences, listed


def names(section):
    """Of all settings in a group of them, and in those within it."""
    for name, field in section.model_fields.items():
        yield name
        for inner in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(inner, type) and issubclass(inner, Section):
                yield from names(inner)


def test_every_free_setting_is_one():
    assert {*names(config.PretrainSettings), *names(config.DistillSettings)} >= FREE


def test_what_decides_what_is_learned_stays_wherever_it_stands():
    settings = config.resolve("digits").for_stage("pretrain") | {"workers": 3}
    kept = compatible(settings)
    assert "workers" not in kept
    assert kept["mae"]["epochs"] == settings["mae"]["epochs"]
    assert kept["finetune"]["views"] == settings["finetune"]["views"]
    assert not FREE & {*kept, *kept["mae"], *kept["finetune"]}


@pytest.mark.parametrize(
    "name", ["epochs", "batch_size", "seed", "precision", "gradient_compression", "ema_decay", "zero"]
)
def test_a_distillation_goes_on_with_another_value_only_where_that_is_free(name):
    settings = config.DistillSettings().model_dump(mode="json")
    other = settings | {name: "other"}
    assert (compatible(settings) == compatible(other)) == (name in FREE)


def test_each_difference_is_told_with_what_was_and_what_is():
    was = {"epochs": 3, "views": {"flip": True, "mixup": 0.1}, "workers": 1}, {"dataset": "a" * 64, "teacher": "t"}
    now = {"epochs": 4, "views": {"flip": True, "mixup": 0.2}, "workers": 2, "new": None}, {"dataset": "b" * 64}
    assert differences(was, now, section="distill") == [
        "distill.epochs was 3, is 4",
        "distill.views.mixup was 0.1, is 0.2",
        "distill.new was not there, is None",
        "input dataset was aaaaaaaaaaaa, is bbbbbbbbbbbb",
        "input teacher was t, is not there",
    ]
    assert differences(was, was, section="distill") == []


def test_a_long_list_is_cut():
    assert listed([f"a{number} was 0, is 1" for number in range(12)]).endswith("a9 was 0, is 1, and 2 more")
