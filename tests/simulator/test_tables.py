"""Named devices, links and models, and users' own devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from click.testing import CliRunner

from megatron_paradyse.cli import cli
from megatron_paradyse.costs.description import MASKS
from megatron_paradyse.costs.table import Constants, CostTable, Measurement
from megatron_paradyse.errors import UserError
from megatron_paradyse.profiler.lengths import COUNT
from megatron_paradyse.profiler.points import QUICK_COUNT, Options
from megatron_paradyse.simulator import commands
from megatron_paradyse.simulator.hardware import DEVICES, Device, find_device, known_name
from megatron_paradyse.simulator.models import DEFAULTS, MODELS, model_flags
from megatron_paradyse.simulator.network import BETWEEN_NODES, LINKS, find_network
from megatron_paradyse.simulator.stand_in_command import _lengths, _sequence_length
from tests.costs.synthetic import DESCRIPTION

MINE = "like: a100-80g\nname: Mine\nmemory_bytes: 24GiB\nhalf_flops: 5e13\n"
HOST = "host_bytes_per_second: 10e9\nhost_efficiency: 0.5\n"


def test_every_device_has_a_source_and_links_up_to_1024_ranks():
    assert {"a100-40g", "a800-80g", "h100-80g", "h800-80g", "h200", "b200", "l40s"} < set(DEVICES)
    assert DEVICES["a100-80g"].host_rate == 0.4 * 32e9  # 16 lanes of PCI Express 4.0
    assert DEVICES["h100-80g"].host_rate == DEVICES["b200"].host_rate == 0.4 * 64e9
    a100 = DEVICES["a100-80g"]
    assert (a100.memory_bytes, a100.half_flops) == (80 << 30, 312e12)
    assert a100.bandwidth_bytes_per_second == 2039e9
    for device in DEVICES.values():
        assert "datasheet" in device.source
        assert find_network(device.interconnect, 1024).name
    assert all(link.source for link in LINKS.values())
    assert set(BETWEEN_NODES.values()) <= set(LINKS)


def test_a_users_device_takes_the_rest_from_the_one_it_is_like(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(MINE + HOST)
    device = find_device(str(path))
    assert device.host_rate == 5e9
    assert (device.name, device.memory_bytes, device.half_flops) == ("Mine", 24 << 30, 5e13)
    assert device.bandwidth_bytes_per_second == DEVICES["a100-80g"].bandwidth_bytes_per_second


def test_a_users_device_needs_what_has_no_default(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: Mine\nmemory_bytes: 24GiB\nhalf_flops: 5e13\nfloat32_flops: 2e13\n"
        "bandwidth_bytes_per_second: 1e12\nnum_multiprocessors: 60\ninterconnect: pcie5\n"
    )
    rates = {"half_flops": 5e13, "float32_flops": 2e13, "bandwidth_bytes_per_second": 1e12}
    assert find_device(str(path)) == Device(
        name="Mine", memory_bytes=24 << 30, num_multiprocessors=60, interconnect="pcie5", **rates
    )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("like: h200\nmemory_bytes: 0GiB\n", r"line 2: memory_bytes: expected 1 to 1e\+18 bytes"),
        ("like: h200\nmemory_bytes: 9999999TiB\n", r"line 2: memory_bytes: expected 1 to"),
        (MINE + "flops: 3\n", r"line 5: a GPU has no 'flops'"),
        (MINE + "matmul_efficiency: 1.5\n", r"line 5: matmul_efficiency: expected a number"),
        (MINE + "host_efficiency: 0\n", r"line 5: host_efficiency: expected a number above 0"),
        (MINE + "name: Again\n", r"line 5: name is there twice"),
        (MINE + "num_multiprocessors: 108.5\n", r"line 5: num_multiprocessors: expected a whole"),
        ("like: a101\n", r"line 1: like: no GPU named 'a101'"),
        ("like: [a100-80g]\n", r"line 1: like: expected a text, got \['a100-80g'\]"),
        ("name: Mine\n", r"lacks memory_bytes, half_flops"),
        ("half_flops: fast\nlike: h200\n", r"line 1: half_flops: expected a number above 0"),
        ("memory_bytes: 24G\nlike: h200\n", r"line 1: memory_bytes: a size is written like"),
        ("- a\n", "is described by 'key: value' lines"),
        ("a: [\n", "is not YAML"),
    ],
)
def test_a_wrong_device_is_refused_with_its_line(text, fault, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=fault):
        find_device(str(path))


def test_unknown_names_are_refused_with_those_there_are():
    with pytest.raises(UserError, match="no GPU named 'a100': use one of a100-40g"):
        find_device("a100")
    with pytest.raises(UserError, match="no interconnect named 'nvlink'"):
        find_network("nvlink", 8)
    with pytest.raises(UserError, match="does not join 16 ranks"):
        find_network("pcie4+nvlink3", 16)
    with pytest.raises(UserError, match="no model named 'gpt5'"):
        model_flags("gpt5", [], ranks=8, dtype="bfloat16")


def test_named_models_are_flags_and_given_flags_come_after():
    for name in MODELS:
        flags = model_flags(name, ["--num-layers", "96"], ranks=8, dtype="float16")
        assert ("--paradyse-model" in flags) == (name == "bert")
        assert "--fp16" in flags and "--bf16" not in flags
        last = len(flags) - 1 - flags[::-1].index("--num-layers")
        assert flags[last + 1] == "96"


@pytest.mark.parametrize("name", DEFAULTS)
def test_flags_joined_to_their_value_win_over_defaults(name):
    own = ["--vocab-size=96", "--hidden-size=64"]
    for given in ([f"{name}=512"], [name, "512"]):
        flags = model_flags(None, [*own, *given], ranks=2, dtype="float32")
        assert DEFAULTS[name] not in flags
    assert flags.count(name) == 1
    assert DEFAULTS[name] in model_flags(None, own, ranks=2, dtype="float32")


def test_the_group_in_whose_place_one_rank_is_has_as_many_ranks_as_its_flags_say():
    for given in (["--tensor-model-parallel-size=4"], ["--tensor-model-parallel-size", "4"]):
        with pytest.raises(UserError, match=r"size 4 with a group of 8 ranks: give .* 8, or ask"):
            model_flags("llama", given, ranks=8, dtype="bfloat16")
        model_flags("llama", given, ranks=8, dtype="bfloat16", alone=False)  # two replicas
        last_wins = [*given, "--tensor-model-parallel-size", "8"]
        model_flags("llama", last_wins, ranks=8, dtype="bfloat16")


def test_a_stand_in_finds_the_longest_length_joined_or_apart():
    assert _sequence_length(["--seq-length=4096", "--bf16"]) == 4096
    assert _sequence_length(["--bf16", "--seq-length", "4096"]) == 4096
    with pytest.raises(UserError, match="the longest length is missing"):
        _sequence_length(["--bf16"])


def test_a_quick_stand_in_has_fewer_lengths():
    flags, asked = ["--seq-length", "4096"], Options("x.json")
    assert len(_lengths(asked, flags, p=2)) == COUNT
    assert len(_lengths(replace(asked, quick=True), flags, p=2)) == QUICK_COUNT
    assert _lengths(replace(asked, max_length=512), flags, p=2)[-1] == 512


def test_the_command_knows_the_masks_and_is_listed():
    assert commands.MASKS == MASKS
    assert "simulate" in cli.list_commands(None)


def invented(strategy: str, seconds: float) -> list[Measurement]:
    """Halves of a layer that keep 8 MiB each."""
    return [
        Measurement(strategy, half, s, 1, "ok", seconds * s / 3, seconds * s * 2 / 3, 8 << 20)
        for s in (1_024, 1 << 20)
        for half in ("attention", "mlp")
    ]


def test_what_is_printed_has_all_digits_before_the_point(capsys):
    """12,167 s were printed as 1216748 ms."""
    measured = invented("metp", 5.8018e-3) + invented("ulysses_z", 1e-6)
    commands._print(CostTable(DESCRIPTION, tuple(measured), Constants(0, 0)))
    printed = " ".join(capsys.readouterr().out.split())
    assert "simulated s of a layer" in printed
    assert "│ metp │ 11.88 │ 12167 │" in printed and "│ ulysses_z │ 0.002048 │ 2.097 │" in printed
    commands._print(CostTable(DESCRIPTION, tuple(invented("metp", 4e-5)), Constants(0, 0)))
    printed = " ".join(capsys.readouterr().out.split())
    assert "simulated ms of a layer" in printed and "│ metp │ 81.92 │ 83886 │" in printed


def test_a_layer_recomputed_as_a_whole_is_told_to_keep_one_input():
    measured = invented("metp", 1e-6) + invented("metp+recompute", 1e-6)
    layers = commands.summary(CostTable(DESCRIPTION, tuple(measured), Constants(0, 0)))["layers"]
    assert layers["metp"][1_024]["layer_kept_bytes"] == 16 << 20
    assert layers["metp+recompute"][1_024]["layer_kept_bytes"] == 8 << 20


def test_what_follows_from_other_costs_is_not_simulated(tmp_path):
    arguments = ["simulate", "--gpu", "a100-80g", "--ranks", "8", "--model", "gpt"]
    arguments += ["--strategies", "metp,metp+offload", "-o", str(tmp_path / "x.json")]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 1 and "metp+offload is not simulated" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("full_name", "gib", "name"),
    [
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40g"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-80g"),
        ("NVIDIA A10", 22.5, None),
        ("NVIDIA H100 NVL", 93.6, None),
        ("NVIDIA H200 NVL", 139.8, None),
        ("NVIDIA H100 PCIe", 79.2, None),
        ("NVIDIA A100 80GB PCIe", 79.3, None),
        ("NVIDIA A100-PCIE-40GB", 39.4, None),
        ("NVIDIA A800 80GB PCIe", 79.3, None),
        ("NVIDIA L40S", 44.5, "l40s"),
    ],
)
def test_a_gpu_is_known_by_its_own_name_and_memory(full_name, gib, name):
    assert known_name(full_name, int(gib * 2**30)) == name
