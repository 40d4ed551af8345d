"""What travels to the layers with a microbatch, in the place of Megatron's packed_seq_params.

Megatron's activation recomputation closes over that argument, so a layer that runs again in the
backward sees the plan of its own microbatch, whatever has been planned since.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_paradyse.errors import UserError
from megatron_paradyse.packing.cumulative import row_of_cumulative
from megatron_paradyse.packing.row import Row
from megatron_paradyse.plan import Plan
from megatron_paradyse.strategies.collectives import all_gather
from megatron_paradyse.strategies.host import to_device

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_paradyse.strategies.contract import Wide


@dataclass
class RowParams(PackedSeqParams):
    """How a packed microbatch reaches the model: its row, for which max_seqlen_q is the longest.

    wide: the groups of a wide row.
    """

    row: Row | None = None
    wide: Wide | None = None
    _following: tuple[Tensor, Tensor] | None = field(init=False, default=None)
    _numbers: Tensor | None = field(init=False, default=None)

    def __post_init__(self):
        assert self.row is not None
        self.max_seqlen_q = self.max_seqlen_kv = self.row.longest  # Megatron's RoPE table

    def rolled(self, values: Tensor) -> Tensor:
        """values [..., s], one for every row -> for every row its document's next, 0 at its end.

        Of a wide row s is this group's, and values come from the others.
        """
        if self._following is None:
            assert self.row is not None
            rows = to_device(self._own(self.row.following()), values.device)
            self._following = rows.clamp(min=0), rows < 0
        if self.wide is not None:
            values = torch.cat(tuple(all_gather(values[None], self.wide.peers)), dim=-1)
        rows, ends = self._following
        return values.index_select(-1, rows).masked_fill_(ends, 0)

    def sums(self, values: Tensor) -> Tensor:
        """values [1, s], a number for every row -> for every row the sum over its document."""
        assert self.row is not None
        if self._numbers is None:
            self._numbers = to_device(self._own(self.row.numbers()), values.device)[None]
        sums = values.new_zeros(1, 1 + len(self.row.lengths))
        sums.scatter_add_(1, self._numbers, values)
        if self.wide is not None:
            sums = all_gather(sums, self.wide.peers).sum(0, keepdim=True)
        return sums.gather(1, self._numbers)

    def _own(self, of_rows: np.ndarray) -> np.ndarray:
        """Of the rows of all groups, those of this one."""
        assert self.row is not None
        return of_rows[self.row.rows_of(self.wide.peers.rank() if self.wide else 0)]


@dataclass
class PlannedMicrobatch(PackedSeqParams):
    """Megatron's packed-sequence parameters of a microbatch, and its plan.

    original is what Megatron passed: None for unpacked sequences. row: of packed documents, whoever
    packed them; qkv_format is then not "thd", so that Megatron's attention leaves documents and
    their angles to this package. documents: what strategies must know of padding and of documents
    (strategies/contract.py); wide: the groups of a wide row. seed differs between microbatches
    and between data-parallel replicas that do not share them, and is the same after a restart.
    """

    plan: Plan = field(default_factory=lambda: Plan({}))
    original: PackedSeqParams | None = None
    row: Row | None = None
    documents: tuple[tuple[tuple[int, int], ...], ...] | None = None
    wide: Wide | None = None
    seed: int = 0
    _angles: dict[bool, tuple[Tensor, Tensor]] = field(init=False, default_factory=dict)
    _for_kernels: PackedSeqParams | None = field(init=False, default=None)

    def __post_init__(self):
        pass  # seq_idx was computed when the original was made

    @property
    def shards(self) -> tuple[tuple[tuple[int, int], ...], ...] | None:
        """What each rank's rows hold of packed documents (strategies/contract.py)."""
        return None if self.row is None else self.row.shards

    def dropout_seed(self, plan_number: int) -> int:
        """The seed of a layer's attention dropout, alike on every rank of the group."""
        return self.seed * 4096 + plan_number

    def angles(self, table: Tensor, *, by_rows: bool = False) -> Tensor:
        """RoPE's table [longest, 1, 1, d_rot] -> angles [s, 1, 1, d_rot], anew at each document.

        In the order of positions, or by_rows of all ranks' rows. Made once for all layers; without
        packed documents, or of one, the table itself.
        """
        if self.row is None:
            return table
        if len(self.row.lengths) == 1 and not by_rows and len(table) >= self.row.seq_length:
            return table
        known = self._angles.get(by_rows)
        if known is None or not known[0].is_set_to(table):
            places = to_device(self.row.places(by_rows=by_rows), table.device)
            known = self._angles[by_rows] = table, table.index_select(0, places)
        return known[1]

    def for_kernels(self, device: torch.device) -> PackedSeqParams | None:
        """What Megatron's own attention takes of packed documents: cumulative lengths.

        Made once for all layers; what came with the microbatch where that is such already.
        """
        if self.row is None or not isinstance(self.original, RowParams):
            return self.original
        if self._for_kernels is None:
            self._for_kernels = packed_for_kernels(self.row, device)
        return self._for_kernels


def planned_microbatch(
    original: PackedSeqParams | None,
    row: Row | None,
    padded: tuple[tuple[tuple[int, int], ...], ...] | None,
    *,
    plan: Plan,
    seed: int,
) -> PlannedMicrobatch:
    """original is what came with the microbatch; row and padded what its documents are."""
    fields: dict = {}
    if original is not None:
        names = (one.name for one in dataclasses.fields(PackedSeqParams))
        fields = {name: getattr(original, name) for name in names}
    if row is not None:
        fields["qkv_format"] = "sbhd"
    documents = padded if row is None else (row.documents,)
    return PlannedMicrobatch(
        **fields,
        plan=plan,
        original=original,
        row=row,
        documents=documents,
        wide=getattr(original, "wide", None),
        seed=seed,
    )


def row_of(
    params: PackedSeqParams | None, *, seq_length: int, batch_size: int, p: int
) -> Row | None:
    """The packed documents of a microbatch of s tokens over p ranks, None if it has none.

    Of a wide row these are the tokens and ranks of one group.

    RowParams have theirs. Megatron's own (--sft) have contiguous shards, and perhaps padding
    between the documents (cu_seqlens_q_padded).
    """
    if isinstance(params, RowParams):
        assert params.row is not None
        of_row = (params.row.group_length, 1, params.row.group_size)
        assert of_row == (seq_length, batch_size, p), (of_row, seq_length, batch_size, p)
        return params.row
    if params is None or params.cu_seqlens_q is None:
        return None
    if (params.local_cp_size or 1) > 1:
        raise UserError(
            f"documents over {params.local_cp_size} ranks of dynamic context parallelism: "
            "--paradyse divides them itself; drop the flags that turn it on"
        )
    if batch_size != 1 or not _alike(params.cu_seqlens_q, params.cu_seqlens_kv):
        raise UserError(
            f"packed sequences are one row with the same queries and keys, got a batch of "
            f"{batch_size}: use --micro-batch-size 1"
        )
    ends = params.cu_seqlens_q.flatten().tolist()
    if params.cu_seqlens_q_padded is None:
        starts = ends
    else:
        starts = params.cu_seqlens_q_padded.flatten().tolist()
    return row_of_cumulative(ends, starts, seq_length=seq_length, p=p)


def _alike(queries: Tensor, keys: Tensor | None) -> bool:
    return keys is None or keys is queries or torch.equal(queries, keys)


def packed_for_kernels(row: Row, device: torch.device) -> PackedSeqParams:
    """Megatron's parameters of a row whose ranks hold contiguous chunks, for its own attention.

    Padding goes as documents of its own, each no longer than the longest, for RoPE's table.
    """
    longest, ends = max(row.lengths), [0, *(stop for _, stop in row.documents)]
    while ends[-1] < row.seq_length:
        ends.append(min(ends[-1] + longest, row.seq_length))
    cumulative = to_device(np.array(ends, np.int32), device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
