"""Seconds of a kernel, by hand, on a device of round numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_paradyse.simulator.hardware import find_device
from megatron_paradyse.simulator.operation import simulated_costs
from megatron_paradyse.simulator.simulated_device import SimulatedDevice

aten = torch.ops.aten
HALF, SINGLE, MOVED = 4e12, 1e12, 1e9  # that large kernels reach: FLOP/s, and bytes per second
DEVICE = replace(
    find_device("a100-80g"),
    **{"half_flops": 2 * HALF, "float32_flops": 2 * SINGLE, "matmul_efficiency": 0.5},
    **{"attention_forward_efficiency": 0.25, "attention_backward_efficiency": 0.125},
    **{"bandwidth_bytes_per_second": 4 * MOVED, "bandwidth_efficiency": 0.25},
    **{"narrow_head_factor": 0.5, "num_multiprocessors": 6, "host_seconds_per_kernel": 0.0},
)
TILE = 2 * 128 * 128  # FLOPs of a tile for each of the k products that are summed


def seconds(run, *shapes, dtype=torch.bfloat16, device=DEVICE) -> float:
    simulated = SimulatedDevice(device)
    with FakeTensorMode(), simulated:
        tensors = [torch.empty(shape, dtype=dtype) for shape in shapes]
        simulated.clock.restart()
        run(*tensors)
        return simulated.clock.reading()


M, K, N = 300, 1 << 14, 257  # 3 x 3 tiles, in two rounds of 6


@pytest.mark.parametrize(
    ("run", "shapes"),
    [
        (torch.mm, ((M, K), (K, N))),
        (torch.addmm, ((M, N), (M, K), (K, N))),
        (lambda x, a, b: x.addmm_(a, b), ((M, N), (M, K), (K, N))),
    ],
)
def test_a_product_takes_whole_rounds_of_tiles(run, shapes):
    once = replace(DEVICE, bandwidth_bytes_per_second=1e15)
    assert seconds(run, *shapes, device=once) == pytest.approx(TILE * K * 12 / HALF)
    single = seconds(run, *shapes, dtype=torch.float32, device=once)
    assert single == pytest.approx(TILE * K * 12 / SINGLE)


@pytest.mark.parametrize(
    ("run", "more"), [(torch.bmm, ()), (torch.baddbmm, ((4, M, N),))], ids=["bmm", "baddbmm"]
)
def test_products_side_by_side_share_rounds(run, more):
    """4 x 9 tiles are six rounds; of one each they would be eight."""
    once = replace(DEVICE, bandwidth_bytes_per_second=1e15)
    found = seconds(run, *more, (4, M, K), (4, K, N), device=once)
    assert found == pytest.approx(TILE * K * 36 / HALF)
    slow = replace(DEVICE, half_flops=1e20)
    moved = 4 * (M * K + K * N + M * N) * 2
    assert seconds(run, *more, (4, M, K), (4, K, N), device=slow) == pytest.approx(moved / MOVED)


S, G = 512, 2


def forward(causal):
    return lambda q, k, v: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def backward(causal):
    return lambda q, k, v, lse: aten._scaled_dot_product_flash_attention_for_cpu_backward(
        q, q, k, v, q, lse, 0.0, causal
    )


@pytest.mark.parametrize(("d", "efficiency"), [(128, 1.0), (64, 0.5)])
@pytest.mark.parametrize(("causal", "scores"), [(True, S * (S + 1) // 2), (False, S * S)])
def test_attention_takes_two_products_of_each_score_and_five_in_its_backward(
    causal, scores, d, efficiency
):
    fast = replace(DEVICE, bandwidth_bytes_per_second=1e15)
    q, k, lse = (3, 4, S, d), (3, 4, S, d), (3, 4, S)
    product = 2 * d * 3 * 4 * scores / (2 * HALF * efficiency)
    assert seconds(forward(causal), q, k, k, device=fast) == pytest.approx(2 * product / 0.25)
    found = seconds(backward(causal), q, k, k, lse, device=fast)
    assert found == pytest.approx(5 * product / 0.125)


def test_short_attention_takes_what_it_reads_and_writes():
    """q and out, k and v; in the backward their gradients too."""
    slow = replace(DEVICE, half_flops=1e20)
    q, k, lse = (1, 4, 256, 128), (1, 4, 64, 128), (1, 4, 256)
    moved = 4 * (256 + 64) * 128 * 2
    assert seconds(forward(False), q, k, k, device=slow) == pytest.approx(2 * moved / MOVED)
    assert seconds(backward(False), q, k, k, lse, device=slow) == pytest.approx(4 * moved / MOVED)


ROWS = torch.Size((1000, 8))


@pytest.mark.parametrize(
    ("run", "tensors"),
    [
        (torch.add, 3),
        (lambda x, y: x.add_(y), 3),
        (lambda x, y: x.copy_(y), 2),
        (lambda x, y: x.zero_(), 1),
        (lambda x, y: x.fill_(1.0), 1),
        (lambda x, y: torch.exp(x), 2),
        (lambda x, y: x.view(-1).t(), 0),
        (lambda x, y: x.transpose(0, 1)[1:], 0),
        (lambda x, y: x.detach(), 0),
        (lambda x, y: torch.empty_like(x), 0),
        (lambda x, y: torch.cat([x, y]), 4),
    ],
)
def test_all_else_reads_its_inputs_and_writes_its_results_once(run, tensors):
    assert seconds(run, ROWS, ROWS) == pytest.approx(tensors * ROWS.numel() * 2 / MOVED)


def test_a_lookup_reads_the_rows_that_it_returns():
    def look_up(weight):
        torch.nn.functional.embedding(torch.empty(10, dtype=torch.int64), weight)

    assert seconds(look_up, ROWS) == pytest.approx(2 * 10 * 8 * 2 / MOVED)


def test_kernels_wait_for_the_host():
    """Five of no size, of which the last is issued after 5 s."""
    slow = replace(DEVICE, host_seconds_per_kernel=1.0)

    def run(x):
        for _ in range(5):
            x.zero_()

    assert seconds(run, (0,), device=slow) == 5.0


def test_a_fused_function_is_one_kernel_of_what_goes_in_and_comes_out():
    simulated = SimulatedDevice(DEVICE)
    fused = simulated.fused(lambda x, y: torch.exp(x + y) * 2)
    with FakeTensorMode(), simulated:
        x = torch.empty(ROWS, dtype=torch.bfloat16)
        simulated.clock.restart()
        fused(x, torch.empty_like(x))
        once = simulated.clock.reading()
        torch.exp(x)
    assert once == pytest.approx(3 * ROWS.numel() * 2 / MOVED)
    assert simulated.clock.reading() == pytest.approx(once + 2 * ROWS.numel() * 2 / MOVED)


class Doubles:
    """An operation of one product forward and one backward."""

    def make_input(self):
        return torch.empty(ROWS, requires_grad=True)

    def forward(self, x):
        return x * 2, None


def test_forward_and_backward_take_the_time_that_passes():
    simulated = SimulatedDevice(DEVICE)
    with FakeTensorMode():
        costs = simulated_costs(Doubles(), simulated)
    moved = 2 * ROWS.numel() * 4 / MOVED
    assert costs.forward_seconds == pytest.approx(moved)
    assert costs.backward_seconds >= moved
    assert costs.time_seconds == pytest.approx(simulated.clock.reading())
