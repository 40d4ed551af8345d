"""Documents become samples: nothing dropped, nothing repeated, padding never counts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_paradyse.data.choices import ORDER_CHOICES
from megatron_paradyse.data.documents import DocumentDataset, SampleStream, build_sample_table
from megatron_paradyse.data.loader import Balance, BatchSizes, Sharding, collate, microbatches
from megatron_paradyse.data.order import make_order
from megatron_paradyse.data.packed import next_tokens
from megatron_paradyse.data.targets import NO_LABEL
from megatron_paradyse.data.whole_set import OneEpoch, WholeSet
from megatron_paradyse.errors import UserError
from tests.train.harness import write_documents

LENGTHS = [1, 2, 3, 17, 64, 65, 66, 200, 9, 31, 5, 129, 40, 40, 40, 7]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(1, 20))
def test_splitting_makes_every_prediction_exactly_once(token_counts, seq_length):
    table = build_sample_table(
        np.array(token_counts), seq_length=seq_length, long_documents="split"
    )
    targets = [
        (document, start + 1 + i)
        for document, start, length in zip(table.document, table.start, table.length, strict=True)
        for i in range(length)
    ]
    expected = [(d, t) for d, count in enumerate(token_counts) for t in range(1, count)]
    assert sorted(targets) == expected
    assert all(1 <= length <= seq_length for length in table.length)
    assert table.num_short == sum(count < 2 for count in token_counts)


def test_truncating_keeps_the_head_and_counts_the_loss():
    table = build_sample_table(np.array([5, 100]), seq_length=10, long_documents="truncate")
    assert table.length.tolist() == [4, 10]
    assert table.num_truncated == 1


@pytest.mark.parametrize("long_documents", ["refuse", "truncate"])
def test_a_document_that_just_fits_is_whole(long_documents):
    table = build_sample_table(np.array([11]), seq_length=10, long_documents=long_documents)
    assert (table.length.tolist(), table.num_truncated) == ([10], 0)


def test_refusing_names_the_document_and_the_remedy():
    """The first of them, in the second half of a data set, one of several."""
    said = r"^document 3 of wiki has 100 tokens, --seq-length 10 takes 11: raise"
    with pytest.raises(UserError, match=said):
        build_sample_table(
            np.array([5, 100, 50, 200]),
            **{"seq_length": 10, "long_documents": "refuse", "first_document": 2, "prefix": "wiki"},
        )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("documents") / "corpus"
    write_documents(prefix, LENGTHS)
    return DocumentDataset(str(prefix), fraction=(0.0, 1.0), seq_length=64, long_documents="split")


def test_samples_are_the_documents_tokens(dataset):
    rebuilt: dict[int, list[int]] = {}
    for i in range(len(dataset)):
        document = int(dataset.samples.document[i])
        tokens = dataset[i].tolist()
        assert len(tokens) == dataset.lengths[i] + 1
        if document in rebuilt:
            assert rebuilt[document][-1] == tokens[0]  # neighbours share one token
            rebuilt[document].extend(tokens[1:])
        else:
            rebuilt[document] = tokens
    assert {d: len(t) for d, t in rebuilt.items()} == {
        d: n for d, n in enumerate(LENGTHS) if n >= 2
    }
    for document, tokens in rebuilt.items():
        whole = dataset._indexed.get(document)
        assert tokens == whole.tolist()


def test_splits_are_disjoint_and_complete(tmp_path):
    write_documents(tmp_path / "corpus", [4] * 50)
    documents = []
    for fraction in ((0.0, 0.9), (0.9, 0.97), (0.97, 1.0)):
        part = DocumentDataset(
            str(tmp_path / "corpus"), fraction=fraction, seq_length=64, long_documents="split"
        )
        documents.extend(part.samples.document.tolist())
    assert documents == list(range(50))


@pytest.mark.parametrize("name", ORDER_CHOICES)
def test_every_order_is_a_permutation_and_deterministic(name):
    lengths = np.random.default_rng(0).integers(1, 1000, size=101)
    order = make_order(name, seed=3, group=8)
    for epoch in range(3):
        assert sorted(order(lengths, epoch)) == list(range(101))
        np.testing.assert_array_equal(order(lengths, epoch), order(lengths, epoch))


@pytest.mark.parametrize("name", ["shuffled", "bucketed"])
def test_epochs_and_seeds_shuffle_differently(name):
    lengths = np.ones(104)  # whole groups
    shuffled, other = (make_order(name, seed=seed, group=8) for seed in (3, 4))
    orders = [shuffled(lengths, 0), shuffled(lengths, 1), other(lengths, 0), np.arange(104)]
    assert all((one != two).any() for one, two in itertools.combinations(orders, 2))


def test_groups_of_alike_lengths_are_in_no_order_of_their_lengths():
    """Nor of the data: else every epoch would be short to long, of neighbours."""
    lengths = np.repeat([1, 10, 100, 1000], 80)
    order = make_order("bucketed", seed=3, group=8)(lengths, 0)
    assert 10 < np.count_nonzero(np.diff(lengths[order])) < 40  # of 39 ends of groups
    assert np.count_nonzero(np.diff(order) == 1) < 40


def test_short_to_long_is_sorted_and_bucketed_groups_are_alike():
    lengths = np.random.default_rng(1).integers(1, 99, size=400)  # many of them equal
    ascending = make_order("short-to-long", seed=0, group=8)(lengths, 0)
    assert ascending.tolist() == sorted(range(400), key=lambda i: lengths[i])
    order = make_order("bucketed", seed=0, group=8)(lengths, 0)
    buckets = np.log2(lengths[order]).astype(int)
    whole = sum(int(n) // 8 for n in np.bincount(buckets))
    groups = buckets[: whole * 8].reshape(-1, 8)
    assert (groups == groups[:, :1]).all()


RANDOM = np.random.default_rng(1).integers(1, 4096, 1001)
FEW_LEFT = np.where(np.arange(1001) < 504, 5, 100)  # one of 497; where 7 are needed a group is cut


@pytest.mark.parametrize("lengths", [RANDOM, FEW_LEFT], ids=["random", "few left"])
def test_bucketed_groups_begin_with_global_batches_in_every_epoch(lengths):
    order = make_order("bucketed", seed=0, group=8)
    groups = sum(int(n) // 8 for n in np.bincount(np.log2(lengths).astype(int)))
    for epoch in range(9):
        found = order(lengths, epoch)
        assert sorted(found) == list(range(1001))
        first = -epoch * 1001 % 8  # of the next global batch
        batches = np.log2(lengths[found[first : first + 8 * (groups - 1)]]).astype(int)
        assert (batches.reshape(-1, 8) == batches[::8, None]).all()


def stream_of(*datasets, **kwargs):
    options = {"weights": None, "order": make_order("shuffled", seed=1, group=4), "num_samples": 1}
    return SampleStream(datasets, **{**options, **kwargs})


def test_replicas_share_an_epoch_without_gap_or_overlap(dataset):
    """All replicas' microbatches of an epoch together are the epoch, then the next begins."""
    stream = stream_of(dataset)
    seen = []
    for replica in range(3):
        sharding = Sharding(micro_batch_size=2, replica=replica, num_replicas=3)
        for step in range(4):
            seen.extend(sharding.positions(step * sharding.round_size))
    assert sorted(seen) == list(range(24))
    epoch = [stream._locate(k) for k in range(len(dataset))]
    assert sorted(epoch) == [(0, i) for i in range(len(dataset))]


def test_an_order_is_made_once_for_samples_of_two_epochs_in_turn(dataset):
    """As packing reads a global batch in which an epoch begins."""
    made, shuffle = [], make_order("shuffled", seed=1, group=4)

    def order(lengths, epoch):
        made.append(epoch)
        return shuffle(lengths, epoch)

    stream, size = stream_of(dataset, order=order), len(dataset)
    for rank in range(4):
        for epoch in (1, 2):
            expected = shuffle(dataset.lengths, epoch)[rank]
            assert stream._locate(epoch * size + rank) == (0, expected)
    assert made == [1, 2]
    assert [stream._locate(epoch * size)[0] for epoch in (3, 2)] == [0, 0]
    assert made == [1, 2, 3]  # the last two are remembered


def test_a_restart_resumes_at_the_exact_sample(dataset):
    sharding = Sharding(micro_batch_size=2, replica=1, num_replicas=2)
    options = {"sharding": sharding, "alignment": 4, "num_workers": 0}
    whole = iter(microbatches(stream_of(dataset), consumed=0, **options))
    batches = [next(whole) for _ in range(9)]
    resumed = iter(microbatches(stream_of(dataset), consumed=5 * sharding.round_size, **options))
    for expected in batches[5:]:
        batch = next(resumed)
        assert (batch["tokens"] == expected["tokens"]).all()
        assert (batch["lengths"] == expected["lengths"]).all()


@pytest.mark.parametrize("consumed", [0, 12, 60])
def test_replicas_of_even_times_train_on_each_global_batch_whole(consumed, dataset):
    """Also where a restart goes on behind some."""
    stream = stream_of(dataset)
    options = {"alignment": 4, "num_workers": 0, "consumed": consumed, "stop": consumed + 36}
    options["balance"] = Balance(BatchSizes.constant(12), lambda b, s: float(b * s * s))
    dealt: list[list] = [[], [], []]  # by global batch
    for replica in range(2):
        sharding = Sharding(micro_batch_size=2, replica=replica, num_replicas=2)
        for number, batch in enumerate(microbatches(stream, sharding=sharding, **options)):
            for row, length in zip(batch["tokens"], batch["lengths"], strict=True):
                dealt[number // 3].append(row[: length + 1].tolist())
    for number, found in enumerate(dealt):
        first = consumed + 12 * number
        assert sorted(found) == sorted(stream.tokens(first + i).tolist() for i in range(12))


@given(
    grows=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5)), max_size=3),
    first_size=st.integers(1, 6),
    consumed=st.integers(0, 40),
)
@settings(max_examples=60, deadline=None)
def test_global_batches_are_counted_as_they_follow_each_other(grows, first_size, consumed):
    """Each has the size of the last step that is not beyond its start."""
    steps = [(0, first_size)]
    for samples, more in grows:
        steps.append((steps[-1][0] + samples, steps[-1][1] + more))
    sizes, starts = BatchSizes(tuple(steps)), [consumed]
    for _ in range(12):
        size = [size for step, size in steps if step <= starts[-1]][-1]
        assert sizes.at(starts[-1]) == size
        starts.append(starts[-1] + size)
    assert list(sizes.starts(consumed, starts[-1])) == starts[:-1]
    assert [sizes.count(consumed, first) for first in starts] == list(range(13))
    assert all(sizes.count(first, starts[-1]) == 12 - i for i, first in enumerate(starts))


def test_a_whole_set_is_each_sample_and_then_nothing_that_is_learnt(dataset):
    stream = stream_of(dataset)
    count = stream.epoch_size
    whole = OneEpoch(stream, count)
    for position in range(count + 3):
        tokens = whole.tokens(position)
        assert len(tokens) == whole.length(position) + 1
        inputs, labels = next_tokens(tokens, 0)
        assert (labels == NO_LABEL).all() == (position >= count)
        assert (inputs >= 0).all()
        assert position >= count or tokens.tolist() == stream.tokens(position).tolist()


def test_each_evaluation_of_a_whole_set_begins_anew():
    whole = WholeSet([7, 8], 5)
    assert [next(iter(whole)), *iter(whole)] == [7, 7, 8] and len(whole) == 5


def test_collate_pads_to_the_longest_and_the_alignment():
    batch = collate([np.arange(1, 6), np.arange(1, 11)], alignment=8)
    assert batch["tokens"].shape == (2, 17)
    assert batch["lengths"].tolist() == [4, 9]
    assert batch["tokens"][0].tolist() == [1, 2, 3, 4, 5] + [0] * 12
    assert collate([np.arange(9)], alignment=8)["tokens"].tolist() == [[*range(9)]]


def test_an_epoch_of_joined_data_sets_has_every_document_of_each(tmp_path):
    sets, expected = [], []
    for seed, (name, lengths) in enumerate({"a": [9, 3], "b": [5, 1, 7], "c": [4, 6]}.items()):
        write_documents(tmp_path / name, lengths, seed=seed)
        whole = {"fraction": (0.0, 1.0), "seq_length": 64, "long_documents": "split"}
        sets.append(DocumentDataset(str(tmp_path / name), **whole))
        expected += [sets[-1][i].tolist() for i in range(len(sets[-1]))]
    stream = stream_of(*sets)
    for epoch in range(2):
        found = [stream.tokens(6 * epoch + i).tolist() for i in range(6)]
        assert sorted(found) == sorted(expected)
        assert [stream.length(6 * epoch + i) for i in range(6)] == [len(f) - 1 for f in found]


def test_weights_blend_datasets_and_keep_each_ones_epochs(tmp_path):
    for name, count in (("a", 10), ("b", 4)):
        write_documents(tmp_path / name, [8] * count)
    sets = [
        DocumentDataset(
            str(tmp_path / n), fraction=(0.0, 1.0), seq_length=64, long_documents="split"
        )
        for n in "ab"
    ]
    order = make_order("shuffled", seed=1, group=4)
    stream = SampleStream(sets, weights=[3.0, 1.0], order=order, num_samples=40)
    sources = [stream._locate(k) for k in range(80)]
    assert sum(source == 0 for source, _ in sources[:40]) == 30
    first = [index for source, index in sources if source == 0]
    for epoch in range(6):
        assert sorted(first[epoch * 10 : epoch * 10 + 10]) == list(range(10))


def test_bucketed_global_batches_of_a_blend_are_groups_of_one_dataset(tmp_path):
    """By the weights, each data set through its own epochs."""
    random, sets = np.random.default_rng(3), []
    for name, count, longest in (("a", 100, 60), ("b", 37, 20)):
        write_documents(tmp_path / name, random.integers(2, longest, size=count).tolist())
        sets.append(
            DocumentDataset(
                str(tmp_path / name), fraction=(0.0, 1.0), seq_length=64, long_documents="split"
            )
        )
    order = make_order("bucketed", seed=1, group=8)
    stream = SampleStream(sets, weights=[3.0, 1.0], order=order, num_samples=160, group=8)
    batches = [[stream._locate(8 * k + i) for i in range(8)] for k in range(40)]
    assert all(len({source for source, _ in batch}) == 1 for batch in batches)
    assert [batch[0][0] for batch in batches].count(0) == 30
    for number, dataset in enumerate(sets):
        seen = [index for batch in batches for source, index in batch if source == number]
        whole = [order(dataset.lengths, epoch) for epoch in range(-(-len(seen) // len(dataset)))]
        assert seen == np.concatenate(whole)[: len(seen)].tolist()
    spans = [[stream.length(8 * k + i).bit_length() for i in range(8)] for k in range(40)]
    assert sum(len(set(span)) == 1 for span in spans) >= 30  # the others are what buckets leave


def test_a_blended_sample_is_found_without_reading_the_whole_blend(dataset):
    class Unread(np.ndarray):
        def __eq__(self, other):
            raise AssertionError("compared with every position of the blend")

    weights = [0.75, 0.25]
    order = make_order("short-to-long", seed=1, group=4)
    stream = SampleStream([dataset] * 2, weights=weights, order=order, num_samples=24)
    sources, positions = stream._blend
    stream._blend = (sources.view(Unread), positions)
    found = [stream._locate(k) for k in range(24)]
    for source, count in enumerate((18, 6)):
        seen = [index for blended, index in found if blended == source]
        assert seen == [stream._order(dataset.lengths, 0)[k] for k in range(count)]


@pytest.mark.parametrize("group", [1, 4])
def test_a_blend_is_the_same_however_many_samples_are_expected(group, dataset):
    """A restart with another batch size or number of iterations expects others."""
    few, many = (
        stream_of(dataset, dataset, dataset, weights=[1, 1, 1], num_samples=n, group=group)
        for n in (13, 400)
    )
    assert [few._locate(k) for k in range(200)] == [many._locate(k) for k in range(200)]
