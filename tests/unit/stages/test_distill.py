"""The stage distill on real digits, with the teacher online and with what the stage reinforce really recorded of it."""

import dataclasses
import logging
import shutil

import pytest
import torch

from tests.distillations import QUICK, TINY, half_labeled
from tests.trained_digits import SQUARE
from trainer import config
from trainer.config import DistillSettings, ReinforceSettings
from trainer.data.dataset import open_dataset
from trainer.devices import device
from trainer.io import artifacts
from trainer.io.errors import ArtifactError, ModelError, SettingsError, TrainingError
from trainer.models import networks, pretrained
from trainer.profiling.evidence_files import read_evidence
from trainer.stages import distill, reinforce
from trainer.training import loop
from trainer.training.checkpoints import Checkpoints
from trainer.training.loop import Trainer
from trainer.training.metric_logger import ProgressBar

VIEWS = QUICK["views"]
TEN_STEPS = QUICK | {"epochs": 2, "batch_size": 204}
"""Over 1,000 images with a label and 20 without."""


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def record(trained_digits, tmp_path_factory):
    """Records the trained teacher's outputs on the digits, with settings."""

    def run(**settings):
        outputs = tmp_path_factory.mktemp("recorded") / "outputs"
        quick = {"views": 2, "seed": 3, "workers": 0, "batch_size": 250, "augmentation": VIEWS}
        section = config.validate(ReinforceSettings, quick | settings)
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("TRAINER_DEVICE", "cpu")
            reinforce.run(
                section, dataset=trained_digits.dataset, teacher=trained_digits.teacher, teacher_outputs=outputs
            )
        return outputs

    return run


@pytest.fixture(scope="module")
def complete(record):
    return record(top_k=10, features=True)


@pytest.fixture(scope="module")
def sparse(record):
    """Three logits of ten, and no features."""
    return record(top_k=3)


class Distillation:
    """One distillation of the digits' teacher, and what came out."""

    def __init__(self, digits, folder, teacher_outputs=None, **settings):
        self.student, self.evidence = folder / "student", folder / "evidence"
        distill.run(
            config.validate(DistillSettings, TEN_STEPS | settings),
            dataset=digits.dataset,
            teacher=digits.teacher,
            student=self.student,
            evidence=self.evidence,
            teacher_outputs=teacher_outputs,
        )

    def curves(self):
        """Name of each loss -> its value at each step."""
        (training,) = read_evidence(self.evidence).trainings
        return {name: torch.tensor(series.values) for name, series in training.metrics.items()}


@pytest.fixture
def distilled(trained_digits, tmp_path):
    """Runs a distillation below this test's folder."""
    return lambda name, *inputs, **settings: Distillation(trained_digits, tmp_path / name, *inputs, **settings)


SMALLER_FIRST = {
    "epochs": 3,
    "low_resolution": {"epochs": 1, "image_size": 8},
    "student": {"architecture": "vit_tiny_patch16_224", "args": TINY | {"dynamic_img_size": True}},
}


def seen_sizes(monkeypatch):
    """The edge of the network's input in each forward pass of a training."""
    sizes, forward = [], networks.Preprocessing.forward

    def noted(self, images):
        made = forward(self, images)
        if self.training:
            sizes.append(made.shape[-1])  # a teacher is never in training
        return made

    monkeypatch.setattr(networks.Preprocessing, "forward", noted)
    return sizes


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_first_epochs_are_smaller_but_validations_full(trained_digits, tmp_path, monkeypatch, caplog, ema):
    caplog.set_level(logging.INFO)
    sizes, validated, work = seen_sizes(monkeypatch), [], []
    start = ProgressBar.of
    monkeypatch.setattr(
        ProgressBar, "of", lambda spec, first, **named: (work.append(spec.work), start(spec, first, **named))[1]
    )
    validate = loop.validate
    monkeypatch.setattr(
        loop,
        "validate",
        lambda model, *given, **named: (validated.append(model.preprocess.size), validate(model, *given, **named))[1],
    )
    made = Distillation(trained_digits, tmp_path, ema_decay=ema, validate_every_epochs=1, **SMALLER_FIRST)
    assert sizes == [8] * 5 + [16] * 10
    assert validated == [16] * 3
    (training,) = read_evidence(made.evidence).trainings
    assert training.ranks[0].record.context.low_resolution_steps == 5
    assert "distill  the first 5 steps see images of 8 pixels, the others of 16" in caplog.messages
    assert [work[0](steps) for steps in (0, 4, 5, 15)] == [0, 1, 1.25, 11.25]
    assert networks.load(made.student).card.image_size == 16


def test_training_that_resumes_keeps_to_smaller_input(trained_digits, tmp_path, monkeypatch):
    whole = Distillation(trained_digits, tmp_path / "whole", **SMALLER_FIRST)
    take, stops = Trainer.train_step, [4]

    def interrupted(self, step, batches):
        if step in stops:
            raise TrainingError("stopped here")
        return take(self, step, batches)

    monkeypatch.setattr(Trainer, "train_step", interrupted)
    settings = {"checkpoint_every": 4, **SMALLER_FIRST}
    with pytest.raises(TrainingError, match="stopped here"):
        Distillation(trained_digits, tmp_path / "broken", **settings)
    stops.clear()
    sizes = seen_sizes(monkeypatch)
    resumed = Distillation(trained_digits, tmp_path / "broken", **settings)
    assert sizes == [8] + [16] * 10
    weights = networks.load(resumed.student).network.state_dict()
    for name, value in networks.load(whole.student).network.state_dict().items():
        assert torch.equal(weights[name], value), name


def test_network_of_one_size_has_no_smaller_one(distilled):
    smaller = {"epochs": 2, "low_resolution": {"epochs": 1, "image_size": 8}}
    with pytest.raises(
        ModelError, match=r"'vit_tiny_patch16_224': takes no images of 8 pixels beside its own 16 .*dynamic"
    ):
        distilled("fixed", **smaller)


def test_tokens_and_blocks_are_taught_with_smaller_input_too(distilled):
    smaller = {"architecture": "vit_tiny_patch16_224", "args": TINY | {"patch_size": 4, "dynamic_img_size": True}}
    compared = {"blocks": {"1": 1}, "block_weight": 0.5, "token_weight": 0.5, "feature_loss": "mse"}
    curves = distilled("small", **SMALLER_FIRST | compared | {"student": smaller}).curves()
    assert all(curves[name][-1] < curves[name][0] for name in ("token", "block"))
    with pytest.raises(ModelError, match="with an input of 8 pixels has no patch tokens to compare"):
        distilled("one place", **SMALLER_FIRST | compared)


FOLLOWING = {
    "kl and features": {"feature_weight": 1.0},
    "dkd": {"logit": {"loss": "dkd", "temperature": 4.0}},
    "dist of standardized logits": {"logit": {"loss": "dist", "standardize": True}},
}


@pytest.mark.parametrize("name", FOLLOWING)
def test_all_recorded_logits_follow_the_teacher(distilled, complete, name):
    """Same seeds, same views: what differs is that logits and features were rounded to half precision."""
    online = distilled("online", **FOLLOWING[name]).curves()
    recorded = distilled("recorded", complete, teacher="recorded", **FOLLOWING[name]).curves()
    assert online.keys() == recorded.keys()
    assert torch.allclose(online["loss"], recorded["loss"], rtol=2e-3)
    assert not torch.equal(online["loss"], recorded["loss"])


LARGER = {"architecture": "vit_tiny_patch16_224", "args": TINY | {"patch_size": 4}}
"""A student with more patches than the teacher."""


@pytest.mark.parametrize(
    ("kept", "student", "tolerance"),
    [("int8", QUICK["student"], 2e-3), ("fp16", LARGER, 1e-4)],
    ids=["int8, as many patches", "fp16, more patches"],
)
def test_recorded_tokens_teach_what_teacher_in_every_step_does(distilled, record, kept, student, tolerance):
    outputs = record(features=True, tokens=True, token_format=kept)
    settings = {"token_weight": 1.0, "feature_loss": "cosine_smooth_l1", "logit_weight": 0.2, "student": student}
    online = distilled("online", **settings).curves()
    recorded = distilled("recorded", outputs, teacher="recorded", **settings).curves()
    assert online.keys() == recorded.keys() >= {"token"}
    assert torch.allclose(online["token"], recorded["token"], rtol=tolerance)
    assert not torch.equal(online["token"], recorded["token"])
    assert recorded["token"][-1] < recorded["token"][0]


def test_tokens_blocks_and_distillation_token_are_taught_and_resume_exactly(distilled, monkeypatch):
    """The student that is kept is timm's own, which gives the mean of both heads."""
    student = {"architecture": "deit_tiny_distilled_patch16_224", "args": TINY}
    settings = {"blocks": {"1": 1}, "block_weight": 0.5, "token_weight": 0.5, "distillation_token": True}
    settings["student"] = student
    interrupt(distilled, monkeypatch, checkpoint_every=6, **settings)
    interrupted = distilled("interrupted", checkpoint_every=6, **settings)
    whole = distilled("whole", checkpoint_every=6, **settings)
    assert whole.curves()["block"][-1] < whole.curves()["block"][0]
    for name in ("loss", "logit", "block", "label"):
        assert torch.equal(interrupted.curves()[name], whole.curves()[name][6:])
    weights = [networks.load(one.student).network.state_dict() for one in (interrupted, whole)]
    assert weights[0].keys() >= {"head.weight", "head_dist.weight"}
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


SIMILAR = {"similarity_weight": 1.0, "similarity_queue": 500, "logit_weight": 0.5}


def test_similarities_from_recorded_features(distilled, complete):
    """Each feature is rounded to 2^-11 of itself, and a cosine's difference counts a hundredfold at a temperature of 0.01."""
    online = distilled("online", **SIMILAR).curves()
    recorded = distilled("recorded", complete, teacher="recorded", **SIMILAR).curves()
    assert torch.allclose(online["similarity"], recorded["similarity"], rtol=1e-4)
    assert not torch.equal(online["similarity"], recorded["similarity"])
    assert online["similarity"][-1] < online["similarity"][0]


def test_the_queue_is_resumed_exactly(distilled, monkeypatch):
    interrupt(distilled, monkeypatch, checkpoint_every=6, **SIMILAR)
    interrupted = distilled("interrupted", checkpoint_every=6, **SIMILAR)
    whole = distilled("whole", checkpoint_every=6, **SIMILAR)
    assert torch.equal(interrupted.curves()["similarity"], whole.curves()["similarity"][6:])
    weights = [networks.load(one.student).network.state_dict() for one in (interrupted, whole)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert "queue" not in weights[0]
    parts = distilled("parts", accumulation=3, **SIMILAR).curves()
    assert torch.allclose(parts["similarity"], whole.curves()["similarity"], rtol=1e-4)


def test_student_that_starts_from_weights_begins_where_they_ended(distilled):
    """Here its own of an earlier distillation; their content is a parent of the new student."""
    first = distilled("first")
    second = distilled("second", weights=str(first.student))
    assert second.curves()["loss"][0] < first.curves()["loss"][0] - 0.1
    parents = artifacts.manifest(second.student, "model").parents
    assert parents["weights"] == artifacts.manifest(first.student, "model").fingerprint
    assert "weights" not in artifacts.manifest(first.student, "model").parents


def test_package_weights_get_a_new_head(trained_digits):
    settings = config.validate(
        DistillSettings,
        {"weights": "package:tf_efficientnet_lite0", "student": {"architecture": "tf_efficientnet_lite0"}},
    )
    student, fingerprint = distill.start(settings, open_dataset(trained_digits.dataset))
    again, same = distill.start(settings, open_dataset(trained_digits.dataset))
    whole, _ = pretrained.start(settings, settings.student)
    assert student.card.labels == tuple("0123456789")
    assert student.card.origin == whole.card.origin
    assert fingerprint == same
    given, made, repeated = (model.network.state_dict() for model in (whole, student, again))
    new = {name for name, value in made.items() if not torch.equal(value, given[name])}
    assert new == {"classifier.weight", "classifier.bias"}
    assert all(torch.equal(value, repeated[name]) for name, value in made.items())


def test_mixed_views_are_recorded_as_the_student_sees_them(distilled, record):
    views = VIEWS | {"mixup": 0.8, "cutmix": 1.0}
    online = distilled("online", views=views).curves()
    recorded = distilled("recorded", record(top_k=10, augmentation=views), teacher="recorded", views=views).curves()
    assert torch.allclose(online["loss"], recorded["loss"], rtol=2e-3)


def test_recorded_outputs_stand_in_for_the_teachers_weights(trained_digits, sparse, tmp_path):
    """Of the teacher only the manifest is read; the divergence from three logits and the rest is at most the full one."""
    manifest = tmp_path / "teacher" / artifacts.MANIFEST
    manifest.parent.mkdir()
    shutil.copy(trained_digits.teacher / artifacts.MANIFEST, manifest)
    bare = dataclasses.replace(trained_digits, teacher=manifest.parent)
    recorded = Distillation(bare, tmp_path / "recorded", sparse, teacher="recorded")
    online = Distillation(trained_digits, tmp_path / "online")
    assert recorded.curves()["logit"][0] <= online.curves()["logit"][0]
    parents = artifacts.manifest(recorded.student, "model").parents
    assert parents["teacher_outputs"] == artifacts.manifest(sparse, "teacher_outputs").fingerprint
    assert parents["teacher"] == artifacts.manifest(trained_digits.teacher, "model").fingerprint
    assert networks.load(online.student).card.square == SQUARE, (
        "how a photo is served is what the student was trained on"
    )


def test_a_data_set_of_unknown_making_is_refused(trained_digits, monkeypatch, tmp_path):
    shutil.copytree(trained_digits.dataset, tmp_path / "dataset")
    with artifacts.create(tmp_path / "dataset", "dataset", settings={"source": "digits"}):
        pass
    monkeypatch.delattr(Trainer, "train_step")
    with pytest.raises(ArtifactError, match="its manifest does not say how images became squares"):
        Distillation(dataclasses.replace(trained_digits, dataset=tmp_path / "dataset"), tmp_path / "none")


def interrupt(distilled, monkeypatch, *inputs, **settings):
    """Begin the distillation "interrupted", which ends after its first checkpoint."""
    save = Checkpoints.save

    def save_and_stop(checkpoints, state, **reported):
        save(checkpoints, state, **reported)
        raise KeyboardInterrupt

    with monkeypatch.context() as interruption:
        interruption.setattr(Checkpoints, "save", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            distilled("interrupted", *inputs, **settings)


def test_resuming_takes_other_workers_but_no_other_temperature(distilled, monkeypatch, tmp_path):
    monkeypatch.delenv("TRAINER_CHECKPOINTS", raising=False)
    interrupt(distilled, monkeypatch, checkpoint_every=6)
    with pytest.raises(SettingsError) as caught:
        distilled("interrupted", checkpoint_every=6, logit={"temperature": 3.0})
    (folder,) = (tmp_path / "interrupted" / "checkpoints").glob("distill-*")
    assert str(caught.value) == (
        f"distill: {folder} holds an unfinished training of other settings or inputs: distill.logit.temperature was 2.0, is 3.0; "
        "give the old ones to continue it, remove that folder to begin anew, or choose another output"
    )
    assert len(distilled("interrupted", checkpoint_every=5, log_every=1, workers=1).curves()["loss"]) == 4


def test_bf16_without_instructions_is_fp32_with_a_warning(distilled, monkeypatch, caplog):
    monkeypatch.setattr(device, "has_bf16_instructions", lambda: False)
    fp32 = distilled("fp32", precision="fp32")
    assert "bf16" not in caplog.text
    bf16 = distilled("bf16", precision="bf16")
    (warning,) = [text for text in caplog.messages if "bf16" in text]
    assert warning.startswith("distill  precision=bf16 is not used: this processor has no bf16 instructions")
    first, second = (networks.load(run.student).state_dict() for run in (fp32, bf16))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_batch_beyond_the_data_is_clamped(distilled, monkeypatch, caplog):
    monkeypatch.delenv("TRAINER_CHECKPOINTS", raising=False)
    settings = {"epochs": 3, "checkpoint_every": 2}
    interrupt(distilled, monkeypatch, batch_size=5000, **settings)
    (said,) = [text for text in caplog.messages if "images to train on" in text]
    assert said.startswith("distill.batch_size = 5000 is larger than the 1020 images to train on")
    caplog.clear()
    (training,) = read_evidence(distilled("interrupted", batch_size=1020, **settings).evidence).trainings
    assert "images to train on" not in caplog.text
    assert len(training.metrics["loss"].values) == 1, "it goes on after the second of three steps"
    (clamped,) = read_evidence(distilled("clamped", batch_size=5000, **settings).evidence).trainings
    (given,) = read_evidence(distilled("given", batch_size=1020, **settings).evidence).trainings
    for name in ("loss", "learning_rate"):
        assert list(clamped.metrics[name].values) == list(given.metrics[name].values)
    assert clamped.ranks[0].record.context.settings["batch_size"] == 1020
    assert clamped.ranks[0].record.context.total_steps == clamped.ranks[0].record.steps.count == 3


def test_weights_that_update_has_spoilt_are_not_kept(distilled, monkeypatch, tmp_path):
    monkeypatch.delenv("TRAINER_CHECKPOINTS", raising=False)
    update = Trainer._update

    def spoil(loop, step):
        update(loop, step)
        if step == 7:
            with torch.no_grad():
                loop._parameters[0].view(-1)[0] = float("nan")

    monkeypatch.setattr(Trainer, "_update", spoil)
    with pytest.raises(
        TrainingError, match=r"distill: weights are not finite after step 8 \(\S+\), so no checkpoint of them"
    ):
        distilled("spoilt", checkpoint_every=4)
    kept = [path.name for path in (tmp_path / "spoilt" / "checkpoints").glob("distill-*/step-*")]
    assert kept == ["step-00000004-g001"]


def test_a_recorded_distillation_resumes_exactly(distilled, sparse, monkeypatch):
    """Stochastic depth and dropped patches draw from torch's generator, which nothing but the step may move."""
    student = {"architecture": "vit_tiny_patch16_224", "args": TINY | {"depth": 2, "patch_drop_rate": 0.5}}
    settings = {"teacher": "recorded", "student": student, "drop_path": 0.5, "checkpoint_every": 6}
    interrupt(distilled, monkeypatch, sparse, **settings)
    interrupted, whole = distilled("interrupted", sparse, **settings), distilled("whole", sparse, **settings)
    assert len(interrupted.curves()["loss"]) == 4
    assert torch.equal(interrupted.curves()["loss"], whole.curves()["loss"][6:])
    weights = [networks.load(one.student).network.state_dict() for one in (interrupted, whole)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_student_that_drops_patches_in_training_sees_all_afterward(distilled, complete):
    """By timm's argument `patch_drop_rate`; logits and features are learned, and the weights are those of a plain model."""
    student = {"architecture": "vit_tiny_patch16_224", "args": TINY | {"patch_drop_rate": 0.5}}
    dropping = distilled("dropping", complete, teacher="recorded", feature_weight=1.0, student=student)
    plain = distilled("plain", complete, teacher="recorded", feature_weight=1.0)
    losses, others = dropping.curves(), plain.curves()
    assert losses.keys() == others.keys()
    for name in ("logit", "feature", "label"):
        assert not torch.equal(losses[name], others[name])
        assert losses[name][-3:].mean() < losses[name][:3].mean()
    trained, bare = networks.load(dropping.student), networks.load(plain.student)
    bare.network.load_state_dict(trained.network.state_dict())
    images = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    assert torch.equal(trained(images), bare(images))
    assert torch.equal(trained.pooled(images), bare.pooled(images))


def test_paused_training_resumes_exactly(distilled, tmp_path, monkeypatch):
    monkeypatch.setenv(artifacts.CHECKPOINTS_VARIABLE, str(tmp_path / "checkpoints"))
    whole = distilled("whole", epochs=2, ema_decay=0.9)
    paused = distilled("paused", epochs=2, ema_decay=0.9, pause_epochs=0.5)
    steps = len(paused.curves()["loss"])
    assert 0 < steps < len(whole.curves()["loss"])
    assert torch.equal(paused.curves()["loss"], whole.curves()["loss"][:steps])
    (kept,) = (tmp_path / "checkpoints").glob("distill-*")
    again = distilled("again", epochs=2, ema_decay=0.9, pause_epochs=0.5, latency_runs=3)  # its student was lost
    heads = [networks.load(one.student).network.head.weight for one in (paused, again)]
    assert torch.equal(*heads)
    ended = distilled("ended", epochs=2, ema_decay=0.9)
    assert torch.equal(ended.curves()["loss"], whole.curves()["loss"][steps:])
    weights = networks.load(ended.student).network.state_dict()
    for name, value in networks.load(whole.student).network.state_dict().items():
        assert torch.equal(weights[name], value), name
    assert not kept.exists()
    assert not list((tmp_path / "checkpoints").glob("distill-*"))
    distilled("at its end", epochs=1, pause_epochs=1)  # which is no pause
    assert not list((tmp_path / "checkpoints").glob("distill-*"))
    scores = [artifacts.manifest(one.student, "model").figures["val_top1"] for one in (paused, again, ended, whole)]
    assert scores[0] == scores[1]
    assert scores[2] == scores[3]
    latencies = [artifacts.manifest(one.student, "model").figures.get("latency_ms") for one in (paused, again)]
    assert latencies[0] is None
    assert 0 < latencies[1] < 60_000


@pytest.mark.parametrize("settings", [{"epochs": 1}, {"epochs": 1, "teacher": "recorded", "logit_weight": 0}], ids=str)
def test_recorded_outputs_that_no_loss_reads_are_not_opened(distilled, tmp_path, settings):
    student = distilled("student", tmp_path / "there is nothing here", **settings).student
    assert set(artifacts.manifest(student, "model").parents) == {"dataset", "teacher"}


def test_the_average_is_kept_without_the_projection(distilled):
    settings = {"epochs": 1, "feature_weight": 1.0, "label_weight": 0.5}
    averaged = distilled("averaged", ema_decay=0.5, **settings)
    last = distilled("last", **settings)
    kept = [networks.load(one.student).network.state_dict() for one in (averaged, last)]
    assert not [name for name in kept[0] if "projection" in name]
    assert any(not torch.equal(value, kept[1][name]) for name, value in kept[0].items())
    assert "val_top1" in averaged.curves()


@pytest.mark.parametrize(("size", "wanted"), [(8, 16), (24, 24)])
def test_view_is_as_large_as_larger_input(distilled, size, wanted):
    seen = set()

    def look(module, inputs):
        if isinstance(module, networks.Classifier) and module.training:
            seen.add(tuple(inputs[0].shape[-2:]))

    hook = torch.nn.modules.module.register_module_forward_pre_hook(look)
    student = {"architecture": "vit_tiny_patch16_224", "args": TINY | {"img_size": size}}
    try:
        distilled("student", student=student, epochs=1)
    finally:
        hook.remove()
    assert seen == {(wanted, wanted)}


REFUSED = {
    "not given": ({}, SettingsError, r"distill\.teacher is recorded, but no recorded outputs were given"),
    "a loss that needs all": (
        {"logit": {"loss": "dkd"}},
        SettingsError,
        r"distill\.logit\.loss=dkd needs the teacher's logits of all 10 classes, but .* holds the 3 largest .*reinforce\.top_k=all",
    ),
    "standardized logits": (
        {"logit": {"standardize": True}},
        SettingsError,
        r"distill\.logit\.loss=kl with distill\.logit\.standardize needs .* distill\.teacher=online",
    ),
    "features": (
        {"feature_weight": 0.5},
        SettingsError,
        r"distill\.feature_weight is 0\.5, but .* holds no features.*reinforce\.features=true",
    ),
    "features for similarities": (
        {"similarity_weight": 0.5},
        SettingsError,
        r"distill\.similarity_weight is 0\.5, but .* holds no features.*reinforce\.features=true",
    ),
    "tokens": (
        {"token_weight": 0.5},
        SettingsError,
        r"distill\.token_weight is 0\.5, but .* holds no tokens.*reinforce\.tokens=true",
    ),
    "a student without a map": (
        {"token_weight": 0.5, "student": {"architecture": "resnet10t", "image_size": 16}},
        ModelError,
        r"'resnet10t' with an input of 16 pixels has no patch tokens to compare: .* set distill\.token_weight=0",
    ),
    "a student without a distillation token": (
        {"distillation_token": True},
        ModelError,
        r"'vit_tiny_patch16_224' has no distillation token.*distill\.distillation_token=false",
    ),
    "a larger student": (
        {"student": {"architecture": "vit_tiny_patch16_224", "args": TINY | {"img_size": 32}}},
        SettingsError,
        r"distill\.student takes images of 32 pixels, but the views of .* have 16.*reinforce\.view_size=32",
    ),
    "other views": (
        {"views": {"min_scale": 0.7, "flip": False}},
        ArtifactError,
        r"distill\.views\.min_scale was 0\.5 and is 0\.7",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unfit_recorded_outputs_are_refused_unread(trained_digits, sparse, tmp_path, name):
    settings, kind, message = REFUSED[name]
    described = tmp_path / "outputs"
    shutil.copytree(sparse, described, ignore=shutil.ignore_patterns("view-*.bin"))
    with pytest.raises(ArtifactError, match="is missing"):
        artifacts.read(described, "teacher_outputs")
    with pytest.raises(kind, match=message):
        Distillation(
            trained_digits, tmp_path / "out", None if name == "not given" else described, teacher="recorded", **settings
        )
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Images without labels


@pytest.fixture(scope="module")
def half(trained_digits, tmp_path_factory):
    """The digits, with a label for every second training image: 500 with and 520 without."""
    folder = tmp_path_factory.mktemp("half-labeled")
    return dataclasses.replace(trained_digits, dataset=half_labeled(trained_digits.dataset, folder / "dataset"))


def record_half(half, folder, **settings):
    quick = {"views": 2, "seed": 3, "workers": 0, "batch_size": 250, "augmentation": MIXED_VIEWS, "top_k": 10}
    section = config.validate(ReinforceSettings, quick | settings)
    reinforce.run(section, dataset=half.dataset, teacher=half.teacher, teacher_outputs=folder)
    return folder


@pytest.fixture(scope="module")
def half_recorded(half, tmp_path_factory):
    """All logits of all 1,020 images."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRAINER_DEVICE", "cpu")
        return record_half(half, tmp_path_factory.mktemp("recorded") / "outputs")


MIXED_VIEWS = VIEWS | {"mixup": 0.8, "cutmix": 1.0}


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_student_learns_from_images_without_labels(half, tmp_path, caplog, share):
    with caplog.at_level(logging.INFO):
        learned = Distillation(half, tmp_path, views=MIXED_VIEWS, labeled_share=share)
    assert "distill  500 labeled and 520 unlabeled images" in caplog.messages
    curves = learned.curves()
    assert len(curves["loss"]) == 10, "two epochs of 1,020 images"
    loss = 0.9 * curves["logit"] + 0.1 * curves["label"]
    assert torch.allclose(loss, curves["loss"], rtol=1e-5)
    assert 1.5 < curves["label"][0] < 3.5, "the mean over images that have a label, of ten classes"
    (training,) = read_evidence(learned.evidence).trainings
    context = training.ranks[0].record.context
    assert context.samples == 1020
    assert sum(context.classes.values()) == 500


@pytest.mark.parametrize("settings", [{"labeled_share": 0.49}, {"logit": {"loss": "dkd"}, "views": VIEWS}], ids=str)
def test_recorded_outputs_of_images_without_labels_follow_teacher(half, half_recorded, tmp_path, settings):
    settings = {"views": MIXED_VIEWS} | settings
    outputs = half_recorded
    if settings["views"] != MIXED_VIEWS:
        outputs = record_half(half, tmp_path / "outputs", augmentation=settings["views"])
    online = Distillation(half, tmp_path / "online", **settings).curves()
    recorded = Distillation(half, tmp_path / "recorded", outputs, teacher="recorded", **settings).curves()
    assert torch.allclose(online["loss"], recorded["loss"], rtol=2e-3)


def test_labels_of_unlabeled_images_are_recorded(half, half_recorded, tmp_path):
    settings = {"views": MIXED_VIEWS, "unlabeled": False, "batch_size": 100, "teacher": "recorded"}
    outputs = record_half(half, tmp_path / "outputs", unlabeled=False)
    assert artifacts.manifest(outputs, "teacher_outputs").figures["samples"] == 500
    more = Distillation(half, tmp_path / "more", half_recorded, **settings).curves()
    exact = Distillation(half, tmp_path / "exact", outputs, **settings).curves()
    assert torch.equal(more["loss"], exact["loss"])
    # Outputs of labeled images alone do not serve the others.
    outputs = record_half(half, tmp_path / "outputs", unlabeled=False, views=1)
    with pytest.raises(
        ArtifactError,
        match=r"they hold no outputs for the 520 images without labels, from which distill.unlabeled=true learns too"
        r".*with reinforce.unlabeled=true, or set distill.unlabeled=false",
    ):
        Distillation(half, tmp_path / "refused", outputs, teacher="recorded", views=MIXED_VIEWS)


@pytest.mark.parametrize(("share", "warns"), [(0.0, True), (0.1, False)])
def test_steps_that_may_lack_labeled_images_are_warned_of(half, tmp_path, caplog, share, warns):
    quick = {"epochs": 1, "pause_epochs": 0.03, "validate_every_epochs": 0}
    Distillation(half, tmp_path, batch_size=15, labeled_share=share, **quick)
    warning = "of 15 images in a step 7.4 are labeled in the mean, and a step without any counts as 0"
    assert any(warning in line for line in caplog.messages) is warns
