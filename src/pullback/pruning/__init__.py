"""Removing tokens of a frozen ViT while its output stays."""

from pullback.pruning.forward import PrunedRun, StageRecord, run_pruned
from pullback.pruning.matching import Matching
from pullback.pruning.model import PrunedModel, prune, restore
from pullback.pruning.plan import PrunePlan, preset
from pullback.pruning.scores import SCORES, Modes, Score, ScoreContext, as_score
from pullback.vggt.pruning import PrunedScenes, PrunedVGGT, Scope, prune_views, view_plan

__all__ = [
    "SCORES",
    "Matching",
    "Modes",
    "PrunePlan",
    "PrunedModel",
    "PrunedRun",
    "PrunedScenes",
    "PrunedVGGT",
    "Scope",
    "Score",
    "ScoreContext",
    "StageRecord",
    "as_score",
    "preset",
    "prune",
    "prune_views",
    "restore",
    "run_pruned",
    "view_plan",
]
