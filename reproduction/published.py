"""What the paper reports: Ou, Liang, Qiao, Han, Liu, "ParaDySe: A Parallel-Strategy Switching
Framework for Dynamic Sequence Lengths in Transformer", AAAI-26, arXiv 2511.13198.

One node, 8 x A100-SXM4-80GB with NVLink, batch size 1, sequences sorted from short to long.
"""

from __future__ import annotations

from dataclasses import dataclass

HARDWARE = "8 x A100-SXM4-80GB (paper)"
# Less cumulative time than a strategy used alone, at the longest sequences: BERT, the best case.
TIME_REDUCTION = {("bert", "githubcode"): 0.8929, ("bert", "grch38"): 0.5801}
# Longer sequences than a strategy used alone reaches: GPT, the best case.
LENGTH_EXTENSION = {("gpt", "githubcode"): 1.4416, ("gpt", "grch38"): 1.8122}
# Seconds of a restart that changes the strategy. Imports are given as 2 to 3.
RESTART_SECONDS = {"imports": 2.5, "data": 5.0, "model": 22.0, "optimizer": 1.0}
RESTART_TOTAL_SECONDS = 31.0  # as the paper sums it


@dataclass(frozen=True)
class Ablation:
    """A row of table 5 (GPT on GRCh38): seconds until it runs out of memory, and the whole
    framework's until the same length."""

    framework: str
    max_tokens: int
    cumulative_seconds: float
    full_seconds: float

    @property
    def saved_share(self) -> float:
        return 1 - self.full_seconds / self.cumulative_seconds


ABLATIONS = (
    Ablation("full", 329_728, 3117.76, 3117.76),
    Ablation("without MegatronTS", 300_032, 3173.80, 2799.45),
    Ablation("without MegatronCZ", 300_032, 2795.91, 2799.45),
    Ablation("without UlyssesZ", 300_032, 2813.13, 2799.45),
    Ablation("without METP", 112_128, 1741.99, 1724.13),
    Ablation("without forest", 270_336, 2657.04, 2622.89),
    Ablation("without smoothing", 300_032, 2800.49, 2799.45),
)
