"""A rank with packed rows through many plans; stock Megatron runs their documents one by one.

    compare_rows <Megatron flags>

The two models have the same parameters. Rows come as RowParams, their tokens wherever the shards
say, and as Megatron's own packed sequences with and without padding between documents.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch import Tensor

from megatron_paradyse.hook import attach_hooks
from megatron_paradyse.microbatch_params import RowParams
from megatron_paradyse.model_edges import attach_edges
from megatron_paradyse.packing.row import Row, contiguous
from megatron_paradyse.packing.traffic import microbatch_of
from megatron_paradyse.plan import LayerChoice, Plan
from megatron_paradyse.strategies import strategy_names, takes
from megatron_paradyse.train import plugin
from megatron_paradyse.train.loop_counts import loop_counts
from megatron_paradyse.train.model_layers import count_layers
from tests.packing.rows import SPREAD
from tests.train.compare_plans import ChosenPolicy
from tests.train.comparing import compare

SPREAD_OVER = {
    2: Row((13, 4, 1, 2), (((0, 4), (10, 13), (17, 18), (20, 24)), ((4, 10), (13, 17), (18, 20)))),
    4: SPREAD,
}


@dataclass
class Case:
    """A microbatch of documents: its parameters, and the position of every row (s: padding)."""

    params: PackedSeqParams
    row: Row  # what the hook makes of it

    @property
    def rows(self) -> list[int]:
        return [i for shard in self.row.shards for start, stop in shard for i in range(start, stop)]


def cases(p: int, device: torch.device) -> dict[str, Case]:
    lengths = (9, 1, 8, 2)
    rows = {
        "mid-shard": contiguous(lengths, p, alignment=24),
        "in shards": contiguous((5, 1, 6, 3, 3, 6), p, alignment=24),
        "spread": SPREAD_OVER[p],
    }
    made = {name: Case(RowParams(row=row), row) for name, row in rows.items()}
    cumulative = torch.tensor([0, 9, 10, 18, 24], dtype=torch.int32, device=device)
    packed = {"qkv_format": "thd", "max_seqlen_q": 9, "max_seqlen_kv": 9}
    packed |= {"cu_seqlens_q": cumulative, "cu_seqlens_kv": cumulative}
    made["sft"] = Case(PackedSeqParams(**packed), contiguous((9, 1, 8, 6), p))
    padded = torch.tensor([0, 10, 12, 20, 32], dtype=torch.int32, device=device)
    packed |= {"cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": padded}
    pieces = [(0, 9), (24, 25), (9, 10), (25, 26), (10, 18), (18, 24), (26, 32)]
    made["sft padded"] = Case(PackedSeqParams(**packed), _cut((9, 1, 8, 6), pieces, p))
    return made


def _cut(lengths, pieces, p: int) -> Row:
    positions = [i for start, stop in pieces for i in range(start, stop)]
    size = len(positions) // p
    chunks = [positions[i * size : (i + 1) * size] for i in range(p)]
    return Row(lengths, tuple(tuple((i, i + 1) for i in chunk) for chunk in chunks))


def plans(case: Case, p: int, num_layers: int) -> dict[str, Plan]:
    """Mixes over layers and operations in which each strategy that takes the row attends once."""
    microbatch = microbatch_of(case.row)
    bases = [name for name in strategy_names(packed=True) if takes(name, microbatch, p)]
    names = [name for base in bases for name in (base, base + "+recompute")]
    made = {}
    for first in range(0, len(names), num_layers):
        attention, mlp = itertools.cycle(names), itertools.cycle(names[::-1])
        pairs = list(itertools.islice(zip(attention, mlp, strict=False), first, first + num_layers))
        plan = Plan({number: LayerChoice(*pair) for number, pair in enumerate(pairs, 1)})
        made[plan.runs()] = plan
    return made


def main() -> None:
    plugin.install()
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import training
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.models.gpt import GPTModelBuilder, default_layer_spec

    from megatron_paradyse.train.batch import device_of_rank

    args = parse_and_validate_args()
    training.initialize_megatron()
    groups = ProcessGroupCollection.use_mpu_process_groups()

    def build(spec=None):
        config = gpt_config_from_args(args)
        if spec is not None:
            config.transformer_layer_spec = spec
        config.finalize()
        return GPTModelBuilder(config).build_model(groups).to(device_of_rank())

    stock, model = build(default_layer_spec), build()
    for mine, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        mine.data.copy_(theirs.data)
    policy, p = ChosenPolicy(), groups.tp.size()
    attach_hooks([model], policy_of=lambda _: policy, counts=loop_counts)
    attach_edges([model], head_tile=args.paradyse_settings.head_tile, positions_restart=True)
    text = torch.randint(args.vocab_size, (64,), generator=torch.Generator().manual_seed(1))
    text = text.to(device_of_rank())
    num_layers = count_layers(args)
    for name, case in cases(p, text.device).items():
        expected = _results(stock, _losses_one_by_one(stock, case, text, p), groups.tp)
        for label, plan in plans(case, p, num_layers).items():
            policy.choose([plan])
            got = _results(model, _losses_of_row(model, case, text), groups.tp)
            compare(f"{name}, {label}", expected, got)


def _losses_of_row(model, case: Case, text: Tensor) -> Iterator[Tensor]:
    """Of every document's tokens, in the order of positions."""
    rows, num_tokens = torch.tensor(case.rows, device=text.device), case.row.num_tokens
    places = torch.tensor(case.row.places(by_rows=True), device=text.device)
    losses = model(
        text[rows][None], places[None], None, labels=text[rows + 1][None],
        loss_mask=(rows < num_tokens).float()[None], packed_seq_params=case.params,
    )  # fmt: skip
    MTPLossAutoScaler.set_loss_scale(torch.ones((), device=text.device))
    yield losses[0][rows.argsort()][:num_tokens]


def _losses_one_by_one(model, case: Case, text: Tensor, p: int) -> Iterator[Tensor]:
    """The same in turn. A prediction of more tokens weighs, per token, as many as the decoder's
    tokens over as many as are predicted; of Megatron's packed sequences, of all the row.
    """
    row = case.row
    of_row = row.num_tokens / (row.num_tokens - len(row.lengths))
    for start, stop in row.documents:
        end = start - (start - stop) // p * p  # padded, as sequence parallelism wants it
        positions = torch.arange(end - start, device=text.device)[None]
        losses = model(
            text[None, start:end], positions, None, labels=text[None, start + 1 : end + 1],
            loss_mask=(positions < stop - start).float(),
        )  # fmt: skip
        alone = (stop - start) / max(stop - start - 1, 1)
        scale = 1.0 if isinstance(case.params, RowParams) else of_row / alone
        MTPLossAutoScaler.set_loss_scale(torch.tensor(scale, device=text.device))
        yield losses[0, : stop - start]


def _results(model, losses: Iterable[Tensor], group) -> dict[str, Tensor]:
    """The losses, and the gradient of every parameter, complete over the group."""
    model.zero_grad()
    done: list[Tensor] = []
    for part in losses:
        first = sum(map(len, done))
        weights = 0.5 + torch.arange(first, first + len(part), device=part.device) / 24
        (part * weights).sum().backward()
        done.append(part.detach())
    results = {"losses": torch.cat(done)}
    for name, parameter in model.named_parameters():
        grad = parameter.grad.clone()
        if getattr(parameter, "sequence_parallel", False):
            torch.distributed.all_reduce(grad, group=group)
        results[name] = grad
    return results
