"""Procedural scenes with known ground truth: `render` draws pictures, depth, normals, instances and cameras from seeds.

`python -m pullback.scenes.pictures` writes them as folders of PNG files.
"""

from pullback.data.images import normalised
from pullback.scenes.render import SceneBatch, render, scene_labels
from pullback.scenes.splits import CLASSES, HELD_OUT, QUERIES, SHIFTED, TRAINING, SceneRange

__all__ = [
    "CLASSES",
    "HELD_OUT",
    "QUERIES",
    "SHIFTED",
    "TRAINING",
    "SceneBatch",
    "SceneRange",
    "normalised",
    "render",
    "scene_labels",
]
