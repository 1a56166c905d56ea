"""Which of the layers that a decoder reads follow a change at the probe layer."""

from __future__ import annotations

from functools import cached_property

from pullback.backbones import Backbone
from pullback.decoders import Decoder
from pullback.errors import DecoderError
from pullback.vggt.backbone import SceneBackbone


class AtLayer:
    """What the probes of one layer have in common, whatever they are made of."""

    backbone: Backbone | SceneBackbone
    decoder: Decoder
    layer: int
    read_probe_layer: bool

    def __post_init__(self) -> None:
        self.backbone.check_layer(self.layer)
        for layer in self.decoder.layers:
            self.backbone.check_layer(layer)
        following_layers(self.decoder, self.layer, self.read_probe_layer)

    @cached_property
    def _following(self) -> tuple[int, ...]:
        return following_layers(self.decoder, self.layer, self.read_probe_layer)

    @property
    def name(self) -> str:
        return f"{self.backbone.name} {self.decoder.name} L{self.layer:02d}"


def following_layers(decoder: Decoder, layer: int, read_probe_layer: bool) -> tuple[int, ...]:
    """Those above ``layer``, and it itself with ``read_probe_layer``; an error where there are none."""
    first = layer if read_probe_layer else layer + 1
    found = tuple(sorted({read for read in decoder.layers if read >= first}))
    if not found:
        raise DecoderError(
            f"layer: nothing that decoder {decoder.name!r} reads (layers {list(decoder.layers)}) follows a change at "
            f"layer {layer}. Probe a lower layer"
            + (", or set read_probe_layer=True." if layer in decoder.layers else ".")
        )
    return found
