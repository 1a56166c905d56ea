"""Removing tokens of a frozen ViT while its output stays."""

from pullback.pruning.forward import PrunedRun, StageRecord, run_pruned
from pullback.pruning.matching import Matching
from pullback.pruning.model import Pruned, PrunedModel, prune, restore
from pullback.pruning.plan import BlockPlan, PrunePlan, preset
from pullback.pruning.scores import Modes, Score, ScoreContext, as_score

__all__ = [
    "BlockPlan",
    "Matching",
    "Modes",
    "PrunePlan",
    "Pruned",
    "PrunedModel",
    "PrunedRun",
    "Score",
    "ScoreContext",
    "StageRecord",
    "as_score",
    "preset",
    "prune",
    "restore",
    "run_pruned",
]
