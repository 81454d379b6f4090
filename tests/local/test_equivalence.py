"""Several processes, sharded optimizer state and accumulation change how a step is computed, and not what it computes."""

import shutil

import pytest
import torch

WAYS = {
    "two processes, sharded optimizer state, loader processes": (2, {"zero": True, "workers": 1}),
    "three processes, two micro-batches of which some are smaller": (3, {"accumulation": 2}),
    "two processes, gradients sent in bf16": (2, {"gradient_compression": "bf16"}),
    "two machines of two processes, sharded weights": (4, {"sharding": "fsdp", "accumulation": 3}),
}
LONG = {
    "two processes": (2, {}),
    "four micro-batches": (1, {"accumulation": 4}),
    "two processes, two micro-batches": (2, {"accumulation": 2}),
    "compiled": (1, {"compile": "on"}),
}
ROUNDED = {"two processes, gradients sent in bf16": {"rtol": 5e-3, "atol": 2e-2}}
"""Where numbers are rounded on purpose; elsewhere only the order of sums differs."""


@pytest.fixture(scope="module")
def reference(digits, teacher, tmp_path_factory):
    from tests.distillations import Distillation

    return Distillation(digits, teacher, tmp_path_factory.mktemp("reference")).train()


@pytest.mark.slow
@pytest.mark.parametrize("way", [*WAYS, *(pytest.param(way, marks=pytest.mark.long) for way in LONG)])
def test_losses_and_weights_are_those_of_one_process(distillation, reference, way):
    processes, settings = (WAYS | LONG)[way]
    if "compile" in settings and not shutil.which("g++"):
        pytest.skip("torch.compile needs a C++ compiler on a CPU, and this machine has no g++")
    machines = {"LOCAL_WORLD_SIZE": "2"} if "machines" in way else {}
    other = distillation("other", **settings).train(processes, **machines)
    assert len(reference.losses()) == 10
    tolerance = ROUNDED.get(way, {"rtol": 1e-4, "atol": 2e-4})
    assert torch.allclose(other.losses(), reference.losses(), rtol=tolerance["rtol"])
    for name, value in reference.weights().items():
        assert torch.allclose(other.weights()[name], value, atol=tolerance["atol"]), name


HALF = {"label_weight": 1.0, "batch_size": 126, "views": {"mixup": 0.8}}
"""Half of the labels are lost, and those that are left weigh as much as the teacher."""


@pytest.fixture(scope="module")
def half_labeled_digits(digits, tmp_path_factory):
    from tests.distillations import half_labeled

    return half_labeled(digits, tmp_path_factory.mktemp("half-labeled") / "dataset")


@pytest.mark.slow
def test_means_over_labels_do_not_depend_on_dealing(half_labeled_digits, teacher, tmp_path):
    """Micro-batches have unlike numbers of labeled images: a mean of their means would be another one."""
    from tests.distillations import Distillation

    def trained(name, processes, accumulation):
        settings = HALF | {"accumulation": accumulation}
        return Distillation(half_labeled_digits, teacher, tmp_path / name, **settings).train(processes)

    whole = trained("whole", 1, 1)
    for other in (trained("four micro-batches", 1, 4), trained("two processes", 2, 1)):
        for name in ("loss", "label", "logit"):
            assert torch.allclose(other.losses(name), whole.losses(name), rtol=1e-4), name
        for name, value in whole.weights().items():
            assert torch.allclose(other.weights()[name], value, atol=2e-4), name


@pytest.mark.slow
def test_the_seed_alone_decides_the_weights(distillation, reference):
    again, other = distillation("again").train().weights(), distillation("other", seed=4).train().weights()
    assert all(torch.equal(again[name], value) for name, value in reference.weights().items())
    assert any(not torch.equal(other[name], value) for name, value in reference.weights().items())
