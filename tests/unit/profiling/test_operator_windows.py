from __future__ import annotations

import gzip
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.profiler import profile

from trainer.profiling.evidence import ANNOTATION, READ
from trainer.profiling.operator_windows import OperatorWindows, category_of
from trainer.profiling.timeline import HostClock, Timeline

CPU = torch.device("cpu")


def train_steps(window: OperatorWindows, count: int) -> int:
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(count):
        if step in window.steps and step - 1 not in window.steps:
            window.open(step)
        model(torch.ones(64, 128)).square().mean().backward()
        optimizer.step()
        if step in window.steps and step + 1 not in window.steps:
            window.close(step)
    return count


def test_the_window_sees_the_operators_of_its_steps() -> None:
    window = OperatorWindows((2,), 3, CPU)
    window.finish(train_steps(window, 6))
    assert window.table is not None
    assert not window.missing
    assert not window.active
    assert window.table.steps == 3
    rows = {row.name: row for row in window.table.operators}
    assert rows["aten::addmm"].calls == 2 * 3, "two layers, three steps"
    assert rows["aten::addmm"].category == "matrix product"
    assert rows["aten::addmm"].self_cpu_ms > 0
    assert rows["aten::addmm"].kind == "operator"
    assert rows["aten::mm"].calls == (2 + 1) * 3, "weights of both layers, inputs of the second"
    assert "aten::native_layer_norm" in rows
    assert {row.category for row in rows.values()} >= {"matrix product", "normalization", "optimizer"}


def test_short_trainings() -> None:
    window = OperatorWindows((20,), 3, CPU)
    window.finish(train_steps(window, 4))
    assert window.table is None
    assert window.missing == "the training ended after 4 steps, and the first window would have begun after 20"
    # A training that ends in the window says so and stops the profiler.
    window = OperatorWindows((2,), 10, CPU)
    window.finish(train_steps(window, 4))
    assert window.table is None
    assert window.missing == "the training ended after 4 steps, within the window from step 3"
    with profile():
        torch.ones(1).add(1)
    # A window that the end cuts leaves the table of those before.
    windows = OperatorWindows((1, 5), 3, CPU)
    windows.finish(train_steps(windows, 7))
    assert windows.table is not None
    assert windows.table.steps == 3
    assert not windows.missing


def test_several_windows_are_added_up() -> None:
    windows = OperatorWindows((1, 4), 2, CPU)
    windows.finish(train_steps(windows, 8))
    assert windows.table is not None
    assert windows.table.steps == 4
    rows = {row.name: row for row in windows.table.operators}
    assert rows["aten::addmm"].calls == 2 * 4
    times = [row.self_cpu_ms for row in windows.table.operators]
    assert times == sorted(times, reverse=True)


def test_reading_a_value_back_is_seen() -> None:
    windows = OperatorWindows((0,), 1, CPU)
    windows.open(0)
    torch.ones(3).sum().item()
    windows.close(0)
    assert windows.table is not None
    calls = {row.name: row.calls for row in windows.table.operators}
    assert calls["aten::_local_scalar_dense"] == 1


def test_reads_that_load_a_batch_do_not_count_and_ranges_are_in_the_trace() -> None:
    """The samples of a data set lie on the host: reading them never waits for a device."""
    windows = OperatorWindows((0,), 1, CPU)
    timeline = Timeline(HostClock(), windows=windows)
    timeline.start()
    numbers = torch.arange(5)
    with timeline.step(0):
        with timeline.span("data"):
            labels = [int(number) for number in numbers]
        with timeline.span("forward"), timeline.span("attention"):
            numbers.sum().item()
    timeline.finish()
    assert labels == [0, 1, 2, 3, 4]
    assert windows.table is not None
    calls = {row.name: row.calls for row in windows.table.operators}
    assert calls[READ] == 1
    assert not [name for name in calls if name.startswith(ANNOTATION)]
    named = {event["name"] for event in json.loads(gzip.decompress(windows.trace))["traceEvents"]}
    assert named >= {f"{ANNOTATION}data", f"{ANNOTATION}forward", f"{ANNOTATION}attention"}


def averaged(key: str, device: str, *, annotation: bool) -> SimpleNamespace:
    """A row of torch.profiler's averages, of one call that took a millisecond on its device."""
    place = {"CPU": "self_cpu_time_total", "CUDA": "self_device_time_total"}[device]
    times = {"self_cpu_time_total": 0.0, "self_device_time_total": 0.0} | {place: 1000.0}
    return SimpleNamespace(
        key=key, device_type=SimpleNamespace(name=device), count=1, is_user_annotation=annotation, **times
    )


def test_span_of_operator_on_gpu_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch gives `Optimizer.step` a row of its own among the kernels, as long as all of those that it starts."""
    rows = [
        averaged("Optimizer.step#AdamW.step", "CPU", annotation=True),
        averaged("Optimizer.step#AdamW.step", "CUDA", annotation=True),
        averaged("multi_tensor_apply_kernel", "CUDA", annotation=False),
    ]
    windows = OperatorWindows((0,), 1, CPU)
    windows.open(0)
    monkeypatch.setattr(profile, "key_averages", lambda _: rows)
    windows.close(0)
    assert windows.table is not None
    assert {(row.name, row.kind) for row in windows.table.operators} == {
        ("Optimizer.step#AdamW.step", "operator"),
        ("multi_tensor_apply_kernel", "kernel"),
    }


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("aten::mm", "matrix product"),
        ("aten::addmm", "matrix product"),
        ("aten::bmm", "matrix product"),
        ("aten::baddbmm", "matrix product"),
        ("aten::linear", "matrix product"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "matrix product"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("pytorch_flash::flash_fwd_kernel", "attention"),
        ("aten::mkldnn_convolution", "convolution"),
        ("aten::convolution_backward", "convolution"),
        ("aten::native_layer_norm", "normalization"),
        ("aten::native_layer_norm_backward", "normalization"),
        ("aten::linalg_vector_norm", "other"),
        ("aten::copy_", "copy"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("gloo:all_reduce", "communication"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"),
        ("c10d::allreduce_", "communication"),
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::_foreach_lerp_", "optimizer"),
        ("aten::gelu", "other"),
        ("aten::add", "other"),
        # Kernels of a ViT's training in bf16 on an H100, by torch 2.11 with CUDA 13.0; long names are cut.
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "matrix product"),
        ("nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN", "matrix product"),
        (
            "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16>",
            "matrix product",
        ),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma", "matrix product"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_kernel0_0", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1_kernel0_0", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*, void const*, void*)", "attention"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int)", "attention"),
        ("void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16_128x128>", "convolution"),
        ("void implicit_convolve_sgemm<__nv_bfloat16, __nv_bfloat16, 128, 5, 5, 3, 3, 3, 1>", "convolution"),
        ("void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float>", "normalization"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>", "normalization"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata>",
            "optimizer",
        ),
        (
            "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>, unsigned int, 4, 64, 64>",
            "copy",
        ),
        ("Memset (Device)", "copy"),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::GeluBackwardCUDAKernelImpl>", "other"),
        ("aten::convert", "other"),
    ],
)
def test_categories(name: str, category: str) -> None:
    assert category_of(name) == category
