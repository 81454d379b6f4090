"""The doctor beside loops that know nothing of it, and beside the trainers of Lightning and Hugging Face."""

import accelerate
import lightning
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import trainer
from trainer import doctor
from trainer.io.errors import SettingsError
from trainer.profiling.evidence_files import read_evidence


@pytest.fixture
def loop():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 16), nn.ReLU(), nn.Linear(16, 4))
    data = TensorDataset(torch.randn(96, 3, 8, 8), torch.randint(4, (96,)))
    return model, DataLoader(data, batch_size=8), torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture(autouse=True)
def nothing_stays():
    before = torch.autograd.backward
    yield
    assert doctor.Doctor.attached is None
    assert torch.autograd.backward is before


def train(model, loader, optimizer, *, accumulate=1):
    """A loop as people write it."""
    model.train()
    for number, (images, labels) in enumerate(loader):
        F.cross_entropy(model(images), labels).backward()
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    for images, _ in loader:
        model(images)


def recorded(place):
    [training] = read_evidence(place / "evidence").trainings
    return training


def test_a_loop_that_knows_nothing_is_recorded(loop, tmp_path):
    model, loader, optimizer = loop
    watched = doctor.attach(model, tmp_path, name="mine")
    with pytest.raises(SettingsError, match="a training is being recorded already"):
        doctor.attach(model, tmp_path)
    other = nn.Linear(2, 2)
    for _ in range(2):
        train(model, loader, optimizer)
        evaluate(model, loader)
        other(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
    verdict = watched.finish()
    assert verdict == watched.finish() != ""
    assert verdict.removesuffix(".") in (tmp_path / "report" / "report.html").read_text()
    training = recorded(tmp_path)
    [rank] = training.ranks
    assert rank.steps["step"].tolist() == list(range(24))
    assert rank.steps["images"].tolist() == [8] * 24
    for name in ("data", "forward", "backward", "optimizer"):
        assert (rank.steps[name] > 0).all(), name
    assert rank.record.outside["evaluate"].count == 2
    assert "interrupted" not in rank.record.outside
    assert set(rank.tensors.tensors) == {name for name, _ in model.named_parameters()}
    assert (rank.tensors.values["gradient_norm"] > 0).all()
    train(model, loader, optimizer)  # nothing watches it any more


class Stream(IterableDataset):
    def __iter__(self):
        return iter([torch.ones(3, 8, 8)] * 20)


def test_accumulated_batches_are_one_step_and_a_stream_ends(loop, tmp_path):
    model, loader, optimizer = loop
    watched = doctor.attach(model, tmp_path)
    train(model, loader, optimizer, accumulate=3)
    for images in DataLoader(Stream(), batch_size=10):
        model(images).sum().backward()
        optimizer.step()
    watched.finish()
    [rank] = recorded(tmp_path).ranks
    assert rank.steps["images"].tolist() == [24] * 4 + [10] * 2
    assert rank.record.outside["interrupted"].count == 1


def test_a_loop_that_fails_leaves_its_record(loop, tmp_path):
    model, loader, optimizer = loop
    watched = doctor.attach(model, tmp_path)
    train(model, loader, optimizer)
    watched.finish(ZeroDivisionError("the fourth batch"))
    assert recorded(tmp_path).ranks[0].record.failed == "the fourth batch"


def test_wrapped_models_and_closures(loop, tmp_path):
    model, loader, _ = loop
    wrapped = nn.DataParallel(model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    watched = doctor.attach(wrapped, tmp_path)
    wrapped.train()
    for images, labels in loader:

        def closure(images=images, labels=labels):
            optimizer.zero_grad()
            loss = F.cross_entropy(wrapped(images), labels)
            loss.backward()
            return loss

        optimizer.step(closure)
    watched.finish()
    [rank] = recorded(tmp_path).ranks
    assert len(rank.steps["step"]) == 12
    for name in ("data", "forward", "backward", "optimizer"):
        assert (rank.steps[name] > 0).all(), name
    assert not len(rank.tensors.steps)


def test_every_process_is_recorded_into_one_folder(loop, tmp_path, monkeypatch, caplog):
    model, loader, _ = loop
    monkeypatch.setattr(doctor, "_RANKS_WAIT_S", 0.2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for second in (True, False):
        monkeypatch.setenv("RANK", "0")
        place = tmp_path / str(second)
        with trainer.record("mine", place) as first:
            if second:
                monkeypatch.setenv("RANK", "1")
                with trainer.record("mine", place, model=model) as other:
                    for _ in other.steps(loader):
                        pass
                assert other.verdict == ""
            for _ in first.steps(loader):
                pass
        training = recorded(place)
        assert [rank.record.rank for rank in training.ranks] == [0, 1][: 1 + second]
        assert training.ranks[0].record.steps.images == 2 * 96
        assert sorted(path.name for path in place.iterdir()) == ["evidence", "report"]
    assert "process 1 left no record" in training.ranks[0].record.failed
    assert "process 1 left no record" in caplog.text


class LightningModel(lightning.LightningModule):
    """The model and the loop of the other tests, as Lightning wants them."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, _index):
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def validation_step(self, batch, _index):
        images, labels = batch
        self.log("val_loss", F.cross_entropy(self.model(images), labels))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def lightning_trainer(tmp_path, **options):
    return lightning.Trainer(
        accelerator="cpu",
        max_epochs=2,
        callbacks=[doctor.lightning(tmp_path)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


THEIR_WARNINGS = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning", "ignore:.*LeafSpec:FutureWarning"
)


@THEIR_WARNINGS
@pytest.mark.parametrize("accumulate", [1, 2])
def test_lightnings_trainer(loop, tmp_path, accumulate):
    model, loader, _ = loop
    fitting = lightning_trainer(tmp_path, accumulate_grad_batches=accumulate, gradient_clip_val=1.0)
    fitting.fit(LightningModel(model), loader, loader)
    [rank] = recorded(tmp_path).ranks
    assert len(rank.steps["step"]) == 2 * 12 // accumulate
    assert rank.record.steps.images == 2 * 96
    for name in ("data", "forward", "backward", "optimizer"):
        assert (rank.steps[name] > 0).all(), name


@THEIR_WARNINGS
def test_lightnings_trainer_that_fails(loop, tmp_path):
    model, loader, _ = loop

    class Failing(LightningModel):
        def training_step(self, batch, index):
            if index == 5:
                raise ValueError("no more")
            return super().training_step(batch, index)

    with pytest.raises(ValueError, match="no more"):
        lightning_trainer(tmp_path).fit(Failing(model), loader)
    [rank] = recorded(tmp_path).ranks
    assert len(rank.steps["step"]) == 5
    assert "no more" in rank.record.failed


def test_loop_on_accelerate(loop, tmp_path):
    """Its loader asks for a batch ahead, and for the end of an epoch before the last step of it."""
    accelerator = accelerate.Accelerator(cpu=True)
    model, loader, optimizer = accelerator.prepare(*loop)
    watched = doctor.attach(model, tmp_path)
    for _ in range(2):
        train(model, loader, optimizer)
        evaluate(model, loader)
    watched.finish()
    [rank] = recorded(tmp_path).ranks
    assert len(rank.steps["step"]) == 2 * 12
    assert rank.record.steps.images == 2 * 96
    for name in ("forward", "backward", "optimizer"):
        assert (rank.steps[name] > 0).all(), name


def test_a_forward_pass_before_the_loop_is_no_step(loop, tmp_path):
    model, loader, optimizer = loop
    watched = doctor.attach(model, tmp_path)
    model.train()
    model(torch.zeros(1, 3, 8, 8))
    train(model, loader, optimizer)
    watched.finish()
    [rank] = recorded(tmp_path).ranks
    assert len(rank.steps["step"]) == 12


class HuggingFaceModel(nn.Module):
    """The same, as Hugging Face's Trainer wants it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images, labels):
        logits = self.model(images)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize(("accumulate", "evaluation"), [(1, "no"), (2, "epoch"), (1, "steps")])
def test_hugging_faces_trainer(loop, tmp_path, accumulate, evaluation):
    """Accelerate loads a batch ahead, and after an evaluation the model is set to training when the next batches are there."""
    model, loader, _ = loop
    data = [{"images": images, "labels": labels} for images, labels in loader.dataset]
    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"),
        num_train_epochs=2,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=accumulate,
        eval_strategy=evaluation,
        eval_steps=5,
        logging_steps=3,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    callback = doctor.hugging_face(tmp_path)
    transformers.Trainer(
        HuggingFaceModel(model), arguments, train_dataset=data, eval_dataset=data, callbacks=[callback]
    ).train()
    training = recorded(tmp_path)
    [rank] = training.ranks
    steps = 2 * 12 // accumulate
    assert len(rank.steps["step"]) == steps
    for name in ("forward", "backward", "optimizer"):
        assert (rank.steps[name] > 0).all(), name
    assert len(training.metrics["loss"].values) == steps // 3
