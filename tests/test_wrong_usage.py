"""Wrong usages of every command: one line with the wrong value and the remedy, and no file left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from megatron_paradyse.cli import COMMANDS, cli
from tests.report.samples import records, write_trace
from tests.train.synthetic_costs import write_costs

ROOT = Path(__file__).resolve().parents[1]
PLAN = ("plan", "costs.json", "--lengths", "1K")
LONGEST = ("max-length", "costs.json", "--memory-budget", "150MB")
SIMULATE = ("simulate", "--ranks", "8", "-o", "out.json", "--gpu")
GPT = (*SIMULATE, "a100-80g", "--model", "gpt")
PROFILE = ("profile", "--nproc", "2", "-o", "out.json")
STAND_IN = ("profile", "--stand-in", "8", "--interconnect", "nvlink4", "-o", "out.json")
SIZE_4 = ("--vocab-size", "9", "--tensor-model-parallel-size", "4")
PREPARE = ("data", "prepare", "-o", "out")
SYNTHESIZE = ("data", "synthesize", "-o", "out", "--distribution", "githubcode", "--documents")

# arguments -> what is wrong, as the user wrote it; what mends it
CASES: list[tuple[tuple[str, ...], str, str]] = [
    # commands, options and their values
    (("plna", "costs.json"), "'plna'", "did you mean plan?"),
    (("doctor", "--jsn"), "'--jsn'", "--help"),
    (("plan", "costs.json"), "nothing to plan", "give --lengths, --documents, or both"),
    (("plan", "costs.json", "--lengths", "1Q"), "'1Q'", "written like 4096, 128K or 1.5M"),
    (("plan", "costs.json", "--lengths", "64,-5"), "'-5'", "written like 4096, 128K or 1.5M"),
    (("plan", "costs.json", "--lengths", "0"), "got '0'", "such as 1K,32K,300K"),
    (("plan", "costs.json", "--lengths", "9999G"), "'9999G'", "from 1 to 1,099,511,627,776"),
    ((*PLAN, "--batch-size", "0"), "0 is not in the range", "1<=x<="),
    ((*PLAN, "--memory-budget", "76G"), "'76G'", "--memory-budget: a size is written like 76GiB"),
    ((*PLAN, "--memory-budget", "50MB"), "a memory budget of 47.7 MiB", "use more ranks"),
    ((*PLAN, "--memory-margin", "3"), "3.0 is not in the range", "'--memory-margin'"),
    ((*PLAN, "--memory-margin", "nan"), "nan is not in the range", "0<=x<=1"),
    ((*PLAN, "--mixing-gain", "nan"), "nan is not in the range", "0<=x<=1"),
    ((*PLAN, "--strategies", "metq"), "'metq'", "use one of megatron_ts"),
    ((*PLAN, "--policy", "fastest"), "'fastest'", "give optimal, heuristic"),
    ((*PLAN, "--policy", "heuristic:no-brakes"), "no-brakes", "heuristic takes no-prune"),
    ((*PLAN, "--granularity", "token"), "'token'", "'operation', 'layer', 'sequence'"),
    ((*PLAN, "--head-tile", "wide"), "'wide'", "such as 2048, auto or off"),
    ((*PLAN, "--num-layers", "0"), "--num-layers 0", "1 to 100,000 layers"),
    ((*PLAN, "--pipeline-stages", "3"), "3 pipeline stages", "that divides them"),
    ((*PLAN, "--microbatches", "8"), "--microbatches 8 is of a pipeline", "--pipeline-stages"),
    ((*PLAN, "--pipeline-stage", "2"), "stage 2 of 1", "give --pipeline-stage 1 to 1"),
    (
        ("plan", "costs.json", "--documents", "512,1K", "--batch-size", "2"),
        "--batch-size 2 with --documents",
        "leave it out, or give --lengths",
    ),
    (
        ("plan", "costs.json", "--documents", "512", "--spread", "100000000"),
        "100000000 is not in the range",
        "2<=x<=1024",
    ),
    ((*LONGEST, "--spread", "1000000000"), "1000000000 is not in the range", "2<=x<=1024"),
    (("plan", "", "--lengths", "1K"), "'' does not exist", "check the path"),
    (("max-length", "costs.json"), "without a memory budget", "give --memory-budget"),
    ((*LONGEST, "--resolution", "nan"), "nan is not in the range", "0<x<=1"),
    ((*LONGEST, "--resolution", "0.1"), "--resolution is for measuring", "give --measure FILE"),
    ((*LONGEST, "--most-seconds", "9"), "--most-seconds is for measuring", "or leave it out"),
    ((*LONGEST, "--most-seconds", "nan"), "nan is not in the range", "0<x<="),
    # files that are not there, or not what they should be
    (("plan", "none.json", "--lengths", "1K"), "none.json does not exist", "check the path"),
    (("plan", "folder", "--lengths", "1K"), "folder is not a regular file", "check the path"),
    (("plan", "cut.json", "--lengths", "1K"), "cut.json: not JSON, or cut off", "make it again"),
    (("plan", "old.json", "--lengths", "1K"), "old.json: schema_version must be 1, got 7", "again"),
    (("plan", "raw.json", "--lengths", "1K"), "raw.json holds", "fit raw.json -o raw.json"),
    (("plan", "negative.json", "--lengths", "1K"), "kept_bytes must lie in [0", "make it again"),
    (("fit", "one-length.json", "-o", "out.json"), "one-length.json", "profile at more lengths"),
    (("fit", "trace.jsonl", "-o", "out.json"), "trace.jsonl: not JSON", "make it again"),
    (("accuracy", "costs.json", "--held-out", "none.json"), "none.json", "check the path"),
    (("accuracy", "one-length.json"), "one-length.json", "measure at 4 lengths or more"),
    (("report", "none.jsonl"), "none.jsonl does not exist", "--paradyse-trace wrote"),
    (("report", "empty.jsonl"), "empty.jsonl holds no microbatch", "--paradyse-trace wrote"),
    (("report", "starts.jsonl"), "starts.jsonl holds no microbatch", "--paradyse-trace wrote"),
    (("report", "trace.jsonl", "--costs", "raw.json"), "raw.json", "megatron-paradyse fit"),
    (("data", "lengths", "none"), "none.idx does not exist", "data prepare"),
    # YAML, with its line
    ((*PLAN, "--config", "none.yaml"), "none.yaml: No such file", "existing YAML file"),
    ((*PLAN, "--config", "tabs.yaml"), "tabs.yaml, line 3", "spaces, not with tabs"),
    ((*PLAN, "--config", "unknown.yaml"), "yaml:2: unknown key 'polcy'", "did you mean policy?"),
    ((*PLAN, "--config", ""), "--config : No such file", "existing YAML file"),
    ((*PLAN, "--config", "pipe"), "--config pipe is a pipe", "existing YAML file"),
    ((*PLAN, "--config", "nothing.yaml"), "yaml:2: policy is empty", "or leave the line out"),
    ((*PLAN, "--config", "month.yaml"), "yaml:1: trace: cannot be read: month", "in quotes"),
    ((*PLAN, "--config", "digits.yaml"), "yaml:1: head_tile: cannot be read", "in quotes"),
    ((*PLAN, "--config", "twice.yaml"), "twice.yaml:2: key 'order'", "keep one"),
    ((*PLAN, "--config", "type.yaml"), "yaml:1: memory_margin: 'much'", "from 0 to 1"),
    ((*PLAN, "--config", "bytes.yaml"), "bytes.yaml is not YAML", "save it as UTF-8"),
    (("train", "none.yaml"), "none.yaml: No such file", "existing YAML file"),
    (("train", "run.yaml"), "run.yaml, line 2: a run has no 'nodes'", "did you mean nnodes?"),
    (("train", "month-run.yaml"), "month-run.yaml, line 1: rdzv_id: cannot be read", "in quotes"),
    (("train", "zero.yaml"), "line 1: nproc_per_node: '0'", "from 1 to"),
    # outputs that cannot be, or would replace a file of another kind
    (("fit", "costs.json", "-o", "trace.jsonl"), "trace.jsonl is another file", "a new file"),
    (("fit", "costs.json", "-o", "type.yaml"), "type.yaml is another file", "a new file"),
    ((*GPT, "-o", "trace.jsonl"), "trace.jsonl is another file", "a new file"),
    (("schema", "train", "-o", "costs.json"), "not a JSON Schema", "a new file"),
    (("profile", "network", "--nproc", "2", "-o", "costs.json"), "not a network's", "a new file"),
    (("fit", "costs.json", "-o", "folder"), "folder is a folder", "name of a file in it"),
    (("fit", "costs.json", "-o", "pipe"), "pipe is a device, a pipe or", "name of a file"),
    (("schema", "train", "-o", ""), "an output has an empty name", "name of a file"),
    (("fit", "costs.json", "-o", "nowhere/x.json"), "no folder nowhere", "make it"),
    (("fit", "costs.json", "-o", "/proc/x.json"), "/proc", "choose another"),
    ((*LONGEST, "--figure", "x.gif"), "x.gif", "ends in .png, .svg or .pdf"),
    ((*LONGEST, "--figure", "nowhere/x.png"), "no folder nowhere", "make it"),
    (("report", "trace.jsonl", "-o", "trace.jsonl"), "--output trace.jsonl", "another name"),
    (("report", "trace.jsonl", "-o", "nowhere/x.html"), "no folder nowhere", "make it"),
    (("report", "trace.jsonl", "-o", "/proc/x.html"), "/proc", "choose another"),
    (("schema", "train", "-o", "nowhere/x.json"), "no folder nowhere", "make it"),
    ((*PROFILE[:-1], "nowhere/x.json"), "no folder nowhere", "make it"),
    # models and machines
    ((*SIMULATE, "a200", "--model", "gpt"), "'a200'", "use one of a100-40g"),
    ((*SIMULATE, "gpu.yaml", "--model", "gpt"), "gpu.yaml, line 1: like", "use one of a100-40g"),
    ((*SIMULATE, "a100-80g", "--model", "gpt5"), "'gpt5'", "use one of bert, llama, gpt"),
    ((*SIMULATE, "a100-80g"), "vocabulary is missing", "give --vocab-size"),
    ((*GPT, "--tensor-model-parallel-size", "4"), "with a group of 8 ranks", "or ask for 4 ranks"),
    (
        (*STAND_IN, *SIZE_4),
        "--tensor-model-parallel-size 4 with a group of 8 ranks",
        "give --tensor-model-parallel-size 8",
    ),
    ((*GPT, "--ranks", "0"), "0 is not in the range", "1<=x<=1024"),
    ((*GPT, "--state-bytes", "nan"), "nan is not in the range", "0<x<="),
    ((*GPT, "--state-bytes", "inf"), "inf is not in the range", "0<x<="),
    ((*GPT, "--interconnect", "wire"), "'wire'", "use one of nvlink3"),
    ((*GPT, "--lengths", "8K,100"), "--lengths 100", "use 96"),
    ((*GPT, "--lengths", "8K", "--max-length", "64K"), "--max-length 65536", "leave one"),
    ((*GPT, "--batch-sizes", "0"), "got '0'", "such as 1,2"),
    (("profile", "-o", "out.json", "--vocab-size", "9"), "--nproc", "give --nproc P"),
    ((*PROFILE, "--num-layers", "4"), "vocabulary is missing", "give --vocab-size"),
    ((*PROFILE, "--strategies", "metp,quick"), "'quick'", "use one of megatron_ts"),
    ((*PROFILE, "--memory", "5 potatoes"), "'5 potatoes'", "written like 76GiB"),
    ((*PROFILE, "--model", "twice-model.yaml"), "line 2: num_layers is there twice", "keep one"),
    ((*PROFILE, "--interconnect", "nvlink4"), "--interconnect", "describes a --stand-in"),
    ((*STAND_IN, "--budget-seconds", "60"), "--budget-seconds with --stand-in", "leave it out"),
    ((*STAND_IN, "--bytes-lengths", "1K"), "--bytes-lengths with --stand-in", "leave it out"),
    ((*PROFILE, "--lengths", "1K", "--max-length", "4K"), "--max-length 4096", "leave one"),
    ((*PROFILE, "network", "--lengths", "1K"), "--lengths with profile network", "leave it out"),
    ((*PROFILE, "network", "--batch-sizes", "2"), "--batch-sizes with profile", "leave it out"),
    ((*PROFILE, "network", "--num-layers", "4"), "--num-layers with profile", "leave it out"),
    (("profile", "network", "--stand-in", "2", "-o", "out.json"), "--stand-in with", "leave it"),
    (("profile", "network", "--nproc", "1", "-o", "out.json"), "got 1", "--nproc 2 or more"),
    (("bench", "--save"), "--save without a benchmark", "name some, or give --all"),
    (("bench", "--quick", "--json"), "--quick without a benchmark", "name some, or give --all"),
    (("bench", "--time-limit", "5"), "--time-limit without a benchmark", "name some"),
    (("bench", "plannner"), "'plannner'", "did you mean planner?"),
    (("bench", "planner", "--time-limit", "nan"), "nan is not in the range", "'--time-limit'"),
    (("bench", "planner", "--time-limit", "inf"), "inf is not in the range", "'--time-limit'"),
    ((*PROFILE, "--budget-seconds", "nan"), "nan is not in the range", "'--budget-seconds'"),
    (("bench", "planner", "--time-limit", "0"), "0.0 is not in the range", "'--time-limit'"),
    # data
    ((*PREPARE, "none"), "none does not exist", "check the path"),
    ((*PREPARE, "folder"), "no file ends in .py", "--suffix"),
    ((*PREPARE, "empty.py", "--source", "tree"), "no document with a token", "check the input"),
    ((*PREPARE, "empty.jsonl"), "holds no document", "check the input"),
    ((*PREPARE, "trace.jsonl", "--key", "body"), "trace.jsonl:1: no key 'body'", "with --key"),
    ((*PREPARE, "costs.json"), "costs.json:1: not a JSON object", "write one object a line"),
    (
        (*PREPARE, "folder", "--key", "body"),
        "--key is of --source jsonl or chat, and this is tree",
        "leave",
    ),
    ((*PREPARE, "trace.jsonl", "--suffix", ".c"), "--suffix is of --source tree", "leave it out"),
    (
        (*PREPARE, "trace.jsonl", "--split-bases", "9"),
        "--split-bases is of --source fasta",
        "leave",
    ),
    ((*PREPARE, "trace.jsonl", "--kmer", "4"), "--kmer with --tokenizer bytes", "--tokenizer kmer"),
    ((*PREPARE[:-1], "out.bin", "trace.jsonl"), "out.bin is no PREFIX", "are added: give out"),
    (("data", "prepare", "-o", "", "trace.jsonl"), "'' is a folder", "folder/name"),
    ((*PREPARE[:-1], "/proc/x", "run.jsonl"), "/proc/x.bin cannot be", "choose another place"),
    (
        (*PREPARE, "run.jsonl", "--tokenizer", "HuggingFaceTokenizer", "--tokenizer-model", "."),
        "cannot be built from . (",
        "give the files of such a tokenizer",
    ),
    ((*SYNTHESIZE, "0"), "--documents 0", "1 to 10,000,000"),
    ((*SYNTHESIZE, "1000000000000"), "--documents 1000000000000", "1 to 10,000,000"),
    ((*SYNTHESIZE, "9", "--scale", "1e9"), "--scale 1e+09 makes", "or --max-tokens"),
    ((*SYNTHESIZE, "9", "--scale", "1e15", "--max-tokens", "9"), "scale of 1e+15", "smaller"),
    ((*SYNTHESIZE, "9", "--vocab-size", "2"), "--vocab-size 2", "another number"),
    ((*SYNTHESIZE, "5", "--scale", "0/3"), "'0/3'", "written like 1/32"),
]
IN_A_PROCESS = [
    (("plna",), "'plna'", "megatron-paradyse --help"),
    (("fit", "cut.json", "-o", "out.json"), "cut.json: not JSON", "make it again"),
    (("train", "tabs.yaml"), "tabs.yaml, line 3", "indent with spaces"),
    # Megatron's own parser, put into this process, would stay there
    ((*GPT, "--num-attention-heads", "90"), "90 is not", "use --tensor-model-parallel-size 6"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Right and wrong files; a case must change none of them."""
    root = tmp_path_factory.mktemp("wrong")
    costs = json.loads(Path(write_costs(root / "costs.json")).read_text())
    shortest = min(m["seq_length"] for m in costs["measurements"])
    first = [m for m in costs["measurements"] if m["seq_length"] == shortest]
    negative = [{**costs["measurements"][0], "kept_bytes": -5}]
    write_trace(root / "trace.jsonl", records(1))
    texts = {
        "raw.json": json.dumps({**costs, "model": None}),
        "old.json": json.dumps({**costs, "schema_version": 7}),
        "cut.json": (root / "costs.json").read_text()[:5000],
        "one-length.json": json.dumps({**costs, "measurements": first, "model": None}),
        "negative.json": json.dumps({**costs, "measurements": negative, "model": None}),
        "empty.jsonl": "",
        "empty.py": "",
        "run.jsonl": '{"text": "a"}\n',
        "starts.jsonl": (root / "trace.jsonl").read_text().splitlines()[0] + "\n",
        "tabs.yaml": "policy: optimal\nlayers:\n\t1: metp\n",
        "unknown.yaml": "order: shuffled\npolcy: optimal\n",
        "twice.yaml": "order: shuffled\norder: bucketed\n",
        "nothing.yaml": "order: shuffled\npolicy:\n",
        "month.yaml": "trace: 2026-13-01\n",
        "digits.yaml": f"head_tile: {'9' * 5000}\n",
        "month-run.yaml": "rdzv_id: 2026-13-01\n",
        "type.yaml": "memory_margin: much\n",
        "run.yaml": "nproc_per_node: 2\nnodes: 2\n",
        "zero.yaml": "nproc_per_node: 0\n",
        "gpu.yaml": "like: a100-90g\n",
        "twice-model.yaml": "num-layers: 4\nnum_layers: 8\n",
    }
    for name, text in texts.items():
        (root / name).write_text(text)
    (root / "bytes.yaml").write_bytes(b"policy: \xff\n")
    (root / "folder").mkdir()
    os.mkfifo(root / "pipe")
    return root


def contents(root: Path) -> dict[str, bytes | None]:
    """What there is, hidden files too."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


def check(code: int, stdout: str, stderr: str, wrong: str, remedy: str) -> None:
    (line,) = [line for line in stderr.splitlines() if line]
    assert code in (1, 2) and stdout == ""
    assert line.startswith("error: ") and "internal error" not in line
    assert wrong in line and remedy in line, line


@pytest.mark.parametrize(
    ("arguments", "wrong", "remedy"), CASES, ids=[" ".join(case[0]) for case in CASES]
)
def test_a_wrong_usage_is_one_line_that_mends_it_and_leaves_nothing(
    arguments, wrong, remedy, folder, monkeypatch
):
    monkeypatch.chdir(folder)
    before = contents(folder)
    result = CliRunner().invoke(cli, arguments)
    check(result.exit_code, result.stdout, result.stderr, wrong, remedy)
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("arguments", "wrong", "remedy"), IN_A_PROCESS, ids=[case[0][0] for case in IN_A_PROCESS]
)
def test_a_process_ends_the_same_way(arguments, wrong, remedy, folder):
    before = contents(folder)
    command = [sys.executable, "-m", "megatron_paradyse", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # this copy, whatever is installed
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=120,
        check=False,
    )
    check(done.returncode, done.stdout, done.stderr, wrong, remedy)
    assert contents(folder) == before


def test_every_command_has_a_wrong_usage_here():
    assert {arguments[0] for arguments, _, _ in CASES} >= set(COMMANDS)
    assert len(CASES) >= 30
