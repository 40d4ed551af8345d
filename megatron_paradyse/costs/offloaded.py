"""Costs of +offload, which follow from those of +recompute and the rate of copies to the host."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_paradyse.costs.table import CostTable, OperationCosts


@dataclass(frozen=True)
class HostLink:
    """A rank's way to host memory while all ranks use theirs, in either direction.

    overlaps: copies to the host run beside kernels, as they do on a GPU.
    """

    bytes_per_second: float
    overlaps: bool


def host_link(table: CostTable) -> HostLink | None:
    """Of the machine of a table; None where its rate is not known."""
    rate = table.constants.host_bytes_per_second
    return None if rate is None else HostLink(rate, table.description.hardware.kind == "cuda")


def offloaded(recomputed: OperationCosts, link: HostLink) -> OperationCosts:
    """Of a half, or of a layer whose halves both recompute: its input waits in host memory.

    x: the bytes of the input, what +recompute keeps.

        forward   the copy of x begins with it, and it ends when both have ended; the caller holds x
                  meanwhile, so that the peak is that of +recompute
        backward  waits for x to come back, and holds it
    """
    x = recomputed.kept_bytes
    copy = x / link.bytes_per_second
    forward = recomputed.forward_seconds
    return OperationCosts(
        forward_seconds=max(forward, copy) if link.overlaps else forward + copy,
        backward_seconds=recomputed.backward_seconds + copy,
        kept_bytes=0,
        forward_bytes=recomputed.forward_bytes + x,
        backward_bytes=recomputed.backward_bytes + x,
    )
