"""One target of benchmarks/fuzz.py: fuzz_target NAME guided|properties COUNT RESULT FOLDER."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from tests.fuzz.guarded import finding, guard
from tests.fuzz.targets import MAX_INPUT_BYTES, TARGETS

SEED = 1
EVERY = 500  # inputs between two writings of the result


def main() -> None:
    name, way, count, result, folder = sys.argv[1:]
    work = Path(folder) / way
    work.mkdir()
    target = TARGETS[name]
    if way == "guided":
        import atheris

        with atheris.instrument_imports(
            include=["megatron_paradyse"], enable_loader_override=False
        ):
            seeds = _imported(target, work)
        guided(target, seeds, work, int(count), Path(result))
    else:
        properties(target, _imported(target, work), work, int(count), Path(result))


def _imported(target: Any, work: Path) -> list[bytes]:
    """The seeds; parsing them once imports all that the parser needs."""
    (work / "seeds").mkdir()
    seeds = target.seeds(work / "seeds")
    for content in seeds:
        finding(target, work, content)
    return seeds


def guided(target: Any, seeds: list[bytes], work: Path, wanted: int, result: Path) -> None:
    """atheris chooses; the process ends when enough bytes were given."""
    import atheris

    corpus = work / "corpus"
    corpus.mkdir()
    for number, content in enumerate(seeds):
        (corpus / str(number)).write_bytes(content[:MAX_INPUT_BYTES])
    found: dict[str, str] = {}
    done = {"bytes": 0, "inputs": 0}

    def one_input(content: bytes) -> None:
        done["bytes"] += len(content)
        done["inputs"] += 1
        problem = finding(target, work, content)
        if problem is not None and problem[:60] not in found:
            found[problem[:60]] = f"{problem} | {content[:200]!r}"
        if done["inputs"] % EVERY == 0 or done["bytes"] >= wanted:
            result.write_text(json.dumps({**done, "findings": list(found.values())}))
        if done["bytes"] >= wanted:
            os._exit(0)

    guard()
    flags = [f"-max_len={MAX_INPUT_BYTES}", f"-seed={SEED}", "-print_final_stats=0", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *flags, "-rss_limit_mb=0", str(corpus)], one_input)
    atheris.Fuzz()


def properties(target: Any, seeds: list[bytes], work: Path, cases: int, result: Path) -> None:
    """hypothesis draws; every case is kept going, so that all findings are told."""
    from hypothesis import HealthCheck, Phase, given, settings

    from tests.fuzz.mutations import mutated

    found: dict[str, str] = {}
    done = {"cases": 0}

    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(mutated(seeds))
    def all_cases(content: bytes) -> None:
        done["cases"] += 1
        problem = finding(target, work, content)
        if problem is not None and problem[:60] not in found:
            found[problem[:60]] = f"{problem} | {content[:200]!r}"

    random.seed(SEED)
    guard()
    all_cases()
    result.write_text(json.dumps({**done, "findings": list(found.values())}))


if __name__ == "__main__":
    main()
