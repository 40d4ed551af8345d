"""The command `megatron-paradyse simulate`."""

from __future__ import annotations

import json
import math
import os
import sys

import click

from megatron_paradyse.costs.layers import MLP, half_of
from megatron_paradyse.costs.table import CostTable
from megatron_paradyse.errors import UserError
from megatron_paradyse.option_types import (
    BATCH_SIZES,
    COUNT,
    LENGTHS,
    PASS_ON,
    POSITIVE,
    json_option,
)
from megatron_paradyse.strategies import offloads, recomputes
from megatron_paradyse.units import format_count

NUM_LENGTHS, LONGEST = 12, 128 << 10
MAX_SHOWN = 5
MAX_MS_SECONDS = 100.0  # longer ones make the table one of seconds
DTYPES = ("bfloat16", "float16", "float32")
MASKS = ("causal", "bidirectional")


@click.command(
    context_settings=PASS_ON,
    epilog="Example: megatron-paradyse simulate --gpu a100-80g --ranks 8 --model gpt "
    "--lengths 8K,32K,128K -o costs-raw.json",
)
@click.option("--gpu", required=True, metavar="NAME|FILE", help="Such as a100-80g, or your YAML.")
@click.option("--ranks", required=True, type=click.IntRange(1, 1024), help="Size of the group, p.")
@click.option("--model", metavar="NAME|FILE", help="bert, llama, gpt, or YAML of Megatron flags.")
@click.option("-o", "--output", required=True, metavar="FILE", help="Write the cost file here.")
@click.option(
    "--interconnect",
    metavar="NAME|FILE",
    help="Such as nvlink4+infiniband-ndr; default: the GPU's.",
)
@click.option(
    "--lengths", type=LENGTHS, help=f"Such as 8K,32K; default: {NUM_LENGTHS}, log-spaced."
)
@click.option(
    "--max-length",
    type=COUNT,
    help=f"The longest default length; default: {format_count(LONGEST)}.",
)
@click.option("--batch-sizes", type=BATCH_SIZES, default="1", help="Such as 1,2; default 1.")
@click.option("--strategies", help="Comma-separated; default: all, with and without +recompute.")
@click.option("--packed", is_flag=True, help="Attention on packed rows too.")
@click.option("--mask", type=click.Choice(MASKS), help="Default: the named model's, or causal.")
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="bfloat16",
    show_default=True,
    help="Of weights and activations.",
)
@click.option(
    "--state-bytes",
    type=POSITIVE,
    metavar="BYTES",
    help="Of a parameter, its gradient and optimizer states; default: Megatron's 18 (16: float32).",
)
@json_option
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[MEGATRON FLAGS]...")
def simulate(
    gpu: str,
    ranks: int,
    model: str | None,
    output: str,
    interconnect: str | None,
    lengths: tuple[int, ...] | None,
    max_length: int | None,
    batch_sizes: tuple[int, ...],
    strategies: str | None,
    packed: bool,
    mask: str | None,
    dtype: str,
    state_bytes: float | None,
    as_json: bool,
    flags: tuple[str, ...],
) -> None:
    """Estimate what every strategy costs, without a GPU: simulated, not measured.

    Bytes are those of Megatron's and the strategies' own code over tensors without values; seconds
    follow from FLOPs, bytes and datasheets. Megatron flags win over those of --model.
    """
    from megatron_paradyse.costs.cost_file import check_cost_output, write_cost_file
    from megatron_paradyse.profiler.lengths import check_lengths, check_longest, default_lengths
    from megatron_paradyse.profiler.run import strategies_to_profile
    from megatron_paradyse.simulator.hardware import find_device
    from megatron_paradyse.simulator.models import model_flags
    from megatron_paradyse.simulator.network import find_network
    from megatron_paradyse.simulator.run import Options

    check_cost_output(output)
    check_longest(lengths, max_length)
    device = find_device(gpu)
    names = strategies_to_profile(None if strategies is None else strategies.split(","))
    for name in filter(offloads, names):
        raise UserError(
            f"{name} is not simulated: its costs follow from those of +recompute: leave it out"
        )
    megatron = model_flags(model, flags, ranks=ranks, dtype=dtype, mask=mask)
    options = Options(
        device=device,
        network=find_network(interconnect or device.interconnect, ranks),
        lengths=check_lengths(lengths, p=ranks)
        if lengths
        else default_lengths(
            LONGEST if max_length is None else max_length, p=ranks, count=NUM_LENGTHS
        ),
        strategies=names,
        batch_sizes=batch_sizes,
        state_bytes=state_bytes,
        packed=packed,
    )
    table = _in_silence(options, megatron)
    write_cost_file(output, table)
    if as_json:
        click.echo(json.dumps({"output": output, "source": "simulated", **summary(table)}))
        return
    _print(table)
    click.echo(f"simulated, not measured; written to {output}")


def _in_silence(options, flags: list[str]) -> CostTable:
    """The table; Megatron says nothing, and a terminal shows which length is simulated."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU of this machine has no part in it

    from megatron_paradyse.simulator.run import quiet
    from megatron_paradyse.simulator.run import simulate as run

    def report(line: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r{line}\x1b[K", err=True, nl=False)

    with quiet():
        table = run(options, flags, report)
    if sys.stderr.isatty():
        click.echo("\r\x1b[K", err=True, nl=False)
    return table


def summary(table: CostTable) -> dict:
    """Seconds and bytes of a layer under each strategy, by length, for b as given first.

    Where layers differ, their mean. A layer that is recomputed as a whole keeps one input, not one
    of each half.
    """
    first = table.measurements[0].batch_size
    refused = {m.strategy for m in table.measurements if not m.is_ok} | {"model"}
    kinds = table.description.layer_kinds
    layers: dict[str, dict[int, dict[str, float]]] = {}
    for m in table.measurements:
        if m.is_ok and m.batch_size == first and m.strategy not in refused:
            sums = layers.setdefault(m.strategy, {}).setdefault(
                m.seq_length, {"layer_seconds": 0.0, "layer_kept_bytes": 0.0}
            )
            share = kinds.share(m.operation)
            sums["layer_seconds"] += share * m.time_seconds
            if half_of(m.operation) == MLP or not recomputes(m.strategy):
                sums["layer_kept_bytes"] += share * m.kept_bytes
    return {"static_bytes": table.constants.static_bytes, "layers": layers}


def _print(table: CostTable) -> None:
    from rich.console import Console
    from rich.table import Table

    lengths = table.lengths()
    step = max(1, -(-len(lengths) // MAX_SHOWN))
    shown = lengths[::-1][::step][::-1]  # the longest, and every so many before it
    layers = summary(table)["layers"]
    slowest = max((row[s]["layer_seconds"] for row in layers.values() for s in shown), default=0)
    unit, factor = ("s", 1.0) if slowest >= MAX_MS_SECONDS else ("ms", 1e3)
    of = _of(table.description)
    rows = Table(title=f"simulated {unit} of a layer, forward and backward; {of}")
    rows.add_column("strategy", no_wrap=True)
    for s in shown:
        rows.add_column(format_count(s), justify="right", no_wrap=True)
    rows.add_column("MiB kept", justify="right")
    for strategy, by_length in layers.items():
        cells = [number_text(factor * by_length[s]["layer_seconds"]) for s in shown]
        kept = by_length[shown[-1]]["layer_kept_bytes"] / 2**20
        rows.add_row(strategy, *cells, f"{kept:.0f}")
    Console().print(rows)
    refused = {m.strategy: m.status for m in table.measurements if not m.is_ok}
    of_rows = {f"{m.strategy}, packed rows": m.status for m in table.rows if not m.is_ok}
    for strategy, status in (refused | of_rows).items():
        click.echo(f"{strategy}: {status}")


def number_text(value: float) -> str:
    """With four digits, or all of those before the point: 0.06525, 44.78, 12167."""
    decimals = 3 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{max(0, decimals)}f}"


def _of(d) -> str:
    return f"{d.p} x {d.hardware.name}, {d.interconnect}, {d.dtype}, {d.attention_mask}"
