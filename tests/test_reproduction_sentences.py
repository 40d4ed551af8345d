"""What is written by hand beside the paper's results against the numbers in the CSV files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from reproduction import differences
from reproduction.tables import read_table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
VOCABULARY = "50,257"  # GPT-2's, of the simulated models
COUNT = re.compile(r"\b\d{1,3}(?:,\d{3})+\b")
SHARE = re.compile(r"\b\d+\.\d%")


@pytest.fixture(scope="module")
def tables() -> str:
    """RESULTS.md without these sentences, and the lengths of all documents."""
    text = (RESULTS / "RESULTS.md").read_text()
    for sentence in sorted(differences.SENTENCES.values(), key=len, reverse=True):
        text = text.replace(sentence, "")
    tokens = {int(row["tokens"]) for row in read_table(RESULTS / "figure2-simulated.csv").rows}
    authors = read_table(RESULTS / "authors_fits.csv").rows
    saved = [f"{float(row['reduction']):.1%}" for row in authors]
    return " ".join([text, *(f"{count:,}" for count in tokens), *saved])


@pytest.mark.parametrize("name", differences.SENTENCES)
def test_numbers_in_sentences_by_hand_stand_in_the_tables(name, tables):
    sentence = differences.SENTENCES[name]
    found = COUNT.findall(sentence) + SHARE.findall(sentence)
    missing = [number for number in found if number != VOCABULARY and number not in tables]
    assert not missing, f"{name} tells of {missing}, which no table has"


@pytest.mark.parametrize("distribution", ["githubcode", "grch38"])
def test_metps_fixed_time_is_what_its_shortest_document_takes(distribution):
    rows = read_table(RESULTS / "figure2-simulated.csv").where(
        model="bert", distribution=distribution, policy="metp"
    )
    shortest = min(rows, key=lambda row: int(row["tokens"]))
    sentence = differences.sentence(f"reduction:bert:{distribution}:paradyse")
    assert f"{float(shortest['seconds']):.2f} s a sequence simulated" in sentence
