"""What a learned map was made for, so that it is not used for something else by mistake."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pullback.errors import ModelError


@dataclass(frozen=True)
class Origin:
    """Where the training targets came from. None: not known, and then not checked."""

    family: str | None = None
    weights: str | None = None  # hash of the backbone's weights
    layer: int | None = None
    decoder: str | None = None
    rank: int | None = None
    resolutions: tuple[tuple[int, int], ...] = ()  # (height, width) of the images

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Origin:
        values = {field.name: stored[field.name] for field in fields(cls) if field.name in stored}
        values["resolutions"] = tuple((int(h), int(w)) for h, w in values.get("resolutions", ()))
        return cls(**values)

    def check(self, argument: str, *, family: str, layer: int, weights: str | None = None) -> None:
        """Refuse another family, layer or set of weights than the ones in here."""
        for name, made_for, asked in (
            ("family", self.family, family),
            ("layer", self.layer, layer),
            ("weights", self.weights, weights),
        ):
            if made_for is not None and asked is not None and made_for != asked:
                raise ModelError(
                    f"{argument}: it was trained for {name} {made_for}, and is used with {name} {asked}. Train one for "
                    f"this {name} (pullback train), or use it where it belongs."
                )
