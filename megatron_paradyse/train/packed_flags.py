"""Which flags go with packed microbatches."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from megatron_paradyse.errors import UserError
from megatron_paradyse.policy import cost_policy_kind
from megatron_paradyse.settings import PACKED
from megatron_paradyse.strategies import PACKED_ONLY, base_name


def check_packed(
    args: argparse.Namespace, names: Iterable[str], *, only_megatron_ts: str | None
) -> None:
    """Before Megatron validates them; UserError for what cannot run.

    names: every strategy that the policy may choose; only_megatron_ts: a flag for which only
    Megatron's own attention will do, if there is one. Rows whose documents are in pieces go through
    this package's.
    """
    settings = args.paradyse_settings
    if settings.sequences != PACKED:
        alone = [name for name in names if base_name(name) in PACKED_ONLY]
        if alone and cost_policy_kind(settings) is None:
            raise UserError(
                f"{alone[0]} runs packed documents only: give --paradyse-sequences packed, or "
                "another strategy"
            )
        if settings.pack_tokens is not None:
            raise UserError(
                f"--paradyse-pack-tokens {settings.pack_tokens} with --paradyse-sequences "
                f"{settings.sequences}: leave it out, or give --paradyse-sequences packed"
            )
        return
    if settings.pack_tokens is None and cost_policy_kind(settings) is None:
        raise UserError(
            f"--paradyse-sequences packed with --paradyse-policy {settings.policy}, which predicts "
            "no seconds: give --paradyse-pack-tokens, such as 64K"
        )
    for name in ("micro_batch_size", "eval_micro_batch_size"):
        value = getattr(args, name)
        if value not in (1, None):
            flag = "--" + name.replace("_", "-")
            raise UserError(
                f"{flag} {value} with --paradyse-sequences packed, whose microbatches are one row "
                f"each: give {flag} 1"
            )
    if only_megatron_ts is not None:
        raise UserError(
            f"{only_megatron_ts} with --paradyse-sequences packed, whose documents only this "
            "package's attention takes apart: use --paradyse-sequences documents"
        )
    backend = getattr(args.attention_backend, "name", args.attention_backend)
    if backend in ("unfused", "local"):
        raise UserError(
            f"--attention-backend {backend} with --paradyse-sequences packed: its masks know no "
            "documents: leave --attention-backend out"
        )
    if settings.balance:
        raise UserError(
            "--paradyse-balance with --paradyse-sequences packed, which always balances: leave it "
            "out"
        )
