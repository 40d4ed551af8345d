"""A folder with everything that the documented commands name, at a small scale."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

from megatron_paradyse.costs.cost_file import write_cost_file
from megatron_paradyse.costs.fitting import fit_table
from tests.costs.synthetic import make_table
from tests.documentation.markdown import ROOT, Document
from tests.report.samples import RUN, records, write_trace

PAGES = [Document(ROOT / "docs" / f"{name}.md") for name in ("extending", "library")]
LENGTHS = (128, 256, 512, 1024, 2048, 8192)
MODEL = "num-layers: 2\nhidden-size: 64\nnum-attention-heads: 8\nseq-length: 128\nvocab-size: 64\n"


def make_workplace(folder: Path) -> Path:
    """Fill an empty folder; data are left to the commands that prepare them."""
    for name in ("my_project", "megatron_paradyse"):  # sources to prepare
        shutil.copytree(ROOT / "megatron_paradyse" / "edges", folder / name)
    for name in ("configs", "docs", "patches"):
        os.symlink(ROOT / name, folder / name)
    script = folder / "path" / "to" / "pretrain_gpt.py"
    script.parent.mkdir(parents=True)
    script.write_text("raise SystemExit('its flags are parsed, nothing is trained')\n")
    _write_costs(folder)
    (folder / "model.yaml").write_text(MODEL + "max-position-embeddings: 128\n")
    programs = PAGES[-1].blocks("python")
    for block in [*programs, *(block for page in PAGES for block in page.blocks("yaml"))]:
        name = re.match(r"# (\S+\.(?:yaml|py))\n", block)
        assert name, "a file of these pages begins with its name"
        (folder / name[1]).write_text(block + "\n")
    quick = folder / "quick"  # what the quick start's trainings and its profile would leave
    quick.mkdir()
    for trace in (folder / "trace.jsonl", quick / "first.jsonl", quick / "second.jsonl"):
        write_trace(trace, records())
    shutil.copy(folder / "costs-raw.json", quick)
    (folder / "docs.jsonl").write_text('{"body": "first document"}\n{"body": "second"}\n')
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    (folder / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    _write_tokenizer(folder)
    return folder


def _write_costs(folder: Path) -> None:
    """As of a GPU, whose memory is the budget where a command names none."""
    table = make_table(lengths=LENGTHS, strategies=RUN["strategies"])
    hardware = dataclasses.replace(table.description.hardware, kind="cuda")
    description = dataclasses.replace(table.description, hardware=hardware)
    table = dataclasses.replace(table, description=description)
    write_cost_file(folder / "costs.json", table, fit_table(table))
    for name in ("costs-raw.json", "profile.json"):
        write_cost_file(folder / name, table)


def _write_tokenizer(folder: Path) -> None:
    """vocab.json, merges.txt and my_tokenizer/: a BPE of 400 ids, as the page says of its own."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    end, marks = "<|endoftext|>", ["<|im_start|>", "<|im_end|>"]
    bpe = ByteLevelBPETokenizer()
    corpus = str(ROOT / "README.md")
    bpe.train([corpus], vocab_size=400, special_tokens=[end, *marks], show_progress=False)
    bpe.save_model(str(folder))
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token=end)
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    fast.save_pretrained(folder / "my_tokenizer")
