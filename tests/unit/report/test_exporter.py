"""What Prometheus reads of a training: the text, and the port."""

import math
import socket
import urllib.error
import urllib.request

import pytest

from trainer.io.errors import SettingsError
from trainer.report.tracking.exporter import PORT_VARIABLE, ExportingTracker, exported
from trainer.report.tracking.stage_runs import Tracker


class Kept(Tracker):
    def __init__(self):
        self.seen = []

    def metrics(self, step, values):
        self.seen.append((step, dict(values)))


@pytest.fixture
def port(monkeypatch):
    with socket.create_server(("", 0)) as free:
        number = free.getsockname()[1]
    monkeypatch.setenv(PORT_VARIABLE, str(number))
    monkeypatch.setenv("TRAINER_RUN", 'my "run"')
    return number


def read(port, path="/metrics"):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return answer.read().decode()


def values(text):
    """Series -> value, by Prometheus' own parser of the text format."""
    from prometheus_client.parser import text_string_to_metric_families as parse

    return {(one.name, frozenset(one.labels.items())): one.value for family in parse(text) for one in family.samples}


def test_the_newest_values_of_trainings_are_at_the_port(port, monkeypatch):
    monkeypatch.setattr("trainer.io.host.seconds_since_launch", lambda: 100.0)
    inner = Kept()
    with exported(inner, "distill") as tracker:
        assert read(port) == ""
        tracker.follow("distill", 10, 500, 64, lambda: 32.0)
        tracker.metrics(29, {"distill/loss": 3.0, "distill/learning_rate": 0.1})
        tracker.metrics(39, {"distill/loss": math.nan, "distill/learning_rate": 0.2, "distill/val_top1": 0.5})
        tracker.metrics(39, {"distill/finding/input_bound": 1.0, "system/cpu": 7.0})
        found = values(read(port))
        with pytest.raises(urllib.error.HTTPError, match="404"):
            read(port, "/secrets")

    def of(metric, /, training="distill", **labels):
        return found[metric, frozenset({"run": 'my "run"', "stage": "distill", "training": training, **labels}.items())]

    assert (of("trainer_step"), of("trainer_steps"), of("trainer_images_per_second")) == (40, 500, 32)
    assert of("trainer_goodput_ratio") == 30 * 64 / 32 / 100
    assert math.isnan(of("trainer_measure", name="loss"))
    assert of("trainer_measure", name="val_top1") == 0.5
    assert of("trainer_finding", rule="input_bound") == 1
    assert of("trainer_measure", training="", name="system/cpu") == 7
    assert [step for step, _ in inner.seen] == [29, 39, 39], "MLflow gets them too"
    with pytest.raises(OSError, match="refused"):
        read(port)


def test_a_taken_port_does_not_end_a_training(port, caplog):
    with socket.create_server(("", port)), exported(inner := Kept(), "distill") as tracker:
        tracker.metrics(3, {"loss": 1.0})
    assert inner.seen == [(3, {"loss": 1.0})]
    assert f"port {port}" in caplog.text


def test_a_port_is_a_number_and_none_is_fine(monkeypatch):
    monkeypatch.setenv(PORT_VARIABLE, "0")
    with (
        pytest.raises(SettingsError, match="TRAINER_METRICS_PORT must be a port from 1 to 65535, got '0'"),
        exported(Kept(), "x"),
    ):
        pass
    monkeypatch.delenv(PORT_VARIABLE)
    with exported(inner := Kept(), "distill") as tracker:
        assert tracker is inner


def test_it_passes_all_of_a_tracker_on():
    """A method that is added there and forgotten here would record nothing."""
    own = {name for name, value in vars(Tracker).items() if callable(value)}
    assert own <= vars(ExportingTracker).keys()
