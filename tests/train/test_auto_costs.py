"""Costs for a run that names none: which are kept apart, and what they are made of."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.costs.table import Measurement
from megatron_paradyse.errors import UserError
from megatron_paradyse.planner.cost_settings import read_costs
from megatron_paradyse.profiler.flags import megatron_flags
from megatron_paradyse.settings import FIELDS, Settings
from megatron_paradyse.simulator.models import model_flags
from megatron_paradyse.train import agreement, auto_costs, cost_cache, plugin
from megatron_paradyse.train.megatron_version import megatron_version
from tests.train.harness import with_defaults, write_documents
from tests.train.parsing import parsed, validated
from tests.train.searching import search
from tests.train.synthetic_costs import write_costs

# Of the fields that shape a model and its buffers: what its weights begin as, and what is logged.
DROPPED = {"init_method_std", "log_max_attention_logit"}


@pytest.fixture(scope="module")
def names():
    """Of all of Megatron's arguments."""
    plugin.install()
    from megatron.training.arguments import parse_args

    flags = with_defaults(["--mock-data", "--paradyse", "--paradyse-sequences", "fixed"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["pretrain_gpt", *flags])
        return set(vars(parse_args()))


def test_no_argument_that_costs_depend_on_is_left_out_of_their_name(names):
    """By Megatron's own lists of what a model and its gradients are; and one in none of them."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    shaping = {
        field.name
        for config in (MLATransformerConfig, DistributedDataParallelConfig)
        for field in dataclasses.fields(config)
    } & names | {"accumulate_allreduce_grads_in_fp32"}
    assert len(shaping) > 200 and shaping <= names
    assert {name for name in shaping if cost_cache.WITHOUT_EFFECT.fullmatch(name)} == DROPPED


@pytest.mark.parametrize(
    "name", ["tokenizer_type", "tokenizer_model", "vocab_file", "metadata_path"]
)
def test_a_tokenizer_has_costs_of_its_own(name, names):
    """Its vocabulary is known later: kept costs of another one were found and then refused."""
    assert name in names and not cost_cache.WITHOUT_EFFECT.fullmatch(name)


@pytest.mark.parametrize(
    "name", ["lr", "min_lr", "decoupled_min_lr", "lr_warmup_iters", "lr_wsd_decay_style"]
)
def test_a_learning_rate_leaves_costs_as_they_are(name, names):
    assert name in names and cost_cache.WITHOUT_EFFECT.fullmatch(name)


@pytest.mark.parametrize(
    "name",
    ["finetune", "pretrained_checkpoint", "use_checkpoint_args", "no_load_optim", "no_save_rng",
     "override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler", "async_save",
     "verify_integrity", "profile_step_end", "record_memory_history"],
)  # fmt: skip
def test_a_start_from_a_checkpoint_and_the_one_after_it_have_the_same_costs(name, names):
    """Costs of another name were measured anew, and what ran out of memory was forgotten."""
    assert name in names and cost_cache.WITHOUT_EFFECT.fullmatch(name)


def test_the_help_tells_when_a_quick_profile_is_given_up():
    about = FIELDS["profile"].metadata["about"]
    assert f"given up after {auto_costs.LIMIT_SECONDS} s" in about


def test_costs_are_of_the_loss_head_and_sequences_that_the_settings_file_says(
    tmp_path, monkeypatch
):
    """Neither a profile nor a simulation reads the file: its flags say so."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "settings.yaml").write_text("head_tile: 128\nsequences: fixed\norder: bucketed\n")
    ran: list[list[str]] = []
    one = search(tmp_path, monkeypatch, head_tile=128, sequences="fixed")
    monkeypatch.setattr(one, "_gpu", lambda: "h200")
    monkeypatch.setattr(one, "_run", lambda command, *_: ran.append(command))
    monkeypatch.setattr(one, "_fit", lambda raw: None)
    one._simulate()
    given = ran[0][ran[0].index("--") + 1 :]
    for flags in (
        model_flags(None, given, ranks=2, dtype="bfloat16"),
        megatron_flags(given, model_path=None, ranks=2),
    ):
        text = " ".join(flags)
        assert "--paradyse-head-tile 128 --paradyse-sequences fixed" in text
        assert "settings.yaml" not in text and "bucketed" not in text


def test_costs_are_of_the_ranks_that_share_a_layer_in_the_run(tmp_path, monkeypatch):
    """Of 8 ranks that are 4 replicas, of a run that says so in no flag; 8 were measured."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "settings.yaml").write_text("order: bucketed\n")
    given = search(tmp_path, monkeypatch)._flags()[1:]
    flags = megatron_flags(given, model_path=None, ranks=8)
    assert flags.count("--tensor-model-parallel-size") == 1
    assert flags[flags.index("--tensor-model-parallel-size") + 1] == "2"


def test_costs_are_found_with_the_megatron_of_the_run(tmp_path, monkeypatch):
    """A script's checkout comes first in the path of its own process only: costs of the wheel
    were measured, and refused as those of another version."""
    find = "from megatron_paradyse.train.megatron_version import find_megatron as f; print(f()[0])"

    def found() -> str:
        command = [sys.executable, "-c", find]
        environment = auto_costs._environment()
        return subprocess.check_output(command, env=environment, text=True, timeout=60).strip()

    wheel = megatron_version()
    assert found() == wheel
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 77\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert megatron_version() == found() == "0.19.77" != wheel


@pytest.mark.parametrize("sequences", ["fixed", "documents", "packed"])
def test_costs_have_one_name_whether_a_flag_or_a_settings_file_says_it(
    sequences, tmp_path, monkeypatch
):
    """And the ranks of their profile parse the same; other sequences have other costs."""
    from megatron_paradyse.train.counting import samples_of

    write_documents(tmp_path / "corpus", [20] * 10)
    file = tmp_path / "settings.yaml"
    file.write_text(f"sequences: {sequences}\n")
    found = []
    for said in (["--paradyse-sequences", sequences], ["--paradyse-config", file]):
        args = parsed(monkeypatch, "--paradyse-policy", "optimal", "--micro-batch-size", 1, *said)
        args.data_path = [str(tmp_path / "corpus")]
        args = validated(args)
        profiled = megatron_flags(sys.argv[1:], model_path=None, ranks=1)
        last = len(profiled) - profiled[::-1].index("--paradyse-sequences")
        key = cost_cache.cost_key(args, args.paradyse_settings)
        found.append((samples_of(args), key, profiled[last]))
    assert found[0] == found[1]
    assert found[0][2] == {"packed": "documents"}.get(sequences, sequences)


def test_a_flag_wins_over_packed_rows_of_a_settings_file(tmp_path):
    """The profile of fixed sequences was one of documents."""
    file = tmp_path / "settings.yaml"
    file.write_text("sequences: packed\n")
    given = ["--vocab-size", "64", "--paradyse-config", str(file)]
    for more, wanted in (([], "documents"), (["--paradyse-sequences", "fixed"], "fixed")):
        flags = megatron_flags([*given, *more], model_path=None, ranks=1)
        last = len(flags) - flags[::-1].index("--paradyse-sequences")
        assert flags[last] == wanted


def test_ranks_write_what_the_first_found_where_it_is_not_there_yet(tmp_path, monkeypatch):
    """With a home that all machines share it is; every rank of each would write it again."""
    monkeypatch.setenv("RANK", "1")
    costs = write_costs(tmp_path / "costs.json").read_text()
    kept = tmp_path / "costs-key.json"
    written = []
    for before in ("other costs", costs):
        kept.write_text(before)
        inode = kept.stat().st_ino
        one = search(tmp_path, monkeypatch)
        one._say_all("way", "cached")
        one._say_all("costs", costs)
        assert one.run() == (kept, True) and kept.read_text() == costs
        written.append(kept.stat().st_ino != inode)
    assert written == [True, False]


def test_all_ranks_hear_of_a_folder_whose_name_is_no_text(tmp_path, monkeypatch):
    """The store refused the words, and the others waited for more."""
    one = search(tmp_path, monkeypatch)
    with pytest.raises(UserError, match=r"^caf\\udce9: no$"):
        one._fail("caf\udce9: no")


def test_costs_with_which_nothing_can_be_planned_say_why_and_are_not_kept(tmp_path, monkeypatch):
    """Else every later start would find them, and end without a reason."""
    made = write_costs(tmp_path / "made.json")
    table = read_cost_file(made).table
    why = "unsupported: RuntimeError: no kernel"
    lame = [
        Measurement(m.strategy, m.operation, m.seq_length, m.batch_size, why)
        if m.operation == "mlp"
        else m
        for m in table.measurements
    ]
    table = dataclasses.replace(table, measurements=tuple(lame))
    write_cost_file(made, table, fit_table(table))
    said = "no strategy has costs of both halves of a layer: mlp of megatron_ts at s=16: " + why
    with pytest.raises(UserError, match=said):
        read_costs(Settings(cost_model=str(made)))
    one = search(tmp_path, monkeypatch)
    kept = tmp_path / "costs-key.json"
    made = made.read_text()
    monkeypatch.setattr(one, "_run", lambda command, *_: Path(command[-1]).write_text(made))
    with pytest.raises(UserError, match=said):
        one._fit(tmp_path / "raw.json")
    assert not kept.exists()
    kept.write_text(made)  # of an earlier version
    assert one._way() == "profile"


def test_devices_of_one_name_and_two_sizes_have_costs_of_their_own(tmp_path, monkeypatch):
    """Those of the other are refused, and would be found at every start; those of a rank with other
    threads were taken."""
    write_documents(tmp_path / "corpus", [20] * 10)
    args = parsed(monkeypatch, "--paradyse-policy", "optimal", "--micro-batch-size", 1)
    args.data_path = [str(tmp_path / "corpus")]
    args = validated(args)
    keys = set()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for cores in (8, 16):
        monkeypatch.setattr(cost_cache.os, "cpu_count", lambda cores=cores: cores)
        keys.add(cost_cache.cost_key(args, args.paradyse_settings))
    size = cost_cache.system_memory_bytes()
    others = [(cost_cache, "system_memory_bytes", int(more * size)) for more in (1.021, 2)]
    others += [(torch, "get_num_threads", 7), (cost_cache, "cpu_name", "another")]
    for module, name, value in others:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda value=value: value)
            keys.add(cost_cache.cost_key(args, args.paradyse_settings))
    for name, value in (("is_available", True), ("get_device_name", "H20"), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for size in (85 * 10**9, 85 * 10**9 + 10**6, 141 * 10**9):  # drivers keep a little back
        properties = argparse.Namespace(total_memory=size)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=properties: found)
        keys.add(cost_cache.cost_key(args, args.paradyse_settings))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    keys.add(cost_cache.cost_key(args, args.paradyse_settings))
    assert len(keys) == 9


def test_costs_of_other_code_are_not_found(tmp_path, monkeypatch):
    """An earlier version measured, fitted or described them otherwise: the last ended the start, as
    costs of another run. What only plans or reports changes none.
    """
    write_documents(tmp_path / "corpus", [20] * 10)
    args = parsed(monkeypatch, "--paradyse-policy", "optimal", "--micro-batch-size", 1)
    args.data_path = [str(tmp_path / "corpus")]
    args = validated(args)
    real, root = Path(agreement.__file__).parents[1], tmp_path / "megatron_paradyse"
    package = argparse.Namespace(__file__=str(root / "__init__.py"))
    monkeypatch.setattr(agreement, "megatron_paradyse", package)
    keys = []
    made_by = ("costs/laws.py", "strategies/metp.py", "submodules.py", *cost_cache.DESCRIBING)
    for name in (*made_by, "planner/a.py", "train/b.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("one line\n")
        agreement.sources.cache_clear()
        keys.append(cost_cache.cost_key(args, args.paradyse_settings))
    agreement.sources.cache_clear()
    assert len(set(keys)) == 5 and keys[4] == keys[5] == keys[6]
    assert all((real / name).is_file() for name in made_by[3:])


TO_PROFILE = {  # of each setting a value that a run by cost may have
    "policy": "optimal", "strategies": "metp,ulysses_z", "granularity": "layer",
    "mixing_gain": "0.1", "accept_costs": None, "memory_budget": "1GiB", "host_memory": "64GiB",
    "memory_margin": "0.05", "over_budget": "refuse", "smoothing": "0.1", "verify_plans": None,
    "watchdog_seconds": "60", "correction": None, "profile": None, "offload": None,
    "trace": "t.jsonl", "log": "compact", "sequences": "packed", "pack_tokens": "64K",
    "spread": "2", "order": "bucketed", "long_documents": "split", "head_tile": "off",
}  # fmt: skip
NOT_TO_PROFILE = {"cost_model", "layers", "balance", "mask_token"}  # costs there; packed; a BERT


def test_the_profile_at_the_start_parses_beside_every_setting(tmp_path, monkeypatch):
    """It runs on the ranks of one replica, with documents one by one and a fixed strategy."""
    assert {*TO_PROFILE, *NOT_TO_PROFILE} == set(Settings.__dataclass_fields__)
    write_documents(tmp_path / "corpus", [20] * 10)
    given = ["--vocab-size", "64", "--data-path", str(tmp_path / "corpus")]
    for name, value in TO_PROFILE.items():
        no = "no-" if name in ("correction", "profile") else ""
        given += [f"--paradyse-{no}{name.replace('_', '-')}", *([value] if value else [])]
    flags = megatron_flags(given, model_path=None, ranks=1)
    args = parsed(monkeypatch, "--micro-batch-size", 1, *flags)
    args.data_path = [str(tmp_path / "corpus")]
    settings = validated(args).paradyse_settings
    assert (settings.sequences, settings.policy) == ("documents", "fixed:megatron_ts")
    assert (settings.spread, settings.head_tile) == (1, "off")


def test_kept_costs_of_another_number_of_ranks_are_measured_anew(tmp_path, monkeypatch):
    """Earlier versions kept such, which the run then refuses."""
    made = write_costs(tmp_path / "made.json")
    one = search(tmp_path, monkeypatch)
    (tmp_path / "costs-key.json").write_text(made.read_text())
    p = read_cost_file(made).table.description.p
    for of_run, way in ((p, "cached"), (2 * p, "profile")):
        one._args.tensor_model_parallel_size = of_run
        assert one._way() == way
