"""What the hook decides before a block's forward, with a block that is none of Megatron's."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from megatron_paradyse import hook as hooks
from megatron_paradyse.errors import UserError
from megatron_paradyse.hook import Counts, MicrobatchHook
from megatron_paradyse.microbatch_params import RowParams
from megatron_paradyse.packing.row import contiguous
from megatron_paradyse.plan import LayerChoice, Plan, uniform_plan
from megatron_paradyse.policy import RandomPolicy

START = Counts(1, 0, None)
P, HIDDEN = 2, torch.zeros(4, 1, 8)  # [s/p, b, h]
WIDE = replace(contiguous((5, 11), 2 * P), groups=2)


class _Policy:
    def __init__(self, *choice: str):
        self.chosen, self.asked = LayerChoice(*(choice or ("metp", "metp"))), []

    def plan(self, batch_size, seq_length, layer_numbers, **how):
        self.asked.append((batch_size, seq_length, layer_numbers, how))
        return Plan(dict.fromkeys(layer_numbers, self.chosen))


class _Observer:
    def __init__(self):
        self.seen = []

    def begins(self, planned, hidden):
        self.seen.append("begins")

    def forward_ends(self, output):
        self.seen.append("ends")


class _Block:
    """A TransformerBlock of two layers over P ranks, and its hook."""

    def __init__(self, monkeypatch, policy=None, *, counts=START, replica=0, **more):
        self.config = SimpleNamespace(sequence_parallel=True, attention_dropout=0.0)
        self.tp_group = SimpleNamespace(size=lambda: P)
        self.pre_process, self.training, self.counts, self.replica = True, True, counts, replica
        monkeypatch.setattr(hooks, "get_data_parallel_rank", lambda: self.replica)
        attention = SimpleNamespace(attn_mask_type=AttnMaskType.causal, core_attention=None)
        layers = [SimpleNamespace(plan_number=i, self_attention=attention) for i in (3, 4)]
        options = {"predicts": False, "observer": None, "verify": False, **more}
        self.hook = MicrobatchHook(
            self, policy or _Policy(), layers=layers, counts=lambda: self.counts, **options
        )

    def forward(self, hidden_states, attention_mask=None, packed_seq_params=None):
        raise AssertionError

    def run(self, params=None, *, hidden=HIDDEN):
        args, kwargs = self.hook(self, (hidden,), {"packed_seq_params": params})
        assert args == () and kwargs["hidden_states"] is hidden
        return kwargs["packed_seq_params"]

    def seeds(self, num: int, params=None) -> list[int]:
        return [self.run(params).seed for _ in range(num)]


def test_a_microbatch_has_random_numbers_of_its_own_and_the_same_again(monkeypatch):
    counts = Counts(1, 0, 2)
    block = _Block(monkeypatch, counts=counts)
    first = block.seeds(4)
    assert first[0] != first[1] and first[2:] == first[:2]  # Megatron runs the iteration again
    assert max(first) >> 24 and not max(first) >> 32, "layers have the other bits"
    assert block.seeds(1) == first[:1]
    block.counts = counts._replace(iteration=1)
    following = block.seeds(2)
    assert not {*first} & {*following}
    assert _Block(monkeypatch, counts=block.counts).seeds(2) == following, "after a restart"
    assert not {*first} & {*_Block(monkeypatch, counts=counts._replace(seed=2)).seeds(2)}


def test_an_iteration_of_an_own_loop_begins_again_only_where_it_is_told(monkeypatch):
    block = _Block(monkeypatch, counts=Counts(1, 5, None, begun=1))
    first = block.seeds(3)
    assert len({*first}) == 3
    block.counts = block.counts._replace(begun=2)
    assert block.seeds(3) == first


def test_replicas_have_random_numbers_of_their_own_unless_they_share_a_row(monkeypatch):
    alone, shared = [], []
    for replica in range(4):
        block = _Block(monkeypatch, _Policy("megatron_cz", "metp"), replica=replica)
        alone += block.seeds(1)
        shared += _Block(monkeypatch, block.hook._policy, replica=replica).seeds(
            1, RowParams(row=WIDE)
        )
    assert len({*alone}) == 4
    assert shared[0] == shared[1] != shared[2] == shared[3]


def test_a_policy_is_asked_for_the_whole_sequence_and_whether_a_backward_follows(monkeypatch):
    policy = _Policy()
    block = _Block(monkeypatch, policy)
    params = block.run()
    assert params.plan.layers == dict.fromkeys((3, 4), policy.chosen)
    with torch.no_grad():
        block.run()
    assert policy.asked == [
        (1, 8, (3, 4), {"forward_only": False}),
        (1, 8, (3, 4), {"forward_only": True}),
    ]


def test_a_later_stage_has_its_input_beside_its_arguments(monkeypatch):
    policy = _Policy()
    block = _Block(monkeypatch, policy)
    block.pre_process, block.input_tensor = False, torch.zeros(6, 3, 8)
    block.hook(block, (None,), {})
    assert policy.asked[0][:2] == (3, 12)


def test_a_policy_that_draws_is_told_of_the_microbatch(monkeypatch):
    policy = _Policy()
    policy.draws = True
    block = _Block(monkeypatch, policy, counts=Counts(1, 7, None))
    block.seeds(2)
    assert [how["at"] for *_, how in policy.asked] == [(7, 0), (7, 1)]


def test_random_plans_differ_by_microbatch(monkeypatch):
    policy = RandomPolicy("1", ("metp", "ulysses_z", "megatron_cz"))
    block = _Block(monkeypatch, policy)
    plans = {block.run().plan.runs() for _ in range(8)}
    assert len(plans) > 4


ROW = contiguous((4, 4), P)


def test_a_policy_by_cost_is_asked_as_others_are_and_its_predictions_are_observed(monkeypatch):
    policy, observer, seen = _Policy(), _Observer(), []
    monkeypatch.setattr(observer, "begins", lambda *given: seen.append(given))
    monkeypatch.setattr(hooks.time, "perf_counter", iter((5.0, 7.0)).__next__)
    monkeypatch.setattr(hooks, "_drop_other_buffers", lambda num_elements: None)
    policy.outcome = lambda *shape, **how: SimpleNamespace(
        plan=policy.plan(*shape, **how), seconds=1.0, peak_bytes=5
    )
    block = _Block(monkeypatch, policy, observer=observer, counts=Counts(1, 3, None))
    plan = block.run(RowParams(row=ROW)).plan
    assert policy.asked == [(1, 8, (3, 4), {"forward_only": False, "row": ROW})]
    (planned, hidden), *_ = seen
    assert hidden is HIDDEN and planned.plan is plan and planned.policy is policy
    assert planned == hooks.Planned(3, 0, 1, 8, plan, 2.0, 1.0, 5, ROW, policy)


@pytest.mark.parametrize("row", [ROW, contiguous((5, 3), P)], ids=["apart", "over both ranks"])
@pytest.mark.parametrize("choice", [("local_z", "metp"), ("metp", "local_z")])
def test_local_z_runs_rows_whose_documents_lie_on_one_rank_each(choice, row, monkeypatch):
    block = _Block(monkeypatch, _Policy(*choice))
    params = RowParams(row=row)
    if row is ROW:
        assert block.run(params).row is row
    else:
        with pytest.raises(UserError, match="local_z cannot run 2 packed documents of s=8"):
            block.run(params)


@pytest.mark.parametrize("choice", [("local_z", "metp"), ("metp", "local_z")])
def test_a_strategy_that_cannot_run_the_microbatch_is_refused_in_either_half(choice, monkeypatch):
    with pytest.raises(UserError, match="local_z cannot run a whole sequence of s=8 over p=2"):
        _Block(monkeypatch, _Policy(*choice)).run()


def test_of_a_wide_row_attention_alone_must_run_over_replicas(monkeypatch):
    params = RowParams(row=WIDE)
    assert _Block(monkeypatch, _Policy("megatron_cz", "local_z")).run(params).row is WIDE
    with pytest.raises(UserError, match="local_z cannot run attention over 2 replicas"):
        _Block(monkeypatch, _Policy("local_z", "megatron_cz")).run(params)


def test_what_trains_alone_is_observed(monkeypatch):
    observer = _Observer()
    block = _Block(monkeypatch, observer=observer)
    with torch.no_grad():
        block.run()
        block.hook.after(block, (), HIDDEN)
    assert observer.seen == []
    block.run()
    block.hook.after(block, (), HIDDEN)
    assert observer.seen == ["begins", "ends"]


def test_a_prediction_has_the_microbatch_of_the_block_before_it(monkeypatch):
    block = _Block(monkeypatch, predicts=True)
    params = block.run()
    _, kwargs = block.hook.before_prediction(None, (), {"packed_seq_params": None})
    assert kwargs["packed_seq_params"] is params
    assert block.hook._for_prediction is None, "nothing of it is kept"
    without = _Block(monkeypatch)
    without.run()
    assert without.hook._for_prediction is None


def test_plans_by_cost_let_go_of_buffers_for_other_lengths(monkeypatch):
    """Of the whole sequence is what this microbatch gathers into; fixed plans keep all."""
    buffers = {"other": torch.zeros(32), "longer": torch.zeros(128), "own": torch.zeros(64)}
    memory = SimpleNamespace(buffer=buffers)
    monkeypatch.setattr(hooks, "get_global_memory_buffer", lambda: memory)
    _Block(monkeypatch).run()
    assert len(buffers) == 3
    policy = _Policy()
    policy.outcome = lambda *shape, **how: SimpleNamespace(
        plan=policy.plan(*shape, **how), seconds=1.0, peak_bytes=5
    )
    _Block(monkeypatch, policy).run()
    assert [*buffers] == ["own"]


def test_all_ranks_that_have_a_microbatch_are_asked_for_their_plan_where_that_is_wanted(
    monkeypatch,
):
    asked = []
    monkeypatch.setattr(hooks, "_verify", lambda planned, group, device: asked.append(group))
    block = _Block(monkeypatch, _Policy("megatron_cz", "metp"), verify=True)
    block.run()
    ranks = object()
    block.run(RowParams(row=WIDE, wide=SimpleNamespace(ranks=ranks)))
    _Block(monkeypatch).run()
    assert asked == [block.tp_group, ranks]


def test_a_mask_says_what_is_padding_where_no_row_does(monkeypatch):
    asked = []

    def documents_of_mask(mask, **how):
        asked.append((mask, how))
        return "padding"

    monkeypatch.setattr(hooks, "documents_of_mask", documents_of_mask)
    block, mask = _Block(monkeypatch), torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    _, kwargs = block.hook(block, (HIDDEN, mask), {})
    assert kwargs["packed_seq_params"].documents == "padding"
    assert asked == [(mask, {"batch_size": 1, "causal": True})]
    row = contiguous((3, 5), P)
    assert block.run(RowParams(row=row)).documents == (row.documents,) and len(asked) == 1


class _Group:
    def __init__(self, rank: int):
        self.rank = lambda: rank
        self.size = lambda: P


def _verified(monkeypatch, mine: Plan, others: Plan):
    """As on the second rank of P, of which the first has the other plan."""

    def all_gather(gathered, mine, group):
        sent.append(int(mine))
        for one, value in zip(gathered, (sent[0], int(mine)), strict=True):
            one.fill_(value)

    sent: list[int] = []
    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    for rank, plan in enumerate((others, mine)):
        planned = hooks.Planned(7, 0, 1, 64, plan, 0.0)
        hooks._verify(planned, _Group(rank), torch.device("cpu"))


def test_ranks_with_another_plan_are_told_with_both(monkeypatch):
    plan = uniform_plan([1, 2], "metp")
    _verified(monkeypatch, plan, uniform_plan([1, 2], "metp"))
    for other in (uniform_plan([1, 2], "ulysses_z"), Plan({1: LayerChoice("metp", "ulysses_z")})):
        message = r"iteration 7, s=64: rank 1 of .* runs 1-2 metp, ranks \[0\] another plan"
        with pytest.raises(UserError, match=message):
            _verified(monkeypatch, plan, other)


@pytest.mark.parametrize(
    ("dropout", "training", "task", "refused"),
    [
        (0.1, True, 0, True),
        (0.1, True, -1, False),
        (0.1, False, 0, False),
        (0.0, True, 0, False),
    ],
)
def test_a_forward_inside_a_backward_that_would_drop_other_scores_is_refused(
    dropout, training, task, refused, monkeypatch
):
    block = _Block(monkeypatch)
    block.config.attention_dropout, block.training = dropout, training
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: task)
    match = "with attention_dropout 0.1, which would then drop other scores"
    with pytest.raises(UserError, match=match) if refused else contextlib.nullcontext():
        block.run()
