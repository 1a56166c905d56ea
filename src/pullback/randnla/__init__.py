"""Randomised numerical linear algebra on operators that are only multiplied with."""

from pullback.randnla.estimate import Estimate
from pullback.randnla.modes import LeadingModes, Sketch, choose_method, leading_modes, sketch
from pullback.randnla.output_space import OutputSpace, krylov_outputs, output_krylov, pulled_outputs
from pullback.randnla.slq import effective_rank, effective_rank_from_spectrum
from pullback.randnla.streams import Streams
from pullback.randnla.svd import Svd, block_krylov, exact_svd, power_iteration
from pullback.randnla.trace import deflated_hutchinson, hutchinson

__all__ = [
    "Estimate",
    "LeadingModes",
    "OutputSpace",
    "Sketch",
    "Streams",
    "Svd",
    "block_krylov",
    "choose_method",
    "deflated_hutchinson",
    "effective_rank",
    "effective_rank_from_spectrum",
    "exact_svd",
    "hutchinson",
    "krylov_outputs",
    "leading_modes",
    "output_krylov",
    "power_iteration",
    "pulled_outputs",
    "sketch",
]
