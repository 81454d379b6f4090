"""tune measures on XLA, and keeps what is compiled apart."""

from tests.distillations import QUICK
from trainer import config
from trainer.stages import tune
from trainer.stages.tuning.tuning_schema import read_tuning


def test_a_distillation_is_measured(digits, teacher, tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "xla")
    values = {
        "enabled": True,
        "search": False,  # each candidate would be compiled
        "distill": QUICK | {"checkpoint_every": 50, "epochs": 50},
        "reinforce": {"views": 2, "seed": 3, "workers": 0, "augmentation": QUICK["views"]},
    }
    settings = config.validate(config.TuneSettings, values)
    tune.run(settings, dataset=digits, teacher=teacher, tuning=tmp_path / "tuning")
    made = read_tuning(tmp_path / "tuning")
    assert made.measurement.compile_s > 0
    assert made.measurement.startup_s > made.measurement.compile_s
    assert made.measurement.step_s < made.measurement.compile_s
    assert made.measurement.validation_s < made.measurement.compile_s
