"""Matrix-free linear operators, batched over samples. Knows nothing of images or transformers."""

from pullback.operators.base import Composed, DenseOperator, LinearOperator, ProductCount, Transposed
from pullback.operators.jacobian import JacobianOperator, check_sensitive
from pullback.operators.linearization import FunctionLinearization, Linearization, differentiable_attention
from pullback.operators.lowrank import LowRankMetric

__all__ = [
    "Composed",
    "DenseOperator",
    "FunctionLinearization",
    "JacobianOperator",
    "LinearOperator",
    "Linearization",
    "LowRankMetric",
    "ProductCount",
    "Transposed",
    "check_sensitive",
    "differentiable_attention",
]
