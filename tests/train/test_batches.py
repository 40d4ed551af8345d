"""Which samples and shapes a batch has, by Megatron's flags."""

from __future__ import annotations

import argparse

import pytest

from megatron_paradyse.train import plugin


@pytest.fixture(autouse=True)
def installed():
    plugin.install()


@pytest.mark.parametrize(("skip_train", "first"), [(False, 24), (True, 0)])
def test_an_evaluation_alone_begins_at_the_first_sample(skip_train, first, monkeypatch):
    """As Megatron's does, wherever the checkpoint's own evaluations had come to."""
    from megatron_paradyse.train import datasets

    args = argparse.Namespace(
        consumed_train_samples=96,
        consumed_valid_samples=24,
        skip_train=skip_train,
        eval_iters=2,
        paradyse_settings=argparse.Namespace(sequences="documents"),
    )
    monkeypatch.setattr(datasets, "get_args", lambda: args)
    monkeypatch.setattr(datasets, "_sources", lambda args: [None] * 3)
    monkeypatch.setattr(datasets, "_stream", lambda *of: None)
    monkeypatch.setattr(datasets, "_unpacked", lambda args, seconds, split, stream, start: start)
    train, valid, test = datasets.provide_document_iterators([None] * 3)
    assert (train, valid, test) == (None if skip_train else 96, first, 0)
