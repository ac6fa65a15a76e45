"""Linear layers of the embedded engine, packed once: the contract of torch's private operators for it."""

import pytest
import torch
from torch import nn

from ktbridge.serve.local.loading import SMALLEST, pack_linears

ROWS = (1, 5, 16, 40)


def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    sizes = ((576, 576, False), (576, 192, True), (64, 4096, False), (8, 8, True))
    return nn.ModuleList(nn.Linear(a, b, bias) for a, b, bias in sizes).bfloat16().requires_grad_(False)


@torch.inference_mode()
def products(some: nn.ModuleList) -> list[torch.Tensor]:
    torch.manual_seed(1)
    inputs = [torch.randn(rows, 1, each.in_features).bfloat16() for each in some for rows in ROWS]
    return [each(inputs.pop(0)) for each in some for _ in ROWS]


def test_bfloat16_products_of_packed_layers_have_the_same_bits() -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bfloat16 product in oneDNN")
    packed, plain = layers(), layers()
    large = [each.weight for each in packed if each.weight.numel() >= SMALLEST]
    assert len(large) == 3
    assert pack_linears(packed) == sum(each.nbytes for each in large)
    for one, other in zip(products(packed), products(plain), strict=True):
        assert one.dtype == torch.bfloat16
        assert torch.equal(one, other)
    for one, other in zip(packed, plain, strict=True):  # a tied embedding may share it
        assert torch.equal(one.weight, other.weight)


def test_cpus_without_that_product_multiply_by_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is what float32 makes of it, and doesn't depend on who is beside it."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    torch.manual_seed(0)
    big, small = nn.Linear(512, 300).bfloat16(), nn.Linear(16, 16).bfloat16()
    huge = nn.Linear(512, 300).bfloat16()
    with torch.no_grad():
        huge.weight[0, 0] = 1e5  # more than float16 holds
    assert pack_linears(nn.ModuleList([big, small, huge])) == big.weight.nbytes
    rows = torch.randn(2, 8, 512).bfloat16()
    with torch.inference_mode():
        exact = nn.functional.linear(rows.float(), big.weight.float(), big.bias.float())
        got = big(rows)
        assert got.dtype == torch.bfloat16
        assert torch.allclose(got.float(), exact, rtol=2**-8, atol=1e-5)
        assert torch.equal(big(rows[1, 3:6]), big(rows[1])[3:6])
        left = nn.functional.linear(rows, huge.weight, huge.bias)
        assert torch.equal(huge(rows), left)


def test_nothing_is_packed_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    from ktbridge.serve.local import loading

    class Short:
        memory_available = 4 * SMALLEST

    monkeypatch.setattr(loading, "read_machine", Short)
    some = layers()
    assert pack_linears(some) == 0
    assert not any("forward" in vars(each) for each in some)
