"""A hub of tokenizers that does not answer: told within seconds, and what is cached still loads."""

from __future__ import annotations

import argparse
import http.server
import threading

import pytest
from huggingface_hub import constants
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megatron_paradyse import megatron_start, tokenizer_hub
from megatron_paradyse.data.megatron_tokenizers import _MEGATRON_DEFAULTS
from megatron_paradyse.errors import UserError

NAME = "nobody/tiny"
NEWS = f"> paradyse: the hub of tokenizers does not answer: {NAME} is looked for in its local cache"


@pytest.fixture(autouse=True)
def hub(monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")  # nobody listens there
    monkeypatch.setattr(tokenizer_hub, "PAUSES_SECONDS", (0.0, 0.0))
    megatron_start.say_once.cache_clear()


def arguments(**given):
    given = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": NAME, **given}
    return argparse.Namespace(**{**_MEGATRON_DEFAULTS, **given})


def build(args):
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    return megatron_start._in_one_line(build_tokenizer)(args)


def cache(folder):
    """What the hub's library keeps of a repository that it has downloaded."""
    commit = "0" * 40
    kept = folder / f"models--{NAME.replace('/', '--')}"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text(commit)
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="b", unk_token="<unk>")
    fast.save_pretrained(kept / "snapshots" / commit)
    (kept / "snapshots" / commit / "config.json").write_text('{"model_type": "gpt2"}')


def test_of_a_hub_that_does_not_answer_the_cache_is_read_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    said = "the tokenizer HuggingFaceTokenizer cannot be built .* nobody/tiny"
    with pytest.raises(UserError, match=said):
        build(arguments())
    assert capsys.readouterr().out.startswith(NEWS)
    cache(tmp_path)
    assert build(arguments()).vocab_size == 3
    assert not constants.is_offline_mode()  # what comes later may ask again


@pytest.mark.parametrize("status", [200, 404])
def test_a_hub_that_answers_is_asked(status, monkeypatch, capsys):
    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        with tokenizer_hub.cache_alone_if_unreachable(arguments()) as news:
            assert news is None and not constants.HF_HUB_OFFLINE
        server.shutdown()


def test_no_hub_is_asked_for_what_is_here(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_hub, "_answers", lambda constants: pytest.fail("it was asked"))
    local = ({"tokenizer_model": str(tmp_path)}, {"tokenizer_type": "NullTokenizer"})
    for given in (*local, {"tokenizer_type": "TikTokenizer"}):
        with tokenizer_hub.cache_alone_if_unreachable(arguments(**given)) as news:
            assert news is None
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with tokenizer_hub.cache_alone_if_unreachable(arguments()) as news:
        assert news is None and constants.HF_HUB_OFFLINE
    assert constants.HF_HUB_OFFLINE
