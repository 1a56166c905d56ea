"""How long something will take, from one timed product: right within a small factor, and said only if it is long."""

import math

import pytest
import torch

import pullback as pb
from helpers.truth import random_images, seeded
from pullback.geometry import duration
from pullback.geometry.duration import announce, seconds_per_sample
from pullback.operators import ProductCount
from pullback.randnla.modes import planned_products
from pullback.runs.progress import Progress
from pullback.targets.recipe import targets_of


@pytest.mark.parametrize("method", ["exact", "krylov", "paper"])
@pytest.mark.parametrize("decoder", ["cls", "depth-4x4"])
def test_the_planned_products_are_about_those_that_are_spent(decoder, method):
    probe, images = seeded(decoder, 4), random_images(1)
    report = pb.diagnose(probe, images, 4, method, convergence_samples=0)
    planned = planned_products(method, report.output_size, 17 * 64, 4)
    assert 0.5 < planned.total / report.products.total < 3
    if method == "exact":
        assert planned == report.products
    targets = targets_of(probe, probe.features(images), 4, method)
    planned = planned_products(method, report.output_size, 17 * 64, 4, with_effective_rank=False)
    assert 0.3 < planned.total / targets.products.total < 4


def test_auto_plans_for_the_method_that_it_chooses():
    assert planned_products("auto", 384, 257 * 384, 20) == ProductCount(vjp=384)
    assert planned_products("auto", 50_000, 257 * 384, 20) == planned_products("krylov", 50_000, 257 * 384, 20)
    assert planned_products("exact", 50_000, 640, 20) == ProductCount(jvp=640)


class Clock:
    """A clock that stands still but for products, which take so many seconds a column."""

    def __init__(self, monkeypatch, seconds: float) -> None:
        self.now, self.columns = 0.0, 0

        def product(op, columns, count):
            self.columns += columns.shape[-1]
            self.now += seconds * columns.shape[-1]
            return columns.new_zeros(op.batch, count, columns.shape[-1])

        monkeypatch.setattr(duration.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(duration.JacobianOperator, "_matmat", lambda op, columns: product(op, columns, op.rows))
        monkeypatch.setattr(duration.JacobianOperator, "_rmatmat", lambda op, columns: product(op, columns, op.cols))


def test_the_estimate_is_the_time_of_one_product_times_the_planned_ones(monkeypatch):
    probe = seeded("cls", 4)
    features = probe.features(random_images(3))
    clock = Clock(monkeypatch, 0.5)
    assert seconds_per_sample(probe, features, 4, "exact") == pytest.approx(64 * 0.5)
    assert clock.columns < 12, "it costs a fraction of what it foretells"
    planned = planned_products("krylov", 64, 17 * 64, 4)
    assert seconds_per_sample(probe, features, 4, "krylov") == pytest.approx(planned.total * 0.5)


class Heard(Progress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, line: str) -> None:
        self.notes.append(line)


def test_long_work_is_announced_and_short_work_is_not(monkeypatch):
    probe, heard = seeded("cls", 4), Heard()
    Clock(monkeypatch, 0.002)
    announce(heard, {"L04": (probe, 1)}, random_images(1), 4, "exact")
    assert heard.notes == []
    announce(heard, {"L04": (probe, 10_000)}, random_images(1), 4, "exact")
    (line,) = heard.notes
    assert line.startswith("L04: about 0.1 s an image on this CPU; in all about 21 min. Ctrl-C is safe")


def test_too_little_memory_for_the_estimate_is_left_to_the_run(monkeypatch):
    def refuse(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    probe = seeded("cls", 4)
    features = probe.features(random_images(1))
    monkeypatch.setattr(duration, "JacobianOperator", refuse)
    assert math.isnan(seconds_per_sample(probe, features, 4))
