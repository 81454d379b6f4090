from __future__ import annotations

import pytest

from trainer.profiling.operators import category_of


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
        ("aten::native_layer_norm", "normalisation"),
        ("aten::native_layer_norm_backward", "normalisation"),
        ("aten::linalg_vector_norm", "other"),
        ("aten::copy_", "copy"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("gloo:all_reduce", "communication"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"),
        ("c10d::allreduce_", "communication"),
        ("Optimizer.step#AdamW.step", "optimiser"),
        ("aten::_fused_adamw_", "optimiser"),
        ("aten::_foreach_lerp_", "optimiser"),
        ("aten::gelu", "other"),
        ("aten::add", "other"),
        ("aten::convert", "other"),
    ],
)
def test_categories(name: str, category: str) -> None:
    assert category_of(name) == category
