"""The S2-VAE: features of a whole image in a few register tokens on spheres, and back (`sec:vae_extension`).

    x [B, N, sum(dims)] --E--> registers z_1, ..., z_R, each on the unit sphere of R^d --G--> x~, as the head reads it

x are the patch tokens of every layer that a decoder reads, side by side: the features of a probe at the decoder's
inputs. Whatever the decoder makes of x~ has passed through z, so its Jacobian has rank M' = R d at most. Encoder and
decoder are plain transformers over registers and patches together; where a patch sits is told by fixed sinusoids, so
images of any size will do. Of several views each is encoded on its own. Nothing of the class token and the registers of
the backbone passes: in x~ they are zero.

The posterior of a register is power-spherical (De Cao & Aziz 2020). A Gaussian VAE and a plain autoencoder of the same
size are here for comparison.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal, kl_divergence

from pullback.backbones.shipped import has_fingerprint
from pullback.backbones.weights import same_weights
from pullback.checks import of_kind, whole_number
from pullback.errors import ModelError, ShapeError
from pullback.learning.power_spherical import HypersphericalUniform, PowerSpherical
from pullback.learning.pretrained import Origin, Pretrained
from pullback.learning.spn import AttentionBlock
from pullback.tokens import TokenLayout

if TYPE_CHECKING:
    from pullback.probes import ProbeMap

SPHERICAL, GAUSSIAN, DETERMINISTIC = "power-spherical", "gaussian", "deterministic"
POSTERIORS = (SPHERICAL, GAUSSIAN, DETERMINISTIC)
MAX_CONCENTRATION = 1e6
"""Up to which the power-spherical distribution keeps its digits; concentrations approach it and never pass it."""
_FIRST_CONCENTRATION = 30.0
"""Times d: at the start a sample points nearly where its location does, and the network learns from that."""
_FIRST_DEVIATION = 0.1


@dataclass(frozen=True)
class S2VAEConfig:
    """The size of a network, what it was trained for, and how well it does."""

    dims: tuple[int, ...]  # width of what the decoder reads of each layer
    layers: tuple[int, ...]  # those layers
    prefix: int = 1  # tokens of every view before its patches
    registers: int = 32  # R, of each view
    latent: int = 128  # d
    width: int = 256
    heads: int = 4
    blocks: int = 3  # of the encoder, and as many of the decoder
    posterior: str = SPHERICAL
    normed: bool | None = None  # whether the features are behind the backbone's final norm; None: not known
    origin: Origin = field(default_factory=Origin)
    scores: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("registers", "latent", "width", "heads", "blocks"):
            whole_number(name, getattr(self, name), error=ModelError)
        whole_number("prefix", self.prefix, least=0, error=ModelError)
        if self.posterior not in POSTERIORS:
            raise ModelError(f"posterior: expected one of {', '.join(POSTERIORS)}, got {self.posterior!r}.")
        if self.posterior == SPHERICAL and self.latent < 2:
            raise ModelError("latent: expected at least 2 numbers a register, because a sphere has no less, got 1.")
        if self.width % (4 * self.heads):
            raise ModelError(
                f"width, heads: expected width to be a multiple of 4 heads, got {self.width} and {self.heads}."
            )
        for name, least in (("dims", 1), ("layers", 0)):
            of_kind(name, getattr(self, name), tuple, "a tuple with a number for each layer", ModelError)
            for value in getattr(self, name):
                whole_number(name, value, least=least, error=ModelError)
        if len(self.dims) != len(self.layers) or not self.dims:
            raise ModelError(f"dims: expected one width for each of the layers {self.layers}, got {self.dims}.")


class Reconstruction(NamedTuple):
    """What a pass through the network gives."""

    posterior: Distribution | None  # of the registers, batch [B, V R]; None for a plain autoencoder
    latent: Tensor  # z [B, V R, d], which was decoded: a sample in training, else the location
    features: Tensor  # x~ [B, N, sum(dims)]


class S2VAE(Pretrained):
    """A variational autoencoder of multi-layer ViT features, whose latent is a few registers on spheres."""

    kind, title = "s2vae", "S2-VAE bottleneck"
    mean: Tensor  # of each channel of the features it was started from
    spread: Tensor

    def __init__(self, config: S2VAEConfig) -> None:
        super().__init__()
        of_kind("config", config, S2VAEConfig, "an S2VAEConfig of pullback.learning.s2vae", ModelError)
        self.config = config
        width, features = config.width, sum(config.dims)
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("spread", torch.ones(features))
        self.inward = nn.Linear(features, width)
        self.queries = nn.Parameter(0.02 * torch.randn(config.registers, width))
        self.encoder = nn.ModuleList([AttentionBlock(width, config.heads) for _ in range(config.blocks)])
        self.encoder_norm = nn.LayerNorm(width)
        self.location = nn.Linear(width, config.latent)
        spreads = {SPHERICAL: 1, GAUSSIAN: config.latent, DETERMINISTIC: 0}[config.posterior]
        self.precision = nn.Linear(width, spreads) if spreads else None  # log concentration, or log deviation
        self.expand = nn.Linear(config.latent, width)
        self.registers = nn.Parameter(0.02 * torch.randn(config.registers, width))
        self.patch = nn.Parameter(0.02 * torch.randn(width))
        self.decoder = nn.ModuleList([AttentionBlock(width, config.heads) for _ in range(config.blocks)])
        self.decoder_norm = nn.LayerNorm(width)
        self.outward = nn.Linear(width, features)
        if self.precision is not None:
            first = math.log(_FIRST_CONCENTRATION * config.latent) if spreads == 1 else math.log(_FIRST_DEVIATION)
            nn.init.zeros_(self.precision.weight)
            nn.init.constant_(self.precision.bias, first)

    @classmethod
    def config_from_dict(cls, stored: Mapping[str, Any]) -> S2VAEConfig:
        names = ("prefix", "registers", "latent", "width", "heads", "blocks", "posterior")
        dims, layers = (tuple(int(value) for value in stored[name]) for name in ("dims", "layers"))
        origin, scores = Origin.from_dict(stored["origin"]), dict(stored["scores"])
        sizes = {name: stored[name] for name in names} | {"normed": stored.get("normed")}
        return S2VAEConfig(dims, layers, **sizes, origin=origin, scores=scores)

    @classmethod
    def from_config(cls, config: S2VAEConfig) -> S2VAE:
        return cls(config)

    def extra_repr(self) -> str:
        own = self.config
        return f"{own.registers} registers of {own.latent} numbers, {own.posterior}, for layers {list(own.layers)}"

    @property
    def size(self) -> int:
        """M' = R d, the numbers that an image, or a view, is held in."""
        return self.config.registers * self.config.latent

    @property
    def spherical(self) -> bool:
        """Whether every register lies on the unit sphere."""
        return self.config.posterior == SPHERICAL

    @torch.no_grad()
    def start_from(self, x: Tensor, layout: TokenLayout) -> S2VAE:
        """Hold mean and spread of each channel of these features, so that all count alike. A channel that hardly varies
        gets the spread of an average one: its round-off is not worth learning."""
        patches = self._patches(x, layout).flatten(0, 1).double()
        spread = patches.std(0, correction=0)
        average = torch.where(spread.any(), spread.mean(), 1)
        self.mean.copy_(patches.mean(0))
        self.spread.copy_(torch.where(spread > 1e-3 * average, spread, average))
        return self

    # Forth and back

    def forward(self, x: Tensor) -> Reconstruction:
        """Encode and decode features; in training a sample of the posterior, else its location."""
        layout = self.layout_of(x)
        location, posterior = self._encoded(x, layout)
        z = posterior.rsample() if self.training and posterior is not None else location
        return Reconstruction(posterior, z, self.decode(z, layout))

    def posterior(self, x: Tensor, layout: TokenLayout) -> Distribution | None:
        """Return the distribution of the registers, batch [B, V R] and event [d]; None for a plain autoencoder."""
        return self._encoded(x, layout)[1]

    def encode(self, x: Tensor, layout: TokenLayout) -> Tensor:
        """Return z [B, V R, d], the location of the posterior: the latent wherever none is to be drawn."""
        return self._encoded(x, layout)[0]

    def decode(self, z: Tensor, layout: TokenLayout) -> Tensor:
        """Return x~ [B, N, sum(dims)] in the dtype of z; prefix tokens are zero."""
        own = self.config
        of_kind("z", z, Tensor, f"registers [B, V R, {own.latent}]", ShapeError)
        of_kind("layout", layout, TokenLayout, "a TokenLayout, such as probe.token_layout(features)", ShapeError)
        if z.ndim != 3 or z.shape[1:] != (layout.views * own.registers, own.latent):
            raise ShapeError(
                f"z: expected [B, {layout.views * own.registers}, {own.latent}], {own.registers} registers for each "
                f"of {layout.views} views, got {list(z.shape)}."
            )
        scale = math.sqrt(own.latent) if self.spherical else 1.0  # entries of about 1
        held = self.expand(scale * z.to(self.expand.weight.dtype).unflatten(1, (layout.views, -1)).flatten(0, 1))
        places = (self._positions(layout) + self.patch).expand(len(held), -1, -1)
        tokens = torch.cat([held + self.registers, places], 1)
        for block in self.decoder:
            tokens = block(tokens)
        patches = self.outward(self.decoder_norm(tokens[:, own.registers :])).to(self.mean.dtype)
        patches = patches * self.spread + self.mean
        whole = F.pad(patches, (0, 0, layout.prefix, 0))  # [B V, prefix + h w, sum(dims)]
        return whole.unflatten(0, (-1, layout.views)).flatten(1, 2).to(z.dtype)

    def reconstruct(self, x: Tensor, layout: TokenLayout) -> Tensor:
        """Return G(E(x)), without drawing anything."""
        return self.decode(self.encode(x, layout), layout)

    def divergence(self, posterior: Distribution | None) -> Tensor | None:
        """Return the KL divergence [B, V R] to the uniform on the sphere, or to a standard Gaussian."""
        if posterior is None:
            return None
        if isinstance(posterior, PowerSpherical):
            like = posterior.concentration
            uniform = HypersphericalUniform(self.config.latent, device=like.device, dtype=like.dtype)
            return kl_divergence(posterior, uniform)
        assert isinstance(posterior, Independent)
        standard = Normal(torch.zeros_like(posterior.mean), torch.ones_like(posterior.mean))
        return kl_divergence(posterior, Independent(standard, 1))

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return what belongs to each layer, [B, N, dims[k]]."""
        return x.split(list(self.config.dims), -1)

    def layout_of(self, x: Tensor) -> TokenLayout:
        """Return where the tokens of these features sit: as they say themselves, else as those of a square image."""
        known = getattr(x, "token_layout", None)
        return known if isinstance(known, TokenLayout) else TokenLayout.square(x.shape[1], self.config.prefix)

    def check(self, probe: ProbeMap, argument: str = "vae") -> None:
        """Raise an error that names ``argument`` unless this network was made for what the decoder of ``probe`` reads:
        the same model, layers and widths and, where it was trained for a task, the same decoder. Where the probe sits
        makes no difference."""
        from pullback.probes import ProbeMap

        of_kind("probe", probe, ProbeMap, "a probe map, such as pb.multi_layer_probe(model, decoder)")
        own, backbone, decoder = self.config, probe.backbone, probe.decoder
        if own.origin.family in (None, backbone.family) and own.layers != decoder.layers:
            raise ModelError(
                f"{argument}: expected one of the layers {list(decoder.layers)}, which decoder {decoder.name!r} reads, "
                f"got one of {list(own.layers)}. Train one for this decoder: pullback train bottleneck."
            )
        # a hash of parameters depends on their dtype, so decoders are compared in that of training alone
        known = backbone.dtype == torch.float32 and own.origin.decoder_identity is not None
        own.origin.check(
            argument,
            family=backbone.family,
            layer=decoder.layers[-1],
            decoder=decoder.name,
            decoder_identity=decoder.identity(backbone.model) if known else None,
        )
        if (own.dims, own.prefix) != ((backbone.tap_dim,) * len(decoder.layers), backbone.prefix):
            raise ModelError(
                f"{argument}: expected one of layers that are {backbone.tap_dim} wide, with {backbone.prefix} tokens "
                f"before the patches, as those of {backbone.name}, got {list(own.dims)} and {own.prefix}. Train one "
                "for this model: pullback train bottleneck."
            )
        if own.normed not in (None, decoder.normed):
            before, behind = "before the final norm", "behind the final norm"
            reads, has = (behind if normed else before for normed in (decoder.normed, own.normed))
            raise ModelError(
                f"{argument}: expected one of features {reads}, as decoder {decoder.name!r} reads them, got one of "
                f"features {has}. Train one for this decoder: pullback train bottleneck."
            )
        shipped = own.origin.fingerprint  # which also fits copies that were stored in 16 bits
        same = has_fingerprint(shipped, backbone) if shipped else same_weights(own.origin.blocks, backbone)
        if same is False:
            raise ModelError(
                f"{argument}: it was trained for other weights than those of {backbone.name}. Train one for these "
                "weights (pullback train bottleneck), or use it with the model that it belongs to."
            )

    # Inside

    def _encoded(self, x: Tensor, layout: TokenLayout) -> tuple[Tensor, Distribution | None]:
        patches = self._patches(x, layout)
        tokens = self.inward((patches - self.mean) / self.spread) + self._positions(layout)
        tokens = torch.cat([self.queries.expand(len(tokens), -1, -1), tokens], 1)
        for block in self.encoder:
            tokens = block(tokens)
        seen = self.encoder_norm(tokens[:, : self.config.registers])
        seen = seen.unflatten(0, (-1, layout.views)).flatten(1, 2)  # [B, V R, width]
        location = self.location(seen).to(self.mean.dtype)
        if self.precision is None:
            return location.to(x.dtype), None
        precision = self.precision(seen).to(self.mean.dtype)
        if not self.spherical:
            return location.to(x.dtype), Independent(Normal(location, precision.exp(), validate_args=False), 1)
        location = F.normalize(location, dim=-1)
        most = math.log(MAX_CONCENTRATION)
        concentration = (most - F.softplus(most - precision.squeeze(-1))).exp()
        return location.to(x.dtype), PowerSpherical(location, concentration, validate_args=False)

    def _patches(self, x: Tensor, layout: TokenLayout) -> Tensor:
        """Return the patch tokens of every view, [B V, h w, sum(dims)], in the dtype of the network."""
        of_kind("x", x, Tensor, f"features [B, N, {sum(self.config.dims)}]", ShapeError)
        of_kind("layout", layout, TokenLayout, "a TokenLayout, such as probe.token_layout(features)", ShapeError)
        if x.ndim != 3 or x.shape[1:] != (layout.tokens, sum(self.config.dims)):
            raise ShapeError(
                f"x: expected [B, {layout.tokens}, {sum(self.config.dims)}], the layers {list(self.config.layers)} "
                f"side by side, got {list(x.shape)}."
            )
        plain = x.as_subclass(torch.Tensor).to(self.mean.dtype)
        return layout.patch_map(plain).flatten(2, 3).flatten(0, 1)

    def _positions(self, layout: TokenLayout) -> Tensor:
        """Return sinusoids of row and column [h w, width], as in a vision transformer without learned positions.

        Rows and columns are shares of the image: another resolution shows the same places."""
        quarter = self.config.width // 4
        like = self.queries
        rates = torch.logspace(
            math.log10(_COARSEST), math.log10(_FINEST), quarter, device=like.device, dtype=like.dtype
        )
        waves = []
        for side in layout.grid:
            place = (torch.arange(side, device=like.device, dtype=like.dtype) + 0.5) / side
            angle = 2 * math.pi * place[:, None] * rates
            waves.append(torch.cat([angle.sin(), angle.cos()], -1))  # [side, width / 2]
        rows, columns = layout.grid
        grid = (waves[0][:, None].expand(-1, columns, -1), waves[1][None].expand(rows, -1, -1))
        return torch.cat(grid, -1).flatten(0, 1)


_COARSEST, _FINEST = 0.25, 16.0
"""Periods of the slowest and the fastest sinusoid across the image."""
