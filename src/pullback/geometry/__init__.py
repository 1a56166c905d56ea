"""What the Jacobian says about a backbone and its decoder: spectrum, importance, tractability."""

from pullback.geometry.diagnosis import (
    ConvergenceRow,
    Part,
    SampleDiagnosis,
    Tractability,
    coefficient_of_variation,
    convergence_table,
    diagnose,
    null_cv,
)
from pullback.geometry.importance import BlockNorms, block_norms, exact_block_norms
from pullback.geometry.multiplicity import layer_multiplicity
from pullback.geometry.regimes import Regime, Thresholds, Verdict, classify
from pullback.geometry.spectrum import Spectrum, spectrum, token_importance
from pullback.geometry.summary import Summary

__all__ = [
    "BlockNorms",
    "ConvergenceRow",
    "Part",
    "Regime",
    "SampleDiagnosis",
    "Spectrum",
    "Summary",
    "Thresholds",
    "Tractability",
    "Verdict",
    "block_norms",
    "classify",
    "coefficient_of_variation",
    "convergence_table",
    "diagnose",
    "exact_block_norms",
    "layer_multiplicity",
    "null_cv",
    "spectrum",
    "token_importance",
]
