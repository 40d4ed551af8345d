"""scripts/launch/: the command lines that they make, with stand-ins for torchrun and Slurm."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted((ROOT / "scripts/launch").iterdir())
# Each says its arguments, one a line; srun starts what it is given once for each node.
TORCHRUN = 'printf "%s\\n" torchrun "$@" "connections=$CUDA_DEVICE_MAX_CONNECTIONS"'
SRUN = """echo "srun $*"
while [[ ${1:-} == --* ]]; do shift; done
for node in 1 2; do "$@" || exit; done"""
SCONTROL = '[ "$*" = "show hostnames node[7-8]" ] && printf "node7\\nnode8\\n"'
DOCTOR = 'echo "doctor $*"'


@pytest.fixture
def launch(tmp_path):
    """Run a script with variables and Megatron flags: exit code, lines, standard error."""
    programs = {
        "torchrun": TORCHRUN,
        "srun": SRUN,
        "scontrol": SCONTROL,
        "megatron-paradyse": DOCTOR,
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def run(script: str, *flags: str, **variables: object):
        path = f"{tmp_path}:{os.environ['PATH']}"
        environment = {"PATH": path, **{name: str(value) for name, value in variables.items()}}
        command = ["bash", str(ROOT / "scripts/launch" / script), *flags]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=60, check=False
        )
        return done.returncode, done.stdout.splitlines(), done.stderr

    return run


def slurm(**more: object) -> dict[str, object]:
    """What Slurm sets in a job of two nodes."""
    return {
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_NUM_NODES": 2,
        "SLURM_GPUS_ON_NODE": 8,
        "SLURM_JOB_ID": 12345,
        "SLURM_SUBMIT_DIR": ROOT,
        **more,
    }


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def parsed(words: list[str]):
    """torchrun's own reading of the command line."""
    from torch.distributed.run import get_args_parser

    return get_args_parser().parse_args(words[1:-1])


def test_two_nodes_meet_at_the_head_and_keep_tensor_parallelism_inside_a_node(launch):
    code, words, _ = launch("torchrun.sh", "--num-layers", "4", HEAD="node0")
    assert code == 0
    arguments = parsed(words)
    assert (arguments.nnodes, arguments.nproc_per_node) == ("2", "8")
    assert (arguments.rdzv_backend, arguments.rdzv_endpoint) == ("c10d", "node0:29400")
    assert arguments.rdzv_id == "paradyse"
    assert arguments.module and arguments.training_script == "megatron_paradyse.pretrain_gpt"
    assert arguments.training_script_args == [
        *("--paradyse", "--tensor-model-parallel-size", "8"),
        *("--pipeline-model-parallel-size", "1", "--sequence-parallel", "--num-layers", "4"),
    ]
    assert words[-1] == "connections=1"


def test_variables_change_the_grid(launch):
    grid = {"HEAD": "a", "NNODES": 4, "GPUS": 4, "TP": 8, "PP": 2, "PORT": 1234, "JOB": "x"}
    code, words, _ = launch("torchrun.sh", **grid, CUDA_DEVICE_MAX_CONNECTIONS=8)
    assert code == 0
    assert parsed(words).rdzv_endpoint == "a:1234" and option(words, "--rdzv-id") == "x"
    assert option(words, "--nnodes") == option(words, "--nproc-per-node") == "4"
    assert option(words, "--tensor-model-parallel-size") == "8"
    assert option(words, "--pipeline-model-parallel-size") == "2"
    assert words[-1] == "connections=8"


def test_the_same_ranks_measure_their_costs(launch):
    code, words, _ = launch("torchrun.sh", HEAD="a", TP=16, PROFILE="raw.json")
    assert code == 0 and parsed(words).training_script == "megatron_paradyse"
    rest = parsed(words).training_script_args
    assert rest[:3] == ["profile", "--output", "raw.json"] and "--paradyse" not in rest
    assert option(rest, "--tensor-model-parallel-size") == "16"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "HEAD is not set: give the name of one of the nodes"),
        ({"HEAD": "a", "TP": 0}, "TP=0 is not a number above 0"),
        ({"HEAD": "a", "GPUS": "eight"}, "GPUS=eight is not a number above 0"),
        ({"HEAD": "a", "TP": 3}, "TP=3 on nodes of 8 GPUs: give a divisor or a multiple of 8"),
        ({"HEAD": "a", "PP": 3}, "TP=8 x PP=3 does not divide 2 x 8 ranks: change TP or PP"),
        ({"HEAD": "a", "TP": 32}, "TP=32 x PP=1 does not divide 2 x 8 ranks"),
    ],
)
def test_a_grid_that_cannot_be_is_one_line_and_starts_nothing(variables, message, launch):
    code, words, stderr = launch("torchrun.sh", **variables)
    assert code == 2 and words == []
    assert stderr.startswith("error: ") and message in stderr and stderr.count("\n") == 1


def test_slurm_starts_one_torchrun_on_each_node_of_the_job(launch):
    code, lines, stderr = launch("slurm.sbatch", "--num-layers", "4", **slurm())
    assert code == 0, stderr
    assert lines[0].startswith("srun --kill-on-bad-exit=1 --cpu-bind=none bash ")
    assert lines.count("torchrun") == 2
    words = lines[1 : lines.index("torchrun", 2)]
    assert parsed(words).rdzv_endpoint == "node7:22345"
    assert parsed(words).rdzv_id == "paradyse-12345"
    assert (option(words, "--nnodes"), option(words, "--nproc-per-node")) == ("2", "8")
    assert parsed(words).training_script_args[-2:] == ["--num-layers", "4"]


def test_slurm_takes_the_grid_from_variables_too(launch):
    code, lines, _ = launch("slurm.sbatch", **slurm(TP=16))
    assert code == 0 and option(lines, "--tensor-model-parallel-size") == "16"


def test_slurm_ends_with_the_error_of_a_node(launch):
    code, lines, stderr = launch("slurm.sbatch", **slurm(TP=5))
    assert code == 2 and "torchrun" not in lines and "error: TP=5" in stderr


def test_slurm_asks_every_node_what_it_lacks(launch):
    code, lines, _ = launch("slurm.sbatch", **slurm(CHECK=1))
    assert code == 0 and lines[1:] == ["doctor doctor"] * 2


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_asks_for_no_variable_and_starts_nothing(flag, script, launch):
    code, lines, stderr = launch(script.name, flag, "--num-layers", "4")
    assert code == 0 and not stderr and "torchrun" not in lines
    assert lines[0].startswith("Train on several nodes ") and "--num-layers 32" in lines[2]
    assert not [line for line in lines if line.startswith(("#", "srun"))]


def test_the_script_for_slurm_says_so_outside_of_it(launch):
    code, lines, stderr = launch("slurm.sbatch", "--num-layers", "4")
    assert code == 2 and not lines and stderr.count("\n") == 1
    assert stderr.startswith("error: this is no job of Slurm: start it with sbatch ")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_what_shells_and_shellcheck_accept(script):
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", script], check=True, timeout=60)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", script], check=True, timeout=60)
