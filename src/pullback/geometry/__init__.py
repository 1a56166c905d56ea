"""What the Jacobian says about a backbone and its decoder: spectrum, importance, tractability."""

from pullback.geometry.block_norms import BlockNorms, block_norms, exact_block_norms
from pullback.geometry.concentration import coefficient_of_variation, null_cv
from pullback.geometry.convergence import ConvergenceRow, convergence_table
from pullback.geometry.multiplicity import layer_multiplicity
from pullback.geometry.regimes import Regime, Thresholds, classify
from pullback.geometry.spectrum import Spectrum, spectrum, token_importance
from pullback.geometry.summary import Summary
from pullback.geometry.tractability import SampleDiagnosis, Tractability, diagnose

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
