"""What the CUDA kernels are given, checked without a GPU."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_paradyse.packing.row import Row, contiguous
from megatron_paradyse.strategies import document_kernels, fused_tiles, kernels, small_calls
from megatron_paradyse.strategies.kernels import (
    CUDA_EFFICIENT,
    CUDA_FLASH,
    FLASH_ATTN,
    FUSED_TILES,
    TILED,
)
from megatron_paradyse.strategies.tiled_kernel import BlockRule
from tests.strategies.cuda_operators import CudaOperators
from tests.strategies.pieces import HEADS, MASKS, attend_in_pieces, attend_in_row

# A document in two pieces, the later first, two whole ones, padding.
SHUFFLED = Row((6, 4, 5), (((3, 6), (6, 15), (15, 16), (0, 3)),))

CASES = [(n, g, mask) for n, g in HEADS for mask in MASKS]


@pytest.fixture(autouse=True)
def has_triton(monkeypatch):
    """As on the machine whose kernels are chosen, where this one has no driver for it."""
    monkeypatch.setattr(fused_tiles, "has_triton", lambda: True)


def _kernel_cases():
    for kernel in (CUDA_FLASH, CUDA_EFFICIENT, FLASH_ATTN):
        for n, g, mask in CASES:
            if kernel.has_window or MASKS[mask] is None:
                yield pytest.param(kernel, n, g, mask, id=f"{kernel.name}-{n}-{g}-{mask}")


@pytest.mark.parametrize(("kernel", "n", "g", "mask"), list(_kernel_cases()))
def test_calls_of_cuda_operators_obey_them_and_give_the_right_result(
    kernel, n, g, mask, monkeypatch
):
    """The operators stand in as dense float64 with the true ones' demands; so does the package."""
    options = {"mask": mask, "n": n, "g": g, "d": 8, "dtype": torch.float64}
    truth = attend_in_pieces(TILED, **options)
    operators = CudaOperators()
    monkeypatch.setattr(kernels, "aten", operators)
    _install_flash_attn(monkeypatch, operators)
    for got, true in zip(attend_in_pieces(kernel, **options), truth, strict=True):
        torch.testing.assert_close(got, true)
    assert len(set(operators.names)) == 2  # a forward and its backward, and no other


def _install_flash_attn(monkeypatch, operators: CudaOperators) -> None:
    """A FlashAttention package with the signatures of 2.7 to 2.8, over the stand-in operators."""

    def forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
        alibi_slopes, return_softmax,
    ):  # fmt: skip
        assert (softcap, alibi_slopes, return_softmax) == (0.0, None, False)
        out, lse, *_ = operators._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, causal, False,
            scale=softmax_scale, window_size_left=window_size_left,
            window_size_right=window_size_right,
        )  # fmt: skip
        return out, lse, torch.empty(0), torch.empty(2)

    def backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
        window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert deterministic is torch.are_deterministic_algorithms_enabled()
        grads = operators._flash_attention_backward(
            dout, q, k, v, out, softmax_lse, None, None, q.shape[1], k.shape[1], dropout_p,
            causal, None, None, scale=softmax_scale, window_size_left=window_size_left,
            window_size_right=window_size_right,
        )  # fmt: skip
        for into, grad in zip((dq, dk, dv), grads, strict=True):
            assert into.stride(-1) == 1
            into.copy_(grad)
        return torch.empty(0)

    def varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
        return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
    ):  # fmt: skip
        out, lse, *_ = operators._flash_attention_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, causal,
            False, scale=softmax_scale, window_size_left=window_size_left,
            window_size_right=window_size_right,
        )  # fmt: skip
        return out, lse, torch.empty(0), torch.empty(2)

    def varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
        softcap, alibi_slopes, deterministic, rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        assert deterministic is torch.are_deterministic_algorithms_enabled()
        grads = operators._flash_attention_backward(
            dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
            max_seqlen_k, dropout_p, causal, None, None, scale=softmax_scale,
            window_size_left=window_size_left, window_size_right=window_size_right,
        )  # fmt: skip
        for into, grad in zip((dq, dk, dv), grads, strict=True):
            into.copy_(grad)
        return torch.empty(0)

    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    functions = (forward, backward, varlen_forward, varlen_backward)
    for function in functions:
        setattr(interface, f"_flash_attn_{function.__name__}", function)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("row", [contiguous((5, 1, 7, 3), 1), SHUFFLED], ids=["whole", "shuffled"])
@pytest.mark.parametrize("kernel", [CUDA_FLASH, FLASH_ATTN], ids=lambda kernel: kernel.name)
def test_documents_side_by_side_are_one_call(kernel, row, causal, monkeypatch):
    """Output and gradients as of calls one by one; fewer blocks where rows are in pieces."""
    truth = attend_in_row(TILED, row, causal=causal)
    operators = CudaOperators()
    for module in (kernels, document_kernels):
        monkeypatch.setattr(module, "aten", operators)
    _install_flash_attn(monkeypatch, operators)
    for got, true in zip(attend_in_row(kernel, row, causal=causal), truth, strict=True):
        torch.testing.assert_close(got, true)
    expected = 1 if row is not SHUFFLED else 4 - causal
    assert operators.names.count("_flash_attention_forward") == expected, operators.names


def test_flash_attention_is_told_to_be_deterministic(monkeypatch):
    """By --deterministic-mode, which tells PyTorch; its stand-in looks what it was called with."""
    _install_flash_attn(monkeypatch, CudaOperators())
    torch.use_deterministic_algorithms(True)
    try:
        attend_in_pieces(FLASH_ATTN, mask="causal", n=4, g=2, d=8, dtype=torch.float64)
        attend_in_row(FLASH_ATTN, contiguous((5, 1, 7, 3), 1), causal=True)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("most", [128 * 64 * 2, 1])
@pytest.mark.parametrize("kernel", [CUDA_FLASH, FLASH_ATTN], ids=lambda kernel: kernel.name)
def test_a_backward_with_too_many_elements_for_a_call_goes_in_several(kernel, most, monkeypatch):
    """By sequences, and by key heads with all their queries where one is too many still."""
    options = {"mask": "causal", "n": 4, "g": 2, "d": 8, "dtype": torch.float64}
    truth = attend_in_pieces(TILED, **options)
    calls = {}
    for limit in (2**31 - 1, most):
        monkeypatch.setattr(small_calls, "MOST_ELEMENTS", limit)
        operators = CudaOperators()
        monkeypatch.setattr(kernels, "aten", operators)
        _install_flash_attn(monkeypatch, operators)
        for got, true in zip(attend_in_pieces(kernel, **options), truth, strict=True):
            torch.testing.assert_close(got, true)
        calls[limit] = operators.names.count("_flash_attention_backward")
    assert calls[most] == 2 * 2 * calls[2**31 - 1]  # sequences x key heads


@pytest.mark.parametrize("most", [128 * 64 * 4, 1])
@pytest.mark.parametrize("kernel", [CUDA_FLASH, FLASH_ATTN], ids=lambda kernel: kernel.name)
def test_documents_with_too_many_elements_for_a_call_go_by_heads(kernel, most, monkeypatch):
    """The accumulator has 128 rows more for each, as if none of them had fewer."""
    row = contiguous((5, 1, 7, 3), 1)
    truth = attend_in_row(TILED, row, causal=True)
    operators = CudaOperators()
    for module in (kernels, document_kernels):
        monkeypatch.setattr(module, "aten", operators)
    _install_flash_attn(monkeypatch, operators)
    monkeypatch.setattr(small_calls, "MOST_ELEMENTS", most)
    for got, true in zip(attend_in_row(kernel, row, causal=True), truth, strict=True):
        torch.testing.assert_close(got, true)
    assert operators.names.count("_flash_attention_backward") > 1


@pytest.mark.parametrize(
    ("kernel", "dtype"), [(CUDA_FLASH, torch.bfloat16), (CUDA_EFFICIENT, torch.float32)]
)
def test_cuda_operators_accept_the_calls_and_give_the_layouts_expected(kernel, dtype):
    """On fake tensors: PyTorch's own argument parsing and shapes."""
    b, n, g, d, sq, sk = 2, 4, 2, 64, 100, 44
    with FakeTensorMode():
        q = torch.empty(sq, b, n, d, dtype=dtype, device="cuda").permute(1, 2, 0, 3)
        k, v = torch.empty(2, sk, b, g, d, dtype=dtype, device="cuda").permute(0, 2, 3, 1, 4)
        rule = BlockRule(scale=0.1)
        out, lse = kernel.forward(q, k, v, rule)
        assert out.shape == q.shape and out.dtype == dtype
        assert lse.shape == (b, n, sq) and lse.dtype == torch.float32
        grads = kernel.backward(torch.empty_like(q), q, k, v, out, lse, rule)
        for grad, x in zip(grads, (q, k, v), strict=True):
            assert grad.shape == x.shape and grad.dtype == dtype and grad.device == x.device


def test_the_cuda_operator_accepts_documents_and_gives_the_layouts_expected():
    n, g, d, s = 4, 2, 64, 100
    kernel, rule = CUDA_FLASH.for_documents, BlockRule(scale=0.1, parts=((60, 60), (40, 40)))
    with FakeTensorMode():
        q = torch.empty(s, 1, n, d, dtype=torch.bfloat16, device="cuda").permute(1, 2, 0, 3)
        k, v = torch.empty(2, s, 1, g, d, dtype=torch.bfloat16, device="cuda").permute(
            0, 2, 3, 1, 4
        )
        out, lse = kernel.forward(q, k, v, rule)
        assert out.shape == q.shape and lse.shape == (1, n, s) and lse.dtype == torch.float32
        grads = kernel.backward(torch.empty_like(q), q, k, v, out, lse, rule)
        assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


AMPERE, ADA, HOPPER = (8, 0), (8, 9), (9, 0)


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "name"),
    [
        (AMPERE, torch.bfloat16, 128, "torch CUDA flash"),
        (HOPPER, torch.float16, 256, "torch CUDA flash"),
        (HOPPER, torch.float16, 224, "torch CUDA flash"),
        (ADA, torch.float16, 224, "torch CUDA efficient"),
        (ADA, torch.float16, 256, "torch CUDA flash"),
        ((12, 0), torch.bfloat16, 200, "torch CUDA efficient"),
        (HOPPER, torch.bfloat16, 264, "torch CUDA efficient"),
        (HOPPER, torch.bfloat16, 60, "fused tiles (Triton)"),
        (HOPPER, torch.float32, 60, "torch CUDA efficient"),
        (HOPPER, torch.float32, 6, "fused tiles (Triton)"),
        (HOPPER, torch.bfloat16, 260, "tiled torch operations"),
        (HOPPER, torch.float64, 64, "tiled torch operations"),
        ((7, 5), torch.float16, 64, "torch CUDA efficient"),
        ((7, 5), torch.bfloat16, 64, "tiled torch operations"),
    ],
)
def test_kernel_is_one_that_the_device_has_for_the_head_dim(capability, dtype, head_dim, name):
    with patch.object(kernels, "_flash_attn_package", lambda: ("", "")):
        assert kernels._choose.__wrapped__("cuda", capability, dtype, head_dim).name == name


def test_windows_run_where_the_kernel_has_them(monkeypatch):
    q = SimpleNamespace(is_cuda=True, device=torch.device("cuda"), dtype=torch.float32, shape=(8,))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    for kernel, expected in ((CUDA_FLASH, CUDA_FLASH), (CUDA_EFFICIENT, FUSED_TILES)):
        monkeypatch.setattr(kernels, "_choose", lambda *a, kernel=kernel: kernel)
        assert kernels.choose_kernel(q, window=True) is expected
        assert kernels.choose_kernel(q) is kernel
        assert kernels.choose_kernel(q, dropout=True) is FUSED_TILES
    q.dtype = torch.float64
    assert kernels.choose_kernel(q, dropout=True) is TILED
    q.dtype = torch.float16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert kernels.choose_kernel(q, dropout=True) is TILED


@pytest.mark.parametrize(
    ("version", "works", "name"),
    [
        (None, False, "torch CUDA flash"),
        ("2.6.3", True, "torch CUDA flash (FlashAttention 2.6.3 is installed, 2.7 or a later 2.x"),
        ("3.0.0", True, "torch CUDA flash (FlashAttention 3.0.0 is installed"),
        ("2.8.3", False, "torch CUDA flash (FlashAttention 2.8.3 cannot be imported: ImportError"),
        ("2.7.0.post2", True, "FlashAttention 2.7.0.post2"),
        ("2.10.1", True, "FlashAttention 2.10.1"),
    ],
)
def test_flash_attention_package_is_used_from_2_7_on_if_it_can_be_imported(
    version, works, name, monkeypatch
):
    def version_of(package):
        if version is None:
            raise kernels.metadata.PackageNotFoundError(package)
        return version

    def import_module(module):
        if not works:
            raise ImportError("undefined symbol")

    monkeypatch.setattr(kernels.metadata, "version", version_of)
    monkeypatch.setattr(kernels.importlib, "import_module", import_module)
    monkeypatch.setattr(kernels, "_flash_attn_package", kernels._flash_attn_package.__wrapped__)
    chosen = kernels._choose.__wrapped__("cuda", HOPPER, torch.bfloat16, 64)
    assert chosen.name.startswith(name)
    assert (chosen.forward is FLASH_ATTN.forward) == name.startswith("FlashAttention")
