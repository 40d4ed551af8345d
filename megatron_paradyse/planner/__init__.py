"""Which strategy each layer of a microbatch runs: from costs, and a memory budget. No torch.

problem    what a planner is given (Choice, LayerOptions, Problem) and answers (Outcome)
peak       the peak of a plan: the walk, and the same in one pass
pipeline   what other microbatches hold meanwhile
optimal    the fastest plan that fits; tables, reduce, least_peak; alike layers: bounds,
           blocks, labels; layers of several kinds: kind_bounds, backward
heuristic  the paper's Algorithm 1; uniform
cache      remembered and smoothed plans
policies   the same behind megatron_paradyse.policy.Policy
"""

from megatron_paradyse.planner.cache import CachedPlanner, SmoothedPlanner
from megatron_paradyse.planner.heuristic import HeuristicPlanner
from megatron_paradyse.planner.optimal import OptimalPlanner
from megatron_paradyse.planner.peak import evaluate
from megatron_paradyse.planner.problem import Choice, LayerOptions, Outcome, Planner, Problem

__all__ = [
    "CachedPlanner",
    "Choice",
    "HeuristicPlanner",
    "LayerOptions",
    "OptimalPlanner",
    "Outcome",
    "Planner",
    "Problem",
    "SmoothedPlanner",
    "evaluate",
]
