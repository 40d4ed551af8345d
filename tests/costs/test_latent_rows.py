"""Memory of latent attention, as it is counted on each rank and as it is walked and predicted.

Costs of single documents, of which those of packed rows are made, are what is counted of them.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from megatron_paradyse.costs.row_bytes import walked_row_bytes
from megatron_paradyse.costs.row_sizes import packed_of
from megatron_paradyse.costs.table import OperationCosts
from megatron_paradyse.packing.load import load_of
from megatron_paradyse.packing.traffic import microbatch_of
from megatron_paradyse.strategies import base_name, takes
from megatron_paradyse.strategies.accounting import attention_bytes
from megatron_paradyse.strategies.contract import LatentSizes
from tests.costs.counted_rows import BYTES, NAMES, TOLERANCE, S, measured, off, rows
from tests.costs.synthetic import DESCRIPTION
from tests.strategies.cases import AttentionCase

H, N, P = 16, 8, 4
LATENTS = {  # of queries, and the others: values of as many channels as queries, fewer or more
    "as wide": (96, LatentSizes(keys=32, content=16, positions=8, value=24)),
    "narrow": (96, LatentSizes(keys=96, content=24, positions=8, value=24)),
    "wide": (32, LatentSizes(keys=96, content=8, positions=16, value=40)),
    "no latents of queries": (H, LatentSizes(keys=64, content=16, positions=16, value=16)),
}


WALKED = [name for name in NAMES if base_name(name) != "megatron_ts"]


def case_of(strategy, variant, dtype, p=P):
    of_queries, latent = LATENTS[variant]
    n = N if N % p == 0 else 2 * p
    return AttentionCase(
        strategy, p, n=n, g=n, d=latent.head_dim, h=H, s=p * S // P, b=1, dtype=dtype,
        rope="interleaved", latent=latent, query_latents=of_queries,
    )  # fmt: skip


def packed_of_case(case):
    """As a cost file tells of it."""
    latent, queries = case.latent, case.query_latents
    shape = dataclasses.replace(
        DESCRIPTION.model,
        hidden_size=case.h,
        num_heads=case.n,
        num_kv_heads=case.n,
        head_dim=case.d,
    )
    attention = {
        "q_lora_rank": queries if queries != case.h else 0,
        "kv_lora_rank": latent.keys,
        "qk_head_dim": latent.content,
        "qk_pos_emb_head_dim": latent.positions,
        "v_head_dim": latent.value,
    }
    return packed_of(
        dataclasses.replace(
            DESCRIPTION,
            model=shape,
            p=case.p,
            dtype=str(case.dtype).removeprefix("torch."),
            attention_mask="causal",
            halves={"attention": attention, "mlp": {}},
        )
    )


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("strategy", [name for name in WALKED if base_name(name) != "local_z"])
def test_one_document_holds_what_the_walk_says(strategy, p):
    """Every kind of latents, in one dtype after the other, with several sequences and one."""
    dtypes = itertools.cycle((torch.bfloat16, torch.float32))
    for (variant, dtype), b in zip(zip(LATENTS, dtypes, strict=False), (1, 2, 2, 1), strict=True):
        case = dataclasses.replace(case_of(strategy, variant, dtype, p), b=b)
        sizes = dataclasses.replace(packed_of_case(case).sizes, s=case.s, b=b)
        found, truth = attention_bytes(strategy, sizes), tuple(measured(case).values())
        assert found[:2] == truth[:2], variant
        assert found[2] == pytest.approx(truth[2], rel=TOLERANCE), variant


@pytest.mark.parametrize("strategy", WALKED)
def test_rows_of_latents_are_near_what_ranks_hold(strategy):
    """Kept bytes equal, no peak above the predicted, of which none is a third too high."""
    wrong = []
    variants = itertools.cycle(itertools.product(LATENTS, (torch.float32, torch.bfloat16)))
    for _ in range(NAMES.index(strategy)):
        next(variants)
    for (label, row), (variant, dtype) in zip(rows(P).items(), variants, strict=False):
        if not takes(strategy, microbatch_of(row), P):
            continue
        like = strategy.replace("local_z", "megatron_cz")
        case = case_of(like, variant, dtype)
        packed = packed_of_case(case)
        assert packed.is_walked(strategy, "attention")
        one = OperationCosts(0.0, 0.0, *(measured(case)[quantity] for quantity in BYTES))
        truth = measured(dataclasses.replace(case, strategy=strategy, row=row))
        costs = walked_row_bytes(strategy, like, one, packed.sizes, load_of(row, causal=True))
        wrong += off(costs, truth, label, variant)
        found, peak = (
            kept + max(forward, backward)
            for kept, forward, backward in (
                (getattr(costs, name) for name in BYTES),
                (truth[name] for name in BYTES),
            )
        )
        if costs.kept_bytes != truth["kept_bytes"] or not -TOLERANCE < found / peak - 1 < 0.33:
            wrong.append((label, variant, str(dtype), costs.kept_bytes, truth, found / peak))
    assert not wrong, "\n" + "\n".join(map(str, wrong))
