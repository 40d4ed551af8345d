"""What a table of costs is of: the model, the grid, the machine; and whether a run is alike."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_paradyse import __version__
from megatron_paradyse.costs.layers import (
    ATTENTION,
    LAYER,
    LayerKinds,
    half_of,
    layer_of,
    ranges_text,
)
from megatron_paradyse.edges.tiles import AUTO, OFF, automatic_tile
from megatron_paradyse.errors import UserError
from megatron_paradyse.strategies.sizes import HOLDINGS

CAUSAL = "causal"
MASKS = (CAUSAL, "bidirectional")
NORMS = ("layernorm", "rmsnorm")
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # by dtype
DEVICE_KINDS = ("cpu", "cuda")
ROTARY = ("rope", "yarn")  # position embeddings by angles
LATENT_ROTATED = "qk_pos_emb_head_dim"  # as a kind of attention tells it that is latent
SOURCES = ("measured", "stand-in", "simulated")
MAX_RANKS = 1 << 20
# Two devices of one name may differ by what driver and firmware reserve.
MEMORY_TOLERANCE = 0.02
OF_MODEL = (
    *("head_tile", "num_experts", "attention_dropout", "hidden_dropout", "attention_window"),
    *("mtp_num_layers", "halves"),
)
OPTIONAL_KEYS = (*OF_MODEL, "tiled_scores")  # the last is of the device
HALVES_KEY, HOLDINGS_KEY = "halves", "holdings"
OTHER_LAYERS = "other_layers"  # missing where there are none
# Of an attention in halves.
WINDOW, OUTPUT_GATE, HEAD_NORM, L2_NORM = "window", "output_gate", "qk_norm", "qk_l2_norm"
EXPERT_PARALLEL, EXPERT_TENSOR_PARALLEL = "expert_parallel", "expert_tensor_parallel"


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The transformer whose layer was measured; sizes are of the whole model, not of a rank.

    num_layers: those of multi-token prediction too, which come last.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    gated: bool
    vocab_size: int  # as padded for the grid
    normalization: str  # of NORMS
    biases: bool
    position_embedding: str  # "rope", "yarn", "learned", "none"


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of device, and how many of them the grid and its replicas used."""

    name: str
    kind: str  # "cpu" or "cuda"
    memory_bytes: int  # of one device
    num_devices: int


@dataclass(frozen=True, kw_only=True)
class Description:
    """All that the costs depend on.

    source: "measured" on the grid itself; "stand-in", one device in the place of rank r of p, with
        communication from a model; "simulated", without a device.
    versions: library name -> version.
    date: ISO 8601.
    head_tile: tokens of a tile of the loss head, or "off"; num_experts: 0 of a dense model;
    attention_dropout, hidden_dropout: whether there is any; attention_window: "none", or its size
        and whether all layers have it; mtp_num_layers: how many of the layers are of multi-token
        prediction; halves: of each kind of attention and MLP (see layers.py) what it has, numbers
        by name, such as the keys of its window; tiled_scores: whether attention of dropout or a
        window, where no flash kernel takes it, holds tiles of scores in memory; holdings: see
        strategies/sizes.py. Files of earlier versions do not tell these, which are then None.
    other_layers: see layers.py; none of a model whose layers are alike.
    """

    model: ModelShape
    p: int
    dtype: str  # "float32", "bfloat16", "float16"
    attention_mask: str
    attention_kernel: str
    hardware: Hardware
    interconnect: str
    versions: Mapping[str, str]
    source: str
    date: str
    package_version: str = field(default=__version__)
    head_tile: str | None = None
    num_experts: int | None = None
    attention_dropout: bool | None = None
    hidden_dropout: bool | None = None
    attention_window: str | None = None
    mtp_num_layers: int | None = None
    halves: Mapping[str, Mapping[str, int]] | None = None
    tiled_scores: bool | None = None
    holdings: int | None = HOLDINGS
    other_layers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("attention_mask", self.attention_mask, MASKS),
            ("hardware.kind", self.hardware.kind, DEVICE_KINDS),
            ("source", self.source, SOURCES),
        ):
            if value not in choices:
                raise UserError(f"{name} must be one of {', '.join(choices)}, got {value!r:.60}")
        tile = self.head_tile
        if tile not in (None, OFF) and not (tile.isascii() and tile.isdigit() and int(tile)):
            raise UserError(f'head_tile must be tokens above 0 or "{OFF}", got {tile!r:.40}')
        for name, count in _counts(self):
            if count < 1:
                raise UserError(f"{name} must be at least 1, got {count!r:.40}")
        if not 0 <= (self.mtp_num_layers or 0) < self.model.num_layers:
            raise UserError(
                f"mtp_num_layers must be at least 0 and fewer than the {self.model.num_layers} "
                f"layers, got {self.mtp_num_layers!r:.40}"
            )
        if self.p > MAX_RANKS:
            raise UserError(f"p must be at most {MAX_RANKS:,}, got {self.p!r:.40}")
        LayerKinds(self.model.num_layers, self.other_layers)  # UserError where they contradict

    @functools.cached_property
    def edge_tile_tokens(self) -> float:
        """Of a microbatch that fits into one tile of embedding and loss head; infinite without."""
        if self.p == 1 or self.head_tile == OFF:
            return math.inf
        if self.head_tile is None and self.dtype not in ELEMENT_BYTES:
            return math.inf
        return int(self.head_tile or tile_text(AUTO, self.model, p=self.p, dtype=self.dtype))

    @functools.cached_property
    def windows(self) -> dict[str, int]:
        """Of each kind of attention that has a window: the keys that a query sees."""
        names = [name for name in self.layer_kinds.halves() if half_of(name) == ATTENTION]
        found = {name: self.window(name) for name in names if self.attention_mask == CAUSAL}
        return {name: int(keys) for name, keys in found.items() if math.isfinite(keys)}

    @property
    def common_window(self) -> int | None:
        """Keys that a query sees, where every attention has that window."""
        names = [name for name in self.layer_kinds.halves() if half_of(name) == ATTENTION]
        return common_window(self.windows.get(name) for name in names)

    @property
    def latents(self) -> Mapping[str, int] | None:
        """What halves tell of latent attention, which all layers have or none."""
        return next((has for has in (self.halves or {}).values() if LATENT_ROTATED in has), None)

    @property
    def output_gate(self) -> bool:
        """Whether halves tell of a gate of the attention's output: all layers have one or none."""
        return any(OUTPUT_GATE in has for has in (self.halves or {}).values())

    @property
    def ranks(self) -> int:
        """That run a layer together, as halves tell: see ranks_together."""
        told = (
            (has.get(EXPERT_PARALLEL, 1), has.get(EXPERT_TENSOR_PARALLEL))
            for has in (self.halves or {}).values()
        )
        return math.lcm(self.p, *(ranks_together(self.p, *over) for over in told))

    @property
    def experts_shared(self) -> bool:
        """Whether experts lie over ranks of several replicas, as halves tell."""
        return self.ranks > self.p

    def has_experts(self, mlp: str) -> bool:
        """Whether an MLP has some; where halves do not tell, it may."""
        return (self.halves or {}).get(mlp, {}).get("experts") != 0

    @property
    def head_norm(self) -> str | None:
        """Of queries and keys, as halves tell of it; of latents there is another."""
        halves = () if self.latents is not None else (self.halves or {}).values()
        if any(has.get(HEAD_NORM) for has in halves):
            kind = self.model.normalization
            return kind if kind in NORMS else None
        return "l2" if any(has.get(L2_NORM) for has in halves) else None

    @property
    def rotated_channels(self) -> int:
        """Channels of a head that RoPE turns, at most."""
        if self.latents is not None:
            return self.latents[LATENT_ROTATED]
        return self.model.head_dim if self.model.position_embedding in ROTARY else 0

    def window(self, operation: str) -> float:
        """Keys that a query sees in an attention or a whole layer; infinite of what has none."""
        if half_of(operation) not in (ATTENTION, LAYER):
            return math.inf
        kind = self.layer_kinds.operations(layer_of(operation))
        attention = operation if half_of(operation) == ATTENTION else kind[0]
        return (self.halves or {}).get(attention, {}).get(WINDOW, math.inf)

    @functools.cached_property
    def layer_kinds(self) -> LayerKinds:
        """Which operations are those of which layer."""
        return LayerKinds(self.model.num_layers, self.other_layers)


def ranks_together(p: int, experts: int, parts: int | None) -> int:
    """That run a layer together: p, or those over which experts lie, by whole replicas.

    experts: of --expert-model-parallel-size; parts: of --expert-tensor-parallel-size, p where it is
    not given. Megatron numbers the ranks of an expert first, then those of experts: as many as one
    replica has are its own.
    """
    return math.lcm(p, experts * (parts or p))


def common_window(windows: Iterable[int | None]) -> int | None:
    """The window of all layers; None where there is another, or a layer without."""
    found = set(windows)
    return found.pop() if len(found) == 1 else None


def _counts(d: Description) -> Iterator[tuple[str, int]]:
    yield "p", d.p
    for part, values in (("model", d.model), ("hardware", d.hardware)):
        for f in dataclasses.fields(values):
            value = getattr(values, f.name)
            if isinstance(value, int) and not isinstance(value, bool):
                yield f"{part}.{f.name}", value


def tile_text(head_tile: str | int, model: ModelShape, *, p: int, dtype: str) -> str:
    """A setting of the loss head as descriptions have it: tokens of a tile, or "off".

    UserError for a dtype that has no size here.
    """
    if head_tile != AUTO:
        return str(head_tile)
    if dtype not in ELEMENT_BYTES:
        raise UserError(f"dtype must be one of {', '.join(ELEMENT_BYTES)}, got {dtype!r:.40}")
    shard, element_bytes = model.vocab_size // p, ELEMENT_BYTES[dtype]
    return str(automatic_tile(h=model.hidden_size, vocab_shard=shard, element_bytes=element_bytes))


def differences(
    of_file: Description,
    of_run: Description,
    *,
    places: tuple[str, str] = ("the file", "the run"),
) -> list[str]:
    """What differs and would make the file's costs wrong for the run, as "key: file, run".

    What one of them does not tell is not compared, but for what no version had that did not tell
    it: multi-token prediction, latent attention and a gate of the output. places: where the two
    are, for the text.
    """
    here, there = places
    if None in (of_file.halves, of_run.halves):
        of_file, of_run = map(_with_later_halves, (of_file, of_run))
    of_file, of_run = (
        dataclasses.replace(d, mtp_num_layers=d.mtp_num_layers or 0) for d in (of_file, of_run)
    )
    ours, theirs = _comparable(of_file), _comparable(of_run)
    found = []
    for key in [*ours, *(key for key in theirs if key not in ours)]:
        mine, other = ours.get(key, "none"), theirs.get(key, "none")
        if key == "hardware.memory_bytes" and _close(mine, other):
            continue
        if key in OPTIONAL_KEYS and None in (mine, other):
            continue
        if key == "hardware.num_devices" and of_run.hardware.kind == "cuda":
            continue  # replicas of the grid on GPUs of their own; on a CPU they share the cores
        if mine != other:
            found.append(f"{key}: {mine} in {here}, {other} in {there}")
    return found


def _with_later_halves(d: Description) -> Description:
    """Only with what versions that told of no halves refused: untold, there was none."""
    later = (OUTPUT_GATE, LATENT_ROTATED)
    return dataclasses.replace(
        d,
        halves={
            name: {key: number for key, number in has.items() if key in later}
            for name, has in (d.halves or {}).items()
        },
    )


def _comparable(d: Description) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in dataclasses.asdict(d).items():
        if key in ("source", "date", "package_version", HOLDINGS_KEY):
            continue
        if key == OTHER_LAYERS:
            values |= {f"layers with {name}": ranges_text(layers) for name, layers in value.items()}
        elif key == HALVES_KEY:
            for name, has in (value or {}).items():
                values |= {f"{name}.{inner}": number for inner, number in has.items()}
        elif isinstance(value, dict):
            values |= {f"{key}.{inner}": value[inner] for inner in value}
        else:
            values[key] = value
    return values


def _close(a: Any, b: Any) -> bool:
    return abs(a - b) <= MEMORY_TOLERANCE * max(a, b)


def check_compatible(
    of_file: Description, of_run: Description, *, accept: bool = False
) -> list[str]:
    """Warnings to log and report, or UserError with everything that differs in one line.

    accept: the user knows; the differences become warnings.
    """
    found = differences(of_file, of_run)
    if found and not accept:
        raise UserError(
            f"these costs are not of this run: {'; '.join(found)}: profile this configuration, "
            "or plan by them all the same with --paradyse-accept-costs"
        )
    warnings = [f"costs of another configuration accepted: {fault}" for fault in found]
    if of_file.source != "measured":
        warnings.append(f"costs are {of_file.source}, not measured on this machine")
    if of_file.package_version != of_run.package_version:
        warnings.append(
            f"costs are from megatron_paradyse {of_file.package_version}, "
            f"this is {of_run.package_version}"
        )
    return warnings
