"""A diagnosis folder made by hand: the report must need nothing but these files."""

from pathlib import Path

import numpy as np
import pytest

from pullback.runs import documents as files
from pullback.runs.files import write_arrays, write_json


def summary(mean: float, se: float) -> dict:
    return {"mean": mean, "std": 2 * se, "se": se, "estimation_se": se / 10, "interval": [mean - 2 * se, mean + 2 * se]}


def layer(index: int | str, kappa: float, images: int) -> dict:
    values = np.sqrt(kappa * np.array([0.6, 0.3, 0.1]))
    return {
        "layer": index, "rank": 3, "rank_used": 3, "ranks": [3], "ranks_used": [3], "num_images": images,
        "output_size": 40, "tokens": 13, "dim": 8, "grid": [3, 4], "prefix": 1,
        "kappa": summary(kappa, 0.01), "kappa_at": {"3": {**summary(kappa, 0.01), "rank_used": 3}},
        "cv": {"mean": 1.5, "null": 0.25, "patches": 0.8, "indistinguishable_from_random": False, "std": 0.1,
               "se": 0.05, "patches_se": 0.02},
        "r_eff_trunc": 2.4, "r_eff_trunc_se": 0.1, "r_eff_slq": summary(12.0, 0.5), "tail_ratio": 5.0,
        "r90": {"value": 4, "is_lower_bound": True}, "regime": "iii", "regime_title": "marginal rank",
        "advice": "Score tokens.", "method": "krylov", "products": {"jvp": 100, "vjp": 80},
        "products_per_image": 180 / images, "seconds": 1.5, "gradient_signal_ratio": 20.0,
        "convergence": [
            {"rounds": 0, "paper_q": None, "alignment_error": 0.99, "gradient_signal_ratio": 1.1, "num_images": 1},
            {"rounds": 1, "paper_q": 0, "alignment_error": -1e-8, "gradient_signal_ratio": 1234.0, "num_images": 1},
        ],
        "per_image": [
            {"file": f"{i}.png", "singular_values": (values * (1 + 0.05 * i)).tolist(), "energy": 1.0,
             "energy_se": 0.01}
            for i in range(images)
        ],
    }  # fmt: skip


@pytest.fixture
def document() -> dict:
    return {
        "model": "/models/some-vit", "decoder": "cls", "image_files": ["0.png", "1.png"], "skipped": [],
        "size": [42, 56], "precision": "float32", "machine": "a machine", "seed": 0, "date": "2026-01-01",
        "versions": {"pullback": "0"}, "layers": [layer(2, 0.4, 2), layer("hooks", 0.7, 2)],
    }  # fmt: skip


@pytest.fixture
def folder(document, tmp_path) -> Path:
    random = np.random.default_rng(0)
    arrays = {
        "thumbnails": random.integers(0, 255, (2, 42, 56, 3), dtype=np.uint8),
        "grid": np.array([3, 4]),
        "prefix": np.array(1),
        "L02": random.random((2, 13), dtype=np.float32),
        "hooks": random.random((2, 13), dtype=np.float32),
    }
    write_json(tmp_path / files.DIAGNOSIS, document)
    write_arrays(tmp_path / files.IMPORTANCE, arrays)
    return tmp_path


@pytest.fixture
def scenes(tmp_path) -> Path:
    """Two scenes of a model with two tasks; the second picture is half sky."""
    random = np.random.default_rng(1)
    depth = random.uniform(1, 20, (2, 42, 56))
    depth[1, :21] = 0
    arrays = {
        "model": np.array("some-vit"),
        "captions": np.array(["room: tower of boxes", "open ground: row of spheres"]),
        "pictures": random.integers(0, 255, (2, 42, 56, 3), dtype=np.uint8),
        "true_depth": depth.astype(np.float32),
        "predicted_depth": (1.1 * depth + 0.1).astype(np.float32),
        "abs_rel": np.array([0.1, 0.2], dtype=np.float32),
        "tasks": np.array(["cls, L08", "depth-4x4, L05"]),
        "energy": random.random((2, 2, 3, 4), dtype=np.float32),
    }
    folder = tmp_path / "scenes"
    folder.mkdir()
    write_arrays(folder / files.SCENES, arrays)
    return folder
