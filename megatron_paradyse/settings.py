"""Everything that the user sets, in one dataclass: flags over a YAML file over defaults.

Its fields are the one list of settings: flags (train/arguments.py), the checks of YAML files and
their JSON Schema (schema_command.py) are made from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from megatron_paradyse import setting_kinds as kinds
from megatron_paradyse.data.choices import LONG_DOCUMENT_CHOICES, ORDER_CHOICES
from megatron_paradyse.errors import UserError, did_you_mean
from megatron_paradyse.setting_kinds import Kind, Restriction
from megatron_paradyse.yaml_file import compose_yaml, decimal_value_of, refuse_twice

GRANULARITY_CHOICES = ("operation", "layer", "sequence")
DOCUMENTS, PACKED, FIXED = "documents", "packed", "fixed"  # values of sequences
RUN_FILE_KEY = "paradyse"  # of a file for megatron-paradyse train
BY_COST = (
    "layers",
    "granularity",
    "cost_model",
    "accept_costs",
    "mixing_gain",
    "host_memory",
    "memory_margin",
    "over_budget",
    "smoothing",
    "balance",
    "correction",
    "profile",
    "offload",
)  # settings of policies that choose by cost; others refuse them


def _setting(default: Any, kind: Kind, about: str, *, off: str | None = None) -> Any:
    """A field. about: its help; off: that of --paradyse-no-..., where the default is true."""
    return dataclasses.field(default=default, metadata={"kind": kind, "about": about, "off": off})


@dataclass(frozen=True)
class Settings:
    """Values of the --paradyse-* flags and of the YAML keys of the same name."""

    policy: str = _setting(
        "optimal",
        kinds.POLICY,
        "optimal (default): the fastest plan within the memory budget, with measured costs a mix "
        "of strategies only where it is predicted at least 5% faster than one strategy alone "
        "(mixing_gain); heuristic: the paper's Algorithm 1; fixed:STRATEGY: one strategy "
        "everywhere; plan:FILE: a hand-written plan; random:SEED: one drawn for every microbatch",
    )
    strategies: tuple[str, ...] | None = _setting(
        None, kinds.STRATEGIES, "comma-separated strategies that plans may use (default: all)"
    )
    layers: Mapping[int, Restriction] | None = _setting(
        None, kinds.LAYERS, "what single layers may use, by number or range (only in YAML)"
    )
    cost_model: str | None = _setting(
        None,
        kinds.FILE,
        "the cost file that megatron-paradyse profile and fit wrote (default: one made at the "
        "start, in about a minute on an idle machine, and kept for the next start)",
    )
    profile: bool = _setting(
        True,
        kinds.SWITCH,
        "without a cost file measure at the start, for about a minute on an idle machine; given up "
        "after 300 s (default)",
        off="without a cost file measure nothing at the start: simulate, if the GPU is known",
    )
    accept_costs: bool = _setting(
        False,
        kinds.SWITCH,
        "use a cost file of another configuration or of simulated costs; differences are warned of",
    )
    granularity: str = _setting(
        "operation",
        kinds.choice(*GRANULARITY_CHOICES),
        "operation: attention and MLP apart (default); layer: one strategy per layer; sequence: "
        "one per microbatch",
    )
    mixing_gain: float | None = _setting(
        None,
        kinds.SHARE,
        "optimal mixes strategies only where the plan is predicted to take this share less time "
        "than the fastest plan of one strategy that fits (default: 0.05 with measured costs, 0 "
        "with simulated ones)",
    )
    memory_budget: str | None = _setting(
        None,
        kinds.SIZE,
        "memory per rank, such as 76GiB (default on a GPU: what is free at the start, less a "
        "reserve); on a CPU it is enforced, by the bytes of tensors alive",
    )
    host_memory: str | None = _setting(
        None,
        kinds.SIZE,
        "host memory per rank that +offload may take, such as 64GiB (default: 80% of free host "
        "memory at the start, divided among the node's ranks)",
    )
    memory_margin: float = _setting(
        0.03, kinds.SHARE, "how far a real peak may be above its estimate (default 0.03)"
    )
    over_budget: str = _setting(
        "warn",
        kinds.choice("warn", "refuse"),
        "where no plan fits: warn and run the one of least peak (default), or refuse",
    )
    smoothing: float | None = _setting(
        None,
        kinds.SHARE,
        "keep the previous plan when it is slower by at most this share (default: 0.05 for "
        "heuristic, off for optimal)",
    )
    balance: bool = _setting(
        False,
        kinds.SWITCH,
        "distribute the documents of a global batch over the data-parallel replicas so that their "
        "predicted times are even",
    )
    correction: bool = _setting(
        True,
        kinds.SWITCH,
        "what training measures corrects the cost file (default)",
        off="plan by the cost file alone: what training measures does not correct it",
    )
    offload: bool | None = _setting(
        None,
        kinds.SWITCH,
        "plans may keep the inputs of layers in host memory, +offload (default: with costs of a "
        "GPU)",
        off="no plan keeps the inputs of layers in host memory",
    )
    verify_plans: bool = _setting(
        False,
        kinds.SWITCH,
        "compare the ranks' plans before every microbatch, by a collective",
    )
    watchdog_seconds: float = _setting(
        300.0,
        kinds.SECONDS,
        "if a rank gives no sign of life for so long, end with a line that names it and the "
        "collective that waits for it (default 300); 0: do not watch",
    )
    trace: str | None = _setting(None, kinds.FILE, "write JSON lines per microbatch and iteration")
    log: str = _setting(
        "megatron",
        kinds.choice("megatron", "compact"),
        "megatron: lengths and tokens/s at the end of Megatron's line per iteration (default); "
        "compact: a short line instead",
    )
    sequences: str = _setting(
        DOCUMENTS,
        kinds.choice(DOCUMENTS, PACKED, FIXED),
        "documents: one document is one sequence of its own length (default); packed: many short "
        "documents are one microbatch; fixed: Megatron's own data of --seq-length",
    )
    pack_tokens: int | None = _setting(
        None,
        kinds.TOKENS,
        "tokens of a packed microbatch at most, such as 64K (default: the most predicted tokens "
        "per second within memory, where the policy chooses by cost)",
    )
    spread: int = _setting(
        1,
        kinds.REPLICAS,
        "over how many data-parallel replicas a long document may lie, with packed: those that do "
        "not fit on one replica, and those for which others would wait (default 1)",
    )
    order: str = _setting(
        "shuffled",
        kinds.choice(*ORDER_CHOICES),
        "order of the documents in an epoch: shuffled (default), short-to-long, or bucketed: "
        "global batches of like lengths",
    )
    long_documents: str = _setting(
        "split",
        kinds.choice(*LONG_DOCUMENT_CHOICES),
        "documents beyond --seq-length: split (default), so that every token is still predicted "
        "once, truncate or refuse",
    )
    mask_token: int | None = _setting(
        None,
        kinds.TOKEN,
        "the id of a masked token in a BERT's input (default: the tokenizer's mask token)",
    )
    head_tile: str | int = _setting(
        "auto",
        kinds.HEAD_TILE,
        "loss head and embedding in tiles of so many tokens (such as 4K), auto: tiles of about "
        "256 MiB (default), or off: Megatron's own",
    )


FIELDS = {field.name: field for field in dataclasses.fields(Settings)}
WITHOUT_FLAG = ("layers",)  # settings that only a YAML file can give


def load_yaml_settings(path: str, flag: str = "--paradyse-config") -> dict[str, Any]:
    """The settings that a YAML file gives, checked against the fields of Settings.

    Of a file for `megatron-paradyse train`, those under its key `paradyse`. Raises UserError with
    the file, the line and the remedy; flag: what named the file.
    """
    root = compose_yaml(path, flag)
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{path}:1: expected 'key: value' lines")
    refuse_twice(path, root)
    inner = next((value for key, value in root.value if key.value == RUN_FILE_KEY), None)
    return settings_of(path, root if inner is None else inner)


def settings_of(path: str, node: yaml.Node) -> dict[str, Any]:
    """The settings that a mapping inside a YAML file gives, as load_yaml_settings."""
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{path}:{node.start_mark.line + 1}: expected 'key: value' lines")
    settings: dict[str, Any] = {}
    for key_node, value_node in node.value:
        where = f"{path}:{key_node.start_mark.line + 1}"
        key = key_node.value
        if not isinstance(key_node, yaml.ScalarNode) or key not in FIELDS:
            near = did_you_mean(str(key), FIELDS)
            raise UserError(
                f"{where}: unknown key {key!r:.60}: {near}known are {', '.join(sorted(FIELDS))}"
            )
        if key in settings:
            raise UserError(f"{where}: key {key!r} is given twice: keep one")
        refuse_twice(path, value_node)
        value = decimal_value_of(value_node, f"{where}: {key}")
        if value is None:
            raise UserError(f"{where}: {key} is empty: give a value, or leave the line out")
        if isinstance(value, dict):  # each of its lines, to name the one that is wrong
            lines = {node.value: node.start_mark.line + 1 for node, _ in value_node.value}
            for inner, of_line in value.items():
                line = lines.get(str(inner), key_node.start_mark.line + 1)
                _checked(key, {inner: of_line}, f"{path}:{line}: {key}")
        settings[key] = _checked(key, value, f"{where}: {key}")
    return settings


def make_settings(
    flags: dict[str, Any], config_path: str | None, *, prefix: str = "--paradyse-"
) -> Settings:
    """Flags that were given win over the YAML file, which wins over the defaults.

    prefix: of the flags, for errors.
    """
    values = {} if config_path is None else load_yaml_settings(config_path, f"{prefix}config")
    for name, value in flags.items():
        if value is not None:
            values[name] = _checked(name, value, f"{prefix}{name.replace('_', '-')}")
    return Settings(**values)


def _checked(name: str, value: Any, where: str) -> Any:
    """The value in the type of its field, or UserError."""
    return FIELDS[name].metadata["kind"].check(value, where)
