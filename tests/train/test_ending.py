"""What an error says of its cause."""

from __future__ import annotations

import pytest
import torch

from megatron_paradyse.errors import UserError
from megatron_paradyse.train.ending import is_lost_peer, is_out_of_memory

NO_MEMORY = [
    torch.OutOfMemoryError("2.00 GiB more than the budget"),
    RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    torch.distributed.DistBackendError("NCCL error: Cuda failure 2 'out of memory'"),
    MemoryError(),
]
OTHERS = [
    RuntimeError("shapes cannot be multiplied"),
    UserError("out of memory between microbatches: use more ranks"),
    RuntimeError("Connection closed by peer"),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: str(error)[:30])
def test_memory_that_ran_out_is_told_from_other_errors(error):
    assert is_out_of_memory(error) and not is_lost_peer(error)


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: str(error)[:30])
def test_other_errors_are_not_taken_for_it(error):
    assert not is_out_of_memory(error)
