"""Rules on layers, input and validation: each pathology is really made in a small loop on the digits, and that rule alone fires."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import trainer
from tests.pathologies import RULES, judged
from trainer import doctor
from trainer.config import EvidenceSettings
from trainer.profiling.evidence_files import read_evidence
from trainer.profiling.rules.outcomes import Finding, Healthy, TrainingRule

LEARNING = {rule.name for rule in TrainingRule.__subclasses__()}


@pytest.fixture(autouse=True)
def many_looks(monkeypatch):
    """A loop of a second would afford one look at its weights and layers."""
    looks = partial(EvidenceSettings, tensors_every=5, tensors_budget=1.0, operators_steps=0, system_interval_s=0.05)
    monkeypatch.setattr(doctor, "EvidenceSettings", looks)


@pytest.fixture(scope="module")
def digits():
    """Images of 8 x 8 pixels, 0 ± 1, and their labels."""
    pixels, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(pixels, dtype=torch.float32)
    return ((pixels - pixels.mean()) / pixels.std()).reshape(-1, 1, 8, 8), torch.tensor(labels)


def network(activation=nn.ReLU):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        activation(),
        nn.Flatten(),
        nn.Linear(16 * 64, 64),
        activation(),
        nn.Linear(64, 64),
        activation(),
        nn.Linear(64, 10),
    )


def train(model, digits, place, *, steps=60, rate=1e-3, images=lambda pixels: pixels, loss=F.cross_entropy):
    """Train by AdamW, and give what was recorded."""
    generator, optimizer = torch.Generator().manual_seed(0), torch.optim.AdamW(model.parameters(), lr=rate)
    with trainer.record("digits", place, model=model) as recording:
        for _ in range(steps):
            with recording.step(images=64):
                with recording.span("data"):
                    chosen = torch.randint(len(digits[1]), (64,), generator=generator)
                    batch, labels = images(digits[0][chosen]), digits[1][chosen]
                with recording.span("forward"):
                    value = loss(model(batch), labels)
                with recording.span("backward"):
                    optimizer.zero_grad()
                    value.backward()
                with recording.span("optimizer"):
                    optimizer.step()
                recording.log(loss=value.item())
    [training] = read_evidence(place / "evidence").trainings
    return training


def findings(training):
    answers = judged(training, RULES)
    return {name: one.text for name, one in answers.items() if isinstance(one, Finding) and name in LEARNING}


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid])
def test_healthy_networks(activation, digits, tmp_path):
    training = train(network(activation), digits, tmp_path)
    assert findings(training) == {}
    answers = judged(training, RULES)
    assert isinstance(answers["check_input_images"], Healthy)
    assert isinstance(answers["all_zero"], Healthy)
    of_kind = {nn.ReLU: "dead_relu", nn.GELU: "tensor_variance"}.get(activation, "saturated_activation")
    assert isinstance(answers[of_kind], Healthy)
    assert training.ranks[0].layers.steps.tolist() == [*range(5, 60, 5)]
    assert training.ranks[0].layers.tensors == ["input/0", "1", "4", "6"]


def test_dead_relu(digits, tmp_path):
    model = network()
    with torch.no_grad():
        model[3].bias.fill_(-20)
    found = findings(train(model, digits, tmp_path))
    assert set(found) == {"dead_relu"}, found
    assert found["dead_relu"].startswith(
        "In 2 of 3 layers of ReLU (4, 6) more than 50% of the units gave 0 for every image, "
    )


def test_relu_that_one_class_needs_is_not_dead(digits, tmp_path):
    """Units that answer to a few images only."""
    model = network()
    with torch.no_grad():
        model[3].bias.fill_(-0.1)
    training = train(model, digits, tmp_path)
    assert findings(training) == {}
    shares = training.ranks[0].layers.values["inactive"][:, 2]
    assert 0 < shares[-1] < 0.5


@pytest.mark.parametrize("activation", [nn.Tanh, nn.Sigmoid, nn.Hardtanh])
def test_saturated_activation(activation, digits, tmp_path):
    model = network(activation)
    with torch.no_grad():
        model[3].bias.fill_(40)
    found = findings(train(model, digits, tmp_path))
    assert set(found) == {"saturated_activation"}, found


def test_all_zero(digits, tmp_path):
    """A branch whose scale is 0, and stays so."""

    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.branch = network(), nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

        def forward(self, images):
            return self.body(images) + 0.0 * self.branch(images)

    found = findings(train(Branch(), digits, tmp_path))
    assert set(found) == {"all_zero"}, found
    assert "the gradient of 2 of 10 tensors (branch.1.weight, branch.1.bias)" in found["all_zero"]


@pytest.mark.parametrize(("factor", "word"), [(1e-4, "fades"), (1e3, "grows")])
def test_tensor_variance(factor, word, digits, tmp_path):
    """Each layer passes on a thousandth, or a thousand times, of what it gets."""

    class Scaled(nn.Module):
        def forward(self, values):
            return factor * values

    torch.manual_seed(0)
    linear = partial(nn.Linear, bias=False)
    layers = [nn.Flatten(), linear(64, 64), nn.GELU(), Scaled(), linear(64, 64), Scaled(), nn.GELU()]
    found = findings(train(nn.Sequential(*layers, linear(64, 10)), digits, tmp_path))
    assert set(found) == {"tensor_variance"}, found
    assert word in found["tensor_variance"]


@pytest.mark.parametrize(
    ("images", "severity", "words"),
    [
        (lambda pixels: (pixels + 1) * 100, "warning", "were not scaled"),
        (lambda pixels: 12 * pixels - 6, "warning", "normalized twice"),
        (lambda pixels: pixels / 255, "warning", "scaled down twice"),
        (torch.zeros_like, "severe", "hold one value"),
        (lambda pixels: pixels * (torch.arange(len(pixels)) % 3 > 0)[:, None, None, None], "warning", "no two pixels"),
        (lambda pixels: (pixels + 1) / 4, "note", "not centered"),
    ],
    ids=["0 to 255", "twice normalized", "twice scaled", "empty", "some blank", "0 to 1"],
)
def test_check_input_images(images, severity, words, digits, tmp_path):
    training = train(network(nn.GELU), digits, tmp_path, images=images)
    found = judged(training, RULES)["check_input_images"]
    assert isinstance(found, Finding)
    assert (found.severity, words in found.text) == (severity, True), found
    assert set(findings(training)) == {"check_input_images"}


def test_a_constant_channel(digits, tmp_path):
    """An alpha channel that is always full."""
    model = network(nn.GELU)
    model[0] = nn.Conv2d(4, 16, 3, padding=1)
    full = partial(F.pad, pad=(0, 0, 0, 0, 0, 1), value=1.0)
    found = findings(train(model, digits, tmp_path, images=lambda pixels: full(pixels.expand(-1, 3, -1, -1))))
    assert set(found) == {"check_input_images"}, found
    assert found["check_input_images"].startswith("Channel 3 of 4 of the input ")


def test_overtraining(digits, tmp_path):
    """A linear model is as good as it gets after some hundred steps, and is trained for a thousand."""
    pixels, labels = digits[0].flatten(1), digits[1]
    training, validation = slice(0, 1400), slice(1400, None)
    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.02)

    def run(place, steps):
        with trainer.record("linear", place, model=model) as recording:
            for step in range(steps):
                with recording.step(images=1400):
                    with recording.span("forward"):
                        loss = F.cross_entropy(model(pixels[training]), labels[training])
                    with recording.span("backward"):
                        optimizer.zero_grad()
                        loss.backward()
                    with recording.span("optimizer"):
                        optimizer.step()
                    recording.log(loss=loss.item())
                if step % 10 == 9:
                    logits = model(pixels[validation]).detach()
                    right = (logits.argmax(1) == labels[validation]).float().mean().item()
                    recording.log(val_loss=F.cross_entropy(logits, labels[validation]).item(), val_top1=right)
        [recorded] = read_evidence(place / "evidence").trainings
        return recorded

    short = run(tmp_path / "short", 60)
    assert findings(short) == {}
    assert isinstance(judged(short, RULES)["overtraining"], Healthy)
    found = findings(run(tmp_path / "long", 1000))
    assert set(found) == {"overtraining"}, found
