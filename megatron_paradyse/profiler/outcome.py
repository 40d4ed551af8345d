"""What a profile wrote, in numbers, for --json."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any


def outcome(output: str, *, network: bool) -> dict[str, Any]:
    """Of a cost file, or of a file of measured collectives."""
    if network:
        return {"output": output, **json.loads(Path(output).read_text(encoding="ascii"))}
    from megatron_paradyse.costs.cost_file import read_cost_file
    from megatron_paradyse.costs.table import MODEL

    table = read_cost_file(output).table
    d = table.description
    statuses = Counter(m.status.partition(":")[0] for m in table.measurements)
    return {
        "output": output,
        "source": d.source,
        "hardware": d.hardware.name,
        "p": d.p,
        "dtype": d.dtype,
        "date": d.date,
        "lengths": list(table.lengths()),
        "strategies": sorted({m.strategy for m in table.measurements} - {MODEL}),
        "measurements": dict(statuses),
        "static_bytes": table.constants.static_bytes,
    }
