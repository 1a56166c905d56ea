"""The importance heads that come with the package, found by the weights of a model, its decoder and a layer.

    head = shipped_head(backbone, "cls", 6)   # what pb.prune(model, "importance", stages=[6], ...) uses

They lie in ``models/weights/NAME-heads/DECODER-LAYER`` (`backbones.shipped`), written by `recipes.importance_heads`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pullback.backbones import AnyBackbone, Backbone
from pullback.backbones.shipped import fitting
from pullback.errors import ModelError
from pullback.learning.head import ImportanceHead
from pullback.learning.pretrained import without_cells
from pullback.runs.documents import layer_name


def shipped_heads(backbone: AnyBackbone, decoder: str) -> dict[int, Path]:
    """Return the folders of the heads that ship for a decoder of a model, by layer; none where none do."""
    return _by_layer(_known(backbone), decoder)


def shipped_head(backbone: AnyBackbone, decoder: str, layer: int, *, argument: str = "score") -> ImportanceHead:
    """Return the head that ships for this layer, where the model is, or raise an error that blames ``argument``, says
    what ships, and how to train one."""
    return load_shipped(shipped_folders(backbone, decoder, [layer], argument=argument)[0], backbone)


def shipped_folders(backbone: AnyBackbone, decoder: str, layers: list[int], *, argument: str = "score") -> list[Path]:
    """Return the folders of the heads that ship for these layers, or raise the error of `shipped_head`."""
    known = _known(backbone)
    found = _by_layer(known, decoder)
    for layer in layers:
        if layer not in found:
            raise _missing(backbone, decoder, layer, known, argument)
    return [found[layer] for layer in layers]


def load_shipped(folder: Path, backbone: AnyBackbone) -> ImportanceHead:
    """Read a head to the device of a model, frozen as the model is."""
    return ImportanceHead.from_pretrained(folder, device=backbone.device).requires_grad_(False)


def own_decoder(backbone: AnyBackbone) -> str:
    """Return the name of the decoder that makes the model's own output: its depth, its logits, its projection or its
    class token; of a model without one its pooling head."""
    if backbone.hook_layers:
        return "depth"
    if isinstance(backbone, Backbone) and backbone.classifier is not None:
        return "logits"
    if getattr(backbone.model, "visual_projection", None) is not None:
        return "projection"
    return "cls" if backbone.prefix else "pool"


def _known(backbone: AnyBackbone) -> dict[tuple[str, int], Path]:
    """Return what ships for the weights of a model, by decoder and layer."""
    found = fitting(ImportanceHead.kind, backbone)
    return {(config["decoder"], config["layer"]): folder for folder, config in found}


def _by_layer(known: Mapping[tuple[str, int], Path], decoder: str) -> dict[int, Path]:
    """Return the folders of one decoder by layer. A map that is averaged down to cells is the same decoder."""
    wanted = without_cells(decoder)
    return {layer: folder for (name, layer), folder in sorted(known.items()) if name == wanted}


def _missing(
    backbone: AnyBackbone, decoder: str, layer: int, known: Mapping[tuple[str, int], Path], argument: str
) -> ModelError:
    layers: dict[str, list[str]] = {}
    for name, place in sorted(known):
        layers.setdefault(name, []).append(layer_name(place))
    listing = "; ".join(f"{name} {', '.join(places)}" for name, places in layers.items())
    return ModelError(
        f"{argument}: no importance head that comes with the package fits {backbone.name}, decoder {decoder!r}, "
        f"{layer_name(layer)}; for these weights there {f'are {listing}' if listing else 'is none'}. One command "
        f"trains heads for all layers: pullback train heads MODEL --decoder {decoder} --images DIR --out HEADS"
    )
