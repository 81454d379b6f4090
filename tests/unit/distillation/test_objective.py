import pytest
import torch

from trainer import models
from trainer.config import DistillSettings, ModelSettings, ViewSettings
from trainer.data.loader import Batch
from trainer.data.views import draw_mixing
from trainer.distillation.losses import distillation_kl
from trainer.distillation.objective import DistillObjective

LABELS = ("a", "b", "c")


def classifier(size, seed, *, drop_path=0.0):
    torch.manual_seed(seed)
    arguments = {"img_size": size, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
    settings = ModelSettings(architecture="vit_tiny_patch16_224", args=arguments)
    return models.create(settings, LABELS, drop_path=drop_path)


def batch(mixing=None):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return Batch(images, torch.tensor([0, 1, 2, 0]), torch.arange(4), torch.zeros(4, dtype=torch.int64), mixing)


@pytest.fixture
def losses(timeline):
    return lambda objective, mixing=None: objective(objective.model, batch(mixing), timeline)


def test_the_loss_is_the_weighted_sum_of_its_parts(losses):
    settings = DistillSettings(kl_weight=0.7, label_weight=0.2, temperature=3.0)
    teacher, student = classifier(32, 1), classifier(16, 2)
    result = losses(DistillObjective(student, teacher, settings))
    images = batch().images
    kl = distillation_kl(student(images), teacher(images), 3.0).detach()
    label = torch.nn.functional.cross_entropy(student(images), batch().labels).detach()
    assert float(result["kl"].detach()) == pytest.approx(float(kl), rel=1e-5)
    assert float(result["label"].detach()) == pytest.approx(float(label), rel=1e-5)
    assert float(result["loss"].detach()) == pytest.approx(0.7 * float(kl) + 0.2 * float(label), rel=1e-5)


def test_without_a_weight_the_teacher_is_not_asked(losses):
    teacher, student = classifier(32, 1), classifier(32, 2)
    teacher.register_forward_pre_hook(lambda *_: pytest.fail("the teacher was asked"))
    result = losses(DistillObjective(student, teacher, DistillSettings(kl_weight=0, label_weight=0.5)))
    assert set(result) == {"loss", "label"}
    assert float(result["loss"].detach()) == pytest.approx(0.5 * float(result["label"].detach()))


def test_only_the_student_learns(losses):
    teacher, student = classifier(32, 1, drop_path=0.5).train(), classifier(32, 2)
    objective = DistillObjective(student, teacher, DistillSettings())
    losses(objective)["loss"].backward()
    assert not teacher.training
    assert all(not parameter.requires_grad and parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.grad is not None for parameter in student.parameters())


def test_a_student_that_is_the_teacher_has_nothing_to_learn_from_it(losses):
    teacher, student = classifier(32, 1), classifier(32, 1)
    result = losses(DistillObjective(student, teacher, DistillSettings()))
    assert float(result["kl"].detach()) == pytest.approx(0, abs=1e-6)
    assert float(result["agreement"]) == 1


def test_teacher_and_student_see_the_same_mixed_view(losses):
    seen = []
    teacher, student = classifier(32, 1), classifier(32, 2)
    for model in (teacher, student):
        model.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    mixing = draw_mixing(torch.arange(4).numpy(), seed=0, settings=ViewSettings(mixup=1.0))
    losses(DistillObjective(student, teacher, DistillSettings()), mixing)
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], batch().images.float())
