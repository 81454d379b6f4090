"""The plan of a run: counts by hand, limits, and what is refused."""

from __future__ import annotations

import math

import pytest

from trainer import config
from trainer.data.sampler import SHARD, WINDOW
from trainer.io.costs import Machines, Price
from trainer.io.errors import SettingsError
from trainer.runner import plan, training_work
from trainer.runner.plan import RATES, Place, Room, SourceSize

PRICE = Price(dollars_an_hour=10.0, date="2026-11", region="us-east-1", source="list")
SETTINGS = config.resolve("digits", "pretrain.mae.epochs=0 distill.teacher=recorded reinforce.views=5")
TASK = Room(cores=4, memory=2e9, disk=80e9)


@pytest.fixture(autouse=True, scope="module")
def _networks_of_known_size():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(training_work, "_operations", lambda model: math.nan if model is None else 6e9)
        yield


def planned(images=1_000_000, *, nodes=1, peak=0.0, hours=48.0, disk=1e12, labeled=0.5, settings=SETTINGS):
    node = Room(cores=8, memory=64e9, disk=disk, hours=hours)
    machines = Machines(pool="pool", nodes=nodes, processes_per_node=2, price=PRICE)
    place = Place(node=node, machines=machines, peak_flops=peak, task=TASK)
    made = plan.plan(settings, SourceSize(images=images, file_bytes=100e3, labeled=labeled), place)
    return {one.stage: one for one in made}, plan.table(made, place)


def test_counts_by_hand():
    stages, lines = planned()
    data = SETTINGS.data
    square = RATES["fast square"].value * data.image_size**2 / 256**2
    if data.encoding == "png":
        square = 3 * data.image_size**2
    taught = 500_000 * (1 - data.val_fraction - data.test_fraction)
    learned = taught + 500_000
    assert list(stages) == ["prepare", "pretrain", "reinforce", "distill", "evaluate", "export"]
    # All as decoded, val and test again, four shards of a split that is freed as it is written: the unlabeled ones.
    assert stages["prepare"].disk == pytest.approx(1.5e6 * square + 4 * SHARD * square)
    assert stages["prepare"].memory == pytest.approx(1e6 * RATES["facts"].value)
    assert stages["pretrain"].disk == pytest.approx(taught * square)
    record = learned * 5 * (4 * config.TOP_K + 8)
    assert stages["distill"].disk == stages["reinforce"].disk == pytest.approx(learned * square + record)
    # The teacher is not run in the step, and a training step is three forward passes.
    computed = SETTINGS.distill.epochs * learned * 3 * 6e9 / (8 * RATES["training"].value)
    fetched = (WINDOW * SHARD * square + record) / RATES["disk"].value  # before the first step
    assert stages["distill"].hours == pytest.approx((computed + fetched) / 3600)
    assert any(line.startswith("distill") and f"${10 * stages['distill'].hours:,.2f}" in line for line in lines)


def test_decisions_of_python_take_more_memory():
    settings = config.resolve("digits", "data.near_duplicates=separate")
    assert planned(settings=settings)[0]["prepare"].memory == pytest.approx(1e6 * RATES["lists"].value)


def test_time_by_devices_and_nodes():
    slow, fast = (planned(nodes=nodes, peak=1e14)[0]["pretrain"] for nodes in (1, 4))
    images = 500_000 * (1 - SETTINGS.data.val_fraction - SETTINGS.data.test_fraction)
    fetch_s = WINDOW * SHARD * (slow.disk / images) / RATES["disk"].value
    assert slow.seconds["computing"] - fetch_s == pytest.approx((0.9 * 2) ** 2 * (fast.seconds["computing"] - fetch_s))
    assert planned(peak=1e18)[0]["pretrain"].row()[3] == "loading"
    unknown, lines = planned(peak=math.nan)
    assert math.isnan(unknown["distill"].hours)
    assert [*unknown["distill"].too_much()] == []
    assert any(line.startswith("together") and "not known" in line for line in lines)


def test_a_small_set_is_fetched_whole_and_a_large_one_window_by_window():
    def fetched(images, disk):
        pretrain = planned(images, disk=disk)[0]["pretrain"]
        return pretrain.disk, pretrain.seconds["fetching"] * RATES["disk"].value

    small, _ = fetched(200_000, 1e12)
    assert fetched(200_000, 1e12) == pytest.approx((small, small))
    whole, _ = fetched(10_000_000, 1e12)
    assert fetched(10_000_000, 1e12) == pytest.approx((whole, whole))
    # Without room for all, each epoch fetches them again.
    taught = 5_000_000 * (1 - SETTINGS.data.val_fraction - SETTINGS.data.test_fraction)
    epochs = SETTINGS.pretrain.finetune.epochs
    assert fetched(10_000_000, whole / 2) == pytest.approx((4 * WINDOW * SHARD * whole / taught, epochs * whole))


def test_decoding_grows_with_the_file():
    times = [SourceSize(images=1, file_bytes=count).decode_s for count in (10e3, 46e3, 153e3, 500e3, 1541e3, 5e6)]
    assert times == sorted(times)
    assert [times[1], times[2], times[4]] == pytest.approx(
        [RATES[f"decode {one}"].value for one in ("small", "medium", "large")]
    )


def test_what_cannot_work_is_refused_with_number_and_way_out():
    stages, lines = planned(11_000_000, disk=1e9, hours=48)
    plans = [*stages.values()]
    with pytest.raises(SettingsError) as refused:
        plan.check(plans)
    message = str(refused.value)
    for part in (
        "prepare needs 2.09 GB of memory and has 2.00 GB: name a pool with more memory for it (PREPARE_POOL)",
        "distill needs 2,828 h and has 48 h: more nodes, fewer epochs, or running_minutes = 339360",
        "of disk and has 1.00 GB: give the pool a cache",
    ):
        assert part in message
    assert all(any(problem in line for line in lines) for problem in stages["distill"].too_much())
    # Hours are an estimate: up to twice the limit nothing is refused.
    hours = planned()[0]["distill"].hours
    assert [*planned(hours=hours / 1.9)[0]["distill"].too_much()] == []
    assert len([*planned(hours=hours / 2.1)[0]["distill"].too_much()]) == 1
    plan.check([*planned(peak=1e15)[0].values()])
