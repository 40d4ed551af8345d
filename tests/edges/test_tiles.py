"""Loss head and embedding in tiles against plain PyTorch in float64, on 1, 2 and 4 ranks."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional as F

from megatron_paradyse.edges.cross_entropy import tiled_cross_entropy
from megatron_paradyse.edges.embedding import tiled_embedding
from megatron_paradyse.edges.tiles import of_tile, put_tile, tiles
from megatron_paradyse.strategies.collectives import count_communication
from tests.strategies.harness import run_ranks

# Roundings of the dtype, times the square root of the few hundred terms that sums have here.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1.5e-2}
V, H = 24, 10


@dataclass(frozen=True)
class Case:
    s: int
    b: int
    tile: int
    dtype: torch.dtype = torch.float64
    weighted: bool = True  # whether the head is told the loss mask
    gradient: str = "masked"  # of the losses: masked (times one number), zero, or any
    tied: bool = False
    frozen: bool = False


CASES = {
    "one tile": Case(s=16, b=1, tile=64),
    "tiles that divide s": Case(s=32, b=1, tile=8),
    "tiles that do not": Case(s=28, b=2, tile=12),
    "odd rows, one per tile": Case(s=20, b=3, tile=1),
    "without the mask": Case(s=28, b=2, tile=12, weighted=False),
    "any gradient": Case(s=28, b=2, tile=12, gradient="any"),
    "any gradient, no mask": Case(s=28, b=2, tile=12, weighted=False, gradient="any"),
    "all masked": Case(s=16, b=1, tile=8, gradient="zero"),
    "tied": Case(s=28, b=2, tile=12, tied=True),
    "frozen weight": Case(s=16, b=1, tile=8, frozen=True),
    "float32": Case(s=28, b=2, tile=12, dtype=torch.float32),
    "float32, any gradient": Case(s=28, b=2, tile=12, dtype=torch.float32, gradient="any"),
    "bfloat16": Case(s=28, b=2, tile=12, dtype=torch.bfloat16),
    "bfloat16, any gradient": Case(s=28, b=2, tile=12, dtype=torch.bfloat16, gradient="any"),
}


@functools.cache
def _whole(case: Case):
    """Hidden [s, b, h], weight [v, h], labels [b, s], the mask and the gradient of the losses."""
    random = torch.Generator().manual_seed(7)
    draw = functools.partial(torch.randn, generator=random, dtype=torch.float64)
    x, weight = draw(case.s, case.b, H) * 2, draw(V, H)
    labels = torch.randint(V, (case.b, case.s), generator=random)
    mask = (torch.rand(case.b, case.s, generator=random) < 0.7).double()
    if case.gradient == "zero":
        mask.zero_()
    grad = draw(case.b, case.s) if case.gradient == "any" else mask * 0.37
    return x.to(case.dtype), weight.to(case.dtype), labels, mask, grad.to(_wide(case.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.bfloat16 else dtype


def _oracle(case: Case):
    """Losses [b, s], gradients of hidden and weight: one process, plain PyTorch, float64."""
    x, weight, labels, _, grad = _whole(case)
    x, weight = (t.double().requires_grad_() for t in (x, weight))
    embedded = F.embedding(labels, weight).transpose(0, 1) if case.tied else 0
    logits = (x + embedded) @ weight.t()
    losses = F.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")
    return losses.detach(), *torch.autograd.grad(losses, [x, weight], grad.double())


def _tiled(group, case: Case):
    """The same on a rank: losses, its rows of the hidden's gradient, its shard of the weight's."""
    p, rank = group.size(), group.rank()
    x, weight, labels, mask, grad = _whole(case)
    x = x.chunk(p)[rank].clone().requires_grad_()
    weight = weight.chunk(p)[rank].clone().requires_grad_(not case.frozen)
    hidden = x + tiled_embedding(labels, weight, group, tile=case.tile) if case.tied else x
    losses = tiled_cross_entropy(
        hidden,
        weight,
        labels,
        group,
        tile=case.tile,
        token_weights=mask.float() if case.weighted else None,
    )
    inputs = [x] if case.frozen else [x, weight]
    with count_communication() as sent:
        grads = torch.autograd.grad(losses, inputs, grad)
    return losses.detach(), *grads, sent.calls["all_gather"]


@pytest.mark.parametrize("p", [1, 2, 4])
def test_losses_and_gradients_equal_the_oracle(p):
    found = run_ranks(p, _tiled, CASES)
    for name, case in CASES.items():
        oracle, tolerance = _oracle(case), TOLERANCES[case.dtype]
        for rank, (losses, *grads, _) in enumerate(found[name]):
            assert losses.dtype == _wide(case.dtype)
            expected = [part.chunk(p)[rank] for part in oracle[1:]][: len(grads)]
            for mine, true in zip([losses, *grads], [oracle[0], *expected], strict=True):
                scale = max(float(true.abs().max()), 1e-30)
                assert float((mine.double() - true).abs().max()) <= tolerance * scale, (name, rank)


def test_tiles_run_again_exactly_when_the_gradient_is_no_multiple_of_the_mask():
    """Seen by the gathers of the backward: none where the forward's gradients were right."""
    cases = {name: case for name, case in CASES.items() if not case.tied}  # embeddings gather too
    again = {name: results[0][-1] > 0 for name, results in run_ranks(2, _tiled, cases).items()}
    for name, case in cases.items():
        assert again[name] == (case.gradient == "any" or not case.weighted), name


def _embedded(group, case: Case):
    p, rank = group.size(), group.rank()
    x, weight, tokens, *_ = _whole(case)
    weight = weight.chunk(p)[rank].clone().requires_grad_()
    out = tiled_embedding(tokens, weight, group, tile=case.tile)
    (grad,) = torch.autograd.grad(out, weight, x.chunk(p)[rank])
    return out.detach(), grad


@pytest.mark.parametrize("p", [1, 2, 4])
def test_embedding_and_its_gradient_equal_the_oracle(p):
    cases = {name: CASES[name] for name in ("tiles that do not", "float32", "bfloat16", "one tile")}
    for name, results in run_ranks(p, _embedded, cases).items():
        x, weight, tokens, *_ = _whole(cases[name])
        weight = weight.double().requires_grad_()
        out = F.embedding(tokens, weight).transpose(0, 1)
        (grad,) = torch.autograd.grad(out, weight, x.double())
        for rank, (mine, mine_grad) in enumerate(results):
            assert torch.equal(mine.double(), out.detach().chunk(p)[rank])
            tolerance = TOLERANCES[cases[name].dtype] * float(grad.abs().max())
            assert float((mine_grad.double() - grad.chunk(p)[rank]).abs().max()) <= tolerance


def _backward_twice(group, case: Case):
    x, weight, labels, mask, grad = _whole(case)
    x, weight = (t.chunk(group.size())[group.rank()].clone().requires_grad_() for t in (x, weight))
    losses = tiled_cross_entropy(x, weight, labels, group, tile=8, token_weights=mask)
    first = torch.autograd.grad(losses, [x, weight], grad, retain_graph=True)
    first = [part.clone() for part in first]
    second = torch.autograd.grad(losses, [x, weight], grad)
    return all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(first, second, strict=True))


def test_a_second_backward_gives_the_same_gradients():
    results = run_ranks(2, _backward_twice, {"twice": CASES["one tile"]})
    assert results["twice"] == [True, True]


def _without_gradients(group, case: Case):
    x, weight, labels, mask, _ = _whole(case)
    x, weight = (t.chunk(group.size())[group.rank()].requires_grad_() for t in (x, weight))
    with torch.no_grad(), count_communication() as sent:
        tiled_cross_entropy(x, weight, labels, group, tile=case.tile, token_weights=mask)
    return sent.calls["reduce_scatter"]


def test_evaluation_computes_no_gradients():
    case = dataclasses.replace(CASES["one tile"], tile=8)
    assert run_ranks(2, _without_gradients, {"": case})[""] == [0, 0]


@pytest.mark.parametrize("p", [1, 2, 5])
@pytest.mark.parametrize("tile", [1, 7, 1000])
def test_tiles_cover_every_token_once_and_hold_no_more_than_asked(p, tile):
    s, b = 60, 3
    tokens = torch.arange(s * b).reshape(b, s)
    copied = torch.full_like(tokens, -1)
    for rows in tiles(s // p, b, p, tile=tile):
        part = of_tile(tokens, rows, p)
        assert part.numel() <= max(tile, p * b)
        assert torch.equal(part[0], tokens[:, rows.start])  # the first rank's first row
        assert (copied[:, rows] == -1).all()
        put_tile(copied, rows, p, part)
    assert torch.equal(copied, tokens)
