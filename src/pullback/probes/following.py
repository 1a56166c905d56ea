"""Which of the layers that a decoder reads follow a change at the probe layer."""

from __future__ import annotations

from pullback.decoders import Decoder
from pullback.errors import DecoderError


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
