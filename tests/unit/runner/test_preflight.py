"""What a run finds out before its first stage."""

import logging

import huggingface_hub.constants
import pytest
import torch

from components import sections
from components.launching import Placement
from tests.distillations import TINY, blank_teacher
from trainer import config
from trainer.io import artifacts
from trainer.io.errors import ArtifactError, BudgetError, DataError, ModelError, SettingsError
from trainer.models import networks
from trainer.runner import local_run, preflight

WEIGHTS = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"


@pytest.fixture
def commit(tmp_path, monkeypatch):
    """The commit that the cache of the hub's client holds, while the hub does not answer."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    reference = tmp_path / f"models--timm--{WEIGHTS}" / "refs" / "main"
    reference.parent.mkdir(parents=True)
    reference.write_text("a" * 40)
    return "a" * 40


def pinned(*overrides):
    return preflight.pinned(config.resolve("digits", overrides))


def test_revision_of_weights_is_fixed_before_they_are_loaded(commit):
    given = [
        f"distill.weights=timm:{WEIGHTS}",
        f"distill.student.architecture={WEIGHTS.partition('.')[0]}",
        "distill.student.args={}",
    ]
    searched = pinned(*given, "search.enabled=true")
    assert searched.search.distill == searched.distill
    assert searched.distill.weights == f"timm:{WEIGHTS}@{commit}"
    settings = pinned(f"pretrain.weights=timm:{WEIGHTS}", "warm_up.enabled=true")
    assert settings.pretrain.weights == f"timm:{WEIGHTS}@{commit}"
    assert settings.warm_up.pretrain == settings.pretrain
    assert settings == config.resolve("digits", [f"pretrain.weights=timm:{WEIGHTS}@{commit}", "warm_up.enabled=true"])


def test_each_student_that_a_search_names_is_built():
    space = 'search.space={"distill.student.architecture"="choice(vit_tiny_patch16_224,vit_tinny)"}'
    settings = config.resolve_run("digits", ["search.enabled=true", space])
    with pytest.raises(ModelError, match=r"search.space: distill.student.architecture=vit_tinny.*'vit_tinny'"):
        preflight.checked(settings, trains_here=True)


@pytest.mark.parametrize("weights", ["", "/models/teacher", f"timm:{WEIGHTS}@{'b' * 40}"])
@pytest.mark.usefixtures("commit")
def test_other_weights_stay_as_they_are(weights):
    assert pinned(f"pretrain.weights={weights}").pretrain.weights == weights


def test_weights_that_timm_does_not_have_are_refused_before_anything_starts():
    with pytest.raises(ModelError, match=r"timm:vit_tiny_patch16_224\.nobody: timm has no such weights.*vit_tiny"):
        pinned("pretrain.weights=timm:vit_tiny_patch16_224.nobody")


def checked(*overrides, trains_here=True, processes=1):
    settings = config.resolve_run("digits", ["run.device=cpu", *overrides])
    return preflight.checked(settings, trains_here=trains_here, processes=processes)


def test_tables_of_unknown_classes_are_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "build_teacher", lambda *_, **__: pytest.fail("builds a model first"))
    (tmp_path / "table.csv").write_text("class,value\n0,\n")
    with pytest.raises(DataError, match="the column 'value' is empty"):
        checked("data.source=imagefolder:s3://bucket/photos", f"data.attributes={tmp_path}/table.csv")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("distill.teacher=recorded", "distill.feature_weight=1", "reinforce.features=true"),
        (
            "distill.student.architecture=resnet10t",
            "distill.student.args={}",
            "data.image_size=176",
            "distill.feature_weight=1",
            "distill.token_weight=1",
        ),
        ("distill.teacher=recorded", "distill.token_weight=1", "reinforce.tokens=true"),
        ("distill.blocks={0=1}", "distill.block_weight=1"),
    ],
)
def test_what_can_be_trained_is_let_through(overrides):
    assert checked(*overrides) == config.resolve_run("digits", ["run.device=cpu", *overrides])


@pytest.mark.parametrize("name", ["pretrain.finetune", "distill"])
def test_a_fixed_size_network_has_no_smaller_input(name):
    smaller = f"{name}.low_resolution={{epochs=1,image_size=8}}"
    with pytest.raises(
        ModelError, match=rf"^{name}.*: architecture 'vit_\w+': takes no images of 8 pixels beside its own"
    ):
        checked(smaller)
    with pytest.raises(ModelError, match=r"low_resolution.image_size is 64, but its own input has 32 pixels"):
        checked(f"{name}.low_resolution={{epochs=1,image_size=64}}")
    checked(smaller, "pretrain.teacher.args.dynamic_img_size=true", "distill.student.args.dynamic_img_size=true")


@pytest.mark.parametrize("name", ["pretrain.finetune", "distill"])
@pytest.mark.parametrize(("place", "overrides"), [({"device": "xla"}, []), ({}, ["run.device=xla"])])
def test_a_smaller_input_first_is_not_for_xla(name, place, overrides, monkeypatch):
    monkeypatch.setattr("trainer.devices.check_device", lambda wanted: None)
    settings = config.resolve("digits", [f"{name}.low_resolution={{epochs=1,image_size=8}}", *overrides])
    with pytest.raises(
        SettingsError, match=rf"^{name}\.low_resolution\.epochs is 1, but on XLA .*leave {name}\.low_resolution out$"
    ):
        preflight.checked(settings, trains_here=False, **place)


@pytest.mark.parametrize("name", ["pretrain.teacher", "distill.student"])
def test_network_without_patch_tokens_is_refused_where_they_are_compared(name):
    convolutional = (
        f"{name}.architecture=resnet10t",
        f"{name}.args={{}}",
        f"{name}.image_size=32",
        "data.image_size=32",
        "pretrain.mae.epochs=0",
    )
    checked(*convolutional)
    with pytest.raises(
        ModelError, match=rf"^{name}: architecture 'resnet10t' with an input of 32 pixels has no patch tokens"
    ):
        checked(*convolutional, "distill.token_weight=1")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["distill.blocks={9=0}"],
            r"^distill\.student: architecture 'vit_tiny_patch16_224' has blocks 0 to \d+, but .* names 9",
        ),
        (["distill.blocks={0=12}"], r"^pretrain\.teacher: architecture 'vit_\w+' has blocks 0 to \d+, but .* names 12"),
        (
            ["distill.distillation_token=true"],
            r"^distill\.student: architecture 'vit_tiny_patch16_224' has no distillation token",
        ),
    ],
)
def test_what_network_does_not_have_cannot_be_taught(overrides, message):
    weights = ["distill.block_weight=1"] if "blocks" in overrides[0] else []
    with pytest.raises(ModelError, match=message):
        checked(*overrides, *weights)


HEADLESS = ("pretrain.head=none", "pretrain.finetune.epochs=0")
PROBE = ("distill.head=probe", "distill.logit_weight=0", "distill.label_weight=0", "distill.feature_weight=1")


def test_teachers_without_a_head(tmp_path):
    checked(*HEADLESS, *PROBE)
    args = ["distill.student.architecture=volo_d1_224", "distill.student.args={}", "data.image_size=224"]
    expected = r"^distill\.student: architecture 'volo_d1_224' cannot be compared by its features"
    with pytest.raises(ModelError, match=expected):
        checked(*PROBE, *args)
    # A teacher whose weights have no head cannot be taken for a classifier.
    model = networks.with_labels(networks.load(blank_teacher(tmp_path / "teacher")), ())
    with artifacts.create(tmp_path / "headless", "model", settings={}) as draft:
        networks.save(model, draft.path)
    given = [f"pretrain.weights={tmp_path / 'headless'}", "pretrain.mae.epochs=0", "pretrain.finetune.epochs=0"]
    with pytest.raises(ModelError, match=r"headless: has no head, .* \(pretrain\.head=none\), or let it be fine-tuned"):
        checked(*given)
    checked(*given, "pretrain.head=none", *PROBE)
    checked(*given, "pretrain.head=probe")


@pytest.mark.parametrize(
    ("architecture", "why"),
    [("levit_128s", "take a linear probe as its head"), ("efficientvit_m0", "be taken without its head")],
)
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("pretrain.teacher", ("pretrain.mae.epochs=1", *HEADLESS, *PROBE)),
        ("pretrain.teacher", ("pretrain.mae.epochs=1", "pretrain.head=probe", "pretrain.finetune.epochs=0")),
        ("distill.student", PROBE),
    ],
)
def test_an_impossible_probe_is_refused_early(name, overrides, architecture, why):
    args = [f"{name}.architecture={architecture}", f"{name}.args={{}}", "data.image_size=224"]
    with pytest.raises(ModelError, match=rf"^{name}: architecture '{architecture}' cannot {why}"):
        checked(*overrides, *args)


def test_a_given_teacher_may_enlarge_small_images(caplog):
    weights = ("pretrain.weights=package:tf_efficientnet_lite0", "pretrain.teacher.architecture=tf_efficientnet_lite0")
    teacher = (*weights, "pretrain.teacher.args={}", "pretrain.teacher.image_size=64", "pretrain.mae.epochs=0")
    for recorded in ((), ("distill.teacher=recorded",)):
        caplog.clear()
        checked(*teacher, *recorded)
        assert any("enlarges images of 32 pixels to 64" in line for line in caplog.messages)
    # What students learn from is not enlarged.
    with pytest.raises(SettingsError, match=r"distill\.student asks for views of 48 pixels"):
        checked(*teacher, "distill.student.args.img_size=48")
    with pytest.raises(SettingsError, match=r"reinforce\.view_size asks for views of 48 pixels"):
        checked(*teacher, "distill.teacher=recorded", "reinforce.view_size=48")


def test_given_weights_are_looked_at(tmp_path):
    given = [
        f"pretrain.weights={blank_teacher(tmp_path / 'teacher')}",
        "pretrain.mae.epochs=0",
        "pretrain.finetune.epochs=0",
    ]
    checked(*given)
    with pytest.raises(ModelError, match=r"^pretrain\.label_map: the data set has no class 'x'"):
        checked(*given, "pretrain.label_map={x=1}")
    nowhere = "pretrain.weights=/nowhere"
    with pytest.raises(ArtifactError, match=r"pretrain\.teacher: .*/nowhere"):
        checked(nowhere)
    checked(nowhere, trains_here=False)  # a node of the pool may have it
    # So are those of the student.
    teacher = blank_teacher(tmp_path / "weights")
    args = [f"distill.student.args.{key}={value}" for key, value in (TINY | {"embed_dim": 32}).items()]
    checked(f"distill.weights={teacher}", *args)
    with pytest.raises(
        ModelError,
        match=r"^distill\.weights .*/weights is vit_tiny_patch16_224 of 16 pixels .*'embed_dim': 32.*, but the",
    ):
        checked(f"distill.weights={teacher}")
    nowhere = "distill.weights=/nowhere"
    with pytest.raises(ArtifactError, match=r"distill\.student: .*/nowhere"):
        checked(nowhere)
    checked(nowhere, trains_here=False)
    package = ["distill.student.args={}", "distill.student.architecture=tf_efficientnet_lite1"]
    with pytest.raises(SettingsError, match=r"distill\.student asks for views of 240 pixels"):
        checked("distill.weights=package:tf_efficientnet_lite1", *package)
    checked("distill.weights=package:tf_efficientnet_lite1", *package, "data.image_size=240")
    with pytest.raises(ModelError, match=r"distill\.student: package:resnet18: no package has such weights"):
        checked("distill.weights=package:resnet18", "distill.student.architecture=resnet18", "distill.student.args={}")


def test_an_impossible_fine_tuning_is_refused(tmp_path):
    lora = ("pretrain.finetune.method=lora", "pretrain.mae.epochs=0", f"pretrain.weights={tmp_path / 'teacher'}")
    blank_teacher(tmp_path / "teacher")
    checked(*lora)
    with pytest.raises(
        ModelError, match=r"^pretrain\.finetune\.lora\.layers: VisionTransformer has no .* named 'query'"
    ):
        checked(*lora, 'pretrain.finetune.lora.layers=["query"]')
    resnet = networks.create(config.ModelSettings(architecture="resnet10t"), ["a", "b"])
    with artifacts.create(tmp_path / "resnet", "model", settings={}) as draft:
        networks.save(resnet, draft.path)
    with pytest.raises(ModelError, match=r"^pretrain\.finetune\.method is lora, but ResNet has no linear layer"):
        checked(*lora, f"pretrain.weights={tmp_path / 'resnet'}", "data.image_size=176")


def test_device_of_pool_is_not_looked_for_here(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    checked("run.device=cuda", trains_here=False)


def test_recipe_that_is_made_for_such_data_is_named(caplog, tmp_path):
    caplog.set_level(logging.INFO)
    for name in ("a/1.png", "a/2.png", "b/1.png", "b/2.png", *(f"unlabeled/{number}.png" for number in range(5))):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    checked(f"data.source=imagefolder:{tmp_path}")
    assert any("4 labeled images, 2 a class" in line and "few-labels" in line for line in caplog.messages)


def test_batches_that_will_be_clamped_are_named_before_first_stage(caplog, tmp_path):
    caplog.set_level(logging.WARNING)
    checked("distill.batch_size=1797")
    assert not caplog.messages
    checked(
        "distill.batch_size=1798",
        "pretrain.finetune.batch_size=5000",
        "pretrain.mae.batch_size=5000",
        "pretrain.mae.epochs=0",
    )
    assert [line.partition(", but digits has 1797 images for it")[0] for line in caplog.messages] == [
        "pretrain.finetune.batch_size = 5000",
        "distill.batch_size = 1798",
    ]


@pytest.mark.parametrize(
    "source", ["hub:someone/photos", "imagefolder:s3://bucket/photos", "manifest:memory://photos.csv"]
)
def test_source_that_takes_long_to_list_is_not_listed(source):
    checked(f"data.source={source}")


@pytest.mark.parametrize(
    ("overrides", "processes", "name"),
    [
        (("distill.batch_size=8", "distill.accumulation=2"), 5, "distill.batch_size = 8"),
        (("pretrain.mae.batch_size=2",), 3, "pretrain.mae.batch_size = 2"),
        (("pretrain.mae.batch_size=4096",), 2000, "pretrain.mae.batch_size = 1797"),  # as many as there are images
    ],
)
def test_batch_that_cannot_be_dealt_to_processes_is_refused(overrides, processes, name):
    with pytest.raises(SettingsError, match=f"^{name} cannot be divided among {processes} processes"):
        checked(*overrides, processes=processes)


CONVOLUTIONAL = ("distill.student.architecture=resnet10t", "distill.student.args={}", "data.image_size=176")


def test_batch_normalization_needs_two_images_in_each_micro_batch():
    checked(*CONVOLUTIONAL, "distill.batch_size=8", "distill.accumulation=4")
    with pytest.raises(SettingsError, match=r"^distill\.batch_size = 8 leaves one image .*; choose 16 or more"):
        checked(*CONVOLUTIONAL, "distill.batch_size=8", "distill.accumulation=4", processes=2)
    teacher = [word.replace("distill.student", "pretrain.teacher") for word in CONVOLUTIONAL]
    teacher += ["pretrain.mae.epochs=0", "pretrain.finetune.batch_size=4", "pretrain.finetune.accumulation=4"]
    with pytest.raises(SettingsError, match=r"^pretrain\.finetune\.batch_size = 4 leaves one image"):
        checked(*teacher)
    package = ["pretrain.teacher.architecture=tf_efficientnet_lite0", "pretrain.teacher.args={}", "data.image_size=224"]
    given = [*teacher, *package, "pretrain.weights=package:tf_efficientnet_lite0"]
    with pytest.raises(SettingsError, match=r"^pretrain\.finetune\.batch_size = 4 leaves one image"):
        checked(*given)
    checked(*given, "pretrain.finetune.method=head")  # whose network stays in evaluation mode


@pytest.mark.parametrize("part", ["pretrain.teacher", "distill.student"])
def test_networks_take_three_channels(part):
    with pytest.raises(ModelError, match=rf"^{part}: architecture .*: in_chans is 1, but every image has 3 channels"):
        checked(f"{part}.args.in_chans=1")


@pytest.mark.parametrize(
    ("weights", "advice"),
    [
        (WEIGHTS, f"timm:{WEIGHTS}"),
        ("timm/vit_tiny_patch16_224", "timm:vit_tiny_patch16_224"),
        (f"hf-hub:timm/{WEIGHTS}", f"timm:{WEIGHTS}"),
        ("tf_efficientnet_lite0", "package:tf_efficientnet_lite0"),
    ],
)
def test_the_prefix_of_public_weights_is_suggested(weights, advice):
    with pytest.raises(ModelError, match=rf"^pretrain\.teacher: weights is '{weights}', .* are {advice}$"):
        checked(f"pretrain.weights={weights}")


def test_a_relative_place_is_named_with_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError, match=rf"model runs/latest/teacher \(in {tmp_path}\): no such directory"):
        checked("pretrain.weights=runs/latest/teacher")


def test_of_weights_in_store_only_outline_is_fetched(object_store, teacher):
    uri = object_store.uri("teacher")
    artifacts.copy(teacher, uri, "model")
    object_store.clear()
    assert networks.outline(uri).card == networks.load(teacher).card
    weights = [one for one in object_store.requests if one.path.endswith("model.safetensors")]
    assert (
        0 < sum(one.sent for one in weights) < artifacts.manifest(uri, "model").files["model.safetensors"]["size"] / 2
    )


def test_export_without_its_packages_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr("trainer.stages.onnx_export.PACKAGES", ("onnx", "no_such_package"))
    with pytest.raises(
        SettingsError, match=r"export\.enabled needs the package no_such_package; .* or set export\.enabled=false"
    ):
        preflight.checked(config.resolve("digits"), trains_here=True)
    assert preflight.checked(config.resolve("digits", "export.enabled=false"), trains_here=True)


def test_openvino_is_wanted_where_it_is_to_be_tried(monkeypatch):
    assert preflight.checked(config.resolve("digits", "export.openvino=true"), trains_here=True)
    monkeypatch.setattr("trainer.runner.preflight.OPENVINO", "no_such_package")
    with pytest.raises(SettingsError, match=r"export\.openvino needs the package .*, or set export\.openvino=false"):
        preflight.checked(config.resolve("digits", "export.openvino=true"), trains_here=True)
    nothing = config.resolve("digits", ["export.openvino=true", "export.enabled=false"])
    assert preflight.checked(nothing, trains_here=True), "a run that exports nothing needs neither"


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["run.budget_usd=3"], "run.budget_usd=3"),
        (["search.enabled=true", "search.budget_usd=9"], "search.budget_usd=9"),
    ],
)
def test_a_budget_in_dollars_needs_a_price_before_anything_starts(overrides, name, tmp_path):
    with pytest.raises(BudgetError, match=f"{name} cannot be kept, since the price of this machine is not known"):
        local_run.run("digits", overrides, output=tmp_path / "run", processes=1)
    assert not (tmp_path / "run").exists()
    with pytest.raises(BudgetError, match="is not known; give the pool a price"):
        sections.configure(config.resolve("digits", overrides), Placement(pool="cpu", nodes=2))
