"""Names that commands, CSV files and figures share."""

from __future__ import annotations

MODELS = ("bert", "llama", "gpt")
DISTRIBUTIONS = ("githubcode", "grch38")
ORDERS = SORTED, SHUFFLED = ("sorted", "shuffled")
FIXED = ("megatron_ts", "megatron_cz", "ulysses_z", "colossal_z", "metp")
PARADYSE, AS_PUBLISHED = "paradyse", "paradyse-as-published"
POLICIES = (*FIXED, PARADYSE, AS_PUBLISHED)
WITHOUT_HALVES = "without halves apart"
SIMULATED, MEASURED = "simulated", "measured"
FORMS = (SIMULATED, MEASURED)
TITLES = {
    "megatron_ts": "MegatronTS",
    "megatron_cz": "MegatronCZ",
    "ulysses_z": "UlyssesZ",
    "colossal_z": "ColossalZ",
    "metp": "METP",
    PARADYSE: "ParaDySe",
    AS_PUBLISHED: "ParaDySe, as published",
    "bert": "BERT",
    "llama": "LLaMA",
    "gpt": "GPT",
    "githubcode": "GitHubCode",
    "grch38": "GRCh38",
}


def title(name: str) -> str:
    """As people write it: METP, METP+recompute, BERT."""
    base, plus, rest = name.partition("+")
    return TITLES.get(base, base) + plus + rest


def framework_name(text: str) -> str:
    """The name in table5-simulated.csv of a framework of table5-measured.csv."""
    if text == "full":
        return PARADYSE
    whole, change = PARADYSE, text
    if text.startswith("as published"):
        whole, change = AS_PUBLISHED, text.removeprefix("as published").removeprefix(", ")
    if ":" in text or text in (PARADYSE, AS_PUBLISHED):
        return text
    changes = {"without the forest": "without forest", "layers for operations": WITHOUT_HALVES}
    part = change.removeprefix("without ")
    if part in FIXED:
        change = f"without {title(part)}"
    return f"{whole}: {changes.get(change, change)}" if change else whole
