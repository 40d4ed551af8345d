"""Profiles of a small model on 2 ranks, with real collectives."""

from __future__ import annotations

import pytest

from megatron_paradyse.costs.cost_file import read_cost_file
from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.costs.offloaded import host_link, offloaded
from megatron_paradyse.costs.recomputed import recomputed_layer
from megatron_paradyse.costs.table import BYTE_QUANTITIES, BYTES_ONLY, Measurement
from megatron_paradyse.profiler.agree import RESTART_CODE, note_path
from megatron_paradyse.strategies.accounting import operation_costs
from megatron_paradyse.strategies.sizes import LayerSizes
from tests.profiler.profiling import HIDDEN, LENGTHS, RANKS, run_profile

FFN = 256


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """The file of a profile whose metp mlp fails on every rank, and what it holds."""
    output = tmp_path_factory.mktemp("profile") / "costs.json"
    return output, run_profile(output, fault="metp mlp all")[0]


def test_kept_bytes_are_those_counted_by_hand(profiled):
    """Of an MLP: its output, the norm's output and statistics, fc1's output."""
    for s in LENGTHS:
        rows = s // RANKS
        x, statistics = rows * HIDDEN * 4, 2 * rows * 4
        expected = {
            "ulysses_z": 2 * x + rows * FFN * 4 + statistics,
            "megatron_ts": 2 * x + 2 * s * FFN // RANKS * 4 + statistics,  # and its activation
            "megatron_ts+recompute": x,
        }
        for strategy, kept in expected.items():
            assert profiled[1][strategy, "mlp", s].kept_bytes == kept, strategy


def test_bytes_are_those_of_the_formulas_and_what_megatrons_half_adds(profiled):
    """Kept: the norm's input and statistics; its output is the formulas' x.

    The residual's sum replaces the output, so that where the forward's peak holds that output, the
    workspace above what stays is one activation less.
    """
    for s in LENGTHS:
        rows = s // RANKS
        x, statistics = rows * HIDDEN * 4, 2 * rows * 4
        sizes = LayerSizes(
            s=s, b=1, h=HIDDEN, n=4, g=4, d=16, f=FFN, p=RANKS, element_bytes=4, bias=True
        )
        for strategy, operation, less in (("metp", "attention", 0), ("ulysses_z", "mlp", x)):
            formula = operation_costs(strategy, operation, sizes)
            measured = profiled[1][strategy, operation, s]
            assert measured.kept_bytes == formula.kept_bytes + x + statistics
            assert measured.forward_bytes == formula.forward_bytes - less
            scalars = 8  # the measured graph ends in one, which has a gradient
            assert measured.backward_bytes == formula.backward_bytes + scalars


def test_static_bytes_are_parameters_gradients_and_adam(profiled):
    """Float32: 16 bytes per parameter of the rank, the gather buffer, the tied gradient."""
    per_layer = (4 * HIDDEN * HIDDEN + 2 * HIDDEN * FFN + 3 * HIDDEN + FFN) / RANKS + 6 * HIDDEN
    vocabulary = 256 * HIDDEN // RANKS  # padded to a multiple of 128 p
    parameters = 6 * per_layer + vocabulary + 512 * HIDDEN + 2 * HIDDEN
    expected = 16 * parameters + LENGTHS[-1] * HIDDEN * 4 + vocabulary * 4
    constants = read_cost_file(profiled[0]).table.constants
    assert constants.static_bytes == pytest.approx(expected, rel=0.002)
    assert constants.waiting_bytes == vocabulary * 4
    assert constants.optimizer_seconds > 0


def test_a_profile_tells_what_else_its_costs_depend_on(profiled):
    """The head's tile: 256 MiB of rows of 128/2 logits (padded) and four times h, in float32."""
    description = read_cost_file(profiled[0]).table.description
    tile = 256 * 2**20 // (4 * (description.model.vocab_size // RANKS + 4 * HIDDEN))
    assert description.head_tile == str(tile)
    assert (description.num_experts, description.attention_dropout) == (0, False)
    assert description.attention_window == "none"


def test_a_layer_is_the_sum_of_its_halves(profiled):
    found = profiled[1]
    s = LENGTHS[0]
    for strategy in ("megatron_ts", "ulysses_z"):
        a, m, layer = (found[strategy, o, s] for o in ("attention", "mlp", "layer"))
        assert layer.kept_bytes == pytest.approx(a.kept_bytes + m.kept_bytes, rel=0.002)
        forward = max(a.forward_bytes - m.kept_bytes, m.forward_bytes)
        backward = max(m.backward_bytes, a.backward_bytes - m.kept_bytes)
        assert layer.forward_bytes == pytest.approx(forward, rel=0.02)
        assert layer.backward_bytes == pytest.approx(backward, rel=0.02)


def test_a_recomputed_layer_follows_from_its_halves(profiled):
    found = profiled[1]
    s, name = LENGTHS[0], "megatron_ts+recompute"
    layer = found[name, "layer", s]
    composed = recomputed_layer(name, name, lambda n, o: found[n, o, s].costs)
    for quantity in ("kept_bytes", "forward_bytes", "backward_bytes"):
        assert getattr(composed, quantity) == pytest.approx(getattr(layer, quantity), rel=0.02)


def test_offload_measures_what_follows_from_recompute(profiled):
    """Of the halves and of the layer, on the ranks; the rate of copies is measured too."""
    found, table = profiled[1], read_cost_file(profiled[0]).table
    link = host_link(table)
    assert link is not None and 1e6 < link.bytes_per_second < 1e12 and not link.overlaps
    compared = [key for key in found if key[0] == "megatron_ts+offload"]
    assert {operation for _, operation, _ in compared} == {"attention", "mlp", "layer"}
    for _, operation, s in compared:
        measured = found["megatron_ts+offload", operation, s].costs
        derived = offloaded(found["megatron_ts+recompute", operation, s].costs, link)
        assert measured.kept_bytes == derived.kept_bytes == 0
        for quantity in ("forward_bytes", "backward_bytes"):
            assert getattr(measured, quantity) == getattr(derived, quantity), (operation, quantity)


def test_a_failure_is_recorded_and_does_not_end_the_profile(profiled):
    found = profiled[1]
    for s in LENGTHS:
        assert found["metp", "mlp", s].status == "unsupported: RuntimeError: no kernel for this"
        assert found["metp", "attention", s].is_ok
    assert all(m.is_ok for m in found.values() if m.strategy != "metp")


def test_a_profile_goes_on_where_it_stopped_and_refuses_another_model(profiled):
    output, before = profiled
    after, events, _ = run_profile(output)
    assert after == before
    points = [event for event in events if "share" in event]
    assert len(points) == len(before) and all(event["resumed"] for event in points)
    _, _, stderr = run_profile(output, code=2, model={"--hidden-size": 32})
    assert "model.hidden_size: 64 in the file, 32 in the run" in stderr
    _, _, stderr = run_profile(output, fault="other disk", code=2)
    assert f"has 0 points on one machine, {len(before)} on another: put it on a disk" in stderr


def test_a_failure_of_one_rank_is_noted_and_skipped_by_the_next_start(tmp_path):
    output = tmp_path / "costs.json"
    few = {"lengths": (64,), "strategies": ("ulysses_z+recompute",)}
    fault = "ulysses_z+recompute mlp one"
    run_profile(output, fault=fault, code=RESTART_CODE, **few)
    assert note_path(output).exists()
    found, _, _ = run_profile(output, fault=fault, **few)
    assert found["ulysses_z+recompute", "mlp", 64].status == "oom"
    assert found["ulysses_z+recompute", "layer", 64].is_ok
    assert not note_path(output).exists()


def test_a_second_profile_gives_the_same_bytes_and_short_lengths_leave_out_long_ones(
    tmp_path, profiled
):
    found, _, _ = run_profile(
        tmp_path / "costs.json",
        lengths=(32, 64, 128, 256),
        strategies=("megatron_ts",),
        memory_bytes=2_250_000,
    )
    by_length = [found["megatron_ts", "mlp", s].status for s in (32, 64, 128, 256)]
    assert by_length[0] == "ok" and by_length[-1] == "oom"
    assert isinstance(found["megatron_ts", "mlp", 256], Measurement)
    for operation in ("attention", "mlp"):
        for s in LENGTHS:
            first, second = (
                profiled[1]["megatron_ts", operation, s],
                found["megatron_ts", operation, s],
            )
            for name in BYTE_QUANTITIES if second.is_ok else ():
                assert getattr(first, name) == getattr(second, name)
    assert found["megatron_ts", "attention", 64].is_ok
    untimed = [s for (_, operation, s), m in found.items() if m.status == BYTES_ONLY]
    assert untimed and all(32 < s < 64 for s in untimed)


def test_a_training_that_overlaps_its_reductions_is_profiled_like_another(tmp_path, profiled):
    """Halves of a layer leave gradients of a bucket missing; Megatron asserts that none is."""
    flags = ("--overlap-grad-reduce", "--overlap-param-gather", "--use-distributed-optimizer")
    found, _, _ = run_profile(
        tmp_path / "costs.json", strategies=("megatron_ts",), model=dict.fromkeys(flags, "")
    )
    for s in LENGTHS:
        for operation in ("attention", "mlp"):
            alike = (profiled[1]["megatron_ts", operation, s], found["megatron_ts", operation, s])
            for name in BYTE_QUANTITIES:
                assert getattr(alike[0], name) == getattr(alike[1], name)


def test_a_quick_profile_goes_on_until_it_can_be_fitted(tmp_path):
    output = tmp_path / "costs.json"
    more = {"lengths": (64, 96, 128, 160), "strategies": ("ulysses_z",), "budget_seconds": 1e-3}
    found, events, _ = run_profile(output, quick=True, packed=True, **more)
    assert {s for _, _, s in found} == {64, 96, 128}
    assert "budget of 0.001 s spent; run again to go on" in [event.get("text") for event in events]
    assert fit_table(read_cost_file(output).table).strategies("attention") == ("ulysses_z",)
    assert len(run_profile(output, **more)[0]) == len(found)  # a whole one stops at once
