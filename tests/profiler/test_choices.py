"""What a profile decides before it measures: lengths, flags, points."""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from megatron_paradyse.cli import cli
from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.table import LAYER, MLP, Measurement
from megatron_paradyse.errors import UserError
from megatron_paradyse.flag_file import read_flags
from megatron_paradyse.profiler import start
from megatron_paradyse.profiler.agree import (
    Agreement,
    OneRankFailedError,
    leave_note,
    status_alone,
    status_of,
    take_note,
)
from megatron_paradyse.profiler.flags import megatron_flags
from megatron_paradyse.profiler.journal import Journal
from megatron_paradyse.profiler.lengths import (
    check_lengths,
    default_lengths,
    expected_bytes,
    lengths_between,
)
from megatron_paradyse.profiler.outcome import outcome
from megatron_paradyse.profiler.points import Options, choose_lengths, points, strategies_to_profile
from megatron_paradyse.simulator.network import find_network, write_network
from megatron_paradyse.strategies import transport
from megatron_paradyse.units import parse_bytes
from tests.costs.synthetic import LENGTHS, make_table
from tests.strategies.harness import run_ranks


def test_default_lengths_are_log_spaced_aligned_and_end_at_the_longest():
    for longest, p in ((8192, 4), (131072, 8), (600, 3), (64, 4), (15, 4)):
        lengths = default_lengths(longest, p=p)
        assert lengths == tuple(sorted(set(lengths))) and len(lengths) <= 8
        assert all(length % (2 * p) == 0 for length in lengths)
        assert longest - 2 * p < lengths[-1] <= longest
    lengths = default_lengths(8192, p=4)
    ratios = [b / a for a, b in itertools.pairwise(lengths)]
    assert lengths[0] == 128 and max(ratios) / min(ratios) < 1.1
    with pytest.raises(UserError, match="at least 2p = 16"):
        default_lengths(8, p=8)
    with pytest.raises(UserError, match="at least 2p = 8, got 0"):
        choose_lengths(Options("raw.json", max_length=0), 4096, p=4)


def test_given_lengths_must_be_shared_evenly():
    assert check_lengths((64, 32), p=4) == (32, 64)
    with pytest.raises(UserError, match="100 is not a multiple of 2p = 8: use 96"):
        check_lengths((100,), p=4)
    with pytest.raises(UserError, match="2p = 8: use 8"):
        check_lengths((3,), p=4)  # not 0, the nearest


def test_expected_bytes_extrapolate_a_quadratic_and_never_shrink():
    def at(s: int) -> Measurement:
        kept = 100 + 3 * s
        return Measurement("metp", MLP, s, 1, "ok", 1.0, 1.0, kept, 0, 2.0 * s * s)

    measured = [at(s) for s in (16, 32, 64)]
    assert expected_bytes(measured[:2], 128) is None
    assert expected_bytes(measured, 128) == pytest.approx(100 + 3 * 128 + 2 * 128**2)


def test_bytes_are_measured_at_more_lengths_up_to_a_quarter_of_the_longest():
    timed = default_lengths(8192, p=4)
    others = lengths_between(timed, p=4)
    assert all(length % 8 == 0 and length not in timed for length in others)
    together = sorted({*timed, *others})
    for shorter, longer in itertools.pairwise(together):
        assert shorter >= 8192 / 4 or longer <= 1.4 * shorter + 8, (shorter, longer)
    assert max(others) < 2496  # the first timed length above a quarter
    chosen = choose_lengths(Options("x", bytes_lengths=()), 8192, p=4)
    assert chosen == dict.fromkeys(timed, True)
    chosen = choose_lengths(Options("x", lengths=(64, 256), bytes_lengths=(128, 256)), 512, p=4)
    assert chosen == {64: True, 128: False, 256: True}


def test_layers_are_checked_at_every_other_length():
    strategies = strategies_to_profile(("metp", "metp+recompute"))
    found = {
        (p.strategy, p.seq_length)
        for p in points({8: True, 12: False, 16: True, 32: True}, (1,), strategies)
        if p.operation == LAYER
    }
    assert {s for name, s in found if name == "metp"} == {8, 32}
    assert {s for name, s in found if name == "metp+recompute"} == {8, 32}
    with pytest.raises(UserError, match="no strategy named"):
        strategies_to_profile(("meta",))


def test_a_strategy_that_runs_no_single_document_is_not_profiled_alone():
    with pytest.raises(UserError, match="runs no single document"):
        strategies_to_profile(("local_z", "local_z+recompute"))
    assert strategies_to_profile(("local_z", "metp")) == ("local_z", "metp")


def test_what_the_costs_of_a_named_strategy_need_is_profiled_too():
    assert strategies_to_profile(("ulysses_z+recompute",)) == ("ulysses_z", "ulysses_z+recompute")
    found = strategies_to_profile(("metp+offload", "megatron_ts", "metp"))
    assert found == ("metp", "metp+recompute", "metp+offload", "megatron_ts")


def test_flags_of_a_training_become_those_of_a_profile():
    given = ["--num-layers", "4", "--vocab-size", "9", "--paradyse-policy", "random:1"]
    given += ["--load", "x", "--rampup-batch-size", "1", "2", "3", "--swiglu", "--save=y"]
    flags = megatron_flags(given, model_path=None, ranks=4)
    text = " ".join(flags)
    assert "--num-layers 4 --vocab-size 9 --swiglu" in text
    assert "--tensor-model-parallel-size 4 --sequence-parallel" in text
    for gone in ("random:1", "--load", "--rampup-batch-size", "--save"):
        assert gone not in text
    with pytest.raises(UserError, match="vocabulary is missing"):
        megatron_flags(["--num-layers", "4"], model_path=None, ranks=4)


def test_a_given_size_of_the_vocabulary_counts_beside_data_too():
    given = ["--data-path", "data/code", "--vocab-size", "257"]
    assert "--tokenizer-type NullTokenizer" in " ".join(
        megatron_flags(given, model_path=None, ranks=2)
    )
    others = (given[:2], [*given, "--tokenizer-type", "TikTokenizer"])
    for flags in others:
        assert "NullTokenizer" not in megatron_flags(flags, model_path=None, ranks=2)


def test_data_need_not_be_here_where_the_size_of_the_vocabulary_is_given(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("megatron: {train-data-path: [0.3, a, 0.7, b], split: '9,1,0'}\n")
    text = " ".join(megatron_flags(["--vocab-size=9", "--swiglu"], model_path=str(path), ranks=2))
    assert "--train-data-path" not in text and "--split 9,1,0 --vocab-size=9 --swiglu" in text
    text = " ".join(megatron_flags(["--swiglu"], model_path=str(path), ranks=2))
    assert "--train-data-path 0.3 a 0.7 b --split" in text


def test_a_model_file_is_a_mapping_of_flags(tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text("num-layers: 4\nswiglu: true\nbf16: false\nspec: [a, b]\nlr: null\n")
    flags = ["--num-layers", "4", "--swiglu", "--spec", "a", "b"]
    assert read_flags(str(path)) == flags
    for text, message in (
        ("- a\n", "line 1: a model is described by"),
        ("b: 1\na: {b: 1}\n", "line 2: --a: expected a number or a text"),
        ("a: 1\na: 2\n", "line 2: a is there twice: keep one"),
        ("a: [\n", "is not YAML"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            read_flags(str(path))
    with pytest.raises(UserError, match="give an existing YAML file"):
        read_flags(str(tmp_path / "none"))


MODELS = sorted((Path(__file__).parents[2] / "configs" / "models").glob("*.yaml"))
RUN_FILE = """\
nproc_per_node: 8
environment: {A_VARIABLE_OF_THE_RUN: 7}
megatron: {num-layers: 4, vocab-size: 9, swiglu: true}
paradyse: {policy: optimal, head_tile: 128, sequences: fixed, trace: t.jsonl}
"""


def test_a_file_that_train_takes_is_a_model_file_too(tmp_path):
    """Its flags of Megatron's, and of its settings what costs depend on; given flags win."""
    path = tmp_path / "run.yaml"
    path.write_text(RUN_FILE)
    given = ["--paradyse-sequences", "documents", "--num-layers", "2"]
    text = " ".join(megatron_flags(given, model_path=str(path), ranks=2))
    parts = [
        "--paradyse-head-tile 128 --paradyse-sequences fixed",
        "--num-layers 4 --vocab-size 9 --swiglu",
        " ".join(given),
    ]
    assert sorted(map(text.index, parts)) == list(map(text.index, parts))
    assert "t.jsonl" not in text and "optimal" not in text
    path.write_text("megatron: {num-layers: 4, lr: {a: b}}\n")
    with pytest.raises(UserError, match="line 1: --lr: expected a number or a text"):
        read_flags(str(path))


@pytest.mark.parametrize("path", MODELS, ids=lambda p: p.stem)
def test_known_models_can_be_profiled(path):
    flags = megatron_flags(["--vocab-size", "9"], model_path=str(path), ranks=8)
    assert {"--num-layers", "--hidden-size", "--num-attention-heads"} <= {*flags}
    assert not {"--train-samples", "--nproc-per-node", "--environment", "optimal"} & {*flags}


def test_ranks_of_a_profile_have_the_environment_of_the_run(tmp_path, monkeypatch):
    path = tmp_path / "run.yaml"
    path.write_text(RUN_FILE)
    monkeypatch.setenv("A_VARIABLE_OF_THE_RUN", "1")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    seen = []
    monkeypatch.setattr(
        start, "start_ranks", lambda *_, **__: seen.append(os.environ["A_VARIABLE_OF_THE_RUN"])
    )
    command = ["profile", "--nproc", "1", "--output", str(tmp_path / "raw.json"), "--model"]
    assert CliRunner().invoke(cli, [*command, str(path)]).exit_code == 0
    path.write_text("num-layers: 4\nvocab-size: 9\n")
    assert CliRunner().invoke(cli, [*command, str(path)]).exit_code == 0
    path.write_text("- a\n")
    assert "a model is described by" in CliRunner().invoke(cli, [*command, str(path)]).output
    assert seen == ["7", "7"]


@pytest.mark.parametrize("more", [["--nproc", "2"], ["--stand-in", "2"]])
def test_a_file_that_no_profile_can_go_on_with_is_refused_before_ranks_start(
    more, tmp_path, monkeypatch
):
    def started(*_, **__):
        raise AssertionError("ranks started")

    monkeypatch.setattr(start, "start_ranks", started)
    path = tmp_path / "notes.json"
    command = ["profile", *more, "--output", str(path), "--num-layers", "2"]
    whole = tmp_path / "whole.json"
    write_cost_file(whole, make_table(LENGTHS, ("metp",)))
    for text, said in (
        ("notes\n", "is another file, not a cost file: give the name of a new file"),
        (whole.read_text()[:-20], "not JSON, or cut off"),
    ):
        path.write_text(text)
        result = CliRunner().invoke(cli, command)
        assert result.exit_code == 1 and f"error: {path}" in result.output
        assert said in result.output and path.read_text() == text


def test_the_first_rank_that_failed_says_why(tmp_path):
    output, key = tmp_path / "costs.json", ("metp", "mlp", 64, 1)
    leave_note(output, key, "oom")
    leave_note(output, key, "unsupported: connection closed by peer")
    assert take_note(output) == (key, "oom")
    assert take_note(output) is None and not list(tmp_path.iterdir())


def test_sizes_in_bytes_need_a_unit():
    assert parse_bytes("76GiB") == 76 << 30
    assert parse_bytes("1.5 MB") == 1_500_000
    for text in ("76G", "-1GiB", "4iB", "GiB"):
        with pytest.raises(UserError):
            parse_bytes(text)


def test_what_a_profile_wrote_is_told_in_numbers(tmp_path):
    path = tmp_path / "costs.json"
    table = make_table(strategies=("metp",))
    *measured, last = table.measurements
    refused = Measurement(last.strategy, last.operation, last.seq_length, 1, "unsupported: n: p")
    write_cost_file(path, dataclasses.replace(table, measurements=(*measured, refused)))
    told = outcome(str(path), network=False)
    assert told["output"] == str(path) and told["strategies"] == ["metp"]
    assert told["lengths"] == sorted(LENGTHS) and told["static_bytes"] == 1e8
    assert told["measurements"] == {"ok": len(measured), "unsupported": 1}
    network = find_network("nvlink4", 4)
    write_network(str(tmp_path / "network.json"), network)
    told = outcome(str(tmp_path / "network.json"), network=True)
    assert told["p"] == 4 and set(told["collectives"]) == set(network.collectives)


def test_a_rank_that_waits_alone_does_not_say_that_all_is_well():
    """Its note becomes the status of a point that was not measured."""
    assert status_alone(OneRankFailedError("oom")) == "oom"
    assert status_alone(OneRankFailedError("ok")).startswith("unsupported: another rank")


def test_what_an_error_says_of_a_point():
    assert status_of(torch.OutOfMemoryError("CUDA")) == status_of(MemoryError()) == "oom"
    assert status_of(UserError("g % p\n== 1")) == "unsupported: g % p == 1"
    assert status_of(KeyError("x\x1b")) == "unsupported: KeyError: 'x\\x1b'"
    assert len(status_of(ValueError("no " * 400))) == 400


def _agreed(group, case):
    """The status agreed on; ranks that `begin` have begun a collective that the others have not."""
    statuses, begin = case
    agreement = Agreement(wait_seconds=30, groups=[group])
    if group.rank() in begin:
        begun.extend(transport.broadcast(torch.zeros(2), group, owner=1))
    try:
        return agreement.status(statuses[group.rank()])
    except OneRankFailedError as error:
        return f"apart, {error}"


begun: list = []


def test_ranks_that_failed_at_different_collectives_do_not_go_on():
    cases = {
        "together": (("oom", "oom"), ()),
        "one": (("ok", "unsupported: why"), ()),
        "well": (("ok", "ok"), (0,)),
        "apart": (("oom", "oom"), ()),  # rank 0 is one ahead since then
        "one apart": (("ok", "oom"), ()),
    }
    assert run_ranks(2, _agreed, cases, timeout_seconds=90) == {
        "together": ["oom"] * 2,
        "one": ["unsupported: why"] * 2,
        "well": ["ok"] * 2,
        "apart": ["apart, oom"] * 2,
        "one apart": ["apart, oom"] * 2,
    }


def test_longer_lengths_of_a_later_start_leave_the_constants_and_their_buffer(tmp_path):
    """static_bytes holds the buffer of the first start: of 4,096 tokens, not of those added."""
    path = tmp_path / "costs.json"
    table = make_table()
    longest = max(LENGTHS) * 4
    for first in (dataclasses.replace(table.constants, buffer_tokens=4096), table.constants):
        write_cost_file(path, dataclasses.replace(table, constants=first))
        journal = Journal(path, table.description)
        journal.complete(dataclasses.replace(first, static_bytes=9e9, buffer_tokens=longest))
        journal.add(Measurement("metp", MLP, longest, 1, "ok", 1.0, 1.0))
        journal.save()
        again = read_cost_file(path).table
        assert again.constants.static_bytes == table.constants.static_bytes
        assert again.buffer_tokens == (first.buffer_tokens or table.buffer_tokens) < longest


def test_constants_with_which_nothing_was_measured_are_those_of_this_start(tmp_path):
    path = tmp_path / "costs.json"
    table = make_table()
    write_cost_file(path, table.only(lambda measurement: False))
    journal = Journal(path, table.description)
    now = dataclasses.replace(table.constants, static_bytes=9e9, buffer_tokens=4096)
    journal.complete(now)
    assert journal.constants == now
