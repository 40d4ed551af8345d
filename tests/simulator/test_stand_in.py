"""One device in the place of a rank, and the network's model that stands for the others."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from megatron_paradyse.costs.cost_file import read_cost_file
from megatron_paradyse.costs.table import BYTE_QUANTITIES
from megatron_paradyse.errors import UserError
from megatron_paradyse.simulator import measured_clock
from megatron_paradyse.simulator.measure_network import FASTEST, fit_alpha_beta
from megatron_paradyse.simulator.network import AlphaBeta, find_network, write_network
from megatron_paradyse.simulator.traffic import fill_with_own
from tests.simulator.small_models import COMMON, GPT, LENGTH, simulated
from tests.train.harness import run_forked

STRATEGIES = ("megatron_ts", "ulysses_z", "ulysses_z+recompute", "metp", "metp+recompute")
STRATEGIES += ("local_z",)  # runs packed rows only, of which a stand-in measures none


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """Of 4, on links of 1 s per collective, and how many of them each operation waits for."""
    folder = tmp_path_factory.mktemp("stand-in")
    network = find_network("nvlink3", 4)
    slow = {name: AlphaBeta(1.0, 1e15) for name in network.collectives}
    write_network(str(folder / "slow.json"), dataclasses.replace(network, collectives=slow))
    output = folder / "costs.json"
    argv = [output, folder / "slow.json", 4, ",".join(STRATEGIES), LENGTH, *GPT, *COMMON]
    code, _, stderr = run_forked(
        "tests.simulator.stand_in_driver", [str(a) for a in argv], ranks=1, folder=folder,
        timeout_seconds=100,
    )  # fmt: skip
    assert code == 0, stderr[-4000:]
    return read_cost_file(output).table


def test_a_stand_in_holds_the_bytes_of_the_simulation(stand_in, tmp_path):
    """The same layers, with values: the simulation without a device is checked once more."""
    fake = simulated(tmp_path, GPT, 4, strategies=STRATEGIES)
    assert stand_in.description.source == "stand-in"
    assert stand_in.description.hardware.kind == "cpu"
    for real, other in zip(stand_in.measurements, fake.measurements, strict=True):
        assert (real.strategy, real.operation) == (other.strategy, other.operation)
        for name in BYTE_QUANTITIES:
            expected = pytest.approx(getattr(other, name), rel=0.01, abs=64)
            assert getattr(real, name) == expected, (name, real, other)


def test_a_stand_in_waits_for_the_collectives_that_its_strategy_begins(stand_in):
    """1 s each, one after the other; the kernels of so small a layer take far less."""
    seconds = {
        (m.strategy, m.operation): (round(m.forward_seconds), round(m.backward_seconds))
        for m in stand_in.measurements
    }
    assert seconds["megatron_ts", "mlp"] == (2, 3)  # gather, scatter; two gathers, scatter
    # Weights of fc1 and fc2 and the bias; backward again, and of each the gradient.
    assert seconds["ulysses_z", "mlp"] == (3, 5)
    forward, backward = seconds["metp", "mlp"]
    assert forward == 3 and backward >= 2 * 3


def test_the_end_of_an_mlp_does_not_run_again(stand_in):
    """Nobody reads it: of METP nothing is sent again, of UlyssesZ fc1's weight and bias alone."""
    seconds = {
        m.strategy: (round(m.forward_seconds), round(m.backward_seconds))
        for m in stand_in.measurements
        if m.operation == "mlp"
    }
    assert seconds["metp+recompute"] == seconds["metp"]
    forward, backward = seconds["ulysses_z"]
    assert seconds["ulysses_z+recompute"] == (forward, backward + 2)


def test_kernels_and_communication_are_laid_side_by_side(monkeypatch):
    moments = iter([0.0, 1.0, 1.5, 4.5, 5.5])
    monkeypatch.setattr(measured_clock, "moment", lambda: next(moments))
    clock = measured_clock.MeasuredClock()
    clock.restart()  # 0
    begun = clock.begin(2.0, prepare=lambda: None)  # at 1; prepared until 1.5, which is not counted
    clock.wait(begun)  # kernels until 4.5: 3 s, so that the 2 s are over
    clock.mark()  # 5.5
    assert clock.laps() == [5.0]


@pytest.mark.parametrize(
    ("sent", "filled"), [([], [0.0] * 5), ([1.0, 2.0], [1.0, 2.0, 1.0, 2.0, 1.0])]
)
def test_what_is_received_is_filled_also_where_nothing_is_sent(sent, filled):
    """Within a narrow window the last rank sends no keys, and receives some."""
    into = torch.full((5,), torch.nan)
    fill_with_own(into, torch.tensor(sent))
    assert into.tolist() == filled


def test_latency_and_bandwidth_are_found_again():
    truth = AlphaBeta(3e-5, 2e9)
    found = fit_alpha_beta([(size, truth.seconds(size)) for size in (1e3, 1e5, 1e7)])
    assert found.latency_seconds == pytest.approx(truth.latency_seconds)
    assert found.bytes_per_second == pytest.approx(truth.bytes_per_second)
    steep = fit_alpha_beta([(1e3, 1e-3), (1e6, 1.0), (2e6, 2.1)])
    assert steep.latency_seconds == 0 and steep.bytes_per_second == pytest.approx(1e6, rel=0.05)


def test_where_a_longer_message_takes_no_longer_all_of_it_is_latency():
    """Noise made the longest of these the shortest: they are not a matter of bytes."""
    found = fit_alpha_beta([(1 << 12, 1.0e-3), (1 << 17, 1.1e-3), (1 << 22, 0.9e-3)])
    assert found.latency_seconds == pytest.approx(1e-3, rel=0.05)
    assert found.bytes_per_second == FASTEST


def test_a_measured_network_is_read_for_its_own_number_of_ranks(tmp_path):
    output = tmp_path / "network.json"
    code, _, stderr = run_forked(
        "tests.simulator.network_driver", [str(output)], ranks=2, folder=tmp_path,
        timeout_seconds=100,
    )  # fmt: skip
    assert code == 0, stderr[-4000:]
    network = find_network(str(output), 2)
    assert all(c.bytes_per_second > 0 for c in network.collectives.values())
    assert network.seconds("all_gather", 1 << 20) > 0
    with pytest.raises(UserError, match="measured on 2 ranks, not 4"):
        find_network(str(output), 4)
    values = json.loads(output.read_text())
    values["collectives"]["exchange"]["bytes_per_second"] = -1
    output.write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"exchange\.bytes_per_second must lie in"):
        find_network(str(output), 2)
