"""The program of docs/library.md, as it is printed, on ranks of its own."""

from __future__ import annotations

import re
import sys

from megatron_paradyse.ports import free_port
from tests.documentation.markdown import ROOT, Document
from tests.train.harness import run_bounded
from tests.train.synthetic_costs import write_costs

LIBRARY = Document(ROOT / "docs" / "library.md")
COSTS = 'cost_model="costs.json"'


def test_the_program_trains(tmp_path):
    """With invented costs, which differ from the model's, and are told to be accepted."""
    (program,) = LIBRARY.blocks("python")
    assert program.startswith("# my_loop.py\n") and program.count(COSTS) == 1
    costs, script = write_costs(tmp_path / "costs.json"), tmp_path / "my_loop.py"
    script.write_text(program.replace(COSTS, f"cost_model={str(costs)!r}, accept_costs=True"))
    code, stdout, stderr = run_bounded(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--master-port", str(free_port()), str(script)),
        ],
        timeout_seconds=150,
    )
    assert code == 0, stdout + stderr
    lines = re.findall(r"^\d \[([\d.]+), ([\d.]+)\] 1-2 (\S+)$", stdout, re.M)
    assert len(lines) == 3, stdout
    assert float(lines[-1][1]) < float(lines[0][0])
    assert f"> paradyse: plans by {costs}" in stdout
