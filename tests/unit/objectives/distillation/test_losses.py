"""Each loss against its paper's formula in slow float64 loops, against identities, and from recorded outputs against complete ones."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from trainer.config import DistillSettings
from trainer.config.settings import HardSettings
from trainer.data.batch import Recorded
from trainer.objectives.distillation import losses
from trainer.objectives.distillation.losses import TeacherOutputs, all_logits, complete, top_class
from trainer.objectives.distillation.objective import FEATURE_LOSSES, logit_loss

BATCH, CLASSES = 6, 5
TEMPERATURES = [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0]


def logits(seed, batch=BATCH, classes=CLASSES, scale=3.0):
    return torch.randn(batch, classes, generator=torch.Generator().manual_seed(seed)) * scale


LABELS = torch.tensor([0, 1, 2, 3, 4, 0])
TEACHER = logits(1)


# ---------------------------------------------------------------------------------------------------------------------
# The papers' formulas, one sample and class at a time


def softmax(row, temperature):
    powers = [math.exp(value / temperature) for value in row]
    return [power / sum(powers) for power in powers]


def kl_of(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def rows(student):
    return zip(student.tolist(), TEACHER.double().tolist(), LABELS.tolist(), strict=True)


def kl_by_hand(student, temperature):
    """Hinton et al. 2015, times T^2."""
    divergences = [kl_of(softmax(z, temperature), softmax(s, temperature)) for s, z, _ in rows(student)]
    return temperature**2 * sum(divergences) / len(divergences)


def binary_kl_by_hand(student, temperature):
    """The divergence of each class's two-way distribution, times T^2, summed over the classes."""
    total = 0.0
    for s, z, _ in rows(student):
        for ours, theirs in zip(s, z, strict=True):
            p, q = (1 / (1 + math.exp(-value / temperature)) for value in (theirs, ours))
            total += temperature**2 * kl_of([p, 1 - p], [q, 1 - q]) / len(student)
    return total


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_divergence_of_each_class_is_its_formula(temperature):
    student = logits(2).double()
    ours = losses.binary_kl(student, TEACHER, temperature)
    assert float(ours) == pytest.approx(binary_kl_by_hand(student, temperature), rel=1e-4)
    assert float(losses.binary_kl(TEACHER, TEACHER, temperature)) == 0


def test_divergence_of_classes():
    far = torch.tensor([[500.0, -500.0]], requires_grad=True)
    loss = losses.binary_kl(far, -far.detach(), 1.0)
    (gradient,) = torch.autograd.grad(loss, far)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    # Agreement is f1 between the classes that both find likelier than not.
    student, teacher = torch.tensor([[1.0, -1.0, 2.0]]), torch.tensor([[3.0, 1.0, 0.5]])
    assert float(losses.class_agreement(student, teacher)) == pytest.approx(2 * 2 / (2 + 3))
    nothing = -torch.ones(1, 3)
    assert float(losses.class_agreement(nothing, nothing)) == 1


def hard_by_hand(student):
    """Touvron et al. 2021: cross-entropy with y_t = argmax_c Z_t(c)."""
    return sum(-math.log(softmax(s, 1)[z.index(max(z))]) for s, z, _ in rows(student)) / len(student)


def dkd_by_hand(student, temperature, alpha, beta):
    """Zhao et al. 2022, equations 2 to 7."""
    total = 0.0
    for s, z, t in rows(student):
        p, q = softmax(z, temperature), softmax(s, temperature)
        tckd = kl_of([p[t], 1 - p[t]], [q[t], 1 - q[t]])
        others = [c for c in range(CLASSES) if c != t]
        nckd = kl_of(softmax([z[c] for c in others], temperature), softmax([s[c] for c in others], temperature))
        total += alpha * tckd + beta * nckd
    return temperature**2 * total / len(student)


def dist_by_hand(student, temperature, beta, gamma):
    """Huang et al. 2022, equations 7 to 9, with numpy's correlation; times T^2 as in the authors' code."""
    p = np.array([softmax(z, temperature) for _, z, _ in rows(student)])
    q = np.array([softmax(s, temperature) for s, _, _ in rows(student)])
    inter = np.mean([1 - np.corrcoef(p[i], q[i])[0, 1] for i in range(len(p))])
    intra = np.mean([1 - np.corrcoef(p[:, c], q[:, c])[0, 1] for c in range(CLASSES)])
    return temperature**2 * (beta * inter + gamma * intra)


def standardized_by_hand(student, temperature):
    """Sun et al. 2024, algorithm 1: Z-scores over the classes, then T^2 x KL."""

    def score(row):
        mean = sum(row) / len(row)
        deviation = math.sqrt(sum((value - mean) ** 2 for value in row) / len(row))
        return [(value - mean) / deviation for value in row]

    divergences = [kl_of(softmax(score(z), temperature), softmax(score(s), temperature)) for s, z, _ in rows(student)]
    return temperature**2 * sum(divergences) / len(divergences)


def cosine_by_hand(student):
    total = 0.0
    for s, z, _ in rows(student):
        total += 1 - np.dot(s, z) / (np.linalg.norm(s) * np.linalg.norm(z))
    return total / len(student)


def mse_by_hand(student):
    return sum((a - b) ** 2 for s, z, _ in rows(student) for a, b in zip(s, z, strict=True)) / (len(student) * CLASSES)


def cosine_smooth_l1_by_hand(student):
    """Sariyildiz et al. 2024: cosine and smooth-L1 (Girshick 2015), half of each."""
    gaps = [abs(a - b) for s, z, _ in rows(student) for a, b in zip(s, z, strict=True)]
    smooth_l1 = sum(gap**2 / 2 if gap < 1 else gap - 0.5 for gap in gaps) / len(gaps)
    return (cosine_by_hand(student) + smooth_l1) / 2


QUEUE = torch.nn.functional.normalize(logits(7, batch=20))
"""Features of other images, as the teacher saw them."""


def similarity_by_hand(student, temperature, teacher_temperature):
    """Fang et al. 2021, equations 3 to 6: cross-entropy of the softmax of cosines to one's own target and to the queue."""
    total = 0.0
    for s, z, _ in rows(student):
        own, their = (np.array(one) / np.linalg.norm(one) for one in (s, z))
        candidates = [their, *QUEUE.double().tolist()]
        ours, theirs = ([float(np.dot(one, candidate)) for candidate in candidates] for one in (own, their))
        p, q = softmax(theirs, teacher_temperature), softmax(ours, temperature)
        total -= sum(a * math.log(b) for a, b in zip(p, q, strict=True))
    return total / len(student)


def similarity(temperature, teacher_temperature):
    """The loss with these temperatures, as a function of the student's features, and the same by hand."""
    settings = {"temperature": temperature, "teacher_temperature": teacher_temperature}
    return (
        lambda student: losses.similarity_loss(student, TEACHER, QUEUE, **settings),
        lambda student: similarity_by_hand(student, temperature, teacher_temperature),
    )


def chosen(**settings):
    """What the objective computes with these settings, as a function of the student's logits."""
    loss = partial(logit_loss, DistillSettings(logit=settings).logit)
    return lambda student: loss(student, TeacherOutputs(TEACHER), LABELS)


LOSSES = {
    **{
        f"kl at {temperature}": (
            chosen(temperature=temperature),
            lambda student, temperature=temperature: kl_by_hand(student, temperature),
        )
        for temperature in TEMPERATURES
    },
    "hard": (chosen(loss="hard"), hard_by_hand),
    "dkd": (chosen(loss="dkd", temperature=4), lambda student: dkd_by_hand(student, 4, 1, 8)),
    "dkd with other weights": (
        chosen(loss="dkd", temperature=1, alpha=0.3, beta=2),
        lambda student: dkd_by_hand(student, 1, 0.3, 2),
    ),
    "dist": (chosen(loss="dist", temperature=1), lambda student: dist_by_hand(student, 1, 1, 1)),
    "dist with other weights": (
        chosen(loss="dist", temperature=4, beta=2, gamma=0.5),
        lambda student: dist_by_hand(student, 4, 2, 0.5),
    ),
    "standardized kl": (
        chosen(standardize=True, temperature=2),
        lambda student: standardized_by_hand(student, 2),
    ),
    "similarity": similarity(0.2, 0.01),
    "similarity to many": similarity(0.07, 0.5),
    "feature cosine": (lambda student: FEATURE_LOSSES["cosine"](student, TEACHER), cosine_by_hand),
    "feature mse": (lambda student: FEATURE_LOSSES["mse"](student, TEACHER), mse_by_hand),
    "feature cosine and smooth-L1": (
        lambda student: FEATURE_LOSSES["cosine_smooth_l1"](student, TEACHER),
        cosine_smooth_l1_by_hand,
    ),
}
"""Name -> (ours, by hand), both as functions of the student's logits."""


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_papers_formula(name):
    ours, by_hand = LOSSES[name]
    for seed in range(3):
        student = logits(10 + seed)
        assert float(ours(student)) == pytest.approx(by_hand(student.double()), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_its_gradient_is_the_slope_of_the_formula(name):
    ours, by_hand = LOSSES[name]
    student, step = logits(0).requires_grad_(), 1e-5
    ours(student).backward()
    for place in np.ndindex(BATCH, CLASSES):
        shift = torch.zeros(BATCH, CLASSES, dtype=torch.float64)
        shift[place] = step
        point = student.detach().double()
        slope = (by_hand(point + shift) - by_hand(point - shift)) / (2 * step)
        assert float(student.grad[place]) == pytest.approx(slope, rel=1e-3, abs=2e-5)


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_it_is_computed_in_float32_from_half_precision(name, autocast):
    ours, by_hand = LOSSES[name]
    student = logits(0).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = ours(student)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(by_hand(student.double()), rel=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_large_logits_give_finite_losses_and_gradients(name):
    student = (logits(0) * 1e3).requires_grad_()
    loss = LOSSES[name][0](student)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(student.grad).all()


# ---------------------------------------------------------------------------------------------------------------------
# Identities


def test_kl_and_cosine():
    student = logits(0)
    assert float(losses.distillation_kl(student, student + 7, 2.0)) == pytest.approx(0, abs=1e-6)
    # The feature cosine looks at directions alone.
    assert float(losses.feature_cosine(3 * TEACHER, TEACHER)) == pytest.approx(0, abs=1e-6)
    assert float(losses.feature_cosine(-TEACHER, TEACHER)) == pytest.approx(2, abs=1e-6)

    # Hinton et al. 2015, equation 4: with zero-mean logits the gradient tends to (z - v) / K.
    student, teacher = logits(0), logits(1)
    student, teacher = (
        (student - student.mean(1, keepdim=True)).requires_grad_(),
        teacher - teacher.mean(1, keepdim=True),
    )
    losses.distillation_kl(student, teacher, 1000.0).backward()
    assert torch.allclose(student.grad, (student - teacher).detach() / CLASSES / len(student), atol=2e-3)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_dkd_with_teachers_doubt_as_beta_is_kl(temperature):
    """Zhao et al. 2022, equation 5: KL = TCKD + (1 - p_t) NCKD."""
    student = logits(0)
    for row in range(BATCH):
        one = slice(row, row + 1)
        doubt = 1 - float((TEACHER[row] / temperature).softmax(0)[LABELS[row]])
        ours = losses.decoupled_kl(
            student[one], TEACHER[one], LABELS[one], temperature=temperature, alpha=1, beta=doubt
        )
        assert float(ours) == pytest.approx(
            float(losses.distillation_kl(student[one], TEACHER[one], temperature)), rel=1e-4
        )


def test_dkd_of_two_classes_has_no_others_to_compare():
    student, teacher = logits(0, classes=2), logits(1, classes=2)
    labels = LABELS % 2
    ours = losses.decoupled_kl(student, teacher, labels, temperature=1, alpha=1, beta=100)
    assert float(ours) == pytest.approx(float(losses.distillation_kl(student, teacher, 1)), rel=1e-5)


def test_dist_overlooks_an_affine_change_of_the_probabilities():
    """Huang et al. 2022: a student whose probabilities are a x p + b has learned all relations."""
    probabilities = TEACHER.softmax(1)
    student = (0.3 * probabilities + 0.7 / CLASSES).log()
    assert float(losses.relation_loss(student, TEACHER, temperature=1, beta=1, gamma=1)) == pytest.approx(0, abs=1e-5)
    assert float(losses.distillation_kl(student, TEACHER, 1)) > 0.1


def test_standardized_logits():
    student, ours = logits(0), chosen(standardize=True)
    assert float(ours(student * 5 - 3)) == pytest.approx(float(ours(student)), rel=1e-4)
    assert float(chosen()(student * 5 - 3)) != pytest.approx(float(chosen()(student)), rel=0.1)
    # Standardized logits are z scores.
    scores = losses.standardize(logits(0, classes=100)).double()
    assert scores.mean(1).abs().max() < 1e-6
    assert (scores.square().mean(1) - 1).abs().max() < 1e-5
    alone = torch.zeros(1, 10)
    alone[0, 3] = 7
    assert float(losses.standardize(alone).max()) == pytest.approx(math.sqrt(9))  # the bound in the paper's section 4.2
    assert torch.equal(losses.standardize(torch.ones(2, 3)), torch.zeros(2, 3))


# ---------------------------------------------------------------------------------------------------------------------
# Recorded outputs


def record(teacher, count):
    """The `count` largest logits in half precision and the sum of the rest, as they are recorded."""
    values, indices = teacher.topk(count, dim=1)
    others = teacher.double().scatter(1, indices, -math.inf)
    rest = torch.stack([others.logsumexp(1), (others / 2).logsumexp(1)], 1).float()
    return Recorded(indices, values.half().float(), rest, None)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_complete_recorded_logits_differ_by_the_rounding_alone(temperature):
    """Half precision moves a logit z by at most d = 2^-11 |z|, so a probability by a factor within e^(+-e), e = 2 d / T."""
    teacher = logits(1, batch=32, classes=20)
    online, recorded = (logits(0, batch=32, classes=20).requires_grad_() for _ in range(2))
    full = losses.distillation_kl(online, teacher, temperature)
    ours = losses.recorded_kl(recorded, record(teacher, 20), temperature)
    full.backward()
    ours.backward()
    p, q = (teacher / temperature).softmax(1), (online.detach() / temperature).softmax(1)
    e = 2 * float(teacher.abs().max()) * 2**-11 / temperature
    assert (recorded.grad - online.grad).abs().le(temperature * math.expm1(e) * p / 32 + 1e-7).all()
    bound = temperature**2 * (math.expm1(e) * float((p * (p / q).log().abs()).sum(1).mean()) + e)
    assert 0 < abs(float(ours.detach()) - float(full.detach())) <= bound + 1e-6


OTHERS = [{"loss": "hard"}, {"loss": "dkd"}, {"loss": "dist"}, {"standardize": True}]


def test_recorded_logits_keep_their_top_class():
    loss = partial(logit_loss, HardSettings())
    assert torch.equal(loss(logits(0), record(TEACHER, 1), LABELS), loss(logits(0), TeacherOutputs(TEACHER), LABELS))
    # All recorded logits come back in their places.
    whole = complete(first_logits(3), 3)
    assert torch.equal(whole.logits, OUTPUTS)
    assert torch.equal(whole.features, torch.ones(2, 4))
    assert complete(first_logits(2), 3) is None
    # All logits are those of either kind.
    assert torch.equal(all_logits(TeacherOutputs(OUTPUTS), 3), OUTPUTS)
    assert torch.equal(all_logits(first_logits(3), 3), OUTPUTS)
    with pytest.raises(AssertionError, match="3 logits are needed"):
        all_logits(first_logits(2), 3)
    # The top class is that of either kind.
    assert top_class(TeacherOutputs(OUTPUTS)).tolist() == [1, 2]
    assert top_class(first_logits(1)).tolist() == [1, 2]


def peaked(batch, classes, top, seed):
    """Logits of which one, or a few more than are recorded, tower above the others."""
    teacher = logits(seed, batch, classes, scale=1.0)
    teacher[: batch // 2, 0] += 20
    teacher[batch // 2 :, : top + 1] += 15
    return teacher


TEACHERS = {
    "flat": lambda: (torch.full((8, 12), -3.0), 4),
    "random": lambda: (logits(2, 64, 100, scale=1.0), 10),
    "confident": lambda: (logits(3, 64, 100, scale=8.0), 10),
    "peaked": lambda: (peaked(64, 100, 10, seed=4), 10),
    "one left": lambda: (logits(5, 64, 6), 5),
    "top one": lambda: (logits(6, 64, 1000, scale=3.0), 1),
}


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", TEACHERS)
def test_the_rest_lies_within_its_bounds(name, temperature):
    teacher, count = TEACHERS[name]()
    recorded, classes = record(teacher, count), teacher.shape[1]
    truth = (teacher.double().scatter(1, recorded.indices, -math.inf) / temperature).logsumexp(1)
    lower, upper = losses.rest_bounds(recorded, classes, temperature)
    estimate, tolerance = losses.rest_logit(recorded, classes, temperature), 1e-6 * (1 + float(truth.abs().max()))
    for value in (truth, estimate):
        assert (lower - tolerance <= value).all()
        assert (value <= upper + tolerance).all()
    if temperature in (1.0, 2.0) or name == "flat":
        assert (estimate - truth).abs().max() <= tolerance


@pytest.mark.parametrize("temperature", [1.25, 1.5, 3.0, 4.0, 8.0])
@pytest.mark.parametrize(("scale", "closeness"), [(1.0, 0.01), (3.0, 0.15)])
def test_the_rest_of_usual_logits_is_known_closely(scale, closeness, temperature):
    teacher = logits(8, 64, 100, scale=scale)
    recorded = record(teacher, 10)
    truth = (teacher.double().scatter(1, recorded.indices, -math.inf) / temperature).logsumexp(1)
    assert (losses.rest_logit(recorded, 100, temperature) - truth).abs().max() < closeness


def kl_within(p, q, chosen):
    """KL between two distributions restricted to the chosen classes, for each sample."""
    p, q = (x * chosen / (x * chosen).sum(1, keepdim=True) for x in (p, q))
    return torch.where(chosen, p * (p / q).log(), 0).sum(1)


def divided(student, recorded, temperature, *, rest):
    """The divergence of each sample over (recorded classes, rest), in float64, if the teacher's rest were `rest`; samples [B]."""
    known = torch.cat([recorded.logits.double() / temperature, rest.double().unsqueeze(1)], 1).log_softmax(1)
    scaled = student.double() / temperature
    others = scaled.scatter(1, recorded.indices, -math.inf).logsumexp(1, keepdim=True)
    ours = torch.cat([scaled.gather(1, recorded.indices), others], 1).log_softmax(1)
    return temperature**2 * (known.exp() * (known - ours)).sum(1)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", TEACHERS)
def test_recorded_kl_lacks_what_the_chain_rule_says(name, temperature):
    """Full = recorded + T^2 x mass of the rest x KL within the rest; beside T = 1 and 2 as closely as the rest is known."""
    teacher, count = TEACHERS[name]()
    teacher = teacher.half().float()  # so that only the number of logits counts here
    student, recorded, classes = logits(7, *teacher.shape), record(teacher, count), teacher.shape[1]
    p, q = ((x.double() / temperature).softmax(1) for x in (teacher, student))
    chosen = torch.ones_like(p, dtype=torch.bool).scatter(1, recorded.indices, value=False)
    lacking = temperature**2 * ((p * chosen).sum(1) * kl_within(p, q, chosen)).mean()
    full = temperature**2 * (p * (p / q).log()).sum(1).mean()
    ours = float(losses.recorded_kl(student, recorded, temperature))
    if temperature in (1.0, 2.0):
        assert ours == pytest.approx(float(full - lacking), rel=1e-4, abs=1e-5)
        assert ours <= float(full) + 1e-5
    lower, upper = losses.rest_bounds(recorded, classes, temperature)
    grid = torch.stack(
        [
            divided(student, recorded, temperature, rest=lower + (upper - lower) * share)
            for share in np.linspace(0, 1, 101)
        ]
    )
    least, most = float(grid.amin(0).mean()), float(grid.amax(0).mean())
    tolerance = 1e-4 * (1 + abs(most))
    for value in (ours, float(full - lacking)):
        assert least - tolerance <= value <= most + tolerance


def test_the_rest_is_taught_as_one_class():
    """The gradient at a recorded class is that of the full divergence; the others share that of their sum as they share its probability."""
    temperature, student = 2.0, logits(0, 16, 30).requires_grad_()
    teacher = logits(1, 16, 30).half().float()
    recorded = record(teacher, 5)
    losses.recorded_kl(student, recorded, temperature).backward()
    p, q = ((x.detach() / temperature).softmax(1) for x in (teacher, student))
    chosen = torch.ones_like(p, dtype=torch.bool).scatter(1, recorded.indices, value=False)
    mass = (p * chosen).sum(1, keepdim=True) * q / (q * chosen).sum(1, keepdim=True)
    assert torch.allclose(student.grad, temperature * (q - torch.where(chosen, mass, p)) / 16, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# On the device


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        *((settings, count) for settings in ({}, *OTHERS) for count in (None, CLASSES)),
        ({}, 2),
        ({"loss": "hard"}, 2),
    ],
    ids=str,
)
def test_no_loss_reads_a_value_back(settings, count):
    """Tensors without values stand in for those of a device: whatever waits for a value raises."""
    loss, recorded = partial(logit_loss, DistillSettings(logit=settings).logit), record(TEACHER, count or CLASSES)
    said = recorded._replace(
        **{name: part.to("meta") for name, part in recorded._asdict().items() if isinstance(part, torch.Tensor)}
    )
    student = logits(0).to("meta").requires_grad_()
    loss(student, TeacherOutputs(TEACHER.to("meta")) if count is None else said, LABELS.to("meta")).backward()
    assert student.grad.shape == student.shape


OUTPUTS = torch.tensor([[0.5, 2.0, -1.0], [3.0, 3.0, 7.0]])


def first_logits(count):
    values, indices = OUTPUTS.topk(count, dim=1)
    return Recorded(indices, values, torch.zeros(2, 2), torch.ones(2, 4))
