"""The simulation: every strategy's operations at every length, on a device that is not there."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from megatron_paradyse.costs.description import Description, Hardware
from megatron_paradyse.costs.layers import half_of
from megatron_paradyse.costs.rows import RowMeasurement
from megatron_paradyse.costs.table import (
    ATTENTION,
    MODEL,
    OK,
    QUANTITIES,
    Constants,
    CostTable,
    Measurement,
    edges_of,
)
from megatron_paradyse.profiler.points import like_it
from megatron_paradyse.simulator.hardware import Device
from megatron_paradyse.simulator.network import Network
from megatron_paradyse.simulator.operation import left_out, simulated_costs
from megatron_paradyse.strategies import base_name, singles
from megatron_paradyse.strategies.accounting import RANKS_DIFFER, RINGS
from megatron_paradyse.strategies.sizes import is_narrow

# What an Adam step of mixed precision reads and writes per parameter: the float32 gradient, master
# weight and both moments once, the last three and the weight again; and the gradient for its norm
# and to zero it.
OPTIMIZER_TRAFFIC_BYTES = 4 * 4 + 3 * 4 + 2 + 2 * 4

Report = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What is simulated. fused: Megatron's fused functions are one kernel and attention is
    FlashAttention, as on a GPU; packed: attention on packed rows too.

    state_bytes: per parameter with its gradient and optimizer state; None: as Megatron has them
    without a distributed optimizer, 18 in a half type and 16 in float32.
    """

    device: Device
    network: Network
    lengths: tuple[int, ...]
    strategies: tuple[str, ...]
    batch_sizes: tuple[int, ...] = (1,)
    state_bytes: float | None = None
    fused: bool = True
    packed: bool = False

    @property
    def p(self) -> int:
        return self.network.p


def simulate(options: Options, flags: Sequence[str], report: Report) -> CostTable:
    """The cost table of the model of Megatron's flags. Once in a process.

    Of a mixture of experts all get as many tokens; UserError where values say when they do.
    """
    from megatron_paradyse.train import plugin

    plugin.install()
    from megatron.training import get_args

    from megatron_paradyse.profiler.model import grow_gather_buffer
    from megatron_paradyse.simulator.even_experts import check_balancing, even_experts, num_ranks
    from megatron_paradyse.simulator.flash_kernel import flash_kernel
    from megatron_paradyse.simulator.grouped_gemm import check_grouped_gemm, grouped_gemm
    from megatron_paradyse.simulator.rows import simulated_rows
    from megatron_paradyse.simulator.short_loops import short_loops
    from megatron_paradyse.simulator.simulated_device import SimulatedDevice, fused_functions
    from megatron_paradyse.simulator.simulated_rank import (
        build_layers,
        start_megatron,
        static_numbers,
        without_values,
    )
    from megatron_paradyse.simulator.traffic import replaced
    from megatron_paradyse.train.model_layers import ModelLayers, count_layers
    from megatron_paradyse.train.static_bytes import waiting_gradient_bytes

    start_megatron(flags, world=num_ranks(flags, options.p), rank=options.p - 1)
    args = get_args()
    check_balancing(args)
    check_grouped_gemm(args)
    num_layers = count_layers(args)
    layers = ModelLayers.of_arguments(args, num_layers)
    kinds = layers.kinds()
    description = _description(options, num_layers)
    device = SimulatedDevice(options.device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_values())
        stack.enter_context(even_experts())
        stack.enter_context(replaced(options.network, device.clock))
        stack.enter_context(short_loops(device.clock))
        if options.fused:
            stack.enter_context(fused_functions(device))
            stack.enter_context(flash_kernel(device.scores))
        if args.moe_grouped_gemm:
            stack.enter_context(grouped_gemm())
        with device:
            chosen = tuple(kinds.first_layers.values())
            model = build_layers(layers.only(chosen, predicting=True))
            before = device.live_bytes
            longest_tokens = max(options.lengths) * max(options.batch_sizes)
            grow_gather_buffer(model, longest_tokens)
            buffer_bytes = device.live_bytes - before
        numbers = static_numbers(model, kinds)
        waiting_bytes = waiting_gradient_bytes(model.chunks[0])
        state_bytes = options.state_bytes or (18 if args.params_dtype.itemsize == 2 else 16)
        rate = options.device.bandwidth_bytes_per_second * options.device.bandwidth_efficiency
        constants = Constants(
            static_bytes=numbers * state_bytes + buffer_bytes + waiting_bytes,
            optimizer_seconds=numbers * OPTIMIZER_TRAFFIC_BYTES / rate,
            host_bytes_per_second=options.device.host_rate,
            buffer_tokens=longest_tokens,
            waiting_bytes=waiting_bytes,
        )
        measurements = tuple(_measurements(options, description, model, device, report))
        rows: tuple[RowMeasurement, ...] = ()
        if options.packed:
            rows = tuple(simulated_rows(options, description, model, device, report))
    return CostTable(description, measurements, constants, rows)


def _measurements(
    options: Options, description: Description, model, device, report: Report
) -> Iterator[Measurement]:
    from megatron_paradyse.profiler.operations import Operations
    from megatron_paradyse.simulator.simulated_rank import read_anywhere

    edges, halves = edges_of(description), description.layer_kinds.halves()
    for b in options.batch_sizes:
        for s in options.lengths:
            report(f"simulating s={s} b={b}")
            with device:
                operations = Operations(model, s, b, read=read_anywhere)
            for operation in edges:
                costs = simulated_costs(operations.get(operation, MODEL), device)
                yield Measurement(MODEL, operation, s, b, OK, **asdict(costs))
            strategies = singles(options.strategies)
            known: dict[tuple[str, str], Measurement] = {}
            for strategy, operation in itertools.product(strategies, halves):
                if (strategy, operation) not in known:
                    one = _measurement(options, model, device, operations, strategy, operation)
                    same = like_it(one, strategies, switches=True)
                    known |= {(m.strategy, operation): m for m in (one, *same)}
                yield known[strategy, operation]
            del operations


def _measurement(options: Options, model, device, operations, strategy: str, operation: str):
    """Of the rank that needs most, or "unsupported" with the reason."""
    from megatron_paradyse.shapes import attention_shape
    from megatron_paradyse.simulator.simulated_rank import attention_as_rank
    from megatron_paradyse.strategies import check_takes, get_strategy, leaving_out
    from megatron_paradyse.strategies.contract import Microbatch

    s, b = operations.size
    shape = attention_shape(model.layer_of(operation).self_attention, training=True)
    narrow = is_narrow(shape.window, s, options.p)
    ranks = ranks_that_differ(strategy, operation, p=options.p, causal=shape.causal, narrow=narrow)
    found = []
    try:
        get_strategy(strategy).check(shape, options.p)
        check_takes(strategy, Microbatch(s, b), options.p)
        for rank in ranks:
            with attention_as_rank(model, rank):
                found.append(simulated_costs(operations.get(operation, strategy), device))
    except leaving_out(strategy) as error:
        return Measurement(strategy, operation, s, b, left_out(error))
    most = {name: max(getattr(costs, name) for costs in found) for name in QUANTITIES}
    return Measurement(strategy, operation, s, b, OK, **most)


def ranks_that_differ(
    strategy: str, operation: str, *, p: int, causal: bool, narrow: bool = False
) -> tuple[int, ...]:
    """Ranks of which one needs as much of each quantity as any of the p.

    In a balanced causal ring the outer ranks meet other blocks of scores than the inner ones, and
    with odd p the rank in the middle swaps nothing. Of METP the first rank has the gradients of its
    own weights for longest. The last rank stands for all elsewhere: no other has more scores to
    compute or to hold. narrow: within a window that is (sizes.is_narrow) those in the middle get
    and send the most keys.
    """
    base = base_name(strategy)
    if narrow and base in RINGS and half_of(operation) == ATTENTION:
        return tuple(sorted({0, max(0, p // 2 - 1), p // 2, p - 1}))
    if (base, half_of(operation)) not in RANKS_DIFFER:
        return (p - 1,)
    if causal:
        return tuple(sorted({0, max(0, p // 2 - 1), p // 2, p - 1 if p % 2 else 0}))
    return tuple(sorted({0, p - 1})) if base == "metp" else (p - 1,)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what Megatron prints while it is set up, and what its imports warn of."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def _description(options: Options, num_layers: int) -> Description:
    from megatron.training import get_args

    from megatron_paradyse.simulator.flash_kernel import tiles_scores
    from megatron_paradyse.train.describe import model_shape, told_options, versions
    from megatron_paradyse.train.model_kind import MASKS

    device = options.device
    model = model_shape(get_args(), num_layers)
    return Description(
        model=model,
        p=options.p,
        dtype=str(get_args().params_dtype).removeprefix("torch."),
        attention_mask=MASKS[get_args().paradyse_model],
        attention_kernel="simulated: one fused kernel",
        hardware=Hardware(
            name=device.name, kind="cuda", memory_bytes=device.memory_bytes, num_devices=options.p
        ),
        interconnect=options.network.name,
        versions=versions(),
        source="simulated",
        date=datetime.date.today().isoformat(),
        tiled_scores=tiles_scores(get_args().params_dtype, model.head_dim),
        **told_options(get_args(), model),
    )
