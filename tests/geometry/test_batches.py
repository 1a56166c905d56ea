"""Out of memory halves the batch; what was done is kept, and nothing changes."""

import importlib

import pytest
import torch

import pullback as pb
from helpers.truth import FunctionProbe, random_images, seeded, with_singular_values
from pullback.errors import DecoderError, NumericsError
from pullback.targets import recipe
from pullback.tokens import TokenLayout

batches = importlib.import_module("pullback.geometry.spectrum")  # the package has a function of that name

RANK = 3
MESSAGES = {
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory."),
    "cpu": lambda: RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes."),
    "python": lambda: MemoryError(),
}


class Tight:
    """`sketch` on a machine that holds ``limit`` samples, from call number ``after`` on."""

    def __init__(self, error, limit: int, after: int = 0) -> None:
        self.error, self.limit, self.after, self.sizes = error, limit, after, []
        self.sketch = batches.sketch

    def __call__(self, operator, *args, **kwargs):
        self.sizes.append(operator.batch)
        if operator.batch > self.limit and len(self.sizes) > self.after:
            raise self.error()
        return self.sketch(operator, *args, **kwargs)


@pytest.fixture
def probe():
    return seeded("cls", 4)


@pytest.fixture(scope="module")
def images():
    return random_images(7)


def numbers(found) -> torch.Tensor:
    return torch.cat([found.singular_values, found.kappa.value, found.total.value[:, None]], 1)


@pytest.mark.parametrize("kind", MESSAGES)
def test_out_of_memory_halves_the_batch_and_loses_nothing(probe, images, monkeypatch, kind):
    expected = pb.spectrum(probe, images, RANK, "krylov", batch_size=7)
    tight = Tight(MESSAGES[kind], limit=2)
    monkeypatch.setattr(batches, "sketch", tight)
    progress: list[int] = []
    found = pb.spectrum(probe, images, RANK, "krylov", batch_size=7, on_progress=progress.append)
    assert tight.sizes == [7, 3, 1, *[1] * 6]
    assert sum(progress) == 7
    torch.testing.assert_close(numbers(found), numbers(expected), rtol=1e-6, atol=0)


def test_what_was_finished_before_is_not_done_again(probe, images, monkeypatch):
    tight = Tight(MESSAGES["cuda"], limit=2, after=1)
    monkeypatch.setattr(batches, "sketch", tight)
    report = pb.diagnose(probe, images, RANK, batch_size=4)
    assert tight.sizes == [4, 3, 1, 1, 1]
    assert len(report.samples) == len(report.importance) == 7


def test_a_single_sample_that_does_not_fit_is_an_error(probe, images, monkeypatch):
    monkeypatch.setattr(batches, "sketch", Tight(MESSAGES["cuda"], limit=0))
    with pytest.raises(torch.OutOfMemoryError):
        pb.spectrum(probe, images, RANK, batch_size=4)


def test_other_errors_are_not_taken_for_missing_memory(probe, images, monkeypatch):
    tight = Tight(lambda: RuntimeError("shapes do not match"), limit=0)
    monkeypatch.setattr(batches, "sketch", tight)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        pb.spectrum(probe, images, RANK, batch_size=4)
    assert tight.sizes == [4]


@pytest.mark.parametrize(("samples_worth", "expected"), [(1.5, "exact"), (0.5, "krylov")])
def test_auto_chooses_alike_for_every_batch_size_and_every_machine(probe, images, monkeypatch, samples_worth, expected):
    """Dense J of one sample: 64 x 1088 float64. What fits for one must not be refused for the batch as a whole."""
    monkeypatch.setattr("pullback.randnla.modes.MAX_DENSE_BYTES", samples_worth * 64 * 1088 * 8)
    methods = {pb.spectrum(probe, images, RANK, batch_size=size).method for size in (1, 2, 4, 7)}
    for free in (1 << 20, 1 << 50):
        monkeypatch.setattr(batches, "free_bytes", lambda device, free=free: free)
        methods.add(pb.spectrum(probe, images, RANK).method)
    assert methods == {expected}


def test_the_batch_shrinks_with_the_free_memory(probe, images, monkeypatch):
    features = probe.features(images)
    monkeypatch.setattr(batches, "free_bytes", lambda device: 1 << 50)
    assert batches.samples_that_fit(probe, features, RANK) == batches.MAX_SAMPLES["cpu"]
    monkeypatch.setattr(batches, "free_bytes", lambda device: 1 << 10)
    assert batches.samples_that_fit(probe, features, RANK) == 1


def test_outputs_that_are_larger_than_the_features_count_too(monkeypatch):
    """Their J is as large as the transposed one, and so are the images of a Krylov basis."""
    features = torch.ones(64, 2, 3, dtype=torch.float64)
    monkeypatch.setattr(batches, "MAX_SAMPLES", {"cpu": 64})
    monkeypatch.setattr(recipe, "MAX_SAMPLES", {"cpu": 64})
    monkeypatch.setattr(batches, "free_bytes", lambda device: 2 * 10 * 6 * 600 * 6 * 8)
    wide = FunctionProbe(lambda x: x.flatten(1).repeat(1, 100))
    assert batches.samples_that_fit(wide, features, RANK) == 10
    exact = recipe._samples_that_fit(recipe.Recipe(method="exact"), 600, features)
    assert exact == 15, "four times the dense J, of 600 x 6"


@pytest.mark.parametrize("method", ["auto", "exact", "krylov", "paper"])
def test_a_derivative_that_is_not_finite_is_named(method):
    """The output is finite, J is not: sqrt at zero."""
    probe = FunctionProbe(lambda x: (x[:, 0] * 0).sqrt() + x[:, 1])
    with pytest.raises(NumericsError, match="J: its products hold NaN or infinity"):
        pb.spectrum(probe, torch.ones(2, 1, 4, 5, dtype=torch.float64), 2, method)


def test_float32_features_work_too():
    sigma = [2.0, 1.0, 0.5, 0.1]
    linear = with_singular_values(sigma, 6, 5, 8)
    probe = FunctionProbe(lambda x: linear(x.double()).to(x.dtype))
    found = pb.spectrum(probe, torch.ones(2, 1, 6, 5), 4)
    assert found.modes.dtype == torch.float32
    torch.testing.assert_close(found.singular_values, torch.tensor([sigma, sigma]), rtol=1e-5, atol=1e-6)


def test_a_sample_without_sensitivity_is_named_by_its_place_in_the_whole_set():
    """The third of three images is cut off from the output, and is alone in its batch."""
    gate = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)

    class Gated:
        name, layer = "gated", 0

        def features(self, images):
            return images

        def token_layout(self, features):
            return TokenLayout(0, (2, 2))

        def __call__(self, features):
            return features.flatten(1) * gate[features[:, 0, 0].long()][:, None]

    images = torch.arange(3, dtype=torch.float64)[:, None, None].expand(3, 4, 2).clone()
    with pytest.raises(DecoderError, match=r"zero Jacobian, samples \[2\]"):
        pb.spectrum(Gated(), images, rank=2, batch_size=1)
