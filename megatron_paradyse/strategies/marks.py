"""What a strategy must say that its attention heeds, before a model that has it may run it.

A strategy without the mark would compute another attention than the model's, in silence.
"""

from __future__ import annotations

from megatron_paradyse.errors import UserError
from megatron_paradyse.strategies.contract import Strategy

FLAG_OF_MARK = {
    "takes_offset": "--softmax-type",
    "takes_latents": "--multi-latent-attention",
    "takes_gate": "--attention-output-gate",
}


def check_heeds(strategy: Strategy, *, offset: bool, latents: bool, gate: bool) -> None:
    """UserError unless it heeds what the model has: an offset of the softmax, latents, a gate."""
    for (mark, flag), needed in zip(FLAG_OF_MARK.items(), (offset, latents, gate), strict=True):
        if needed and not getattr(strategy, mark):
            raise UserError(
                f"strategy {strategy.name} knows nothing of {flag} ({mark} is not set): name "
                "others by --paradyse-strategies"
            )
