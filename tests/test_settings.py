"""Settings come from flags over YAML over defaults, and nothing unknown passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_paradyse.errors import UserError
from megatron_paradyse.policy import cost_policy_kind, make_policy
from megatron_paradyse.settings import (
    Restriction,
    Settings,
    load_yaml_settings,
    make_settings,
    settings_of,
)


def write(tmp_path, text):
    path = tmp_path / "paradyse.yaml"
    path.write_text(text)
    return str(path)


def test_flags_win_over_yaml_and_yaml_over_defaults(tmp_path):
    path = write(tmp_path, "order: bucketed\nsmoothing: 0.1\nstrategies: [megatron_ts, metp]\n")
    settings = make_settings({"order": "short-to-long", "trace": None}, path)
    assert settings.order == "short-to-long"
    assert settings.smoothing == 0.1
    assert settings.strategies == ("megatron_ts", "metp")
    assert settings.policy == Settings().policy


@pytest.mark.parametrize(
    "text, value", [("auto", "auto"), ("off", "off"), ("2048", 2048), ("4K", 4096)]
)
def test_head_tile_is_the_same_from_yaml_and_from_the_flag(text, value, tmp_path):
    path = write(tmp_path, f"head_tile: {text}\n")  # YAML reads `off` as false
    assert make_settings({}, path).head_tile == make_settings({"head_tile": text}, None).head_tile
    assert make_settings({}, path).head_tile == value


def test_strategies_flag_is_a_comma_separated_list():
    assert make_settings({"strategies": "metp, ulysses_z"}, None).strategies == (
        "metp",
        "ulysses_z",
    )


def test_a_part_of_a_run_file_may_not_say_a_thing_twice():
    node = yaml.compose("order: shuffled\nlayers:\n  1: [metp]\n  1: [ulysses_z]\n")
    with pytest.raises(UserError, match=r"run.yaml:4: key '1' is given twice: keep one"):
        settings_of("run.yaml", node)


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: 1\n", r"yaml:1: unknown key 'a': known are"),
        ("order: shuffled\n\norder: shuffled\n", r"yaml:3: key 'order' is given twice"),
        (
            "order: random\n",
            r"yaml:1: order: 'random' is not one of shuffled, short-to-long, bucketed",
        ),
        ("smoothing: 2\n", r"yaml:1: smoothing: 2 is not a number from 0 to 1"),
        ("smoothing: true\n", r"yaml:1: smoothing: True is not a number"),
        (
            "head_tile: 0\n",
            r"yaml:1: head_tile: 0 is not a number of tokens such as 2048, auto or off",
        ),
        ("head_tile: true\n", r"yaml:1: head_tile: True is not a number of tokens"),
        ("head_tile: wide\n", r"yaml:1: head_tile: 'wide' is not a number of tokens"),
        ("trace: 7\n", r"yaml:1: trace: 7 is not a text"),
        ("strategies: [1]\n", r"yaml:1: strategies: \[1\] is not a list of strategy names"),
        ("balance: 1\n", r"yaml:1: balance: 1 is not true or false"),
        (
            "granularity: token\n",
            r"yaml:1: granularity: 'token' is not one of operation, layer, sequence",
        ),
        ("layers: [metp]\n", r"yaml:1: layers: give layers and their strategies"),
        ("layers: {0: [metp]}\n", r"yaml:1: layers: 0 is not a layer or a range"),
        ("layers: {1-999999: [metp]}\n", r"yaml:1: layers: '1-999999' names layers beyond 100,000"),
        (
            "order: shuffled\nlayers: {1: [metb]}\n",
            r"yaml:2: layers: no strategy named 'metb'",
        ),
        ("strategies: metp,metb\n", r"yaml:1: strategies: no strategy named 'metb': use one of"),
        (
            "order: shuffled\nlayers:\n  1: [metp]\n  2-4: [metp, metb]\n",
            r"yaml:4: layers: no strategy named 'metb'",
        ),
        ("layers: {1-2: [metp], 2: [metp]}\n", r"yaml:1: layers: layer 2 is given twice"),
        ("layers:\n  1: [metp]\n  1: [metp]\n", r"yaml:3: key '1' is given twice: keep one"),
        ("layers: {[1, 2]: [metp]}\n", r"yaml:1: a key is a sequence: write it as a text or a num"),
        ("paradyse: {order: shuffled}\nparadyse: {}\n", r"yaml:2: key 'paradyse' is given twice"),
        (
            "layers: {010: [metp]}\n",
            r"yaml:1: layers: 010 is 8 in YAML: .* decimal, or '010' in quo",
        ),
        (
            "balance: true\nsmoothing: -1:30.5\n",
            r"yaml:2: smoothing: -1:30.5 is -90.5 in YAML: write the number",
        ),
        ("memory_budget: 76G\n", r"yaml:1: memory_budget: a size is written like 76GiB"),
        (
            "trace:\n\t- a\n",
            r"yaml, line 2: this is not YAML: .* indent with spaces, not with tabs",
        ),
        ("layers: {1: {mlp: [metp]}}\n", r"yaml:1: layers: 1: give both attention and mlp"),
        ("- a\n", r"yaml:1: expected 'key: value' lines"),
        ("a: [\n", r"is not YAML"),
        ("trace: !!python/object/apply:os.getcwd []\n", r"yaml:1: "),
    ],
)
def test_yaml_errors_name_file_line_and_value(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        make_settings({}, write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "value"), [("5e-2", 0.05), ("1.5E-1", 0.15), ("1e-400", 0.0), ("0.05", 0.05)]
)
def test_numbers_with_an_exponent_are_numbers(text, value, tmp_path):
    """As in JSON Schema and on the command line; PyYAML reads those without a point as texts."""
    assert make_settings({}, write(tmp_path, f"smoothing: {text}\n")).smoothing == value
    settings = make_settings({}, write(tmp_path, f"watchdog_seconds: {text}\n"))
    assert settings.watchdog_seconds == value
    with pytest.raises(UserError, match="yaml:1: smoothing: '5e1' is not a number from 0 to 1"):
        make_settings({}, write(tmp_path, "smoothing: 5e1\n"))
    with pytest.raises(UserError, match="'1e999' is not a number of seconds from 0 to a day"):
        make_settings({}, write(tmp_path, "watchdog_seconds: 1e999\n"))


def test_layers_are_restricted_by_number_or_range(tmp_path):
    text = "layers:\n  1-2: [megatron_ts, metp]\n  5: {attention: [ulysses_z], mlp: [metp]}\n"
    layers = make_settings({}, write(tmp_path, text)).layers
    both = ("megatron_ts", "metp")
    assert layers == {
        1: Restriction(both, both),
        2: Restriction(both, both),
        5: Restriction(("ulysses_z",), ("metp",)),
    }


def test_a_strategy_named_twice_counts_once(tmp_path):
    text = "layers: {1: [metp, megatron_ts, metp]}\nstrategies: metp,metp,megatron_ts\n"
    settings = make_settings({}, write(tmp_path, text))
    both = ("metp", "megatron_ts")
    assert settings.strategies == both and settings.layers == {1: Restriction(both, both)}


def test_missing_yaml_file(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.yaml: No such file or directory: give an"):
        load_yaml_settings(str(tmp_path / "nothing.yaml"))


def test_empty_yaml_is_the_defaults(tmp_path):
    assert make_settings({}, write(tmp_path, "# nothing\n")) == Settings()


CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_committed_config_is_valid_and_names_a_policy(path):
    settings = make_settings({}, str(path))
    assert cost_policy_kind(settings) or make_policy(settings).strategies


def test_the_example_config_shows_the_defaults():
    assert make_settings({}, str(CONFIGS[0].with_name("example.yaml"))) == Settings()
