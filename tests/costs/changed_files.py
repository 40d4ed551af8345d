"""Cost files with one value changed."""

import json
from pathlib import Path

import pytest

from megatron_paradyse.costs.cost_file import read_cost_file
from megatron_paradyse.errors import UserError


def is_refused(path: Path, part: str, change: dict, message: str) -> None:
    """The file with this change of the first law that has the part."""
    values = json.loads(path.read_text())
    fits = (one for op in values["model"]["operations"] for one in op["fits"].values())
    next(one[part] for one in fits if part in one).update(change)
    changed = path.with_name("changed.json")
    changed.write_text(json.dumps(values))
    with pytest.raises(UserError, match=message):
        read_cost_file(changed)
