import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.unit.objectives.distillation.test_recording import DESCRIPTION
from trainer.config import DistillSettings, ModelSettings, ViewSettings
from trainer.data.batch import Batch, Recorded
from trainer.data.views.rendering import draw_mixing, mix
from trainer.devices import choose_device
from trainer.devices.process_group import Processes
from trainer.io.errors import ModelError
from trainer.models import networks
from trainer.objectives.distillation.frozen_teacher import Balance, FrozenTeacher
from trainer.objectives.distillation.losses import binary_kl, decoupled_kl, distillation_kl, recorded_kl
from trainer.objectives.distillation.objective import DistillObjective, ProjectedStudent, prepared_student
from trainer.training.classification import cross_entropy
from trainer.training.optimizers import AveragedModel, parameter_groups
from trainer.training.parallelize import CompileCounter

LABELS = ("a", "b", "c")
IMAGES = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
BATCH = Batch(IMAGES, torch.tensor([0, 1, 2, 0]), torch.arange(4), torch.zeros(4, dtype=torch.int64))
RECORDED = Recorded(
    torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]]),
    torch.tensor([[3.0, 1.0], [2.0, 0.5], [4.0, -1.0], [1.0, 0.5]]),
    torch.tensor([[0.5, 0.25], [-1.0, -0.5], [-2.0, -1.0], [0.0, 0.0]]),
    torch.ones(4, 5),
    torch.ones(4, 4, 4, 5, dtype=torch.int8),
    torch.full((4, 4, 4, 1), 0.5),
)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")


def classifier(size, seed, *, drop_path=0.0, dim=16):
    torch.manual_seed(seed)
    arguments = {"img_size": size, "patch_size": 8, "embed_dim": dim, "depth": 2, "num_heads": 2}
    settings = ModelSettings(architecture="vit_tiny_patch16_224", args=arguments)
    return networks.create(settings, LABELS, drop_path=drop_path)


def frozen(model, **says):
    return FrozenTeacher(model, choose_device(), precision="fp32", **says)


def asked(model, settings):
    """A frozen teacher that says what the losses need."""
    return frozen(
        model, features=settings.compares_features, tokens=settings.token_weight > 0, blocks=[*settings.blocks.values()]
    )


@pytest.fixture
def losses():
    def compute(objective, batch=BATCH):
        return objective(objective.model, batch)

    return compute


def values(result):
    return {name: float(part.detach()) for name, part in result.items()}


def test_loss_is_weighted_sum_of_its_parts(losses):
    settings = DistillSettings(logit_weight=0.7, label_weight=0.2, logit={"temperature": 3.0})
    teacher, student = classifier(32, 1).eval(), classifier(16, 2)
    expected = distillation_kl(student(IMAGES), teacher(IMAGES), 3.0).detach()
    result = values(losses(DistillObjective(student, [frozen(teacher)], settings)))
    label = float(F.cross_entropy(student(IMAGES), BATCH.labels).detach())
    assert result["logit"] == pytest.approx(float(expected), rel=1e-4)
    assert result["label"] == pytest.approx(label, rel=1e-5)
    assert result["loss"] == pytest.approx(0.7 * result["logit"] + 0.2 * label, rel=1e-5)
    assert set(result) == {"loss", "logit", "label", "agreement"}


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # dynamo looks at it
@pytest.mark.parametrize(("kind", "recorded"), [("kl", True), ("kl", False), ("dkd", True), ("dist", False)])
def test_the_loss_of_logits_is_one_graph_where_it_is_compiled(losses, kind, recorded):
    settings = DistillSettings(logit_weight=1.0, label_weight=0.5, logit={"loss": kind})
    order, rest = torch.tensor([[0, 2, 1], [1, 0, 2], [2, 1, 0], [0, 1, 2]]), torch.full((4, 2), -torch.inf)
    student, whole = classifier(16, 2), Recorded(order, torch.randn(4, 3), rest)
    batch = BATCH._replace(recorded=whole) if recorded else BATCH
    objective = DistillObjective(student, [] if recorded else [frozen(classifier(32, 1).eval())], settings)
    expected, graphs = values(losses(objective, batch)), CompileCounter("eager")
    torch.compiler.reset()
    objective.compile(graphs)
    for _ in range(2):
        assert values(losses(objective, batch)) == pytest.approx(expected, rel=1e-5)
    assert graphs.count == 1
    torch.compiler.reset()


SETS = np.array([[0, 0, 0], [1, 0, 1], [0, 1, 0]], dtype=np.uint8)


def test_of_several_labels_image_each_class_is_compared_by_itself(losses):
    settings = DistillSettings(logit_weight=0.7, label_weight=0.2, logit={"temperature": 3.0})
    batch = BATCH._replace(labels=BATCH.labels % len(SETS))
    teacher, student = classifier(32, 1).eval(), classifier(16, 2)
    expected = binary_kl(student(IMAGES), teacher(IMAGES), 3.0).detach()
    said = teacher(IMAGES).detach()
    online = values(losses(DistillObjective(student, [frozen(teacher)], settings, SETS), batch))
    targets = torch.from_numpy(SETS)[batch.labels].float()
    label = F.binary_cross_entropy_with_logits(student(IMAGES), targets, reduction="none").sum(1).mean()
    assert online["logit"] == pytest.approx(float(expected), rel=1e-4)
    assert online["label"] == pytest.approx(float(label.detach()), rel=1e-5)
    indices = said.argsort(1, descending=True)
    recorded = Recorded(indices, said.gather(1, indices), torch.full((len(said), 2), -math.inf))
    from_records = values(losses(DistillObjective(student, [], settings, SETS), batch._replace(recorded=recorded)))
    assert from_records == {name: pytest.approx(value, rel=1e-5) for name, value in online.items()}


def test_features_are_compared_after_the_projection(losses):
    settings = DistillSettings(feature_weight=2.0, logit_weight=0.5, label_weight=0.25, feature_loss="mse")
    teacher, student = classifier(32, 1, dim=24), ProjectedStudent(classifier(16, 2), 24)
    target = frozen(teacher, features=True)(IMAGES).features.clone()
    result = values(losses(DistillObjective(student, [frozen(teacher, features=True)], settings)))
    assert set(result) == {"loss", "logit", "feature", "label", "agreement"}
    feature = F.mse_loss(student(IMAGES, compared=True).features, target).detach()
    assert result["feature"] == pytest.approx(float(feature), rel=1e-5)
    parts = 0.5 * result["logit"] + 2 * result["feature"] + 0.25 * result["label"]
    assert result["loss"] == pytest.approx(parts, rel=1e-5)


def test_where_no_loss_compares_teacher_is_not_asked(losses):
    model = classifier(32, 1)
    teacher = frozen(model)
    model.network.patch_embed.register_forward_pre_hook(lambda *_: pytest.fail("the teacher was asked"))
    settings = DistillSettings(logit_weight=0, label_weight=0.5)
    result = values(losses(DistillObjective(classifier(32, 2), [teacher], settings)))
    assert result["loss"] == pytest.approx(0.5 * result["label"])


WAYS = [
    {"logit": {"loss": "kl"}},
    {"logit": {"loss": "hard"}},
    {"logit": {"loss": "dkd"}},
    {"logit": {"loss": "dist"}},
    {"logit": {"standardize": True}},
    {"feature_weight": 1.0, "feature_loss": "cosine"},
    {"feature_weight": 1.0, "feature_loss": "mse"},
    {"token_weight": 1.0, "feature_loss": "cosine_smooth_l1"},
    {"feature_weight": 1.0, "token_weight": 0.5},
    {"similarity_weight": 1.0, "similarity_queue": 6},
]
ONLINE = [
    {"block_weight": 1.0, "blocks": {0: 1}},
    {"block_weight": 1.0, "blocks": {1: 0, 0: 1}, "token_weight": 1.0, "feature_weight": 0.5},
]
"""Which recorded outputs do not serve."""


@pytest.mark.parametrize("settings", WAYS + ONLINE, ids=str)
def test_only_the_student_learns_and_all_of_it(losses, settings):
    chosen = DistillSettings(**settings)
    teacher = classifier(32, 1, drop_path=0.5, dim=24).train()
    student = prepared_student(classifier(16, 2), chosen, teacher)
    objective = DistillObjective(student, [asked(teacher, chosen)], chosen)
    losses(objective)["loss"].backward()
    assert not teacher.training
    assert all(not parameter.requires_grad and parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.grad is not None for parameter in student.parameters())
    AveragedModel(objective.model, 0.9).update(0)


def test_recorded_outputs_take_the_teachers_place(losses):
    student = ProjectedStudent(classifier(32, 2), 5)
    settings = DistillSettings(feature_weight=1.0, logit={"temperature": 1.5})
    result = losses(DistillObjective(student, [], settings), BATCH._replace(recorded=RECORDED))
    logits, _, features, *_ = student(IMAGES, compared=True)
    assert torch.equal(result["logit"], recorded_kl(logits, RECORDED, 1.5))
    assert float(result["feature"].detach()) == pytest.approx(
        1 - float(F.cosine_similarity(features, RECORDED.features).mean().detach()), rel=1e-5
    )
    agreed = (logits.argmax(1) == RECORDED.indices[:, 0]).float().mean()
    assert float(result["agreement"]) == float(agreed)


def test_mixed_views_are_seen_by_both_and_share_their_labels(losses):
    seen = []
    model, student = classifier(32, 1), classifier(32, 2)
    teacher = frozen(model)
    for one in (model, student):
        one.network.patch_embed.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    partner = np.array([1, 0, 3, 2])
    mixing = draw_mixing(
        np.arange(4, dtype=np.uint64),
        np.zeros(4, dtype=np.int64),
        partner,
        BATCH.labels.numpy()[partner],
        seed=0,
        settings=ViewSettings(mixup=1.0),
    )
    mixed = mix(IMAGES, mixing)
    settings = DistillSettings(label_smoothing=0.1)
    result = losses(DistillObjective(student, [teacher], settings), BATCH._replace(images=mixed, mixing=mixing))
    assert torch.allclose(seen[0].float(), seen[1])
    assert not torch.equal(mixed, IMAGES)
    label = cross_entropy(student(mixed), BATCH.labels, mixing, smoothing=0.1)
    assert float(result["label"].detach()) == pytest.approx(float(label.detach()), rel=1e-6)


PARTLY = BATCH._replace(labels=torch.tensor([0, -1, 2, -1]), label_weights=torch.tensor([2.0, 0.0, 2.0, 0.0]))
"""The labels of two of four images are lost."""


@pytest.mark.parametrize("settings", WAYS + ONLINE, ids=str)
def test_the_teacher_speaks_of_unlabeled_images_too(losses, settings):
    chosen = DistillSettings(**settings, label_weight=0.5)
    teacher = asked(classifier(32, 1, dim=24), chosen)
    student = prepared_student(classifier(16, 2), chosen, classifier(32, 1, dim=24))
    objective = DistillObjective(student, [teacher], chosen)
    result, every, said = values(losses(objective, PARTLY)), values(losses(objective)), teacher(IMAGES)
    with torch.no_grad():
        logits = student(IMAGES)
    assert result["label"] == pytest.approx(float(F.cross_entropy(logits[::2], BATCH.labels[::2])), rel=1e-5)
    same = {"agreement", "feature", "token", "block", "similarity", "logit"} & result.keys() - (
        {"logit"} if chosen.logit.loss == "dkd" else set()
    )
    assert same
    assert {name: result[name] for name in same} == {name: every[name] for name in same}
    if chosen.logit.loss == "dkd":
        target = torch.where(PARTLY.labels >= 0, BATCH.labels, said.logits.argmax(1))
        settings = chosen.logit.model_dump(include={"temperature", "alpha", "beta"})
        assert result["logit"] == pytest.approx(float(decoupled_kl(logits, said.logits, target, **settings)), rel=1e-5)


@pytest.mark.parametrize("partly", [False, True])
@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_a_step_reads_no_value_back(losses, settings, partly):
    """Tensors without values stand in for those of a device: whatever waits for a value raises."""
    chosen = DistillSettings(**settings)
    teacher = replace(DESCRIPTION, classes=3, top_k=2, features=5, tokens=(4, 4, 5))
    student = prepared_student(classifier(32, 2), chosen, teacher)
    whole = RECORDED._replace(indices=torch.arange(3).expand(4, 3), logits=torch.ones(4, 3))
    recorded = Recorded(
        *(
            part.to("meta") if isinstance(part, torch.Tensor) else part
            for part in (whole if chosen.needs_all_logits else RECORDED)
        )
    )
    batch = BATCH._replace(images=IMAGES.to("meta"), labels=BATCH.labels.to("meta"), recorded=recorded)
    if partly:
        batch = batch._replace(label_weights=PARTLY.label_weights.to("meta"))
    result = losses(DistillObjective(student.to("meta"), [], chosen), batch)
    result["loss"].backward()
    assert all(part.shape == () for part in result.values())


# -- ProjectedStudent


@pytest.fixture
def student():
    torch.manual_seed(0)
    arguments = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
    return ProjectedStudent(
        networks.create(ModelSettings(architecture="vit_tiny_patch16_224", args=arguments), LABELS), 24
    )


def test_logits_and_features_of_the_classifier(student):
    logits, _, projected, *_ = student(IMAGES, compared=True)
    assert torch.equal(logits, student.classifier(IMAGES))
    assert torch.equal(student(IMAGES), logits)
    network = student.classifier.network
    features = network.forward_features(student.classifier.preprocess(IMAGES))[:, 0]
    assert torch.equal(network.head(features), logits)
    assert torch.equal(projected, features @ student.projection.weight.T + student.projection.bias)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "architecture",
    ["resnet18", "convnext_atto", "vit_base_patch16_clip_224", "levit_128s", "deit_tiny_distilled_patch16_224"],
)
def test_other_architectures_have_features_too(architecture, device):
    """LeViT and DeiT have two heads, and LeViT's begin with a normalization."""
    arguments = {"img_size": 32, "depth": 1} if architecture.startswith(("vit", "deit")) else {}
    with torch.device(device):
        model = networks.create(ModelSettings(architecture=architecture, args=arguments), LABELS).eval()
        images = IMAGES[:1].to(device)
        logits, _, features, *_ = model.outputs(images, features=True)
        assert device == "meta" or torch.equal(logits, model(images))
        assert features.shape == (1, networks.feature_size(model))


def test_two_heads_take_one_forward_pass():
    """DeiT's distillation token learns beside the features."""
    architecture = ModelSettings(architecture="deit_tiny_distilled_patch16_224", args={"img_size": 32, "depth": 1})
    model = networks.create(architecture, LABELS).train()
    networks.train_distilled(model)
    # Logits and features take one forward pass.
    passes = []
    model.network.blocks[0].register_forward_hook(lambda *_: passes.append(1))
    outputs = model.outputs(IMAGES, features=True)
    assert len(passes) == 1
    first, second = model.network.get_classifier()
    tokens = model.network.forward_features(model.preprocess(IMAGES))
    torch.testing.assert_close(outputs.logits, first(tokens[:, 0]))
    torch.testing.assert_close(outputs.distilled, second(tokens[:, 1]))
    torch.testing.assert_close(outputs.features, tokens[:, :2].mean(dim=1))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_logits_apart_from_features_are_refused(device):
    with torch.device(device):
        model = networks.create(ModelSettings(architecture="volo_d1_224"), LABELS)
        with pytest.raises(ModelError, match=r"'volo_d1_224' cannot be compared by its features.*feature_weight=0"):
            ProjectedStudent(model, 24)
    assert model.training


def test_weight_decay_spares_what_the_bare_classifier_spares(student):
    def decayed(model, prefix):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups = parameter_groups(model, weight_decay=0.1)
        return {
            names[id(one)].removeprefix(prefix) for group in groups if group["weight_decay"] for one in group["params"]
        }

    assert decayed(student, "classifier.") == decayed(student.classifier, "") | {"projection.weight"}
    assert "network.pos_embed" not in decayed(student.classifier, "")


def test_its_average_follows_the_projection_too(student):
    average = AveragedModel(student, 0.5)
    before = copy.deepcopy(average.model.projection.weight)
    with torch.no_grad():
        student.projection.weight += 1
    average.update(100)
    assert torch.allclose(average.model.projection.weight, before + 0.5)
    assert isinstance(average.model.classifier, networks.Classifier)
    assert average.model(IMAGES).shape == (4, 3)


@pytest.mark.parametrize("distilled", [False, True])
def test_one_graph_holds_all_that_is_compared(distilled):
    """Of the student and of the teacher, as they are compiled on a GPU."""
    settings = DistillSettings(
        token_weight=1.0,
        blocks={1: 0, 0: 1},
        block_weight=1.0,
        distillation_token=distilled,
        feature_weight=0.0 if distilled else 1.0,
    )
    teacher = classifier(32, 1, dim=24)
    name = "deit_tiny_distilled_patch16_224" if distilled else "vit_tiny_patch16_224"
    arguments = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
    own = networks.create(ModelSettings(architecture=name, args=arguments), LABELS)
    student, said = prepared_student(own, settings, teacher), asked(teacher, settings)
    for plain, call in ((student, {"compared": True}), (said._answer, {})):
        expected, found = plain(IMAGES, **call), torch.compile(plain, backend="eager", fullgraph=True)(IMAGES, **call)
        pairs = zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected), strict=True)
        assert all(ours is theirs is None or torch.allclose(ours, theirs, atol=1e-5) for ours, theirs in pairs)


@pytest.mark.parametrize("static_graph", [True, False])
def test_gradients_reach_all_weights_through_data_parallelism(student, static_graph):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(student, static_graph=static_graph)
        for _ in range(2):
            logits, _, features, *_ = wrapped(IMAGES, compared=True)
            (logits.sum() + features.square().sum()).backward()
        assert all(parameter.grad is not None for parameter in student.parameters())
    finally:
        dist.destroy_process_group()


# -- The queue


QUEUED = DistillSettings(similarity_weight=1.0, similarity_queue=6, logit_weight=0.5, batch_size=4)


def queued(settings=QUEUED):
    teacher = classifier(32, 1, dim=24)
    torch.manual_seed(5)
    return DistillObjective(
        prepared_student(classifier(16, 2), settings, teacher), [asked(teacher, settings)], settings
    )


def test_the_queue_holds_the_last_images(losses):
    objective, alone = queued(), Processes(rank=0, world_size=1, local_rank=0, device=choose_device())
    queue = objective.model.queue
    before = queue.clone()
    assert torch.allclose(before.norm(dim=1), torch.ones(6))
    losses(objective)
    assert torch.equal(queue, before), "an image is not compared with another one of its step"
    objective.end_step(QUEUED, alone)
    said = F.normalize(asked(classifier(32, 1, dim=24), QUEUED)(IMAGES).features)
    assert torch.equal(queue, torch.cat([before[4:], said]))
    losses(objective)
    objective.end_step(QUEUED, alone)
    assert torch.allclose(queue, torch.cat([said[2:], said]))
    objective.end_step(QUEUED, alone)
    assert torch.allclose(queue, torch.cat([said[2:], said])), "nothing was seen"


def test_micro_batches_queue_in_order(losses):
    whole, parts = queued(), queued()
    alone = Processes(rank=0, world_size=1, local_rank=0, device=choose_device())
    halves = [
        BATCH._replace(**{name: getattr(BATCH, name)[rows] for name in ("images", "labels", "keys", "numbers")})
        for rows in (slice(0, 2), slice(2, 4))
    ]
    one = losses(whole)["similarity"]
    two = sum(losses(parts, half)["similarity"] for half in halves) / 2
    assert float(one.detach()) == pytest.approx(float(two.detach()), rel=1e-5)
    whole.end_step(QUEUED, alone)
    parts.end_step(QUEUED.model_copy(update={"accumulation": 2}), alone)
    assert torch.allclose(whole.model.queue, parts.model.queue, atol=1e-6)


# -- Several teachers


def test_the_mean_divergence_has_its_gradient(losses):
    """Against a slow computation in float64: KL(sum of w p || q) and the mean of KL(p || q) differ by what no student changes."""
    settings = DistillSettings(
        logit_weight=1.0,
        label_weight=0.0,
        logit={"temperature": 3.0},
        further_teachers=("a", "b"),
        teacher_weights=(1.0, 2.0, 5.0),
    )
    teachers, student = [classifier(32, seed).eval() for seed in (1, 3, 4)], classifier(16, 2)
    objective = DistillObjective(student, [frozen(teacher) for teacher in teachers], settings)
    result = losses(objective)
    result["loss"].backward()
    own = {name: weight.grad.clone() for name, weight in student.named_parameters() if weight.grad is not None}
    student.zero_grad()
    with torch.no_grad():
        softened = [torch.softmax(teacher(IMAGES).double() / 3, 1) for teacher in teachers]
    mean = sum(share * p for share, p in zip((1 / 8, 2 / 8, 5 / 8), softened, strict=True))
    log_q = torch.log_softmax(student(IMAGES).double() / 3, 1)
    known = log_q.detach()
    expected, slow = torch.zeros((), dtype=torch.float64), 0.0
    for row in range(4):
        for column in range(3):
            expected = expected + 9 / 4 * mean[row, column] * (mean[row, column].log() - log_q[row, column])
            for share, p in zip((1 / 8, 2 / 8, 5 / 8), softened, strict=True):
                slow += float(9 / 4 * share * p[row, column] * (p[row, column].log() - known[row, column]))
    expected.backward()
    assert float(result["logit"].detach()) == pytest.approx(
        slow, rel=1e-4
    )  # a small difference of large logarithms, in float32
    for name, weight in student.named_parameters():
        if weight.grad is not None:
            assert torch.allclose(own[name], weight.grad, rtol=1e-3, atol=1e-6), name


def test_each_teacher_has_its_own_projection_and_balance(losses):
    settings = DistillSettings(
        logit_weight=0.0,
        label_weight=0.5,
        feature_weight=1.0,
        feature_loss="mse",
        further_teachers=("a",),
        teacher_weights=(3, 1),
    )
    teachers, student = [classifier(32, 1, dim=24), classifier(32, 3, dim=12)], classifier(16, 2)
    model = prepared_student(student, settings, *teachers)
    assert model.projection.out_features == 36
    asked_of = [frozen(teacher, features=True) for teacher in teachers]
    objective = DistillObjective(model, asked_of, settings)
    objective.balance([BATCH, BATCH._replace(images=IMAGES.flip(0, 3))], choose_device().open())
    result = values(losses(objective))
    seen = [torch.cat([teacher(IMAGES).features, teacher(IMAGES.flip(0, 3)).features]) for teacher in asked_of]
    balances = [Balance(features.numpy()) for features in seen]
    projected = model(IMAGES, compared=True).features.detach()
    slow = [
        F.mse_loss(part, balance(teacher(IMAGES).features))
        for part, balance, teacher in zip(projected.split([24, 12], 1), balances, asked_of, strict=True)
    ]
    assert result["feature"] == pytest.approx(float(0.75 * slow[0] + 0.25 * slow[1]), rel=1e-5)


def test_a_headless_teacher_beside_one_with_a_head(losses):
    settings = DistillSettings(logit_weight=1.0, feature_weight=1.0, further_teachers=("a",), teacher_weights=(1, 4))
    headed, headless = classifier(32, 1), networks.with_labels(classifier(32, 3), ())
    student = prepared_student(classifier(16, 2), settings, headed, headless)
    says = [frozen(one, features=True) for one in (headed, headless)]
    result = values(losses(DistillObjective(student, says, settings)))
    with torch.no_grad():
        logits = distillation_kl(student(IMAGES), says[0](IMAGES).logits, settings.logit.temperature)
    assert result["logit"] == pytest.approx(float(logits), rel=1e-4), "the mean is over the teachers that have logits"
    assert 0 <= result["agreement"] <= 1
