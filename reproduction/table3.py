"""Table 3: how long documents are, in real data where it is given, else as drawn.

    scripts/table3.sh [--data githubcode=PREFIX] [--data grch38=PREFIX]

PREFIX: a .bin/.idx pair of `megatron-paradyse data prepare`.
"""

from __future__ import annotations

import argparse

import numpy as np

from megatron_paradyse.data.distributions import BUCKET_EDGES, DISTRIBUTIONS, bucket_labels
from megatron_paradyse.data.index import read_index
from megatron_paradyse.errors import UserError
from reproduction.documents import SEED, document_lengths
from reproduction.tables import TABLE3, origin, update_table

DRAWN = 10_000
DRAWN_SOURCE = "drawn from the published distribution"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="NAME=PREFIX",
        help="real documents of a distribution: a .bin/.idx pair; else they are drawn",
    )


def run(arguments: argparse.Namespace) -> None:
    """Write table3.csv."""
    given = dict(_pair(text) for text in arguments.data)
    rows = [
        row for name in arguments.distributions for row in length_rows(name, given.get(name, ""))
    ]
    titles = {DISTRIBUTIONS[name].title for name in arguments.distributions}
    real = ", ".join(sorted(given)) or "no real data"
    update_table(
        arguments.output / "table3.csv",
        TABLE3,
        rows,
        made=origin("simulated" if not given else "measured", f"lengths only, {real}, seed {SEED}"),
        replaces=lambda row: row["dataset"] in titles,
    )


def length_rows(name: str, prefix: str = "") -> list[dict]:
    """One row per bucket; shares in percent."""
    published = DISTRIBUTIONS[name]
    if prefix:
        lengths = np.asarray(read_index(prefix).sequence_lengths)
        source = f"real data {prefix.rsplit('/', 1)[-1]}"
    else:
        lengths, source = document_lengths(name, DRAWN), DRAWN_SOURCE
    buckets = np.searchsorted(BUCKET_EDGES, lengths, side="right") - 1
    counts = np.bincount(buckets, minlength=len(BUCKET_EDGES))
    return [
        {
            "dataset": published.title,
            "tokenizer": published.tokenizer,
            "source": source,
            "bucket": label,
            "documents": int(count),
            "share": 100 * count / len(lengths),
            "paper_share": share,
            "max_tokens": int(lengths.max()),
        }
        for label, count, share in zip(bucket_labels(), counts, published.percent, strict=True)
    ]


def _pair(text: str) -> tuple[str, str]:
    name, equals, prefix = text.partition("=")
    if name not in DISTRIBUTIONS or not equals or not prefix:
        raise UserError(
            f"--data is {' or '.join(DISTRIBUTIONS)}=PREFIX of a .bin/.idx pair, got {text!r:.80}"
        )
    return name, prefix
