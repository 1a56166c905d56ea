"""How much of the paper is done, and with which models and pictures: `tiny`, `small` and `paper`.

Everything goes by roles. A role of a model, such as "dinov2", stands in the paper's tables; a scale says which weights
play it, and a role that a scale lacks leaves its rows absent, never filled by another model. Roles of data are folders
of pictures, or scenes that are drawn from their seeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pullback.errors import PullbackError
from pullback.experiments.experiment import ABSENT, Cell
from pullback.scenes.splits import HELD_OUT, QUERIES, SHIFTED, TRAINING, SceneRange

ScaleName = Literal["tiny", "small", "paper"]
MODELS = {
    "tiny-scenes": "the embedded network of procedural scenes, with class token and depth",
    "tiny-views": "the embedded VGGT of procedural scenes, with cameras, points and depth",
    "dinov2": "DINOv2 (paper: ViT-B/14)",
    "clip": "CLIP (paper: ViT-B/16)",
    "saliency": "DINOv2-S, fine-tuned for saliency, with its decoder",
    "depth-anything": "Depth Anything V2 (paper: ViT-B/14)",
    "vggt": "VGGT (paper: 1B)",
}
"""Every role of a model, and what it is."""
OF_THE_PAPER = ("dinov2", "clip", "depth-anything", "vggt")
"""Roles of the models in the paper's tables."""
DATA = {
    "photos-train": "photographs to train on (ImageNet-val)",
    "photos": "photographs to measure on, apart from those (ImageNet-val)",
    "photos-bank": "further photographs, for banks of neighbours (ImageNet-val)",
    "sketches": "drawings (paper: ImageNet-Sketch)",
    "rooms": "pictures of rooms (paper: NYU-Depth-V2)",
    "multiview": "folders of scenes of several views",
    "scenes-train": "procedural scenes to train on",
    "scenes": "procedural scenes that nothing was trained on",
    "scenes-shifted": "procedural scenes from outside the training ranges",
}
"""Every role of data, and what it is."""
DRAWN: dict[str, tuple[int, SceneRange]] = {
    "scenes-train": (HELD_OUT, TRAINING),  # not those of the embedded models, whose outputs on them are not typical
    "scenes": (QUERIES, TRAINING),
    "scenes-shifted": (QUERIES, SHIFTED),
}
"""Scenes by role: the first seed, and the ranges that they are drawn from."""


@dataclass(frozen=True)
class Scale:
    """How much is done, and with what.

    ``models``: by role a name that `load_probe` takes, or a folder. ``data``: by role a folder of pictures, or "drawn".
    ``substitutes``: roles whose weights or pictures are not the paper's, with what they are.
    """

    name: ScaleName
    models: Mapping[str, str]
    data: Mapping[str, str]
    substitutes: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    def why_absent(self, cell: Cell) -> str | None:
        """Say why a cell cannot be measured at this scale; None if it can."""
        if cell.absent:
            return f"{ABSENT}: {cell.absent}"
        lacking = [role for role in cell.roles if role not in self.models and role not in self.data]
        return f"{ABSENT}: it has no {' and no '.join(lacking)}" if lacking else None

    def shown(self, role: str) -> str | None:
        """Return the name of a model as rows have it, without the path of a folder; None without the role."""
        model = self.models.get(role)
        return None if model is None else Path(model).name if Path(model).exists() else model

    def own_models(self) -> set[str]:
        """Return the names of models that are the paper's own, not substitutes for them."""
        shown = {self.shown(role) for role in OF_THE_PAPER if role not in self.substitutes}
        return {name for name in shown if name is not None}

    def has(self, *roles: str) -> bool:
        """Whether the scale has all of these roles, of models or data."""
        return all(role in self.models or role in self.data for role in roles)


_EMBEDDED = {"tiny-scenes": "tiny-scenes", "tiny-views": "tiny-views"}
_DRAWN = dict.fromkeys(DRAWN, "drawn")

SCALES: dict[ScaleName, Scale] = {
    "tiny": Scale("tiny", _EMBEDDED, _DRAWN),
    "small": Scale(
        "small",
        _EMBEDDED,  # and what --model and --images name: dinov2=, clip=, saliency=, photos=, ...
        _DRAWN,
        substitutes={
            "dinov2": "ViT-S/14 in place of ViT-B/14",
            "sketches": "TU-Berlin sketches in place of ImageNet-Sketch",
            "rooms": "RGB-D frames of four sources in place of NYU-Depth-V2",
        },
    ),
    "paper": Scale(
        "paper",
        _EMBEDDED
        | {
            "dinov2": "facebook/dinov2-base",
            "clip": "openai/clip-vit-base-patch16",
            "depth-anything": "depth-anything/Depth-Anything-V2-Base-hf",
            "vggt": "facebook/VGGT-1B",
        },
        _DRAWN,
    ),
}


def scale_of(
    name: str, models: Mapping[str, str] | None = None, data: Mapping[str, str] | None = None, seed: int = 0
) -> Scale:
    """Return a scale with these models and folders of pictures by role in addition, or raise an error that names what
    is not a scale, a role or a folder."""
    found = next((scale for scale in SCALES.values() if scale.name == name), None)
    if found is None:
        raise PullbackError(f"scale: expected one of {', '.join(SCALES)}, got {name!r}.")
    models, data = dict(models or {}), dict(data or {})
    for argument, given, known in (("model", models, MODELS), ("images", data, DATA)):
        for role in given:
            if role not in known:
                raise PullbackError(f"{argument}: expected ROLE=NAME with a role of {', '.join(known)}, got {role!r}.")
    for role, folder in data.items():
        if role in DRAWN:
            raise PullbackError(f"images: {role} are drawn from their seeds. Leave {role}= out.")
        if not Path(folder).expanduser().exists():
            raise PullbackError(f"images: there is no {folder}, given as {role}. Name a folder of pictures.")
    return replace(found, models={**found.models, **models}, data={**found.data, **data}, seed=seed)
