"""Decoders by name, from the table in `pullback.registry`, or from a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn

from pullback.backbones import AnyBackbone, check_evaluation_mode
from pullback.checks import shown
from pullback.decoders.decoder import Decoder
from pullback.decoders.dense import PatchGrid, on_patch_grid
from pullback.decoders.identity import name_of
from pullback.errors import DecoderError
from pullback.registry import DecoderEntry, decoders_for, resolve

DecoderChoice = str | Callable[[Tensor], Tensor] | PatchGrid | Decoder


def build_decoder(choice: DecoderChoice, backbone: AnyBackbone, *, pose_derivative: str = "exact") -> Decoder:
    """A decoder by name; a function of the last layer's normalised tokens, [B, N, D] -> [B, ...]; or a `PatchGrid`.

    Functions and patch grids are for backbones of single images; those of several views take a `Decoder`.
    ``pose_derivative`` is for the cameras of a VGGT (`pullback.vggt.decoders.camera`) and refused for all others.
    """
    options = {"pose_derivative": pose_derivative} if pose_derivative != "exact" else {}
    if not isinstance(choice, Decoder) and not callable(choice) and not isinstance(choice, PatchGrid):
        return _named_decoder(choice, backbone, options)
    if options:
        raise _no_choice(pose_derivative)
    if isinstance(choice, Decoder):
        return choice
    if backbone.views:
        raise _unknown(choice, backbone)
    head = choice.head if isinstance(choice, PatchGrid) else choice
    if isinstance(head, type) or not callable(head):
        raise DecoderError(f"decoder: expected a function or a module that was made, got {shown(head)}.")
    if isinstance(head, nn.Module):
        check_evaluation_mode(head, "decoder")
    first = head[0] if isinstance(head, nn.Sequential) and len(head) else head
    if head is choice and isinstance(first, nn.Conv2d | nn.ConvTranspose2d):
        raise DecoderError(
            f"decoder: a {type(first).__name__} reads a map [B, D, h, w], but a decoder gets tokens [B, N, D]. Wrap "
            "it: decoder=pb.PatchGrid(head)."
        )
    if isinstance(choice, PatchGrid):
        return on_patch_grid(backbone, choice)
    return Decoder(name_of(choice), (backbone.depth - 1,), lambda taps, layout: choice(taps[0]), source=choice)


def _named_decoder(choice: object, backbone: AnyBackbone, options: dict[str, str]) -> Decoder:
    for entry in decoders_for(backbone.family):
        match = entry.match(str(choice))
        if match is not None:
            if not set(options) <= set(entry.options):
                raise _no_choice(options["pose_derivative"])
            built = _checked(resolve(entry.build)(backbone, *match.groups(), **options), entry)
            return built if entry.known_version is None else replace(built, version=entry.known_version)
    raise _unknown(choice, backbone)


def _checked(built: object, entry: DecoderEntry) -> Decoder:
    if not isinstance(built, Decoder):
        raise DecoderError(
            f"decoder: the function of {entry.name!r} in the registry returned a {type(built).__name__}, expected a "
            "pullback.Decoder: Decoder(name, layers=(backbone.depth - 1,), decode=...)."
        )
    return built


def _no_choice(pose_derivative: str) -> DecoderError:
    return DecoderError(
        f"pose_derivative: only the cameras of a VGGT have a choice, expected 'exact', got {pose_derivative!r}."
    )


def _unknown(choice: object, backbone: AnyBackbone) -> DecoderError:
    names = ", ".join(entry.name for entry in decoders_for(backbone.family))
    other = "a Decoder of the taps" if backbone.views else "a function"
    return DecoderError(f"decoder: expected one of {names}, or {other}, for {backbone.name}, got {shown(choice)}.")
