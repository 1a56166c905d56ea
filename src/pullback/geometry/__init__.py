"""What the Jacobian says about a backbone and its decoder: spectrum, importance, tractability."""

from pullback.geometry.diagnosis import (
    ConvergenceRow,
    Regime,
    SampleDiagnosis,
    Summary,
    Thresholds,
    Tractability,
    classify,
    coefficient_of_variation,
    convergence_table,
    diagnose,
    null_cv,
)
from pullback.geometry.importance import BlockNorms, block_norms, exact_block_norms
from pullback.geometry.multiplicity import layer_multiplicity
from pullback.geometry.spectrum import Spectrum, spectrum, token_importance

__all__ = [
    "BlockNorms",
    "ConvergenceRow",
    "Regime",
    "SampleDiagnosis",
    "Spectrum",
    "Summary",
    "Thresholds",
    "Tractability",
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
