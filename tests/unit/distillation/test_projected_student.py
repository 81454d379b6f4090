import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainer import models
from trainer.config import ModelSettings
from trainer.distillation.objective import ProjectedStudent
from trainer.errors import ModelError
from trainer.training.optimizers import AveragedModel, parameter_groups

LABELS = ("a", "b", "c")
IMAGES = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def student():
    torch.manual_seed(0)
    arguments = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
    return ProjectedStudent(
        models.create(ModelSettings(architecture="vit_tiny_patch16_224", args=arguments), LABELS), 24
    )


def test_it_gives_the_classifiers_logits_and_the_features_that_the_head_read(student):
    logits, projected = student(IMAGES, features=True)
    assert torch.equal(logits, student.classifier(IMAGES))
    assert torch.equal(student(IMAGES), logits)
    network = student.classifier.network
    features = network.forward_features(student.classifier.preprocess(IMAGES))[:, 0]
    assert torch.equal(network.head(features), logits)
    assert torch.equal(projected, features @ student.projection.weight.T + student.projection.bias)


def test_logits_and_features_take_one_forward_pass(student):
    passes = []
    student.classifier.network.blocks[0].register_forward_hook(lambda *_: passes.append(1))
    student(IMAGES, features=True)
    assert len(passes) == 1


@pytest.mark.parametrize("architecture", ["resnet18", "convnext_atto", "vit_base_patch16_clip_224"])
def test_other_architectures_have_features_too(architecture):
    arguments = {"img_size": 32, "depth": 1} if architecture.startswith("vit") else {}
    model = models.create(ModelSettings(architecture=architecture, args=arguments), LABELS).eval()
    logits, features = model.forward_with_features(IMAGES[:1])
    assert torch.equal(logits, model(IMAGES[:1]))
    assert features.shape == (1, models.feature_size(model))


@pytest.mark.parametrize("architecture", ["deit_tiny_distilled_patch16_224", "volo_d1_224"])
def test_a_model_whose_logits_are_not_one_layer_of_its_features_is_refused(architecture):
    arguments = {"img_size": 32, "depth": 1} if architecture.startswith("deit") else {}
    model = models.create(ModelSettings(architecture=architecture, args=arguments), LABELS)
    with pytest.raises(ModelError, match=f"'{architecture}' cannot be compared by its features.*feature_weight=0"):
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
    assert isinstance(average.model.classifier, models.Classifier)
    assert average.model(IMAGES).shape == (4, 3)


def test_one_graph_holds_logits_and_features(student):
    compiled = torch.compile(student, backend="eager", fullgraph=True)
    expected = student(IMAGES, features=True)
    for ours, theirs in zip(compiled(IMAGES, features=True), expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("static_graph", [True, False])
def test_gradients_reach_all_weights_through_data_parallelism(student, static_graph):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(student, static_graph=static_graph)
        for _ in range(2):
            logits, features = wrapped(IMAGES, features=True)
            (logits.sum() + features.square().sum()).backward()
        assert all(parameter.grad is not None for parameter in student.parameters())
    finally:
        dist.destroy_process_group()
