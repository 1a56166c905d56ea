"""Running out of memory: the chunk halves, what was computed is kept, and a single tangent that does not fit raises."""

import pytest
import torch

from helpers.families import random_normal
from pullback.operators import FunctionLinearization, JacobianOperator
from pullback.operators.execution import apply_in_chunks, free_bytes, is_out_of_memory, tangents_that_fit

ERRORS = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory."),
    "cpu": RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
    "python": MemoryError(),
    "kernel": RuntimeError("CUDA error: invalid argument\nSearch for `cudaErrorInvalidValue' in https://docs..."),
}


class Cramped(FunctionLinearization):
    """Memory for ``room`` tangents; remembers how many were asked for at a time."""

    def __init__(self, point: torch.Tensor, room: int, error: BaseException) -> None:
        super().__init__(lambda x: x.sin() * x.flip(1), point)
        self.room, self.error, self.asked = room, error, []

    def pushforward(self, tangents):
        return self._cramped(super().pushforward, tangents)

    def pullback(self, cotangents):
        return self._cramped(super().pullback, cotangents)

    def _cramped(self, product, stack):
        self.asked.append(stack.shape[1])
        if stack.shape[1] > self.room:
            raise self.error
        return product(stack)


class CrampedProbe:
    def __init__(self, room: int, error: BaseException) -> None:
        self.room, self.error = room, error

    def linearize(self, features):
        return Cramped(features, self.room, self.error)


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS.keys())
def test_the_chunk_halves_until_it_fits_and_the_products_are_right(error):
    point = random_normal(2, 6)
    operator = JacobianOperator(CrampedProbe(3, error), point, chunk_size=16)
    roomy = JacobianOperator(CrampedProbe(100, error), point, chunk_size=16)
    v, w = random_normal(2, 6, 11), random_normal(2, 6, 11, seed=1)
    torch.testing.assert_close(operator @ v, roomy @ v)
    assert operator.linearization.asked == [11, 5, 2, 2, 2, 2, 2, 1]
    assert operator.chunk_size == 2, "the size that worked is remembered"
    torch.testing.assert_close(operator.T @ w, roomy.T @ w)
    assert max(operator.linearization.asked[8:]) == 2


def test_what_was_computed_before_memory_ran_out_is_kept():
    asked = []

    def later_cramped(stack):
        asked.append(stack.shape[1])
        if len(asked) == 2:
            raise ERRORS["cuda"]
        return stack * 2

    stack = random_normal(1, 10, 3)
    out, size = apply_in_chunks(later_cramped, stack, 4)
    torch.testing.assert_close(out, stack * 2)
    assert asked == [4, 4, 2, 2, 2] and size == 2


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS.keys())
def test_a_single_tangent_that_does_not_fit_raises(error):
    operator = JacobianOperator(CrampedProbe(0, error), random_normal(2, 6))
    with pytest.raises(type(error)):
        operator @ random_normal(2, 6, 4)


def test_other_errors_are_not_taken_for_memory():
    operator = JacobianOperator(CrampedProbe(0, RuntimeError("a real mistake")), random_normal(2, 6))
    with pytest.raises(RuntimeError, match="a real mistake"):
        operator @ random_normal(2, 6, 4)
    assert operator.linearization.asked == [4], "no second attempt"
    assert not is_out_of_memory(ValueError("not enough memory"))


def test_the_first_chunk_follows_from_free_memory():
    cpu = torch.device("cpu")
    assert free_bytes(cpu) > 0
    assert tangents_that_fit(1, cpu) > 1000
    assert tangents_that_fit(2 * free_bytes(cpu), cpu) == 1
