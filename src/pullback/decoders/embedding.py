"""Decoders that give one vector per image: class token, projection, pooling head, mean of the patches, logits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pullback.backbones import Backbone
from pullback.backbones.loading import stored_classifier
from pullback.backbones.outputs import attention_pool, pooling_head
from pullback.decoders.decoder import Decoder
from pullback.errors import DecoderError
from pullback.tokens import TokenLayout


def class_token(backbone: Backbone) -> Decoder:
    """The class token after the final norm."""
    if backbone.prefix == 0:
        raise DecoderError(
            f"decoder: {backbone.name} has no class token, so 'cls' does not exist. Use 'pool' or 'mean'."
        )

    def decode(taps: Sequence[Tensor], layout: TokenLayout) -> Tensor:
        return taps[0][:, 0]

    return Decoder("cls", (backbone.depth - 1,), decode, rows=1, linear=True)


def projection(backbone: Backbone) -> Decoder:
    """CLIP's embedding in the space that it shares with text: a matrix on the normalised class token."""
    project = getattr(backbone.model, "visual_projection", None)
    if project is None:
        raise DecoderError(
            f"decoder: {backbone.name} has no visual_projection. 'projection' needs a CLIP model with one."
        )

    def decode(taps: Sequence[Tensor], layout: TokenLayout) -> Tensor:
        return project(taps[0][:, 0])

    return Decoder("projection", (backbone.depth - 1,), decode, rows=1, linear=project.bias is None)


def patch_mean(backbone: Backbone) -> Decoder:
    """The mean of the patch tokens after the final norm."""

    def decode(taps: Sequence[Tensor], layout: TokenLayout) -> Tensor:
        return layout.patch_map(taps[0]).mean((1, 2, 3))

    return Decoder("mean", (backbone.depth - 1,), decode, linear=True)


def pool(backbone: Backbone) -> Decoder:
    """The model's own pooling head: attention pooling (SigLIP) or a dense layer on the class token (ViT, DeiT)."""
    last = (backbone.depth - 1,)
    head = pooling_head(backbone) if backbone.family.startswith("siglip") else None
    if head is not None:
        return Decoder("pool", last, lambda taps, layout: attention_pool(head, taps[0]))
    pooler = getattr(backbone.model, "pooler", None)
    if pooler is None:
        raise DecoderError(f"decoder: {backbone.name} ({backbone.family}) has no pooling head. Use 'cls' or 'mean'.")
    return Decoder("pool", last, lambda taps, layout: pooler(taps[0]), rows=1)


def logits(backbone: Backbone, number: str | None = None) -> Decoder:
    """The logits of an image classifier, [B, classes], or that of class ``number`` alone, [B, 1].

    The classifier is that of the model, or lies beside the weights that it was loaded from.
    """
    found = backbone.classifier or stored_classifier(backbone)
    if found is None or found.classes is None:
        raise DecoderError(
            f"decoder: {backbone.name} has no classifier. {'logits' if number is None else f'logit-{number}'!r} "
            "needs a *ForImageClassification model, or the folder or hub id of one."
        )
    name, chosen = "logits", slice(None)
    if number is not None:
        name, chosen = f"logit-{int(number)}", slice(int(number), int(number) + 1)
        if int(number) >= found.classes:
            raise DecoderError(
                f"decoder: expected logit-0 to logit-{found.classes - 1}, because {backbone.name} has {found.classes} "
                f"classes, got {name!r}."
            )

    def decode(taps: Sequence[Tensor], layout: TokenLayout) -> Tensor:
        return found.logits(taps[0], layout)[:, chosen]

    return Decoder(name, (backbone.depth - 1,), decode, normed=found.normed, rows=found.rows)
