"""A checkpoint goes through six layouts, stock Megatron and ours, and comes back bit for bit.

Three iterations are trained in the first layout (4 layers, h = 64, Adam); each next one loads what
the one before saved, under another tensor- and pipeline-parallel size, and saves it again without
training. Every tensor of every checkpoint, parameters and optimizer state, is compared with the
first by its bytes. The legacy format, which cannot change its layout, goes from stock to ours and
back.

    .venv/bin/python benchmarks/checkpoints.py --json
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from benchmarks.common import finish, options
from tests.train.harness import train

ITERATIONS = 3
LAYOUTS = (
    ("stock", 1, 1),
    ("ours", 2, 1),
    ("stock", 4, 1),
    ("ours", 1, 2),
    ("stock", 2, 2),
    ("ours", 4, 1),
    ("stock", 1, 1),
)
QUICK = (("stock", 1, 1), ("ours", 2, 1), ("stock", 1, 1))
LEGACY = (("stock", 2, 1), ("ours", 2, 1), ("stock", 2, 1))
OURS = ["--paradyse", "--paradyse-sequences", "fixed", "--paradyse-policy", "random:3"]


def main() -> None:
    arguments = options(__doc__.splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as name:
        layouts = QUICK if arguments.quick else LAYOUTS
        rows = chain(Path(name) / "torch_dist", layouts, "torch_dist")
        if not arguments.quick:
            rows += chain(Path(name) / "torch", LEGACY, "torch")
    for row in rows:
        print(json.dumps(row))
    result = {
        "layouts": len({(r["by"], r["tp"], r["pp"]) for r in rows if r["format"] == "torch_dist"}),
        "different_tensors": sum(row["different_tensors"] for row in rows),
        "rows": rows,
    }
    finish("checkpoints", result, {"iterations": ITERATIONS, "dtype": "float32"}, arguments)


def chain(folder: Path, layouts, form: str) -> list[dict]:
    """Save in the first layout, then load and save in each; how far each is from the first."""
    rows: list[dict] = []
    first: dict[str, torch.Tensor] = {}
    before: Path | None = None
    for number, (by, tp, pp) in enumerate(layouts):
        saved = folder / f"{number}-{by}-tp{tp}-pp{pp}"
        flags = ["--mock-data", "--train-iters", ITERATIONS, "--save", saved, "--save-interval", 9]
        flags += ["--ckpt-format", form, "--attention-dropout", 0, "--lr-decay-style", "constant"]
        flags += ["--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", pp]
        flags += ["--sequence-parallel"] if tp > 1 else []
        flags += OURS if by == "ours" else []
        flags += ["--load", before] if before is not None else []
        train(folder / f"run-{number}", *flags, ranks=tp * pp, timeout_seconds=400)
        tensors = read(saved / f"iter_{ITERATIONS:07d}", form)
        first = first or tensors
        different = [n for n in {*first, *tensors} if not same(first.get(n), tensors.get(n))]
        rows.append(
            {
                "format": form,
                "by": by,
                "tp": tp,
                "pp": pp,
                "tensors": len(tensors),
                "bytes": sum(tensor.nbytes for tensor in tensors.values()),
                "different_tensors": len(different),
                "different": sorted(different)[:5],
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        before = saved
    return rows


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """By bytes: NaN and signed zeros count."""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    one, other = (x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(one, other)


def read(checkpoint: Path, form: str) -> dict[str, torch.Tensor]:
    """Every parameter and every tensor of the optimizer, whole; random states are left out."""
    if form == "torch":
        found: dict[str, torch.Tensor] = {}
        for path in sorted(checkpoint.rglob("*.pt")):
            values = torch.load(path, map_location="cpu", weights_only=False)  # written just now
            _collect(found, str(path.parent.name), {k: values[k] for k in ("model", "optimizer")})
        return found
    reader = dcp.FileSystemReader(checkpoint)
    metadata = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata) and "rng" not in name
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def _collect(found: dict[str, torch.Tensor], name: str, value) -> None:
    if isinstance(value, torch.Tensor):
        found[name] = value
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            _collect(found, f"{name}.{key}", inner)


if __name__ == "__main__":
    main()
