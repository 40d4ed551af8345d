"""Chat templates, a small tokenizer for them, and conversations."""

from __future__ import annotations

import os
import sysconfig

START, END, STOP = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
NANO = ["<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<unk>"]
SAYS = "{{ m.content }}<|im_end|>\n"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    f"{{% if m.role == 'assistant' %}}SAYS{{% else %}}{SAYS}{{% endif %}}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = TEMPLATE.replace("SAYS", SAYS)
MARKED = TEMPLATE.replace("SAYS", f"{{% generation %}}{SAYS}{{% endgeneration %}}")
# As Qwen3's: reasoning is written of the last turn alone.
FORGETFUL = PLAIN.replace(
    "{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
)
# The same of all turns since the last question, with the results of tools between them.
STEP = "{{ content }}<|im_end|>\n"
MARKED_STEP = f"{{% generation %}}{STEP}{{% endgeneration %}}"
STEPS = (
    "{% set ns = namespace(asked=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set content = m.content %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% if loop.index0 < ns.asked %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}SAYS"
    f"{{% else %}}{STEP}{{% endif %}}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_CONTENT = TEMPLATE.replace(
    "SAYS", "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>{{ '\\n' }}"
)
# A turn is ended only once more follows.
OPEN = PLAIN.replace(
    SAYS,
    "{{ m.content }}{% if m.role == 'user' or not loop.last %}<|endoftext|>{% endif %}",
)


def small_bpe(folder, *, trim_offsets=False):
    """A small BPE with a chat template, of which no network is asked."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer(trim_offsets=trim_offsets)
    corpus = os.path.join(sysconfig.get_paths()["stdlib"], "textwrap.py")
    special = [STOP, START, END, *NANO]
    bpe.train([corpus], vocab_size=400, special_tokens=special, show_progress=False)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token=STOP, unk_token="<unk>"
    )
    fast.chat_template = PLAIN
    fast.save_pretrained(folder)
    return folder


def chat(*turns: str) -> list[dict]:
    """Turns of the user and the assistant."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
