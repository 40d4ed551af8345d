"""Plans as text and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_paradyse.errors import UserError
from megatron_paradyse.plan import MOST_LAYERS, LayerChoice, Plan, parse_runs

NAMES = st.sampled_from(["megatron_ts", "ulysses_z+recompute", "metp", "someone.else-s"])
CHOICES = st.builds(LayerChoice, NAMES, NAMES)


@given(st.dictionaries(st.integers(1, 40), CHOICES, min_size=1))
def test_a_plan_is_read_back_from_its_runs(layers):
    assert parse_runs(Plan(layers).runs()) == Plan(layers)


@pytest.mark.parametrize(
    "text", ["", "metp", "0 metp", "2-1 metp", "1 metp,2 metp", "1-2 metp, 2 metp", "1-2000 metp"]
)
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(UserError):
        parse_runs(text)


def test_a_plan_of_the_most_layers_is_read_and_of_one_more_is_not():
    text = f"1-{MOST_LAYERS} metp"
    assert len(parse_runs(text).layers) == MOST_LAYERS
    with pytest.raises(UserError, match="a plan of 1025 layers: at most 1024 are read"):
        parse_runs(f"{text}, {MOST_LAYERS + 1} metp")
