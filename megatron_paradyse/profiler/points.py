"""What is measured, in which order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_paradyse.costs.layers import LAYER, MLP, half_of
from megatron_paradyse.costs.table import (
    EMBEDDING,
    HEAD,
    LAYER_OPERATIONS,
    MODEL,
    OOM,
    Measurement,
)
from megatron_paradyse.errors import UserError
from megatron_paradyse.profiler.lengths import (
    COUNT,
    check_lengths,
    default_lengths,
    lengths_between,
)
from megatron_paradyse.strategies import (
    RECOMPUTE,
    base_name,
    parse_strategy_name,
    shares_mlp,
    singles,
    strategy_names,
    with_names_of_costs,
)

QUICK_COUNT = 4  # lengths


@dataclass(frozen=True)
class Options:
    """What the user asked for; None means the default that profiling finds.

    lengths are timed; at bytes_lengths only bytes are measured. quick: by default fewer lengths,
    none for bytes only; halves of layers without the whole as a check. packed: attention on packed
    rows too.
    """

    output: str
    lengths: tuple[int, ...] | None = None
    bytes_lengths: tuple[int, ...] | None = None
    max_length: int | None = None
    batch_sizes: tuple[int, ...] = (1,)
    strategies: tuple[str, ...] | None = None
    budget_seconds: float | None = None
    memory_bytes: int | None = None
    seconds_per_point: float = 0.12
    agree_seconds: float = 120.0
    quick: bool = False
    packed: bool = False


@dataclass(frozen=True)
class Point:
    strategy: str
    operation: str
    seq_length: int
    batch_size: int
    is_timed: bool = True

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.strategy, self.operation, self.seq_length, self.batch_size

    @property
    def weight(self) -> float:
        """Roughly in proportion to its seconds, for the time left."""
        fixed = 1024 if self.is_timed else 256
        return self.batch_size * self.seq_length * (1 + self.seq_length / 8192) + fixed


def choose_lengths(options: Options, seq_length: int, *, p: int) -> dict[int, bool]:
    """The lengths to profile, ascending, and whether each is timed."""
    if options.lengths:
        timed = check_lengths(options.lengths, p=p)
    else:
        count = QUICK_COUNT if options.quick else COUNT
        longest = seq_length if options.max_length is None else options.max_length
        timed = default_lengths(longest, p=p, count=count)
    others: tuple[int, ...] = ()
    if options.bytes_lengths is None and not options.quick:
        others = lengths_between(timed, p=p)
    elif options.bytes_lengths is not None:
        others = check_lengths(options.bytes_lengths, p=p)
    return {s: s in timed for s in sorted({*timed, *others})}


def points(
    lengths: Mapping[int, bool],
    batch_sizes: Sequence[int],
    strategies: Sequence[str],
    operations: Sequence[str] = LAYER_OPERATIONS,
    *,
    edges: Sequence[str] = (EMBEDDING, HEAD),
    check_layers: bool = True,
) -> Iterator[Point]:
    """Short ones first, so that longer ones can be foreseen; lengths and whether each is timed.

    operations: of layers; edges: of the model. The layer as a whole is a check, at every other
    timed length of the shorter half: it follows from its halves, under +recompute too
    (costs/recomputed.py).
    """
    timed = [s for s in lengths if lengths[s]]
    checked = timed[: (len(timed) + 1) // 2 + 1 : 2] if check_layers else []
    for b in batch_sizes:
        for s, is_timed in lengths.items():
            for edge in edges:
                yield Point(MODEL, edge, s, b, is_timed)
            for strategy in singles(strategies):
                for operation in operations:
                    if half_of(operation) != LAYER or s in checked:
                        yield Point(strategy, operation, s, b, is_timed)


def like_it(
    measurement: Measurement, strategies: Sequence[str], *, switches: bool
) -> list[Measurement]:
    """The same of those of `strategies` after its own that run its operation by the same code.

    Of an MLP those that share its functions; of what does not switch, all. With +recompute, with
    +offload or with neither, as its own. None of what could not run: its strategy may refuse it.
    """
    own = measurement.strategy
    if own == MODEL or not (measurement.is_ok or measurement.status == OOM):
        return []
    suffix = own.removeprefix(base_name(own))
    alike = [name for name in singles(strategies) if name.removeprefix(base_name(name)) == suffix]
    if switches:
        if half_of(measurement.operation) != MLP:
            return []
        alike = [name for name in alike if shares_mlp(own, name)]
    return [replace(measurement, strategy=name) for name in alike[alike.index(own) + 1 :]]


def strategies_to_profile(names: Sequence[str] | None) -> tuple[str, ...]:
    """The named strategies, and those whose costs theirs need; without names all, each with and
    without +recompute.

    The costs of +offload follow from these (costs/offloaded.py); named, it is measured.
    """
    if names is None:
        return tuple(name for base in strategy_names() for name in (base, base + RECOMPUTE))
    for name in names:
        parse_strategy_name(name)
    if not singles(names):
        raise UserError(
            f"--strategies {','.join(names)} runs no single document, from which the costs of "
            "packed ones follow: name megatron_cz too"
        )
    return with_names_of_costs(names)
