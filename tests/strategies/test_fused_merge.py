"""The kernel that merges on a CUDA device, by Triton's interpreter on the CPU, and on a device."""

from __future__ import annotations

import pytest
import torch

from megatron_paradyse.strategies import fused_merge
from tests.strategies.interpreted import interpreted


def merged_both_ways(device: str) -> None:
    """Over views of any stride, with -inf and 1e4 among the lse; against float64."""
    from megatron_paradyse.strategies.fused_merge import merge_on_device_

    random = torch.Generator().manual_seed(0)
    for sq, b, n, d, dtype in (
        (300, 2, 3, 64, torch.bfloat16),
        (65, 1, 4, 40, torch.float32),
        (7, 1, 1, 192, torch.float16),
    ):
        whole = torch.randn(sq + 9, b, n, d, generator=random).to(device)
        whole_lse = (3000 * torch.randn(b, n, sq + 9, generator=random)).to(device)
        block_out = torch.randn(b, n, sq, d, generator=random).to(device, dtype)
        block_lse = whole_lse[:, :, 9:].clone() + torch.randn(b, n, sq, generator=random).to(device)
        whole_lse[:, :, 9:12] = whole_lse[:, :, 10] = float("-inf")
        whole[9:12] = 0.0
        block_lse[:, :, 1:4] = float("-inf")  # both there and alone
        out, lse = whole[9:], whole_lse[:, :, 9:]
        seen = block_lse > float("-inf")
        before, more = lse.double(), block_lse.double()
        true_lse = torch.logaddexp(before, more)
        weight = torch.where(seen, torch.exp(more - true_lse), 0.0).permute(2, 0, 1)[..., None]
        added = block_out.permute(2, 0, 1, 3)
        truth = torch.lerp(out.double(), added.double(), weight)
        kept = whole[:9].clone(), whole_lse[:, :, :9].clone()
        merge_on_device_(out, lse, added, block_lse)
        torch.testing.assert_close(out.double(), truth, rtol=0.0, atol=1e-5)
        torch.testing.assert_close(lse.double(), true_lse, rtol=1e-6, atol=1e-6)
        assert torch.equal(whole[:9], kept[0]) and torch.equal(whole_lse[:, :, :9], kept[1])
    print("merged")


def test_the_kernel_merges_as_float64_does_by_the_interpreter():
    pytest.importorskip("triton")
    assert interpreted("test_fused_merge", "merged_both_ways('cpu')") == "merged\n"


def test_every_length_runs_the_same_kernel(monkeypatch):
    """Triton compiles one for each kind of numbers and addresses, which takes about a second."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel, kinds = fused_merge._kernel(), set()
    backend = make_backend(GPUTarget("cuda", 90, 32))
    kinds_of = create_function_from_signature(kernel.signature, kernel.params, backend)

    class Launch:
        def __getitem__(self, grid):
            return lambda *given, **fixed: kinds.add(tuple(kinds_of(*given, **fixed)[1]))

    monkeypatch.setattr(fused_merge, "_kernel", Launch)
    for rows, first in ((16, 0), (48, 16), (17, 0), (100, 3), (2, 1), (1, 0)):
        out, lse = torch.zeros(rows + first, 2, 3, 64), torch.zeros(2, 3, rows + first)
        block = torch.zeros(2, rows, 3, 64, dtype=torch.bfloat16).permute(1, 0, 2, 3)
        fused_merge.merge_on_device_(out[first:], lse[:, :, first:], block, torch.zeros(2, 3, rows))
    assert len(kinds) == 1, kinds


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_merges_as_float64_does_on_a_device():
    merged_both_ways("cuda")
