"""Flags of torch that shorten float32 products do not reach those that have to be float32."""

from __future__ import annotations

import pytest
import torch

from trainer.devices import full_float32

PRODUCTS = (
    torch.backends.cuda.matmul,
    torch.backends.cudnn.conv,
    torch.backends.mkldnn.matmul,
    torch.backends.mkldnn.conv,
)


def precisions():
    return [one.fp32_precision for one in PRODUCTS]


def test_no_product_is_shortened_whichever_way_torch_was_told_to(short_products):
    before = precisions()
    assert {"tf32", "bf16"} & {*before}, "the flags were set"
    with full_float32():
        assert {*precisions()} <= {"none", "ieee"}
    assert precisions() == before
    with pytest.raises(RuntimeError, match="a reason"), full_float32():
        raise RuntimeError("a reason")
    assert precisions() == before


@pytest.mark.parametrize("short_products", ["high", "medium", "allow_tf32"], indirect=True)
def test_torchs_older_interface_tells_the_same_as_before(short_products):
    with full_float32():
        pass
    assert torch.get_float32_matmul_precision() == {"allow_tf32": "high"}.get(short_products, short_products)
    assert torch.backends.cuda.matmul.allow_tf32
