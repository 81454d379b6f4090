"""Teachers that timm does not have, from the setting to an evaluated student: a folder of Transformers, a function of the user's."""

import json

import pytest
import torch
from transformers import (
    EfficientNetImageProcessor,
    MobileViTImageProcessor,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from trainer import config, stages
from trainer.config import ModelSettings, TransformersWeights
from trainer.io import artifacts
from trainer.io.errors import ArtifactError, ModelError, SettingsError
from trainer.models import custom_networks, networks, pretrained

DIGITS = [str(digit) for digit in range(10)]
NAMES = ["none of these", *(f"digit {digit}" for digit in reversed(DIGITS))]  # of the teacher's 11 classes
LABEL_MAP = "pretrain.label_map={" + ",".join(f'{digit}="digit {digit}"' for digit in DIGITS) + "}"
OF_CLASSES = [NAMES.index(f"digit {digit}") for digit in DIGITS]
MODULE = "module:digit_teacher:teacher"
SOURCE = """
import torch
from torch import nn

CALLS = []


def teacher(width=8, pretrained=False):
    CALLS.append(pretrained)
    torch.manual_seed(width if pretrained else 0)
    network = nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 11))
    network.default_cfg = {"label_names": NAMES}
    return network


def plain():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 10))


def text():
    return "no module"


def broken():
    raise RuntimeError("checkpoint.pt is missing")


def map_of_features():
    return nn.Conv2d(3, 4, 3)
"""
GIVEN = ["pretrain.teacher.image_size=16", "pretrain.teacher.mean=[0.5,0.4,0.3]", "pretrain.teacher.std=[0.2,0.25,0.5]"]


@pytest.fixture(autouse=True)
def _quietly(monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")


@pytest.fixture
def code(tmp_path, monkeypatch):
    """A module that may be imported."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "digit_teacher.py").write_text(f"NAMES = {NAMES!r}\n{SOURCE}")
    monkeypatch.syspath_prepend(tmp_path / "code")
    monkeypatch.setenv(custom_networks.MODULES_VARIABLE, "another, digit_teacher")
    monkeypatch.delitem(__import__("sys").modules, "digit_teacher", raising=False)


@pytest.fixture
def folder(tmp_path):
    """What Transformers writes of a model that was trained with it."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    labels = {"id2label": dict(enumerate(NAMES)), "label2id": {name: index for index, name in enumerate(NAMES)}}
    network = ViTForImageClassification(ViTConfig(**sizes, **labels, image_size=24, patch_size=8)).eval()
    network.save_pretrained(tmp_path / "vit")
    processor = ViTImageProcessor(
        size={"height": 24, "width": 24}, image_mean=[0.5, 0.4, 0.3], image_std=[0.2, 0.25, 0.5]
    )
    processor.save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


def settings(weights, *overrides):
    given = [
        f"pretrain.weights={weights}",
        f"pretrain.teacher.architecture={weights.partition('@')[0]}",
        "pretrain.teacher.args={}",
    ]
    given += ["pretrain.teacher.image_size=0", "pretrain.mae.epochs=0", "pretrain.finetune.epochs=0", *overrides]
    return config.resolve("digits", [*given, "distill.epochs=1", "evaluate.latency_runs=10"])


def run_stage(name, given, **places):
    stages.call(name, json.dumps(given.for_stage(name)), {place: str(path) for place, path in places.items()})


def taught(given, dataset, output):
    """Make the teacher, distill a student from it, and compare both; gives the teacher as it is opened again."""
    names = {"dataset": dataset, "teacher": output / "teacher"}
    run_stage("pretrain", given, **names, evidence=output / "evidence")
    run_stage("distill", given, **names, student=output / "student", evidence=output / "student-evidence")
    run_stage("evaluate", given, **names, student=output / "student", evaluation=output / "evaluation")
    metrics = json.loads((output / "evaluation" / "metrics.json").read_text())
    assert metrics["teacher"]["architecture"] == given.pretrain.teacher.architecture
    return networks.load(output / "teacher")


def test_a_model_of_transformers_teaches(folder, trained_digits, tmp_path, monkeypatch):
    teacher = taught(settings(f"transformers:{folder}", LABEL_MAP), trained_digits.dataset, tmp_path)
    assert teacher.card.labels == tuple(DIGITS)
    assert (teacher.card.image_size, teacher.card.mean, teacher.card.std) == (24, (0.5, 0.4, 0.3), (0.2, 0.25, 0.5))
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    given = ViTForImageClassification.from_pretrained(folder).eval()
    wanted = given(teacher.preprocess(images)).logits[:, OF_CLASSES]
    torch.testing.assert_close(teacher(images), wanted)
    with monkeypatch.context() as gone:
        gone.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ModelError, match=r"needs the library transformers"):
            networks.load(tmp_path / "teacher")


@pytest.mark.parametrize(
    "processor",
    [
        ViTImageProcessor(do_normalize=False),
        ViTImageProcessor(do_rescale=False, image_mean=[120.0, 110.0, 100.0], image_std=[60.0, 50.0, 40.0]),
        EfficientNetImageProcessor(image_mean=[0.485, 0.456, 0.406], image_std=[0.4, 0.5, 0.6]),
        EfficientNetImageProcessor(rescale_factor=1 / 127.5, rescale_offset=True, include_top=False),
        MobileViTImageProcessor(do_flip_channel_order=False),  # leaves do_normalize open
    ],
)
def test_the_input_is_what_the_image_processor_of_transformers_makes(processor):
    mean, std = (torch.tensor(one)[:, None, None] for one in custom_networks._normalization("one", processor))
    pixels = torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8)
    wanted = processor(pixels, do_resize=False, do_center_crop=False, return_tensors="pt").pixel_values[0]
    torch.testing.assert_close((pixels / 255 - mean) / std, wanted.float())


def test_a_processor_that_swaps_colors_is_refused(folder):
    MobileViTImageProcessor().save_pretrained(folder)
    with pytest.raises(
        ModelError, match=r"swaps red and blue \(do_flip_channel_order\), which is not supported; choose another"
    ):
        pretrained.load(TransformersWeights(str(folder), ""), ModelSettings(architecture="transformers:x"))


def test_a_function_of_the_users_teaches(code, trained_digits, tmp_path, monkeypatch):
    given = settings(MODULE, *GIVEN, "pretrain.teacher.args={width=6}", LABEL_MAP)
    teacher = taught(given, trained_digits.dataset, tmp_path)
    assert teacher.card.labels == tuple(DIGITS)
    assert (teacher.card.image_size, teacher.card.mean, teacher.card.std) == (16, (0.5, 0.4, 0.3), (0.2, 0.25, 0.5))
    import digit_teacher

    assert digit_teacher.CALLS[0], "it was asked for its weights"
    assert not any(digit_teacher.CALLS[1:]), "and for none where a directory was opened again"
    images = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    wanted = digit_teacher.teacher(6, pretrained=True)(teacher.preprocess(images))[:, OF_CLASSES]
    torch.testing.assert_close(teacher(images), wanted)
    assert networks.outline(tmp_path / "teacher").network.rows.is_meta
    monkeypatch.delenv(custom_networks.MODULES_VARIABLE)
    for opened in (networks.load, networks.outline):
        with pytest.raises(ModelError, match=r"not allowed here.*TRAINER_MODULES=digit_teacher"):
            opened(tmp_path / "teacher")


@pytest.mark.parametrize(
    ("function", "overrides", "message"),
    [
        ("teacher", [], r"does not say its input's image_size and mean and std.*pretrain\.teacher"),
        (
            "teacher",
            [*GIVEN, "pretrain.teacher.args={depth=6}"],
            r"failed with the arguments .*TypeError.*set pretrain\.teacher\.args",
        ),
        ("teacher", GIVEN, r"of the data set's 10 classes 10 are not among its 11 .*label_map"),
        ("plain", [*GIVEN, "pretrain.teacher.image_size=20"], r"takes no images of 20 pixels"),
        ("plain", GIVEN, r"10 are not among its 10 \('module:digit_teacher:plain\[0\]'"),
        ("text", GIVEN, "returned a str; let it return a torch.nn.Module"),
        ("broken", GIVEN, "RuntimeError: checkpoint.pt is missing; mend it"),
        ("map_of_features", GIVEN, r"returns \(1, 4, 14, 14\) for one image instead of logits"),
        ("absent", GIVEN, "digit_teacher has no function absent"),
    ],
)
def test_a_function_that_makes_no_teacher(code, trained_digits, tmp_path, function, overrides, message):
    given = settings(f"module:digit_teacher:{function}", *overrides)
    with pytest.raises(ModelError, match=message):
        run_stage("pretrain", given, dataset=trained_digits.dataset, teacher=tmp_path / "t", evidence=tmp_path / "e")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pretrain.teacher.architecture=vit_tiny_patch16_224"], r"set pretrain\.teacher\.architecture=module:"),
        (["pretrain.weights="], "weights is empty; set pretrain.weights=module:"),
        (["pretrain.finetune.epochs=3"], r"taken as it is.*finetune\.epochs=3; set pretrain\.finetune\.epochs=0"),
        (["pretrain.head=probe"], r"head=probe; set pretrain\.head=classes"),
        (["distill.student.architecture=module:digit_teacher:teacher"], "can be a teacher only"),
        ([f"distill.weights={MODULE}"], "can be a teacher only"),
    ],
)
def test_settings_that_a_custom_teacher_cannot_have(overrides, message):
    with pytest.raises(SettingsError, match=message):
        settings(MODULE, *overrides)


def test_what_is_compared_beside_logits_is_refused(code, tmp_path):
    given = settings(MODULE, *GIVEN).pretrain
    model = pretrained.check(given, given.teacher)
    assert networks.find_token_shape(model) is None
    with pytest.raises(ModelError, match="cannot be compared by its features"):
        networks.feature_size(model)
    with pytest.raises(ModelError, match=r"does not give what its blocks give.*distill\.block_weight=0"):
        networks.block_shapes(model, [0])
    with pytest.raises(ModelError, match="neither trained nor given another head"):
        networks.with_labels(model, ["a"])


def test_directory_cannot_ask_transformers_for_code_from_elsewhere(folder):
    given = json.loads((folder / "config.json").read_text())
    hostile = given | {"auto_map": {"AutoConfig": "x.Y"}, "_attn_implementation": "a/b", "attn_implementation": "a/b"}
    built = custom_networks.create("transformers:a/b", {"config": json.dumps(hostile)}, 3)
    assert built.module.config._attn_implementation == "sdpa"
    assert not hasattr(built.module.config, "auto_map")


def test_folder_that_is_no_model_of_transformers_is_named(tmp_path):
    absent = TransformersWeights(str(tmp_path / "absent"), "")
    with pytest.raises(ModelError, match=r"absent: there is no such folder on this machine"):
        pretrained.load(absent, ModelSettings(architecture="transformers:x"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"is no image classifier that Transformers can load"):
        pretrained.load(TransformersWeights(str(tmp_path), ""), ModelSettings(architecture="transformers:x"))


def test_model_of_hub_has_revision_and_license(model_hub):
    model_hub.revisions["models/somebody/vit-food"] = "1" * 40
    model_hub.licenses["models/somebody/vit-food"] = "cc-by-nc-4.0"
    pinned = pretrained.pin(TransformersWeights("somebody/vit-food", ""))
    assert str(pinned) == f"transformers:somebody/vit-food@{'1' * 40}"
    given = settings(str(pinned)).pretrain
    with pytest.raises(
        ModelError,
        match=r"its license is cc-by-nc-4\.0.*huggingface\.co/somebody/vit-food.*accept_license=cc-by-nc-4\.0",
    ):
        pretrained.start(given, given.teacher)


def test_other_weights_in_folder_make_what_came_of_them_stale(folder):
    before = artifacts.weights_version(f"transformers:{folder}")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert artifacts.weights_version(f"transformers:{folder}") != before
    assert artifacts.weights_version("transformers:somebody/vit-food") == ""
    with pytest.raises(ArtifactError):
        artifacts.read(f"transformers:{folder}", "model")
