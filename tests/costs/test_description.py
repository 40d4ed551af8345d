"""Which cost files fit which runs."""

import dataclasses
import json

import pytest

from megatron_paradyse.costs.cost_file import read_cost_file, write_cost_file
from megatron_paradyse.costs.description import (
    OPTIONAL_KEYS,
    check_compatible,
    differences,
    tile_text,
)
from megatron_paradyse.costs.table import CostTable, Measurement
from megatron_paradyse.errors import UserError
from tests.costs.synthetic import CONSTANTS, DESCRIPTION

MEASURED = dataclasses.replace(DESCRIPTION, source="measured")


def changed(**changes):
    return dataclasses.replace(MEASURED, **changes)


def test_the_same_configuration_is_accepted_without_a_word():
    assert check_compatible(MEASURED, changed(date="2027-01-01", source="simulated")) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"p": 8},
        {"dtype": "bfloat16"},
        {"attention_mask": "bidirectional"},
        {"attention_kernel": "flash"},
        {"interconnect": "nvlink3"},
        {"versions": {"torch": "2.16.0"}},
        {"versions": {"torch": "2.15.0", "flash_attn": "2.7"}},
        {"hardware": dataclasses.replace(MEASURED.hardware, name="B200")},
        {"hardware": dataclasses.replace(MEASURED.hardware, memory_bytes=1 << 30)},
        {"model": dataclasses.replace(MEASURED.model, hidden_size=512)},
        {"model": dataclasses.replace(MEASURED.model, gated=True)},
    ],
)
def test_any_difference_is_refused_and_can_be_accepted_knowingly(changes):
    with pytest.raises(UserError, match="these costs are not of this run: ") as caught:
        check_compatible(MEASURED, changed(**changes))
    assert "profile this configuration, or plan by them" in str(caught.value)
    assert str(caught.value).endswith("with --paradyse-accept-costs")
    (warning,) = check_compatible(MEASURED, changed(**changes), accept=True)
    assert "accepted" in warning


TOLD = {
    "head_tile": ("4096", "off"),
    "num_experts": (0, 8),
    "attention_dropout": (False, True),
    "hidden_dropout": (False, True),
    "attention_window": ("none", "(1024, 0) of all layers"),
    "mtp_num_layers": (0, 1),
    "halves": ({"attention": {"window": 4096}}, {"attention": {"window": 128}}),
    "tiled_scores": (False, True),
}


@pytest.mark.parametrize("key", OPTIONAL_KEYS)
def test_what_one_description_does_not_tell_is_not_compared(key, tmp_path):
    """Files of earlier versions tell neither head tile, nor experts, dropout, and so on."""
    said = "attention.window" if key == "halves" else key
    ours, theirs = (changed(**{key: value}) for value in TOLD[key])
    assert check_compatible(MEASURED, ours) == check_compatible(ours, MEASURED) == []
    assert check_compatible(ours, ours) == []
    with pytest.raises(UserError, match=f"{said}: .* in the file, .* in the run"):
        check_compatible(ours, theirs)
    for description in (MEASURED, ours, theirs):
        path = tmp_path / "costs.json"
        write_cost_file(path, CostTable(description, (), CONSTANTS))
        assert read_cost_file(path).table.description == description
        written = json.loads(path.read_text())["description"]
        assert (key in written) == (description is not MEASURED)


@pytest.mark.parametrize(
    ("later", "said"),
    [
        ({"mtp_num_layers": 1}, "mtp_num_layers: 0 in the file, 1"),
        ({"halves": {"attention": {"qk_norm": 0, "output_gate": 1}}}, "output_gate: none in the"),
        (
            {"halves": {"attention": {"qk_norm": 0, "qk_pos_emb_head_dim": 16}}},
            "qk_pos_emb_head_dim: none in the file, 16",
        ),
    ],
)
def test_what_came_after_a_file_that_does_not_tell_it_is_not_in_its_costs(later, said):
    """Versions that told no halves had neither latents nor a gate, and refused both."""
    with pytest.raises(UserError, match=f": (attention.)?{said}[^;]*: profile"):
        check_compatible(MEASURED, changed(**later))


@pytest.mark.parametrize(
    ("key", "value"),
    [("head_tile", "auto"), ("head_tile", "0"), ("head_tile", 3), ("num_experts", "8"),
     ("attention_dropout", 0.1), ("attention_window", None), ("halves", []),
     ("mtp_num_layers", -1), ("mtp_num_layers", 99),
     ("halves", {"mlp": 1}), ("halves", {"mlp": {"experts": -1}})],
)  # fmt: skip
def test_a_description_that_tells_nonsense_is_refused(key, value, tmp_path):
    path = tmp_path / "costs.json"
    write_cost_file(path, CostTable(MEASURED, (), CONSTANTS))
    content = json.loads(path.read_text())
    content["description"][key] = value
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=key):
        read_cost_file(path)


def test_an_automatic_tile_is_told_in_tokens():
    assert tile_text("off", DESCRIPTION.model, p=4, dtype="float32") == "off"
    assert tile_text(2048, DESCRIPTION.model, p=4, dtype="float32") == "2048"
    shape = dataclasses.replace(DESCRIPTION.model, vocab_size=200_000, hidden_size=1024)
    # 256 MiB of rows: 50,000 logits and 4 h numbers of 4 bytes
    expected = 256 * 2**20 // (50_000 * 4 + 4 * 1024 * 4)
    assert tile_text("auto", shape, p=4, dtype="float32") == str(expected)


def test_all_differences_are_told_at_once():
    run = changed(p=8, dtype="float16", versions={})
    with pytest.raises(UserError) as caught:
        check_compatible(MEASURED, run)
    for part in (
        "p: 4 in the file, 8",
        "dtype: float32",
        "versions.torch: 2.15.0 in the file, none",
    ):
        assert part in str(caught.value)


def test_replicas_on_other_gpus_are_no_difference_but_on_one_cpu_they_are():
    def with_devices(kind, count):
        return changed(
            hardware=dataclasses.replace(MEASURED.hardware, kind=kind, num_devices=count)
        )

    assert check_compatible(with_devices("cuda", 4), with_devices("cuda", 64)) == []
    with pytest.raises(UserError, match=r"hardware\.num_devices: 4 in the file, 8 in the run"):
        check_compatible(with_devices("cpu", 4), with_devices("cpu", 8))


def test_memory_reserved_by_a_driver_is_no_difference():
    hardware = dataclasses.replace(MEASURED.hardware, memory_bytes=(1 << 33) - (1 << 26))
    assert check_compatible(MEASURED, changed(hardware=hardware)) == []


def test_costs_that_were_not_measured_and_other_package_versions_are_warned_of():
    warnings = check_compatible(DESCRIPTION, changed(package_version="9.9"))
    assert any("simulated, not measured" in text for text in warnings)
    assert any("this is 9.9" in text for text in warnings)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("metp", "head", 128, 1), "operation must be one of attention, mlp, layer"),
        (("model", "mlp", 128, 1), "operation must be one of embedding, prediction, head"),
        (("", "mlp", 128, 1), "a strategy's name"),
        (("metp", "mlp", 0, 1), "seq_length must lie in"),
        (("metp", "mlp", 128, 0), "batch_size must lie in"),
        (("metp", "mlp", 128, 1, "fine"), 'status must be "ok"'),
        (("metp", "mlp", 128, 1, "oom", 1.0), 'must be 0 where status is "oom"'),
        (("metp", "mlp", 128, 1, "ok", float("nan")), "forward_seconds must lie in"),
        (("metp", "mlp", 128, 1, "ok", 1.0, 1.0, -5.0), "kept_bytes must lie in"),
        (("metp", "mlp", 128, 1, "ok"), "forward_seconds must be above 0"),
    ],
)
def test_impossible_measurements_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        Measurement(*values)


def test_a_point_is_in_a_table_once():
    point = Measurement("metp", "mlp", 128, 1, "oom")
    with pytest.raises(UserError, match="in the table twice"):
        CostTable(DESCRIPTION, (point, point), CONSTANTS)


@pytest.mark.parametrize(("more", "differs"), [(0.019, False), (0.022, True)])
def test_devices_of_one_name_may_differ_by_2_percent_of_memory(more, differs):
    hardware = MEASURED.hardware
    larger = dataclasses.replace(hardware, memory_bytes=round(hardware.memory_bytes * (1 + more)))
    assert bool(differences(MEASURED, changed(hardware=larger))) == differs


@pytest.mark.parametrize(
    ("ranks", "shared"),
    [((1, 4), False), ((2, None), True), ((2, 2), False), ((4, 1), False), ((4, 2), True)],
)
def test_experts_are_shared_where_they_lie_over_more_ranks_than_a_replica_has(ranks, shared):
    has = dict(zip(("expert_parallel", "expert_tensor_parallel"), ranks, strict=True))
    mlp = {name: count for name, count in has.items() if count is not None}
    described = changed(halves={"attention": {}, "mlp": mlp})
    assert MEASURED.p == 4 and described.experts_shared == shared
