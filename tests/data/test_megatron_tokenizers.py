"""Tokenizers that Megatron builds: from local files, the same ids as their library, no network."""

import base64
import json
import logging
import os
import socket
import sysconfig

import pytest

from megatron_paradyse.data.commands import MEGATRON_TOKENIZERS
from megatron_paradyse.data.megatron_tokenizers import (
    MEGATRON_TYPES,
    SENTENCEPIECE_TYPES,
    MegatronTokenizer,
)
from megatron_paradyse.errors import UserError

END = "<|endoftext|>"
TEXT = "import os  # häßlich\n"


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a tokenizer opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Small tokenizers of every library, trained on a file of the standard library."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import sentencepiece
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizers")
    corpus = os.path.join(sysconfig.get_paths()["stdlib"], "textwrap.py")
    bpe = ByteLevelBPETokenizer()
    bpe.train([corpus], vocab_size=400, special_tokens=[END], show_progress=False)
    bpe.save_model(str(folder))
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token=END)
    fast.save_pretrained(folder / "hf")
    sentencepiece.SentencePieceTrainer.train(
        input=corpus,
        model_prefix=str(folder / "sp"),
        vocab_size=400,
        byte_fallback=True,
        model_type="bpe",
        minloglevel=2,
    )
    ranks = [
        {"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": None}
        for i in range(256)
    ]
    (folder / "ranks.json").write_text(json.dumps(ranks))
    return folder, bpe


def test_gpt2_and_huggingface_ids_are_those_of_the_library(files):
    folder, bpe = files
    expected = bpe.encode(TEXT).ids
    gpt2 = MegatronTokenizer(
        "GPT2BPETokenizer",
        vocab_file=str(folder / "vocab.json"),
        merge_file=str(folder / "merges.txt"),
    )
    huggingface = MegatronTokenizer("HuggingFaceTokenizer", model=str(folder / "hf"))
    for tokenizer in (gpt2, huggingface):
        assert tokenizer.tokenize(TEXT).tolist() == expected
        assert tokenizer.vocab_size == 400
        assert tokenizer.eod == bpe.token_to_id(END)


def test_a_tokenizer_tells_what_its_ids_stand_for(files, tmp_path):
    """By any library and of any file; two files of one size and end may hold other tokens."""
    folder, _ = files
    gpt2 = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    digests = [
        MegatronTokenizer(name, **given).parameters()["vocabulary"]
        for name, given in (
            ("GPT2BPETokenizer", gpt2),
            ("HuggingFaceTokenizer", {"model": str(folder / "hf")}),
            ("SentencePieceTokenizer", {"model": str(folder / "sp.model")}),
            ("TikTokenizer", {"model": str(folder / "ranks.json")}),
        )
    ]
    assert digests[0] == digests[1] and len(set(digests)) == 3
    tokens = json.loads((folder / "vocab.json").read_text())
    first, second = list(tokens)[5:7]
    tokens[first], tokens[second] = tokens[second], tokens[first]
    (tmp_path / "vocab.json").write_text(json.dumps(tokens))
    swapped = MegatronTokenizer(
        "GPT2BPETokenizer", **{**gpt2, "vocab_file": str(tmp_path / "vocab.json")}
    )
    assert swapped.vocab_size == 400 and swapped.parameters()["vocabulary"] not in digests


def test_text_that_arrives_in_chunks_is_tokenized_whole(files):
    tokenizer = MegatronTokenizer("HuggingFaceTokenizer", model=str(files[0] / "hf"))
    data = TEXT.encode()
    chunks = [data[i : i + 1] for i in range(len(data))]  # cuts inside the two-byte letters
    (ids,) = tokenizer.stream(chunks)
    assert ids.tolist() == tokenizer.tokenize(TEXT).tolist()
    assert len(tokenizer.tokenize(b"\xff\xfe")) > 0
    assert len(tokenizer.tokenize("")) == 0


def test_a_text_begins_with_what_its_tokenizer_puts_there_and_the_lack_of_one_is_empty(files):
    from tokenizers.processors import TemplateProcessing

    tokenizer = MegatronTokenizer("HuggingFaceTokenizer", model=str(files[0] / "hf"))
    library = tokenizer._tokenizer._tokenizer.tokenizer
    begins = TemplateProcessing(single=f"{END} $A", special_tokens=[(END, tokenizer.eod)])
    library.backend_tokenizer.post_processor = begins
    assert tokenizer.tokenize("a")[0] == tokenizer.eod
    assert len(tokenizer.tokenize("")) == 0


def test_documents_beyond_the_length_of_the_tokenizers_own_model_are_no_news(files):
    """Which would be told to result in errors."""
    tokenizer = MegatronTokenizer("HuggingFaceTokenizer", model=str(files[0] / "hf"))
    tokenizer._tokenizer._tokenizer.tokenizer.model_max_length = 2
    said: list[str] = []
    logger = logging.getLogger("transformers.tokenization_utils_base")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        assert len(tokenizer.tokenize(TEXT)) > 2
        logger.warning("else")
    finally:
        logger.removeHandler(handler)
    assert said == ["else"]


@pytest.mark.parametrize("name", SENTENCEPIECE_TYPES)
def test_sentencepiece_ids_are_those_of_the_library(name, files):
    import sentencepiece

    model = str(files[0] / "sp.model")
    tokenizer, library = MegatronTokenizer(name, model=model), sentencepiece.SentencePieceProcessor
    assert tokenizer.vocab_size == 400 and tokenizer.eod == 2
    for text in (TEXT, "    return  x\n\n\tif", "<s>a</s>"):
        assert tokenizer.tokenize(text).tolist() == library(model_file=model).encode(text)


def test_a_vocabulary_without_an_end_has_none(files, tmp_path):
    import sentencepiece

    corpus = os.path.join(sysconfig.get_paths()["stdlib"], "textwrap.py")
    sentencepiece.SentencePieceTrainer.train(
        input=corpus, model_prefix=str(tmp_path / "sp"), vocab_size=120, eos_id=-1, minloglevel=2
    )
    tokenizer = MegatronTokenizer("SentencePieceTokenizer", model=str(tmp_path / "sp.model"))
    assert tokenizer.eod is None


def test_tiktoken_is_built(files):
    folder, _ = files
    tiktoken = MegatronTokenizer("TikTokenizer", model=str(folder / "ranks.json"))
    assert tiktoken.vocab_size == 256 + 1000
    assert tiktoken.tokenize("A").tolist() == [1000 + ord("A")]


def test_missing_or_broken_files_are_named(files, tmp_path):
    with pytest.raises(UserError, match="needs --tokenizer-model"):
        MegatronTokenizer("HuggingFaceTokenizer")
    with pytest.raises(UserError, match=r"nowhere does not exist.*local files only"):
        MegatronTokenizer("HuggingFaceTokenizer", model="nowhere")
    with pytest.raises(UserError, match="takes no --tokenizer-model"):
        MegatronTokenizer("GPT2BPETokenizer", model="x", vocab_file="v", merge_file="m")
    broken = tmp_path / "broken.json"
    broken.write_text("[{}]")
    for name in ("TikTokenizer", "SentencePieceTokenizer", "HuggingFaceTokenizer"):
        with pytest.raises(UserError, match=f"{name} cannot be built from .*broken.json"):
            MegatronTokenizer(name, model=str(broken))


def test_the_command_line_offers_every_type():
    assert set(MEGATRON_TOKENIZERS) == set(MEGATRON_TYPES)
