"""Loss head and embedding in tiles against plain PyTorch in float64, on 1, 2 and 4 ranks."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from megatron_paradyse.edges.cross_entropy import tiled_cross_entropy
from megatron_paradyse.edges.embedding import tiled_embedding, tiled_positions
from megatron_paradyse.edges.tiles import RowBytes, counted_tiles, of_tile, put_tile, tiles
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
    counted: float | None = None  # the share of tokens that count, None: all
    logits_scale: float = 1.0


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
    "some count": Case(s=32, b=1, tile=8, counted=0.3),
    "some count, of several sequences": Case(s=28, b=2, tile=12, counted=0.3),
    "some count, any gradient": Case(s=28, b=2, tile=12, gradient="any", counted=0.3),
    "few count": Case(s=48, b=1, tile=4, counted=0.04),
    "none counts": Case(s=16, b=1, tile=8, counted=0.0),
    "all count": Case(s=20, b=3, tile=1, counted=1.0),
    "some count, tied": Case(s=28, b=2, tile=12, tied=True, counted=0.5),
    "some count, bfloat16": Case(s=28, b=2, tile=12, dtype=torch.bfloat16, counted=0.3),
    "scaled": Case(s=28, b=2, tile=12, logits_scale=0.3),
    "scaled, any gradient": Case(s=28, b=2, tile=12, gradient="any", logits_scale=0.3),
    "scaled, some count": Case(s=28, b=2, tile=12, counted=0.3, logits_scale=3.0),
    "scaled, bfloat16": Case(s=28, b=2, tile=12, dtype=torch.bfloat16, logits_scale=0.3),
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
    if case.counted is not None:
        mask *= torch.rand(case.b, case.s, generator=random) < case.counted
    grad = draw(case.b, case.s) if case.gradient == "any" else mask * 0.37
    return x.to(case.dtype), weight.to(case.dtype), labels, mask, grad.to(_wide(case.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.bfloat16 else dtype


def _oracle(case: Case):
    """Losses [b, s], gradients of hidden and weight, logits [s, b, v]: plain PyTorch, float64."""
    x, weight, labels, mask, grad = _whole(case)
    x, weight = (t.double().requires_grad_() for t in (x, weight))
    embedded = F.embedding(labels, weight).transpose(0, 1) if case.tied else 0
    logits = (x + embedded) @ weight.t() * case.logits_scale
    losses = F.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")
    if case.counted is not None:
        losses = losses * (mask != 0)
    return (
        losses.detach(),
        *torch.autograd.grad(losses, [x, weight], grad.double()),
        logits.detach(),
    )


def _tiled(group, case: Case):
    """The same on a rank: losses, its rows of the hidden's gradient, its shard of the weight's."""
    p, rank = group.size(), group.rank()
    x, weight, labels, mask, grad = _whole(case)
    x = x.chunk(p)[rank].clone().requires_grad_()
    weight = weight.chunk(p)[rank].clone().requires_grad_(not case.frozen)
    hidden = x + tiled_embedding(labels, weight, group, tile=case.tile) if case.tied else x
    predicted = torch.empty_like(labels)
    losses = tiled_cross_entropy(
        hidden,
        weight,
        labels,
        group,
        tile=case.tile,
        token_weights=mask.float() if case.weighted else None,
        predicted=predicted,
        counted=None if case.counted is None else mask != 0,
        logits_scale=case.logits_scale,
    )
    inputs = [x] if case.frozen else [x, weight]
    with count_communication() as sent:
        grads = torch.autograd.grad(losses, inputs, grad)
    return losses.detach(), *grads, predicted, sent.calls["all_gather"]


def _embedded(group, case: Case):
    p, rank = group.size(), group.rank()
    x, weight, tokens, *_ = _whole(case)
    weight = weight.chunk(p)[rank].clone().requires_grad_()
    out = tiled_embedding(tokens, weight, group, tile=case.tile)
    (grad,) = torch.autograd.grad(out, weight, x.chunk(p)[rank])
    return out.detach(), grad


def _positioned(group, case: Case):
    x, weight, positions, *_ = _whole(case)
    weight = weight.clone().requires_grad_()
    out = tiled_positions(positions, weight, group, tile=case.tile)
    (grad,) = torch.autograd.grad(out, weight, x.chunk(group.size())[group.rank()])
    return out.detach(), grad


def _backward_twice(group, case: Case):
    x, weight, labels, mask, grad = _whole(case)
    x, weight = (t.chunk(group.size())[group.rank()].clone().requires_grad_() for t in (x, weight))
    losses = tiled_cross_entropy(x, weight, labels, group, tile=8, token_weights=mask)
    first = torch.autograd.grad(losses, [x, weight], grad, retain_graph=True)
    first = [part.clone() for part in first]
    return first, torch.autograd.grad(losses, [x, weight], grad)


def _without_gradients(group, case: Case):
    x, weight, labels, mask, _ = _whole(case)
    x, weight = (t.chunk(group.size())[group.rank()].requires_grad_() for t in (x, weight))
    with torch.no_grad(), count_communication() as sent:
        tiled_cross_entropy(x, weight, labels, group, tile=8, token_weights=mask)
    return sent.calls["reduce_scatter"]


EMBEDDED = ("tiles that do not", "float32", "bfloat16", "one tile")
JOBS = {
    _tiled: tuple(CASES),
    _embedded: EMBEDDED,
    _positioned: EMBEDDED,
    _backward_twice: ("one tile",),
    _without_gradients: ("one tile",),
}


def _run(group, job_and_case):
    job, name = job_and_case
    return job(group, CASES[name])


@functools.cache
def _results(p: int) -> dict[str, list]:
    """Every job on every case of it, by "job case", in one spawn."""
    cases = {f"{job.__name__} {name}": (job, name) for job, names in JOBS.items() for name in names}
    return run_ranks(p, _run, cases)


def _largest_error(mine: torch.Tensor, true: torch.Tensor) -> float:
    """Over the largest true value."""
    return float((mine.double() - true).abs().max()) / max(float(true.abs().max()), 1e-30)


@pytest.mark.parametrize("p", [1, 2, 4])
def test_losses_and_gradients_equal_the_oracle(p):
    for name, case in CASES.items():
        losses, *grads, logits = _oracle(case)
        for rank, (mine, *my_grads, predicted, _) in enumerate(_results(p)[f"_tiled {name}"]):
            assert mine.dtype == _wide(case.dtype)
            expected = [losses, *(grad.chunk(p)[rank] for grad in grads[: len(my_grads)])]
            for found, true in zip([mine, *my_grads], expected, strict=True):
                assert _largest_error(found, true) <= TOLERANCES[case.dtype], (name, rank)
            of_predicted = logits.gather(-1, predicted.t()[..., None]).squeeze(-1)
            seen = torch.ones(()) if case.counted is None else _whole(case)[3].t() != 0
            error = _largest_error(of_predicted * seen, logits.amax(-1) * seen)
            assert error <= TOLERANCES[case.dtype], name


def test_tiles_run_again_exactly_when_the_gradient_is_no_multiple_of_the_mask():
    """Seen by the gathers of the backward: none where the forward's gradients were right."""
    for name, case in CASES.items():
        if not case.tied:  # embeddings gather too
            again = _results(2)[f"_tiled {name}"][0][-1] > 0
            assert again == (case.gradient == "any" or not case.weighted), name


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("job", [_embedded, _positioned])
def test_embedding_and_its_gradient_equal_the_oracle(job, p):
    for name in EMBEDDED:
        x, weight, tokens, *_ = _whole(CASES[name])
        weight = weight.double().requires_grad_()
        out = F.embedding(tokens, weight).transpose(0, 1)
        (grad,) = torch.autograd.grad(out, weight, x.double())
        for rank, (mine, my_grad) in enumerate(_results(p)[f"{job.__name__} {name}"]):
            assert torch.equal(mine.double(), out.detach().chunk(p)[rank])
            true = grad.chunk(p)[rank] if job is _embedded else grad
            assert _largest_error(my_grad, true) <= TOLERANCES[CASES[name].dtype], (name, rank)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_tiles_of_counted_rows_hold_each_once_and_no_more_bytes_than_whole_tiles(data):
    """What fits into one tile is one, which holds no more than a copy of its input and gradient
    besides: Megatron's own head would hold all its logits too."""
    p, b, rows = (data.draw(st.integers(1, most)) for most in (4, 3, 24))
    counted = data.draw(st.lists(st.booleans(), min_size=b * p * rows, max_size=b * p * rows))
    counted = torch.tensor(counted).view(b, p * rows)
    _check_counted_tiles(counted, p, data.draw(st.integers(1, 40)), data.draw(ROWS))


def test_while_a_gradient_is_scattered_all_rows_of_its_tile_are_held():
    """Those that do not count too: two tiles of 10 and 8 rows would hold more than whole ones."""
    counted = torch.tensor([bit == "1" for bit in "000011101100001010"])[None]
    _check_counted_tiles(counted, 2, 7, RowBytes(logits=8, gradient=5, hidden=49))


def _check_counted_tiles(counted: torch.Tensor, p: int, tile: int, row: RowBytes) -> None:
    found, stops, tiles_, alone = torch.zeros_like(counted), [0], [(0, 0)], False
    for slice_, chosen in counted_tiles(counted.numpy(), p, tile=tile, row=row):
        assert len(chosen) and slice_.start >= stops[-1]
        stops.append(slice_.stop)
        of_slice = of_tile(counted, slice_, p)
        assert torch.equal(of_slice.flatten().nonzero()[:, 0], torch.from_numpy(chosen))
        put_tile(found, slice_, p, of_slice)
        alone = alone or slice_.stop - slice_.start == 1
        tiles_.append((len(chosen), of_slice.numel()))
    assert torch.equal(found, counted)
    held = _most_held([*tiles_, (0, 0)], p, row)
    whole = _most_held([(tile, tile)] * 3, p, row, select=False)
    copies = 0
    if counted.numel() <= tile:
        assert len(tiles_) <= 2, "the one before all, and one"
        copies = 2 * tiles_[-1][0] * row.hidden
    assert alone or all(one <= other + copies for one, other in zip(held, whole, strict=True))


def _most_held(tiles_, p: int, row: RowBytes, select: bool = True) -> tuple[int, int]:
    """Of tiles of which so many rows count of so many gathered; while a weight's gradient is made.

    select: whether those that count are copied, and the others then let go.
    """
    h, most, product = row.hidden, 0, 0
    gathered, sent = (h, h + h // p) if p > 1 else (0, h)
    for (_, before), (counted, rows), (_, after) in zip(
        tiles_, tiles_[1:], tiles_[2:], strict=False
    ):
        kept = counted * h if select else rows * gathered
        beside, scattering = kept + after * gathered, before * sent
        most = max(most, select * (kept + rows * gathered + scattering))
        most = max(most, counted * row.logits + beside + scattering)
        gradient = counted * row.gradient + beside
        most = max(most, gradient + rows * h + select * counted * h)
        product = max(product, gradient + rows * sent)
    return most, product


ROWS = st.builds(
    lambda narrow, wide, h: RowBytes(narrow + wide, narrow, h),
    *(st.integers(least, 50) for least in (1, 0, 1)),
)


def test_fewer_counted_rows_make_fewer_tiles():
    row = RowBytes.of(h=1024, vocab_shard=2**17, element_bytes=2)
    one_in_ten = np.arange(2**16)[None] % 10 == 0
    num_tiles = {
        name: len(list(counted_tiles(counted, 1, tile=1024, row=row)))
        for name, counted in (("all", one_in_ten | True), ("few", one_in_ten))
    }
    assert num_tiles == {"all": 65, "few": 7}


def test_a_second_backward_gives_the_same_gradients():
    for first, second in _results(2)["_backward_twice one tile"]:
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


def test_evaluation_computes_no_gradients():
    assert _results(2)["_without_gradients one tile"] == [0, 0]


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
