"""A hub of tokenizers that cannot be reached is told within seconds, and its local cache is used.

A --tokenizer-model that is no local path is a name on the Hugging Face hub. Its library asks six
times for each file before it falls back on what it has cached: most of a minute without a network.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator

ASKING = (  # Megatron's tokenizers that are built through that library
    "HuggingFaceTokenizer",
    "SFTTokenizer",
    "MultimodalTokenizer",
    "GPT2BPETokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
)
PAUSES_SECONDS = (1.0, 2.0, 0.0)  # after each failure, as a network may fail for a moment


@contextlib.contextmanager
def cache_alone_if_unreachable(args: argparse.Namespace) -> Iterator[str | None]:
    """Within, the library reads its local cache alone if the hub does not answer.

    Gives the news of that, or None. Where the hub answers or is not needed, nothing changes.
    """
    model = getattr(args, "tokenizer_model", None)
    asks = args.tokenizer_type in ASKING and not (model and os.path.exists(model))
    try:
        from huggingface_hub import constants
    except ImportError:
        asks = False
    if not asks or constants.HF_HUB_OFFLINE or _answers(constants):
        yield None
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield (
            f"the hub of tokenizers does not answer: {model or args.tokenizer_type} is looked for "
            "in its local cache alone"
        )
    finally:
        constants.HF_HUB_OFFLINE = False


def _answers(constants) -> bool:
    """Whether the library's own session, with the user's proxy, gets any answer."""
    from huggingface_hub.utils import get_session

    for pause in PAUSES_SECONDS:
        try:
            get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
            return True
        except Exception:  # of the library below, which differs between versions
            time.sleep(pause)
    return False
