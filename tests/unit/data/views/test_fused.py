import numpy as np
import pytest
import torch

from tests.inductor import Counts
from trainer.config import ViewSettings
from trainer.data.views import fused, rendering
from trainer.data.views.parameters import draw_views

STRONG = ViewSettings(min_scale=0.2, color_jitter=0.4, erasing=0.5, mixup=0.5, cutmix=1)
WITH_OPERATIONS = STRONG.model_copy(update={"randaugment_operations": 2})


@pytest.fixture
def graphs(monkeypatch):
    """Graphs that are compiled, which run as they are: what torch's compiler captures, without its kernels."""
    found = []

    def backend(*_):
        return lambda graph, _: found.append(graph) or graph

    monkeypatch.setattr(fused, "compiler_backend", backend)
    fused._compiled.cache_clear()
    yield found
    fused._compiled.cache_clear()
    torch._dynamo.reset()


def drawn_for(count, stored, settings):
    keys, numbers = np.arange(count, dtype=np.uint64), np.arange(count) % 3
    drawn = draw_views(keys, numbers, stored=stored, seed=0, settings=settings)
    partners = np.arange(count)[::-1].copy()
    return drawn, rendering.draw_mixing(keys, numbers, partners, partners, seed=0, settings=settings)


@pytest.mark.parametrize(("stored", "size"), [(72, 64), (40, 56)])
def test_crops_have_the_same_bits_and_a_graph_serves_any_batch(images, graphs, stored, size):
    settings, numbers = STRONG, []
    for count in (6, 9, 4):
        pictures, (drawn, mixing) = images(count, stored, "noise"), drawn_for(count, stored, settings)
        expected = rendering.finish_views(rendering.crop_by_products(pictures, drawn, size), drawn, settings)
        views = fused.make_views(pictures, drawn, size, settings)
        assert torch.equal(views, expected)
        assert torch.equal(fused.mix(views, mixing), rendering.mix(expected, mixing))
        numbers.append(len(graphs))
    assert numbers == [3, 3, 3]  # columns; rows with color and rectangles; mixing


def test_operations_have_the_same_bits(images, graphs):
    pictures, (drawn, _) = images(24, 40, "smooth"), drawn_for(24, 40, WITH_OPERATIONS)
    expected = rendering.make_views(pictures, drawn, 32, WITH_OPERATIONS)
    assert torch.equal(fused.make_views(pictures, drawn, 32, WITH_OPERATIONS), expected)
    assert len(graphs) >= 7  # these, the four families that are ours, and rectangles


@pytest.mark.long
def test_views_take_few_kernels_and_bytes(images, monkeypatch):
    """Operation by operation, 256 views of 224 px take 62 kernels and move 4.7 GB."""
    counts, count = Counts(), 4
    monkeypatch.setattr(fused, "compiler_backend", lambda *_: counts.backend)
    monkeypatch.setattr(fused, "any_number", lambda _: None)  # counted for this number of images
    fused._compiled.cache_clear()
    pictures, (drawn, mixing) = images(count, 256), drawn_for(count, 256, STRONG)
    with torch._inductor.config.patch(fused.INLINED):
        fused.mix(fused.make_views(pictures, drawn, 224, STRONG), mixing)
    fused._compiled.cache_clear()
    assert counts.kernels <= 6
    assert counts.bytes / count * 256 <= 0.3e9


@pytest.mark.long
def test_compiled_kernels_give_the_same_crops(images):
    pictures, (drawn, mixing) = images(7, 72, "noise"), drawn_for(7, 72, STRONG)
    expected = rendering.make_views(pictures, drawn, 64, STRONG)
    views = fused.make_views(pictures, drawn, 64, STRONG)
    assert (views.int() - expected.int()).abs().max() <= 1  # colors may round otherwise
    plain = STRONG.model_copy(update={"color_jitter": 0, "erasing": 0})
    assert torch.equal(fused.make_views(pictures, drawn, 64, plain), rendering.make_views(pictures, drawn, 64, plain))
    assert (fused.mix(views, mixing).int() - rendering.mix(views, mixing).int()).abs().max() <= 1


@pytest.mark.gpu
def test_a_gpu_makes_the_cpus_views_without_waiting(images):
    pictures, (drawn, mixing) = images(12, 256), drawn_for(12, 256, WITH_OPERATIONS)
    plain = ViewSettings(min_scale=0.1)
    on_gpu, mixed_on_gpu = pictures.cuda(), type(mixing)(*(part.cuda() for part in mixing))
    expected = rendering.crop_batch(pictures, drawn, 224)
    assert torch.equal(fused.make_views(on_gpu, drawn, 224, plain).cpu(), expected)  # compiled now
    colored = STRONG.model_copy(update={"erasing": 0})
    views = fused.make_views(on_gpu, drawn, 224, colored)
    fused.mix(views, mixed_on_gpu)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours = fused.make_views(on_gpu, drawn, 224, colored)
        mixed = fused.mix(ours, mixed_on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    one_by_one = rendering.finish_views(expected, drawn, colored)
    assert (ours.cpu().int() - one_by_one.int()).abs().max() <= 1
    assert (mixed.cpu().int() - rendering.mix(ours.cpu(), mixing).int()).abs().max() <= 1
