"""Bytes of the loss head and of the embedding at lengths no CPU holds: fake tensors, one rank of p.

Every allocation of the real code is counted while it lives. It holds no numbers; nothing is sent.
What a kernel or a collective allocates for itself is not seen.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.head_rank import Head, make_layer
from megatron_paradyse.edges import cross_entropy
from megatron_paradyse.live_bytes import LiveBytes


@contextlib.contextmanager
def rank_of(p: int):
    """The last rank of p, in a group that moves nothing."""
    from megatron.core import parallel_state

    dist.init_process_group("fake", store=FakeStore(), rank=p - 1, world_size=p)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=p)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_global_memory_buffer()
        dist.destroy_process_group()


def head_workspace_bytes(way: str, *, s: int, h: int, v: int, p: int, again: bool = False) -> int:
    """Peak of forward and backward, in bfloat16, beyond the input, its gradient and the weight.

    way: "tiles" or "megatron". again: the gradient of the losses is no multiple of the loss mask,
    so that tiles run again.
    """
    with rank_of(p), FakeTensorMode():
        layer = make_layer(h=h, v=v, p=p, tile=None, dtype=torch.bfloat16)
        x = torch.empty(s // p, 1, h, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.empty(1, s, dtype=torch.int64)
        mask = torch.empty(1, s)
        head = Head(layer, x, labels, mask)
        factor = None if again else torch.ones(())
        meter = LiveBytes([x, layer.weight, labels, mask])
        # Whether the gradient is a multiple of the mask, fake numbers cannot say.
        with patch.object(cross_entropy, "_common_factor", lambda *a: factor), meter:
            head.run(way)
        return meter.peak_bytes - x.nbytes


def embedding_workspace_bytes(way: str, *, s: int, h: int, v: int, p: int) -> int:
    """Peak of the word embedding's forward and backward, in bfloat16, without learned positions.

    Beyond its output and the gradient of it [s/p, b, h], the tokens and the weight.
    """
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import VocabParallelEmbedding

    from megatron_paradyse.edges.tiles import automatic_tile
    from megatron_paradyse.model_edges import TiledWords

    config = ModelParallelConfig(
        tensor_model_parallel_size=p,
        sequence_parallel=True,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    config.deterministic_mode = False
    with rank_of(p), FakeTensorMode():
        words: Any = VocabParallelEmbedding(
            v, h, init_method=torch.nn.init.zeros_, reduce_scatter_embeddings=True, config=config
        )
        if way == "tiles":
            words.__class__, words.in_tiles = TiledWords, True
            words.tile = automatic_tile(h=h, vocab_shard=v // p, element_bytes=2)
        tokens = torch.empty(1, s, dtype=torch.int64)
        grad = torch.empty(s // p, 1, h, dtype=torch.bfloat16)
        meter = LiveBytes([tokens, words.weight, grad])
        with meter:
            output = words(tokens)
            output.backward(grad)
        return meter.peak_bytes - grad.nbytes
