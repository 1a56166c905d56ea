"""Every experiment by name, in the order of the paper. Looking one up imports its module and nothing else."""

from __future__ import annotations

from importlib import import_module

from pullback.errors import PullbackError
from pullback.experiments.experiment import Experiment

EXPERIMENTS = {
    "taxonomy": "taxonomy:TAXONOMY",
    "full-sweep": "taxonomy:FULL_SWEEP",
    "multi-layer": "taxonomy:MULTI_LAYER",
    "output-metric": "output_metric:OUTPUT_METRIC",
    "convergence": "convergence:CONVERGENCE",
    "estimators": "estimators:ESTIMATORS",
    "delocalization": "delocalization:DELOCALIZATION",
    "cls-pruning": "cls_pruning:CLS_PRUNING",
    "cls-baselines": "cls_baselines:CLS_BASELINES",
    "clip-wilcoxon": "cls_baselines:WILCOXON",
    "accuracy": "accuracy:ACCURACY",
    "dense-pruning": "dense_pruning:DENSE_PRUNING",
    "dense-robustness": "dense_pruning:DENSE_ROBUSTNESS",
    "dense-stages": "dense_pruning:DENSE_STAGES",
    "pruning-theorem": "pruning_theorem:PRUNING_THEOREM",
    "pruning-cost": "pruning_cost:PRUNING_COST",
    "head-ablations": "ablations:HEAD_ABLATIONS",
    "head-transfer": "head_transfer:HEAD_TRANSFER",
    "spn": "spn:SPN",
    "spn-vae": "spn_vae:SPN_VAE",
    "retrieval": "retrieval:RETRIEVAL",
    "importance-maps": "maps:IMPORTANCE_MAPS",
    "overview": "overview:OVERVIEW",
}
"""Name → "module of this room:constant"."""


def experiment(name: str) -> Experiment:
    """Return the experiment of this name, or raise an error that lists what there is."""
    if name not in EXPERIMENTS:
        raise PullbackError(f"experiment: expected all or one of {', '.join(EXPERIMENTS)}, got {name!r}.")
    module, constant = EXPERIMENTS[name].split(":")
    found: Experiment = getattr(import_module(f"pullback.experiments.{module}"), constant)
    if found.name != name:
        raise PullbackError(f"experiment: {module} calls {name!r} {found.name!r}.")
    return found


def chosen(names: str) -> list[Experiment]:
    """Return the experiments of "all", or of names by commas, each once."""
    wanted = EXPERIMENTS if names == "all" else dict.fromkeys(part.strip() for part in names.split(","))
    return [experiment(name) for name in wanted]
