"""Devices as their makers describe them, and how much of that their kernels reach.

Rates are dense (no sparsity). Where a vendor gives a memory in GB, devices report about as many
GiB. A user's own device is a YAML mapping with the keys of Device; what is not known of it may be
taken from a named one with `like: a100-80g`.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, fields
from typing import Any

from megatron_paradyse.errors import UserError
from megatron_paradyse.yaml_file import Entry, compose_yaml, entry_of

GIB = 1 << 30
PCIE4, PCIE5 = 32e9, 64e9  # 16 lanes, bytes per second in one direction
MEMORY_TOLERANCE = 0.1  # a driver takes its share, and some count GB
CARD = re.compile(r"\b(PCIe|NVL)\b", re.IGNORECASE)  # in the name of a GPU that is no SXM module


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator; efficiencies are shares of the rates that large kernels reach.

    half_flops, float32_flops: multiply-adds count as 2. attention_*_efficiency: of a fused
    attention kernel with head dim 128; narrow_head_factor: what of that is left with head dim 64
    or less. host_bytes_per_second: of the link to the host, one way; host_efficiency: the share of
    it that copies to and from pinned memory reach while all devices copy. host_seconds_per_kernel:
    in which Python and PyTorch get from one operator to the next, strategies' own code included; so
    that METP's layer at 8K tokens takes what it took on an H200's host (docs/simulator.md).
    """

    name: str
    memory_bytes: int
    half_flops: float  # bfloat16 and float16 on tensor cores
    float32_flops: float  # without TF32, as PyTorch multiplies by default
    bandwidth_bytes_per_second: float
    num_multiprocessors: int
    interconnect: str  # a name of network.py
    matmul_efficiency: float = 0.75
    attention_forward_efficiency: float = 0.70
    attention_backward_efficiency: float = 0.60
    narrow_head_factor: float = 0.85
    bandwidth_efficiency: float = 0.80
    host_bytes_per_second: float = PCIE4
    host_efficiency: float = 0.40
    host_seconds_per_kernel: float = 28e-6
    host_seconds_per_collective: float = 40e-6
    source: str = "the user"

    @property
    def host_rate(self) -> float:
        """Bytes per second to or from host memory, while every device copies."""
        return self.host_bytes_per_second * self.host_efficiency


def _nvidia(name: str, memory_gib: int, half_tflops: float, gbytes: float, **more: Any) -> Device:
    return Device(
        name=name,
        memory_bytes=memory_gib * GIB,
        half_flops=half_tflops * 1e12,
        bandwidth_bytes_per_second=gbytes * 1e9,
        **more,
    )


_AMPERE: dict[str, Any] = {"float32_flops": 19.5e12, "num_multiprocessors": 108}
# FlashAttention 2, which the strategies call, does not use Hopper's newer instructions.
_HOPPER: dict[str, Any] = {
    "float32_flops": 67e12,
    "num_multiprocessors": 132,
    "host_bytes_per_second": PCIE5,
    "matmul_efficiency": 0.70,
    "attention_forward_efficiency": 0.37,
    "attention_backward_efficiency": 0.33,
}
_A100 = "NVIDIA A100 Tensor Core GPU datasheet (SXM)"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet (SXM)"

DEVICES: dict[str, Device] = {
    "a100-40g": _nvidia(
        "A100-SXM4-40GB", 40, 312, 1555, interconnect="nvlink3", source=_A100, **_AMPERE
    ),
    "a100-80g": _nvidia(
        "A100-SXM4-80GB", 80, 312, 2039, interconnect="nvlink3", source=_A100, **_AMPERE
    ),
    "a800-80g": _nvidia(
        "A800-SXM4-80GB",
        80,
        312,
        2039,
        interconnect="nvlink3-a800",
        source="NVIDIA A800 datasheet (SXM): the A100's rates, NVLink 400 GB/s",
        **_AMPERE,
    ),
    "h100-80g": _nvidia(
        "H100-SXM5-80GB", 80, 989.4, 3350, interconnect="nvlink4", source=_H100, **_HOPPER
    ),
    "h800-80g": _nvidia(
        "H800-SXM5-80GB",
        80,
        989.4,
        3350,
        interconnect="nvlink4-h800",
        source="NVIDIA H800 datasheet (SXM): the H100's rates, NVLink 400 GB/s",
        **_HOPPER,
    ),
    "h200": _nvidia(
        "H200-SXM-141GB",
        141,
        989.4,
        4800,
        interconnect="nvlink4",
        source="NVIDIA H200 Tensor Core GPU datasheet (SXM)",
        **_HOPPER,
    ),
    "b200": _nvidia(
        "B200-SXM-180GB",
        180,
        2250,
        7700,
        interconnect="nvlink5",
        source="NVIDIA HGX B200 datasheet, an eighth of the board; attention assumed",
        **(
            _HOPPER
            | {
                "float32_flops": 75e12,
                "num_multiprocessors": 148,
                "attention_forward_efficiency": 0.20,
                "attention_backward_efficiency": 0.18,
            }
        ),
    ),
    "l40s": _nvidia(
        "L40S-48GB",
        48,
        362.05,
        864,
        interconnect="pcie4",
        source="NVIDIA L40S datasheet; attention assumed",
        float32_flops=91.6e12,
        num_multiprocessors=142,
        attention_forward_efficiency=0.60,
        attention_backward_efficiency=0.50,
    ),
}


def known_name(full_name: str, memory_bytes: int) -> str | None:
    """The name above of a GPU that calls itself so, such as "NVIDIA H200"; None for others.

    Of cards too, "NVIDIA H100 PCIe" or "NVIDIA H200 NVL": they have other rates, and NVLink between
    some of them at most.
    """
    if CARD.search(full_name):
        return None
    for name, device in DEVICES.items():
        kind = name.partition("-")[0].upper()
        near = abs(memory_bytes / device.memory_bytes - 1) < MEMORY_TOLERANCE
        if near and re.search(rf"\b{kind}\b", full_name):
            return name
    return None


def find_device(text: str) -> Device:
    """A named device, or the one that a YAML file describes."""
    if text in DEVICES:
        return DEVICES[text]
    if not text.endswith((".yaml", ".yml")):
        raise UserError(
            f"no GPU named {text!r}: use one of {', '.join(DEVICES)}, or a YAML file of your own"
        )
    keys = ("like", *(f.name for f in fields(Device)))
    entry = entry_of(text, compose_yaml(text), "a GPU", keys)
    values: dict[str, Any] = {}
    if "like" in entry.values:
        like = entry.text("like")
        del entry.values["like"]
        if like not in DEVICES:
            raise entry.error("like", f"no GPU named {like!r}: use one of {', '.join(DEVICES)}")
        values = {f.name: getattr(DEVICES[like], f.name) for f in fields(Device)}
        values["source"] = f"the user, like {like}"
    values |= {name: _checked(entry, name) for name in entry.values}
    required = [f.name for f in fields(Device) if f.name not in values and f.default is MISSING]
    if required:
        raise entry.error(None, f"lacks {', '.join(required)}: add them, or like: a100-80g")
    return Device(**values)


def _checked(entry: Entry, name: str) -> Any:
    kinds = {f.name: str(f.type) for f in fields(Device)}
    if kinds[name] == "str":
        return entry.text(name)
    if name == "memory_bytes":
        return entry.size(name)
    if kinds[name] == "int":
        number = entry.number(name, low=1, high=1e6)
        if not number.is_integer():
            raise entry.error(name, f"expected a whole number, got {number:g}")
        return int(number)
    high = 1.0 if name.endswith(("_efficiency", "_factor")) else 1e18
    return entry.number(name, low=0, high=high, above=not name.startswith("host_seconds"))
