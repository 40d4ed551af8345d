"""What an error says of its cause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

from megatron_paradyse.errors import UserError
from megatron_paradyse.train.ending import is_lost_peer, is_out_of_memory, words_of
from tests.train.harness import ROOT

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
# By gloo, the store and NCCL, in PyTorch 2.11 as in 2.15.
LOST = [
    RuntimeError("[/pytorch/third_party/gloo/pair.cc:547] Connection closed by peer [127.0.0.1]"),
    RuntimeError("Timed out waiting 60000ms for recv operation to complete"),
    torch.distributed.DistStoreError("wait timeout after 300000ms, keys: /default_pg/0/0"),
    torch.distributed.DistBackendError("NCCL error: remote process exited or there was a network"),
    torch.distributed.DistBackendError(
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
        "OpType=ALLREDUCE) ran for 600004 milliseconds before timing out."
    ),
    torch.distributed.DistBackendError("Work WorkNCCL(SeqNum=7) timed out in blocking wait."),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: str(error)[:30])
def test_memory_that_ran_out_is_told_from_other_errors(error):
    assert is_out_of_memory(error) and not is_lost_peer(error)


@pytest.mark.parametrize("error", LOST, ids=lambda error: str(error)[:30])
def test_a_lost_peer_is_known_by_what_each_backend_says(error):
    assert is_lost_peer(error) and not is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: str(error)[:30])
def test_other_errors_are_not_taken_for_it(error):
    assert not is_out_of_memory(error)


class Refusing(torch.utils.data.Dataset):
    def __getitem__(self, position: int):
        raise UserError("document 3 has the token -1: prepare the data again")


def test_an_error_in_a_worker_of_a_loader_is_the_line_that_it_says():
    loader = torch.utils.data.DataLoader(Refusing(), sampler=[0], num_workers=1)
    with pytest.raises(UserError) as caught:
        next(iter(loader))
    assert "Traceback" in str(caught.value)  # by PyTorch
    assert words_of(caught.value) == "document 3 has the token -1: prepare the data again"
    assert words_of(RuntimeError("one\n  two")) == "one two"


@pytest.mark.parametrize(("rank", "said"), [("0", "error: interrupted\n"), ("1", "")])
def test_ctrl_c_is_one_line_of_the_first_rank(rank, said):
    """A terminal sends it to every rank, and each printed a traceback."""
    code = "import os, signal; from megatron_paradyse.train import uncaught; "
    code += "uncaught.show_user_errors_in_one_line(); os.kill(os.getpid(), signal.SIGINT)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "RANK": rank, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, said)


def test_a_name_that_is_no_text_does_not_hide_what_is_wrong():
    """The line could not be written: a traceback of ours stood in its place, with exit code 1."""
    code = "import sys; from megatron_paradyse.train import uncaught; "
    code += "from megatron_paradyse.errors import UserError; "
    code += "uncaught.show_user_errors_in_one_line(); raise UserError(f'{sys.argv[1]}.idx is gone')"
    done = subprocess.run(
        [sys.executable, "-c", code, b"data\xff\n"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (2, "error: data\\udcff .idx is gone\n")
    torch.distributed.HashStore().set("failed", words_of(UserError("data\udcff is gone")))
