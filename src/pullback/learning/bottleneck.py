"""A VAE of the features as part of a probe: compressed probes, and probes of its latent (`sec:vae_extension`).

    psi(x)  = phi(x)                x: what the decoder phi reads, its layers side by side
    psi~(x) = phi(G(E(x)))          `compressed_probe`: x passes the bottleneck, so J~ has rank M' = R d at most
              z = E(x)              `encoder_probe`
              z -> phi(G(z))        `latent_probe`: J has M' columns, few enough for an exact SVD

All three are ordinary probe maps: spectra, diagnoses, targets and heads work on them as on any other. The first two
have the place of the probe that they are made of (its layer, or the decoder's inputs), the third sits in the latent.
With F the features, J~ = J_latent J_encoder; so ``JacobianOperator(encoder_probe(probe, vae), F).T @ directions`` pulls
directions of the latent back to the features.

Directions off the sphere. Registers of a power-spherical VAE lie on unit spheres, and nothing that E does leaves them.
With ``space="sphere"`` the latent probe is z -> phi(G(z / |z|)), register by register: its J is that of G with the
tangent projector P behind it, J = J_ambient P, which annihilates the radial direction of every register, so its rank
is R (d - 1) at most. ``space="ambient"`` takes G as a function of all of R^(R d): J then also measures what G makes of
registers longer or shorter than 1, which no image has. J~ is the same with either.

By name the decoder depth@FOLDER is depth behind the bottleneck in FOLDER, depth@s2vae behind the one that comes with
the package for the weights of the model. The layers "latent" and "latent-ambient" are the latent in the two spaces.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.backbones import AnyBackbone, Samples, State, unchanged
from pullback.backbones.backbone import Size
from pullback.backbones.shipped import shipped
from pullback.checks import of_kind
from pullback.data.images import ImageSource, PixelFormat
from pullback.data.pictures import Pictures
from pullback.decoders import Decoder, build_decoder
from pullback.errors import DecoderError, ModelError, PullbackError, ShapeError, naming
from pullback.learning.s2vae import S2VAE
from pullback.operators import Linearization
from pullback.probes import INPUTS, LATENTS, ProbeMap
from pullback.runs.provenance import weights_hash
from pullback.tokens import Features, TokenLayout

SHIPPED = "s2vae"
SPACES = tuple(LATENTS.values())
_DIGITS = 16
_UNREAD = 1e-3
"""Of the output's largest entry: how far another class token may move it where it is not read."""

logger = logging.getLogger(__name__)


def compressed_probe(probe: ProbeMap, vae: S2VAE) -> ProbeMap:
    """Return the probe with a bottleneck in front of its decoder: psi~ = phi o G o E at the same place.

    The VAE has to be one of the layers that the decoder reads. Nothing of the class token and the registers of the
    backbone passes it, so decoders of the class token are refused.
    """
    return replace(probe, decoder=_compressed(probe, vae))


def latent_probe(probe: ProbeMap, vae: S2VAE, *, space: str = "sphere") -> ProbeMap:
    """Return the probe z -> phi(G(z)) of the registers z [B, V R, d] that a VAE makes of the images (of V views).

    ``space``: "sphere", z -> phi(G(z / |z|)), whose J knows no directions off the spheres and has rank V R (d - 1) at
    most, or "ambient", z -> phi(G(z)). A VAE whose posterior is not on spheres has the second alone.

        exact = pb.targets_of(latent, latent.features(images), rank=20, method="exact")   # by V R d JVPs an image
    """
    own, decoder = _compressed(probe, vae).latent(probe.backbone, space)
    return ProbeMap(own, decoder, 0, distance=probe.distance, output_metric=probe.output_metric)


def encoder_probe(probe: ProbeMap, vae: S2VAE) -> ProbeMap:
    """Return the map from the features of a probe to the latent, z = E(x) [B, V R, d], as a probe of its own."""
    compressed = _compressed(probe, vae)

    def decode(taps: Sequence[Tensor], layout: TokenLayout) -> Tensor:
        return compressed.encode(taps, layout)

    name = f"encoder of {compressed.name}"
    encoder = Decoder(name, compressed.layers, decode, normed=compressed.normed, source=compressed.vae)
    return replace(probe, decoder=encoder, distance=None, output_metric=None)


def named_decoder(backbone: AnyBackbone, inner: str, name: str) -> CompressedDecoder:
    """Build the decoder ``inner``@``name`` of the registry. ``name``: the folder or the hub id of a VAE, or "s2vae" for
    the one that comes with the package for these weights (a folder of that name is ./s2vae)."""
    decoder = build_decoder(inner, backbone)
    with naming("decoder"):
        fix = "Train one: pullback train bottleneck, and write its FOLDER behind the @."
        folder = shipped(S2VAE.kind, backbone, layers=decoder.layers, fix=fix) if name == SHIPPED else name
        try:
            vae = S2VAE.from_pretrained(folder).requires_grad_(False)
        except ModelError as error:
            if Path(folder).is_dir():
                raise
            raise ModelError(
                f"{str(error).rstrip('.')}. Write the folder that `pullback train bottleneck` made behind the @, or "
                f"{SHIPPED} for the one that comes with the package."
            ) from None
    return _compressed(ProbeMap(backbone, decoder, INPUTS), vae, f"{inner}@{name}", argument="decoder")


def _compressed(probe: ProbeMap, vae: S2VAE, name: str | None = None, argument: str = "vae") -> CompressedDecoder:
    """Return the decoder of a probe behind a VAE, on the device of the backbone and at least in its precision.

    ``argument``: what errors about a VAE that does not fit call it.
    """
    of_kind("probe", probe, ProbeMap, "a probe map, such as pb.load_probe(model, decoder, layer)")
    of_kind("vae", vae, S2VAE, "an S2VAE; pb.train_bottleneck makes one, S2VAE.from_pretrained loads one", ModelError)
    check_bare(probe)
    inner = probe.decoder
    if inner.rows is not None:
        raise DecoderError(
            f"decoder: {inner.name!r} reads the first {inner.rows} tokens alone, of which nothing passes a bottleneck. "
            "Choose one that reads patches, such as mean or depth."
        )
    vae.check(probe, argument)
    held = next(vae.parameters())
    dtype = torch.promote_types(held.dtype, probe.backbone.dtype)
    if (held.device, held.dtype) != (probe.device, dtype):
        vae = deepcopy(vae).to(probe.device, dtype)  # the caller's stays where it is
    own = vae.config
    if own.origin.decoder is None and own.origin.resolutions:  # else training has looked at this decoder
        size, patch = own.origin.resolutions[0], probe.backbone.patch_size
        layout = TokenLayout(own.prefix, (size[0] // patch, size[1] // patch))
        check_patches_alone(probe, _typical(vae, layout).to(probe.backbone.dtype))
    encode = _Encoder(vae, probe.backbone.patch_size)

    def decode(taps: Sequence[Tensor], layout: TokenLayout) -> Tensor:
        return inner.decode(vae.split(vae.decode(encode(taps, layout), layout)), layout)

    return CompressedDecoder(
        name or f"{inner.name}@{own.registers}x{own.latent}",
        inner.layers,
        decode,
        normed=inner.normed,
        inner=inner,
        vae=vae,
        encode=encode,
    )


def check_bare(probe: ProbeMap) -> None:
    """Refuse a probe whose decoder has a bottleneck already."""
    if isinstance(probe.decoder, CompressedDecoder | LatentDecoder):
        raise DecoderError(
            f"decoder: expected one without a bottleneck, got {probe.decoder.name!r}. Use the decoder behind it."
        )


def check_patches_alone(probe: ProbeMap, features: Tensor) -> None:
    """Refuse a decoder whose output at these features, which are its inputs, depends on class or register tokens."""
    layout = probe.token_layout(features)
    if layout.prefix == 0:
        return
    with torch.no_grad():
        plain = features.as_subclass(Tensor)
        decoded = replace(probe, at=INPUTS, after_norm=True).bind(Features.attach(plain, layout, {}))
        patches = layout.patch_mask().to(plain.device)[:, None]
        truth, other = decoded(plain), decoded(torch.where(patches, plain, 1 - 2 * plain))
        reads = (other - truth).abs().max() > _UNREAD * truth.abs().max()
    if reads:
        raise DecoderError(
            f"decoder: {probe.decoder.name!r} reads class or register tokens, and a bottleneck carries patch tokens "
            "only. Use a decoder of the patches, such as depth, saliency or mean."
        )


def _typical(vae: S2VAE, layout: TokenLayout) -> Tensor:
    """Draw features [1, N, sum(dims)] with the mean and the spread of those that the VAE was trained on."""
    noise = torch.randn(1, layout.tokens, len(vae.mean), generator=torch.Generator().manual_seed(0)).to(vae.mean)
    return Features.attach(vae.mean + vae.spread * noise, layout, {})


@dataclass(frozen=True, eq=False)
class _Encoder:
    """E: the taps of an image to its registers. Says once for every size of image that the VAE was not trained on."""

    vae: S2VAE
    patch_size: int
    _said: set[tuple[int, int]] = field(default_factory=set, repr=False)

    def __call__(self, taps: Sequence[Tensor], layout: TokenLayout) -> Tensor:
        rows, columns = (side * self.patch_size for side in layout.grid)
        known = self.vae.config.origin.resolutions
        if known and (rows, columns) not in {*known, *self._said}:
            self._said.add((rows, columns))
            sizes = " and ".join(f"{height}x{width}" for height, width in known)
            logger.warning(
                f"vae: it was trained on images of {sizes} pixels, and sees {rows}x{columns}: its scores do not tell "
                "how well it restores these. Train one for this size: pullback train bottleneck --size."
            )
        return self.vae.encode(torch.cat(list(taps), -1), layout)


@dataclass(frozen=True, repr=False)
class CompressedDecoder(Decoder):
    """A decoder behind a VAE: decode(G(E(taps)))."""

    inner: Decoder = field(kw_only=True)
    vae: S2VAE = field(kw_only=True, compare=False)
    encode: Callable[[Sequence[Tensor], TokenLayout], Tensor] = field(kw_only=True, compare=False)
    bottleneck: ClassVar[bool] = True

    def __repr__(self) -> str:
        own = self.vae.config
        return f"CompressedDecoder({self.name!r}, {self.inner!r} behind {own.registers} registers of {own.latent})"

    def identity(self, model: nn.Module) -> str:
        """Return what files know it by: the decoder behind the bottleneck, and the sizes and weights of the VAE."""
        own = self.vae.config
        size = f"{own.registers}x{own.latent} {own.posterior} heads {own.heads}"
        return f"{self.inner.identity(model)}, bottleneck {size} {weights_hash(self.vae)[:_DIGITS]}"

    def latent(self, backbone: AnyBackbone, space: str) -> tuple[LatentBackbone, LatentDecoder]:
        if space not in SPACES:
            raise PullbackError(f"space: expected one of {', '.join(SPACES)}, got {space!r}.")
        if space == "sphere" and not self.vae.spherical:
            raise ModelError(
                f"space: the registers of {self.name} have a {self.vae.config.posterior} posterior and lie on no "
                "spheres, expected 'ambient' (by name the layer latent-ambient), got 'sphere'."
            )
        inner, vae = self.inner, self.vae

        def decode(taps: Sequence[Tensor], layout: TokenLayout) -> Tensor:
            z = F.normalize(taps[0], dim=-1) if space == "sphere" else taps[0]
            image = _image_layout(layout)
            return inner.decode(vae.split(vae.decode(z, image)), image)

        own = LatentBackbone(
            name=backbone.name,
            family=backbone.family,
            model=backbone.model,
            norm=unchanged,
            prefix=0,
            patch_size=backbone.patch_size,
            preprocessing=backbone.preprocessing,
            image=backbone,
            decoder=self,
            space=space,
        )
        return own, LatentDecoder(self.name, (0,), decode, normed=False, compressed=self)


@dataclass(frozen=True, repr=False)
class LatentDecoder(Decoder):
    """What reads the registers. Files know it by the decoder that it is part of; their "layer" tells the place."""

    compressed: CompressedDecoder = field(kw_only=True)
    bottleneck: ClassVar[bool] = True

    def __repr__(self) -> str:
        own = self.compressed.vae.config
        return f"LatentDecoder({self.name!r}, reads {own.registers} registers of {own.latent})"

    def identity(self, model: nn.Module) -> str:
        return self.compressed.identity(model)


@dataclass(frozen=True)
class LatentLayout(TokenLayout):
    """``views`` times R registers, which have no place in the picture; ``image`` says where its patches go."""

    image: TokenLayout = field(kw_only=True)

    @property
    def in_picture(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True, repr=False)
class LatentBackbone(AnyBackbone):
    """A frozen network and the encoder of a VAE behind it, whose only layer are the registers z [B, V R, d].

    ``image``: the network; samples are its samples. ``decoder``: the one whose taps are encoded.
    """

    image: AnyBackbone
    decoder: CompressedDecoder
    space: str

    def __repr__(self) -> str:
        own = self.decoder.vae.config
        return f"LatentBackbone({self.image!r}, {own.registers} registers of {own.latent}, {self.space})"

    @property
    def views(self) -> bool:
        return self.image.views

    @property
    def depth(self) -> int:
        return 1

    @property
    def dim(self) -> int:
        return self.decoder.vae.config.latent

    @property
    def device(self) -> torch.device:
        return self.image.device

    @property
    def dtype(self) -> torch.dtype:
        return self.image.dtype

    def layer_name(self, layer: int) -> str:
        return next(name for name, space in LATENTS.items() if space == self.space)

    def token_layout(self, images: Tensor) -> LatentLayout:
        image = self.image.token_layout(images)
        return LatentLayout(0, (1, self.decoder.vae.config.registers), image.views, image=image)

    def layout_of(self, features: Tensor) -> TokenLayout:
        raise ShapeError(
            "features: expected what probe.features(images) returned (sums, scalings and batch slices of it keep the "
            f"layout of the image, which registers do not show), got a plain {type(features).__name__} "
            f"{list(features.shape)}. Under torch.func transforms use probe.bind(features)."
        )

    def embed(self, images: Tensor) -> Tensor:
        states, read = self.image.states(images, self.decoder.layers), self.decoder.read
        seen = [read(states[layer].tap(), self.image.norm) for layer in self.decoder.layers]
        return self.decoder.encode(seen, self.image.token_layout(images))

    def tables(self, layout: TokenLayout, like: Tensor) -> None:
        return None

    def step(self, layer: int, tokens: Tensor, layout: TokenLayout, tables: Any, rows: int | None = None) -> State:
        return State(tokens)

    def linearize(
        self, function: Callable[[Tensor], Tensor], point: Tensor, layout: TokenLayout, reads: int
    ) -> Linearization:
        """Linearise by `torch.func`; a tangent takes the memory that it does at the decoder's inputs, which are wider
        than the registers."""
        image, layers = _image_layout(layout), len(self.decoder.layers)
        found = self.image.linearize(function, point, image, layers)
        inside = len(point) * image.tokens * self.image.tap_dim * layers + found.output.numel()
        found.bytes_per_tangent = max(found.bytes_per_tangent, _COPIES * inside * point.element_size())
        return found

    def arithmetic(self) -> AbstractContextManager[Any]:
        return self.image.arithmetic()

    def batch(self, images: Pictures, *, normalized: bool = False) -> Tensor:
        return self.image.batch(images, normalized=normalized)

    def check_size(self, size: Size) -> None:
        self.image.check_size(size)

    def pixel_format(self, size: Size = None) -> PixelFormat:
        return self.image.pixel_format(size)

    def read(self, path: ImageSource, size: Size = None, limit: int | None = None) -> Samples:
        return self.image.read(path, size, limit)

    def load_views(self, path: ImageSource, size: int | None = None) -> Tensor:
        return self.image.load_views(path, size)


_COPIES = 32
"""Of the decoder's inputs and outputs, that a tangent takes inside a product."""


def _image_layout(layout: TokenLayout) -> TokenLayout:
    assert isinstance(layout, LatentLayout)  # `LatentBackbone` makes no others
    return layout.image
