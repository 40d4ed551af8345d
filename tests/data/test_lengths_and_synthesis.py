"""Published distributions, lengths drawn like them, and documents that can be learned."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_paradyse.data import synthesize as synthesis
from megatron_paradyse.data.distributions import (
    BUCKET_EDGES,
    DISTRIBUTIONS,
    bucket_labels,
    draw_lengths,
)
from megatron_paradyse.data.index import read_index
from megatron_paradyse.data.lengths import summarize, summary_lines
from megatron_paradyse.data.lengths_plot import plot_lengths
from megatron_paradyse.data.synthesize import MarkovChain, synthesize
from megatron_paradyse.errors import UserError
from megatron_paradyse.units import format_count, parse_count, parse_ratio
from tests.train.harness import write_documents


def test_buckets_are_labelled_as_the_paper_does():
    assert bucket_labels() == ["0-4K", "4K-8K", "8K-16K", "16K-32K", "32K-64K", "64K-128K", "128K+"]
    assert bucket_labels(1 / 32)[:2] == ["0-128", "128-256"]


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("scale", [1.0, 1 / 32, 1 / 3])
def test_drawn_lengths_have_the_published_shares_and_maximum(name, scale):
    row = DISTRIBUTIONS[name]
    count = 200_000
    lengths = draw_lengths(name, count, scale, rng=0)
    edges = np.array(BUCKET_EDGES) * scale
    shares = np.bincount(np.searchsorted(edges, lengths, side="right") - 1, minlength=7) / count
    # Five standard deviations of a share of `count` draws: once in a million at a fixed seed.
    tolerance = 5 * np.sqrt(row.probabilities * (1 - row.probabilities) / count)
    assert np.all(np.abs(shares - row.probabilities) < tolerance)
    assert lengths.min() >= 2
    assert 0.9 * row.max_tokens * scale < lengths.max() <= (row.max_tokens + 1) * scale


def test_published_shares_and_maxima_are_the_papers():
    published = {name: (row.percent, row.max_tokens) for name, row in DISTRIBUTIONS.items()}
    assert published == {
        "githubcode": ((65.7, 14.5, 9.8, 5.1, 2.7, 1.1, 1.1), 309 * 1024),
        "grch38": ((3.5, 26.4, 28.7, 21.2, 11.9, 5.5, 1.9), 624 * 1024),
    }


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_half_of_a_bucket_is_shorter_than_the_geometric_mean_of_its_ends(name):
    lengths = draw_lengths(name, 100_000, rng=0)
    edges = [32, *BUCKET_EDGES[1:], DISTRIBUTIONS[name].max_tokens + 1]
    assert lengths.min() == 32
    for low, high in itertools.pairwise(edges):
        inside = lengths[(low <= lengths) & (lengths < high)]
        shorter = (inside < math.sqrt(low * high)).mean()
        # Five standard deviations, and what whole tokens make of it.
        assert abs(shorter - 0.5) < 2.5 / math.sqrt(len(inside)) + 1e-3


@given(
    count=st.integers(0, 50),
    scale=st.floats(1e-6, 10),
    seed=st.integers(0, 2**32),
    name=st.sampled_from(sorted(DISTRIBUTIONS)),
)
def test_draws_depend_on_the_seed_alone(count, scale, seed, name):
    lengths = draw_lengths(name, count, scale, seed)
    assert np.array_equal(lengths, draw_lengths(name, count, scale, np.random.default_rng(seed)))
    assert len(lengths) == count and lengths.dtype == np.int64 and np.all(lengths >= 2)


def test_draws_that_cannot_be_are_refused():
    scales = (0.0, math.inf, 1e15)
    for arguments in (("bert", 1), ("grch38", -1), *(("grch38", 1, scale) for scale in scales)):
        with pytest.raises(UserError):
            draw_lengths(*arguments)


def test_synthetic_documents_are_deterministic_labelled_and_cut(tmp_path):
    arguments = dict(distribution="grch38", num_documents=50, scale=1 / 32, max_tokens=300)
    first = synthesize(str(tmp_path / "a"), seed=1, **arguments)
    synthesize(str(tmp_path / "b"), seed=1, **arguments)
    synthesize(str(tmp_path / "c"), seed=2, **arguments)
    content = {name: (tmp_path / f"{name}.bin").read_bytes() for name in "abc"}
    assert content["a"] == content["b"] != content["c"]
    assert first.is_synthetic and first.tokenizer == "synthetic"
    assert first.max_document_tokens == 300 and first.num_documents == 50
    assert first.source_parameters == {
        "distribution": "GRCh38",
        "scale": 1 / 32,
        "seed": 1,
        "max_tokens": 300,
        # Of 32, 16, ..., 1 in 63.
        "entropy_nats_per_token": round(math.log(63) - 258 / 63 * math.log(2), 6),
    }


def test_a_walk_goes_on_from_one_array_to_the_next(monkeypatch):
    chain = MarkovChain.create(50, np.random.default_rng(0))
    (whole,) = chain.walk(100, np.random.default_rng(1))
    monkeypatch.setattr(synthesis, "CHUNK_TOKENS", 7)
    parts = list(chain.walk(100, np.random.default_rng(1)))
    assert len(parts) == 15 and np.concatenate(parts).tolist() == whole.tolist()


def test_synthetic_tokens_are_predictable_from_the_token_before(tmp_path):
    """A table of which id follows which, learned on one half, predicts the other half."""
    metadata = synthesize(
        str(tmp_path / "a"), distribution="githubcode", num_documents=40, vocab_size=33
    )
    tokens = np.fromfile(tmp_path / "a.bin", dtype=np.uint8).astype(int)
    lengths = read_index(tmp_path / "a").sequence_lengths
    ends = np.cumsum(lengths) - 1
    assert np.all(tokens[ends] == 32) and np.count_nonzero(tokens == 32) == len(lengths)

    half = len(tokens) // 2
    counts = np.full((33, 33), 1e-3)
    np.add.at(counts, (tokens[: half - 1], tokens[1:half]), 1)
    chances = counts / counts.sum(axis=1, keepdims=True)
    loss = -np.log(chances[tokens[half:-1], tokens[half + 1 :]]).mean()
    entropy = metadata.source_parameters["entropy_nats_per_token"]
    # The table also meets the ends of documents, a few in a thousand tokens.
    assert abs(loss - entropy) < 0.02
    assert loss < 0.5 * math.log(33)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_documents": 0}, "--documents 0"),
        ({"vocab_size": 2}, "--vocab-size 2"),
        ({"max_tokens": 1}, "--max-tokens 1"),
        ({"seed": -1}, "got -1"),
        ({"scale": 0.0}, "scale > 0"),
        ({"scale": 1e9}, r"--scale 1e\+09 makes a document of .* tokens.*or --max-tokens"),
    ],
)
def test_synthesis_that_cannot_be_is_refused(tmp_path, change, message):
    arguments = {"distribution": "grch38", "num_documents": 1, **change}
    with pytest.raises(UserError, match=message):
        synthesize(str(tmp_path / "a"), **arguments)
    assert list(tmp_path.iterdir()) == []


def test_summary_counts_lengths_on_the_edges_of_buckets(tmp_path):
    synthesize(str(tmp_path / "a"), distribution="githubcode", num_documents=300, scale=1 / 32)
    index = read_index(tmp_path / "a")
    summary = summarize(index, scale=1 / 32)
    lengths = index.sequence_lengths
    assert summary.bucket_sequences[0] == np.count_nonzero(lengths < 128)
    assert summary.bucket_sequences[-1] == np.count_nonzero(lengths >= 4096)
    assert sum(summary.bucket_tokens) == summary.num_tokens == lengths.sum()
    assert sum(summary.percent) == pytest.approx(100)
    assert summary.median_tokens == np.median(lengths)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ((3, 10), "median 6.5, mean 6.5, p99 9.9,"),
        ((6, 6), "mean 6, p99 6,"),
        ((1000, 2001), "median 1,500, mean 1,500, p99 1,991,"),
    ],
)
def test_a_mean_of_few_tokens_is_told_with_its_tenths(tokens, said, tmp_path):
    write_documents(tmp_path / "a", tokens)
    _, quantiles, _ = summary_lines(summarize(read_index(tmp_path / "a")))
    assert said in quantiles


def test_a_figure_is_drawn_whole_or_not_at_all(tmp_path):
    synthesize(str(tmp_path / "a"), distribution="githubcode", num_documents=5, scale=1 / 32)
    summary = summarize(read_index(tmp_path / "a"), scale=1 / 32)
    for suffix, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        path = tmp_path / f"figure{suffix}"
        plot_lengths(summary, str(path), label="a", source="synthetic data")
        assert path.read_bytes().startswith(magic)
    with pytest.raises(UserError, match=r"\.png, \.svg or \.pdf"):
        plot_lengths(summary, str(tmp_path / "x.exe"), label="a", source="x")
    with pytest.raises(UserError, match="there is no folder"):
        plot_lengths(summary, str(tmp_path / "none" / "x.png"), label="a", source="x")
    assert len(list(tmp_path.iterdir())) == 6


@given(st.integers(0, 10**12))
def test_counts_are_read_as_written(count):
    assert parse_count(str(count)) == count
    assert parse_count(f"{count}k") == 1024 * count


def test_units():
    assert [parse_count(t) for t in ("1.5M", "128 K", "2Gi")] == [1572864, 131072, 2147483648]
    assert [parse_ratio(t) for t in ("1/32", "0.25", "2", "1e-3")] == [1 / 32, 0.25, 2.0, 1e-3]
    assert [format_count(n) for n in (85.3, 640, 1000, 1023.5, 4096, 131072, 316416)] == [
        "85.3", "640", "1000", "1024", "4K", "128K", "309K",
    ]  # fmt: skip
    for text in ("", "K", "-1", "1.0001K", "1e400", "9" * 99):
        with pytest.raises(UserError):
            parse_count(text)
    for text in ("", "0", "-1", "1/0", "nan", "inf", "1/", "0/5", "9" * 99):
        with pytest.raises(UserError):
            parse_ratio(text)
