"""The S2-VAE: features of a whole image in a few register tokens on spheres, and back (`sec:vae_extension`).

    x [B, N, sum(dims)] --E--> registers z_1, ..., z_R, each on the unit sphere of R^d --G--> x~, as the head reads it

x are the patch tokens of every layer that a decoder reads, side by side: the features of a probe at the decoder's
inputs. Whatever the decoder makes of x~ has passed through z, so its Jacobian has rank M' = R d at most. Encoder and
decoder are plain transformers over registers and patches together; where a patch sits is told by fixed sinusoids, so
images of any size will do. Of several views each is encoded on its own. Nothing of the class token and the registers of
the backbone passes: in x~ they are zero.

The posterior of a register is power-spherical (De Cao & Aziz 2020). A Gaussian VAE and a plain autoencoder of the same
size are here for comparison.

A register may have a cell of the image of its own. It then starts at the principal components of the patches there,
which one batch of features gives in closed form, and the transformers learn what to add to them. Without cells a
network has to find out by attention alone which register holds what, and that takes most of a short training.
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
_FIRST_CONCENTRATION, _FIRST_OF_CELLS = 30.0, 300.0
"""Times d, the first concentration of a register, without and with a cell: a sample points nearly where its location
does, and the network learns from that. Cells know their location better at the start."""
_FIRST_DEVIATION = 0.1
_ADDED = 0.1
"""Factor on what the transformers add to the cells. A step of Adam changes all weights of a layer at once; without the
factor a few steps would undo what is known at the start."""
_RIDGE = 1e-4
"""Ridge of the first least-squares fit of G, as a share of the mean variance of a register's numbers."""
_DEAD = 1e-3
"""A channel that varies by less than this share of an average one hardly varies."""


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
    grid: tuple[int, int] | None = (
        None  # rows and columns of patches, of which each register has a cell; None: no cells
    )
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
        if self.grid is not None:
            of_kind("grid", self.grid, tuple, "rows and columns of patches, or None", ModelError)
            for value in self.grid:
                whole_number("grid", value, error=ModelError)
            if len(self.grid) != 2:
                raise ModelError(f"grid: expected rows and columns of patches, or None, got {self.grid}.")


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
    patch_of_slot: Tensor
    slot_of_patch: Tensor

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
            concentration = config.latent * (_FIRST_OF_CELLS if config.grid else _FIRST_CONCENTRATION)
            nn.init.zeros_(self.precision.weight)
            nn.init.constant_(self.precision.bias, math.log(concentration if spreads == 1 else _FIRST_DEVIATION))
        if config.grid is not None:
            cells = cells_of(config.registers, config.grid)
            slots = torch.zeros(math.prod(config.grid) + 1, dtype=torch.long)
            slots[cells.flatten()] = torch.arange(cells.numel())
            self.register_buffer("patch_of_slot", cells, persistent=False)  # [R, cell]
            self.register_buffer("slot_of_patch", slots[:-1], persistent=False)  # [h w], in all cells side by side
            places = width * cells.shape[1]
            self.fold, self.unfold = nn.Linear(places, config.latent), nn.Linear(config.latent, places)
            self.refine = nn.Linear(width, width)
            for added in (self.location, self.refine):  # what the transformers add to the cells: nothing yet
                nn.init.zeros_(added.weight)
                nn.init.zeros_(added.bias)
            # Steps of equal size in all entries, as Adam's are, would spoil them: small entries may matter most.
            for known in (self.inward, self.outward, self.fold, self.unfold):
                known.requires_grad_(False)

    @classmethod
    def config_from_dict(cls, stored: Mapping[str, Any]) -> S2VAEConfig:
        names = ("prefix", "registers", "latent", "width", "heads", "blocks", "posterior")
        dims, layers = (tuple(int(value) for value in stored[name]) for name in ("dims", "layers"))
        origin, scores = Origin.from_dict(stored["origin"]), dict(stored["scores"])
        sizes = {name: stored[name] for name in names} | {"normed": stored.get("normed")}
        sizes["grid"] = None if stored.get("grid") is None else tuple(int(side) for side in stored["grid"])
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

    @property
    def _scale(self) -> float:
        """What the numbers of a register have to be multiplied by to be of about 1."""
        return math.sqrt(self.config.latent) if self.spherical else 1.0

    @torch.no_grad()
    def start_from(self, x: Tensor, layout: TokenLayout, task_metric: Tensor | None = None) -> S2VAE:
        """Hold mean and spread of each channel of these features, so that all count alike. A channel that hardly varies
        gets the spread of an average one: its round-off is not worth learning.

        Registers with cells start at the principal components of these features there. They are those in which an
        error e of a patch costs |e / spread|^2 / sum(dims) + e^T T e, with ``task_metric`` T [sum(dims), sum(dims)],
        or its first part alone.
        """
        patches = self._patches(x, layout)
        if not patches.isfinite().all():
            raise ShapeError("x: expected finite features to start from, got NaN or infinite ones.")
        flat = patches.flatten(0, 1).double()
        spread = flat.std(0, correction=0)
        average = torch.where(spread.any(), spread.mean(), 1)
        self.mean.copy_(flat.mean(0))
        self.spread.copy_(torch.where(spread > _DEAD * average, spread, average))
        if self.config.grid is not None:
            metric = torch.eye(len(spread), dtype=torch.float64, device=spread.device)
            if task_metric is not None:
                units = self.spread.double()
                metric += len(spread) * units[:, None] * task_metric.to(metric) * units
            self._start_cells((patches - self.mean) / self.spread, layout, metric)
        return self

    def _start_cells(self, patches: Tensor, layout: TokenLayout, metric: Tensor) -> None:
        """Set the linear maps so that G(E(x)) are the principal components of x in every cell, under ``metric``.

        ``inward`` and ``outward`` are the leading components of a patch, ``fold`` those of all patches of a cell. On a
        sphere a register has no length, so one of its numbers is held constant before it is normalised: the length of
        the others beside it tells theirs. ``unfold`` is the least-squares fit of the patches to what that leaves.
        """
        own, linear = self.config, (self.inward, self.outward, self.fold, self.unfold)
        for layer in linear:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        root, inverse = (power.to(patches.dtype) for power in _roots(metric))
        components = _components(patches.flatten(0, 1) @ root, own.width)  # [sum(dims), k]
        scale = _or_one((patches @ (root @ components)).square().mean().sqrt())
        self.inward.weight[: components.shape[1]] = (root @ components).mT / scale
        self.outward.weight[:, : components.shape[1]] = inverse @ components * scale
        cells = self._folded(self.inward(patches), layout).flatten(0, 1)  # [B V R, cell * width]
        leading = _components(cells, own.latent - self.spherical)
        length = _or_one((cells @ leading).square().sum(-1).mean().sqrt()) * self._scale / math.sqrt(own.latent)
        self.fold.weight[: leading.shape[1]] = leading.mT / length
        if self.spherical:
            self.fold.bias[-1] = 1.0
        held = self.fold(cells)
        held = (F.normalize(held, dim=-1) if self.spherical else held).double()
        centre, target = held.mean(0), cells.double().mean(0)
        gram = (held - centre).mT @ (held - centre)
        gram.diagonal().add_(_RIDGE * _or_one(gram.diagonal().mean()))
        weight = torch.linalg.solve(gram, (held - centre).mT @ (cells.double() - target)).mT
        self.unfold.weight.copy_(weight)
        self.unfold.bias.copy_(target - weight @ centre)

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
        held = self.expand(self._scale * z.to(self.expand.weight.dtype).unflatten(1, (layout.views, -1)).flatten(0, 1))
        places = (self._positions(layout) + self.patch).expand(len(held), -1, -1)
        known = None if own.grid is None else self._unfolded(z, layout)
        tokens = torch.cat([held + self.registers, places if known is None else places + known], 1)
        for block in self.decoder:
            tokens = block(tokens)
        found = self.decoder_norm(tokens[:, own.registers :])
        patches = self.outward(found if known is None else known + _ADDED * self.refine(found)).to(self.mean.dtype)
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
        inside = self.inward((patches - self.mean) / self.spread)
        tokens = torch.cat([self.queries.expand(len(inside), -1, -1), inside + self._positions(layout)], 1)
        for block in self.encoder:
            tokens = block(tokens)
        seen = self.encoder_norm(tokens[:, : self.config.registers])
        seen = seen.unflatten(0, (-1, layout.views)).flatten(1, 2)  # [B, V R, width]
        location = self.location(seen).to(self.mean.dtype)
        if self.config.grid is not None:
            folded = self.fold(self._folded(inside, layout)).to(self.mean.dtype)  # [B V, R, d]
            location = _ADDED / self._scale * location + folded.unflatten(0, (-1, layout.views)).flatten(1, 2)
        if self.precision is None:
            return location.to(x.dtype), None
        precision = self.precision(seen).to(self.mean.dtype)
        if not self.spherical:
            return location.to(x.dtype), Independent(Normal(location, precision.exp(), validate_args=False), 1)
        location = F.normalize(location, dim=-1)
        most = math.log(MAX_CONCENTRATION)
        concentration = (most - F.softplus(most - precision.squeeze(-1))).exp()
        return location.to(x.dtype), PowerSpherical(location, concentration, validate_args=False)

    def _folded(self, inside: Tensor, layout: TokenLayout) -> Tensor:
        """Return patches [B V, h w, width] by cell, those of a cell side by side: [B V, R, cell * width]."""
        assert self.config.grid is not None
        grid = _resized(inside, layout.grid, self.config.grid)
        return F.pad(grid, (0, 0, 0, 1))[:, self.patch_of_slot].flatten(2)

    def _unfolded(self, z: Tensor, layout: TokenLayout) -> Tensor:
        """Return what registers [B, V R, d] say of the patches of their cells, [B V, h w, width]."""
        own = self.config
        assert own.grid is not None
        registers = z.to(self.unfold.weight.dtype).unflatten(1, (layout.views, -1)).flatten(0, 1)
        by_cell = self.unfold(registers).unflatten(-1, (-1, own.width)).flatten(1, 2)  # [B V, R cell, width]
        return _resized(by_cell[:, self.slot_of_patch], own.grid, layout.grid)

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


def cells_of(registers: int, grid: tuple[int, int]) -> Tensor:
    """Return the patches of each register's cell, [R, patches of the largest cell], padded with rows * columns.

    Registers are laid out in rows and columns, of which there are R together: so that as few as possible have no patch,
    and cells are as square as can be. A prime number of registers makes strips.
    """

    def empty_and_slim(rows: int) -> tuple[int, float]:
        columns = registers // rows
        used = min(rows, grid[0]) * min(columns, grid[1])
        return registers - used, abs(math.log(grid[0] * columns / (grid[1] * rows)))

    rows = min((own for own in range(1, registers + 1) if registers % own == 0), key=empty_and_slim)
    parts = [
        [range(own * side // count, (own + 1) * side // count) for own in range(count)]
        for side, count in zip(grid, (rows, registers // rows), strict=True)
    ]
    tall, wide = (max(1, *(len(part) for part in own)) for own in parts)
    index = torch.full((registers, tall, wide), grid[0] * grid[1])
    for own in range(registers):
        down, across = parts[0][own // len(parts[1])], parts[1][own % len(parts[1])]
        for place, row in enumerate(down):
            index[own, place, : len(across)] = row * grid[1] + torch.tensor(across)
    return index.flatten(1)


def _components(rows: Tensor, count: int) -> Tensor:
    """Return the leading principal directions [n, k] of rows [m, n], around zero: k = count, or fewer if m or n is."""
    exact = rows.double()
    if len(rows) < rows.shape[1]:  # the smaller of the two moment matrices has the same eigenvalues
        values, vectors = torch.linalg.eigh(exact @ exact.mT)
        kept = values > values[-1] * len(rows) * torch.finfo(exact.dtype).eps
        directions = exact.mT @ vectors[:, kept] / values[kept].sqrt()
    else:
        directions = torch.linalg.eigh(exact.mT @ exact).eigenvectors
    return directions.flip(1)[:, :count].to(rows.dtype)


def _roots(metric: Tensor) -> tuple[Tensor, Tensor]:
    """Return the square root of a positive metric [n, n] and the inverse of that."""
    values, vectors = torch.linalg.eigh(metric)
    roots = values.clamp_min(values[-1] * torch.finfo(torch.float32).eps).sqrt()
    root, inverse = (vectors * power @ vectors.mT for power in (roots, 1 / roots))
    return root, inverse


def _or_one(value: Tensor) -> Tensor:
    return torch.where(value > 0, value, 1)


def _resized(patches: Tensor, grid: tuple[int, int], wanted: tuple[int, int]) -> Tensor:
    """Return patches [B, h w, width] of a grid as those of another one."""
    if grid == wanted:
        return patches
    maps = patches.mT.unflatten(-1, grid)
    return F.interpolate(maps, wanted, mode="bilinear", align_corners=False).flatten(2).mT
