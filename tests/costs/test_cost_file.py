"""Cost files: what is written is read, and whatever else is read ends in one line."""

import codecs
import json
import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megatron_paradyse.costs import fit_values
from megatron_paradyse.costs.cost_file import (
    MAX_FILE_BYTES,
    read_cost_file,
    write_cost_file,
)
from megatron_paradyse.costs.fitting import fit_table
from megatron_paradyse.costs.model import MODELS
from megatron_paradyse.costs.table import BYTES_ONLY, CostTable, Measurement
from megatron_paradyse.errors import UserError
from tests.costs.synthetic import CONSTANTS, DESCRIPTION, make_table

SMALL = make_table(
    (128, 512, 1024, 2048, 4096, 8192, 16384),
    ("metp", "colossal_z"),
    ("attention",),
    batch_sizes=(1, 2),
    noise=0.01,
    steps=0.3,
)
UNUSABLE = (
    Measurement("ulysses_z", "attention", 128, 1, "unsupported: n % p"),
    Measurement("metp", "mlp", 1 << 20, 1, "oom"),
)
# At lengths of which only bytes are known; the others are there in the file beside it.
UNTIMED = tuple(
    replace(
        m, seq_length=m.seq_length + 64, status=BYTES_ONLY, forward_seconds=0, backward_seconds=0
    )
    for m in make_table((192, 1536), ("metp",), ("attention",)).measurements
)
TABLE = CostTable(DESCRIPTION, (*SMALL.measurements, *UNTIMED, *UNUSABLE), CONSTANTS)


@pytest.fixture(scope="module", params=MODELS)
def good(request, tmp_path_factory):
    """(values of a good file as JSON, a folder)."""
    folder = tmp_path_factory.mktemp(request.param)
    write_cost_file(folder / "good.json", TABLE, fit_table(TABLE, request.param))
    return json.loads((folder / "good.json").read_text()), folder


def read_text(folder, text):
    path = folder / "changed.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_cost_file(path)


def assert_one_line(folder, text):
    """Reading gives a cost file or a UserError of one line that names the file."""
    try:
        file = read_text(folder, text)
    except UserError as error:
        assert str(error).startswith(str(folder / "changed.json"))
        assert "\n" not in str(error) and len(str(error)) < 1500
        return
    if file.model is not None:
        for costs in file.model.all_operations(1000, 3).values():
            assert 0 <= costs.time_seconds < float("inf")


@pytest.mark.parametrize("kind", [*MODELS, None])
def test_what_is_written_is_read_back_exactly(tmp_path, kind):
    model = fit_table(TABLE, kind) if kind else None
    write_cost_file(tmp_path / "costs.json", TABLE, model)
    read = read_cost_file(tmp_path / "costs.json")
    assert read.table == TABLE
    if model is None:
        assert read.model is None
        with pytest.raises(UserError, match="no fitted model: run megatron-paradyse fit"):
            read.require_model()
        return
    assert read.require_model().fits == model.fits
    assert read.model.all_operations(777, 3) == model.all_operations(777, 3)
    assert os.listdir(tmp_path) == ["costs.json"]


def test_a_file_without_the_hosts_rate_is_read_and_written_without(good):
    """As earlier versions wrote it."""
    values, folder = good
    old = json.loads(json.dumps(values))
    assert old["constants"].pop("host_bytes_per_second") == 2e9
    file = read_text(folder, json.dumps(old))
    assert file.table.constants == replace(CONSTANTS, host_bytes_per_second=None)
    assert file.require_model().host is None
    write_cost_file(folder / "again.json", file.table)
    assert json.loads((folder / "again.json").read_text())["constants"] == old["constants"]


def set_at(values, path, value):
    *way, last = path
    for key in way:
        values = values[key]
    values[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["schema_version"], 2, "schema_version must be 1, got 2"),
        (["schema_version"], True, "schema_version must be 1, got True"),
        (["extra"], 1, "the file has unknown 'extra'"),
        (["constants"], [], "constants must be an object, got an array"),
        (["constants", "static_bytes"], -1, "constants.static_bytes must lie in"),
        (["constants", "static_bytes"], "1", "static_bytes must be a number, got '1'"),
        (["constants", "host_bytes_per_second"], None, "host_bytes_per_second must be a number"),
        (["constants", "host_bytes_per_second"], 0, "host_bytes_per_second must be at least 1"),
        (["description", "p"], 0, "p must be at least 1, got 0"),
        (["description", "p"], 1 << 40, "p must be at most 1,048,576"),
        (["description", "p"], True, "description.p must be a whole number, got True"),
        (["description", "p"], 10**30, "description.p must lie in"),
        (["description", "dtype"], "a\nb", "description.dtype must be at most 500 printable"),
        (["description", "attention_mask"], "none", "attention_mask must be one of causal"),
        (["description", "model", "gated"], 1, "description.model.gated must be true or false"),
        (["description", "versions"], {"torch": 2}, "description.versions.torch must be a text"),
        (["measurements", 0, "forward_seconds"], 0, "forward_seconds must be above 0"),
        (["measurements", 0, "forward_seconds"], 10**400, "forward_seconds must lie in"),
        (["measurements", 0, "kept_bytes"], None, r"measurements\[0\].kept_bytes must be a number"),
        (["measurements", 0, "operation"], "head", "operation must be one of attention, mlp"),
        (["measurements", 0, "status"], "oom", r"measurements\[0\] has unknown 'forward_seconds'"),
        (["measurements", 0, "seq_length"], 512, "is in the table twice"),
        (["measurements", 0, "seq_length"], 1.5, "seq_length must be a whole number"),
        (["model", "kind"], "best", "model.kind must be one of hybrid, paper, got 'best'"),
        (["model", "operations", 0, "max_length"], 9999, "was not fitted to the lengths"),
        (["model", "operations", 0, "strategy"], "metp2", "was not fitted to the lengths"),
        (["model", "operations", 0, "fits"], {}, "fits lacks 'forward_seconds'"),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_a_remedy(good, path, value, message):
    values, folder = good
    changed = json.loads(json.dumps(values))
    set_at(changed, path, value)
    with pytest.raises(UserError, match=message) as caught:
        read_text(folder, json.dumps(changed))
    assert "megatron-paradyse profile" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON, or cut off"),
        ("[" * 200_000, "not JSON, or cut off"),
        ('{"schema_version": NaN}', "NaN is no number"),
        ('{"model": null, "model": null}', "one key twice"),
        (b"\xff\xfe{\x00}\x00", "not JSON, or cut off"),
        ("[]", "the file must be an object, got an array"),
        ("9" * 5000, "not JSON, or cut off"),
        (b" " * (MAX_FILE_BYTES + 1), "larger than 8 MiB"),
    ],
)
def test_what_is_no_cost_file_is_refused_in_one_line(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        read_text(tmp_path, text)


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, message in (("pipe", "not a regular file"), ("missing", "does not exist")):
        with pytest.raises(UserError, match=message):
            read_cost_file(tmp_path / name)


def test_every_truncation_is_refused(good):
    values, folder = good
    text = json.dumps(values)
    for length in range(0, len(text), max(1, len(text) // 200)):
        with pytest.raises(UserError):
            read_text(folder, text[:length])


def paths_of(value, path=()):
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from paths_of(value[key], (*path, key))


odd_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=10**300, max_value=10**320)
    | st.floats(allow_nan=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_mutated_file_is_read_or_refused_in_one_line(good, data):
    values, folder = good
    changed = json.loads(json.dumps(values))
    for _ in range(data.draw(st.integers(1, 3))):
        paths = list(paths_of(changed))
        path = paths[data.draw(st.integers(0, len(paths) - 1))]
        if not path:
            continue
        parent = changed
        for key in path[:-1]:
            parent = parent[key]
        match data.draw(st.sampled_from(["replace", "delete", "double"])):
            case "delete":
                del parent[path[-1]]
            case "double" if isinstance(parent, list):
                parent.append(parent[path[-1]])
            case _:
                parent[path[-1]] = data.draw(odd_values)
    assert_one_line(folder, json.dumps(changed))


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_flipped_bytes_are_read_or_refused_in_one_line(good, data):
    values, folder = good
    text = bytearray(json.dumps(values).encode())
    for _ in range(data.draw(st.integers(1, 5))):
        position = data.draw(st.integers(0, len(text) - 1))
        text[position] = data.draw(st.integers(0, 255))
    assert_one_line(folder, bytes(text))


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(content=st.binary(max_size=300))
@example(b"\x80\x04\x95.")
@example(b"cos\nsystem\n(S'true'\ntR.")
def test_random_bytes_are_refused_in_one_line(tmp_path, content):
    with pytest.raises(UserError):
        read_text(tmp_path, content)


def test_a_model_of_many_batch_sizes_is_read_again(tmp_path):
    sizes = tuple(range(1, 41))
    table = make_table((128, 512, 2048), ("metp",), ("mlp",), sizes, model_parts=False)
    model = fit_table(table, "paper")
    write_cost_file(tmp_path / "costs.json", table, model)
    assert read_cost_file(tmp_path / "costs.json").require_model().fits == model.fits


def test_a_model_of_more_steps_than_are_read_is_not_written(tmp_path, monkeypatch):
    """It may replace the measurements that it was fitted to."""
    write_cost_file(tmp_path / "costs.json", SMALL)
    before = (tmp_path / "costs.json").read_bytes()
    model = fit_table(SMALL, "paper")
    monkeypatch.setattr(fit_values, "MAX_EDGES", 4)
    with pytest.raises(UserError, match=r"not written.*at most 4 items, got .*: profile fewer"):
        write_cost_file(tmp_path / "costs.json", SMALL, model)
    assert (tmp_path / "costs.json").read_bytes() == before


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    write_cost_file(tmp_path / "costs.json", SMALL)
    before = (tmp_path / "costs.json").read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left"):
        write_cost_file(tmp_path / "costs.json", TABLE)
    assert (tmp_path / "costs.json").read_bytes() == before
    assert os.listdir(tmp_path) == ["costs.json"]


def test_a_byte_order_mark_and_another_systems_lines_change_nothing(good):
    """As editors leave them."""
    values, folder = good
    text = json.dumps(values, indent=1)
    marked = codecs.BOM_UTF8 + text.replace("\n", "\r\n").encode()
    assert read_text(folder, marked).table == read_text(folder, text).table


def test_a_fingerprint_tells_files_apart(tmp_path):
    write_cost_file(tmp_path / "a", SMALL)
    write_cost_file(tmp_path / "b", SMALL)
    write_cost_file(tmp_path / "c", TABLE)
    prints = [read_cost_file(tmp_path / name).fingerprint for name in "abc"]
    assert prints[0] == prints[1] != prints[2]
