"""A comparison of pruning rules made by hand: what its folder holds."""

import numpy as np

RATIOS = (0.1, 0.5)
MERGING = ("bipartite", "bipartite")
RULES = [("best", "importance"), ("best", "random"), ("paper", "importance"), ("paper", "random"), MERGING]


def rule(preset: str, score: str, ratio: float, level: float) -> dict:
    mean = level * ratio
    own = (preset, score) == ("best", "importance")
    test = {"preset": "best", "score": "importance", "p_value": 3e-9, "difference": 1.0, "interval": [0.5, 1.5],
            "factor": 4.2, "worse_on": 0.9}  # fmt: skip
    entry = {"median": 10.0, "low": 9.0, "high": 11.0, "unpruned": 20.0, "speedup": 2.0, "rounds": 5}
    return {
        "preset": preset, "score": score, "ratio": ratio, "images": 4, "mean": mean, "median": mean,
        "interval": [0.8 * mean, 1.3 * mean], "tests": [] if own else [test], "knn": 0.625,
        "cost": {"preset": preset, "score": score, "ratio": ratio, "flops": 2e9, "milliseconds": {"1": entry}},
    }  # fmt: skip


def document(measure: str = "cosine") -> dict:
    rules = [rule(*name, ratio, 1 + place) for place, name in enumerate(RULES) for ratio in RATIOS]
    return {
        "model": "facebook/dinov2-small", "decoder": "cls", "stages": [4, 8], "size": [224, 224], "measure": measure,
        "reference": "importance", "presets": ["best", "paper", "bipartite"], "scores": ["importance", "random"],
        "ratios": list(RATIOS), "images": 5, "images_compared": 4, "machine": "a machine", "notes": ["stages: odd."],
        "skipped": [{"file": "x.png", "reason": "no picture"}], "unpruned": {"flops": 4e9, "knn": 0.75},
        "rules": rules,
    }  # fmt: skip


def arrays(dense: bool, images: int = 2, shape: tuple[int, int] = (3, 4)) -> dict[str, np.ndarray]:
    generator, count = np.random.default_rng(0), 3
    fates = generator.integers(0, 3, (count, images, *shape)).astype(np.uint8)
    partners = np.where(fates > 0, generator.integers(-1, 12, fates.shape), -1)
    found = {
        "pictures": generator.integers(0, 256, (images, 42, 56, 3), dtype=np.uint8),
        "names": np.array(["a.png", "b.png"][:images]),
        "presets": np.array(["best", "best", "bipartite"]),
        "scores": np.array(["importance", "importance", "bipartite"]),
        "ratios": np.array([0.1, 0.5, 0.5]),
        "fates": fates,
        "partners": partners,
        "values": np.array([[0.1] * images, [0.5] * images, [np.nan] * images]),
    }
    if dense:
        found |= {"before": generator.random((images, 42, 56)), "after": generator.random((count, images, 42, 56))}
    return found
