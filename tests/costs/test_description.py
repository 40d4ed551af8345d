"""Which cost files fit which runs."""

import dataclasses

import pytest

from megatron_paradyse.costs.description import check_compatible
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
    assert "profile this configuration" in str(caught.value)
    (warning,) = check_compatible(MEASURED, changed(**changes), accept=True)
    assert "accepted" in warning


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
        (("model", "mlp", 128, 1), "operation must be one of embedding, head"),
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
