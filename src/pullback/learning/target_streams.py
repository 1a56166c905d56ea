"""Pictures that are varied anew all the time, with targets as fast as the device computes them.

Early layers need many different pictures. Block norms from a few VJPs cost a fifteenth of the top-r importance there
and rank tokens nearly alike, so a head learns from many cheap targets first. Pictures come in blocks: block k follows
from the seed and k alone, is used for some steps and forgotten, so a stopped run goes on exactly.

`FreshCrops` has the targets of one layer. `LayerStream` has the block norms of several layers at once: for random signs
u in output space, one backward pass of <decoder(F), u> leaves (J_l)^T u at the features F^l of every layer l, and
E |((J_l)^T u)_t|^2 = |J_l,t|_F^2: block norms of all layers for the price of the earliest. Beside them it gives hints:
what the last layer makes of each token (leading principal components of the normed features, free with the forward
pass).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from pullback.data.crops import CROPS, STRONG, Variation
from pullback.errors import PullbackError
from pullback.geometry.importance import block_norms, quick_importance
from pullback.learning.fit import CurrentBlock, Losses, Network, Share
from pullback.learning.train_head import HeadExamples, HeadTask, head_scores, varied_pixels
from pullback.operators import JacobianOperator
from pullback.probes import ProbeMap
from pullback.randnla import Streams
from pullback.targets.recipe import targets_of


@dataclass(frozen=True)
class FreshCrops:
    """Block k of varied pictures with their targets.

    ``pictures`` [n, 3, H, W] uint8 on any device. ``num_probes``: so many VJPs for block norms; None: importance,
    accurate, or with ``rounds`` as `quick_importance` has it.
    """

    probe: ProbeMap
    pictures: Tensor
    size: int
    block: int = 2048
    variation: Variation = CROPS
    num_probes: int | None = 4
    rank: int = 20
    rounds: int | None = None
    batch: int = 64
    precision: str = "float32"
    seed: int = 0

    def __call__(self, number: int) -> HeadExamples:
        generator = Streams.from_seed(self.seed, 1, first=number).generators[0]
        features, targets = [], []
        for _ in range(0, self.block, self.batch):
            with torch.no_grad():
                part = self.probe.features(_varied_pictures(self, generator), normalized=True)
            seed = int(torch.randint(1 << 62, (), generator=generator))
            targets.append(self._targets(part, seed).float())
            features.append(part.as_subclass(Tensor).half())
        layout = self.probe.backbone.token_layout(torch.empty(0, 3, self.size, self.size))
        return HeadExamples.kept(torch.cat(features)[: self.block], torch.cat(targets)[: self.block], layout.prefix)

    def _targets(self, features: Tensor, seed: int) -> Tensor:
        if self.num_probes is None and self.rounds is None:
            return targets_of(self.probe, features, self.rank, seed=seed, precision=self.precision).importance
        operator = JacobianOperator(self.probe, features, precision=self.precision)
        streams = Streams.from_seed(seed, len(features), features.device)
        if self.num_probes is None:
            width = min(operator.rows, self.rank + 12)
            return quick_importance(
                operator, features.shape[1], self.rank, width=width, rounds=self.rounds or 0, streams=streams
            )
        found = block_norms(operator, features.shape[1], num_probes=self.num_probes, streams=streams)
        return found.squared.value.clamp_min(0).sqrt()


@dataclass(eq=False)
class FreshHeadTask:
    """A `Task` whose examples are replaced every ``steps_per_block`` steps."""

    blocks: Callable[[int], HeadExamples]
    held_out: HeadExamples
    steps_per_block: int
    rank_weight: float = 0.5
    _current: CurrentBlock[HeadTask] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._current = CurrentBlock(self._task, self.steps_per_block)

    def _task(self, number: int) -> HeadTask:
        return HeadTask([self.blocks(number)], self.held_out, self.rank_weight)

    def loss(self, network: Network, step: int, share: Share, generator: torch.Generator) -> Losses:
        return self._current.at(step).loss(network, step, share, generator)

    def validate(self, network: Network) -> Mapping[str, float]:
        return head_scores(network, self.held_out)


@dataclass(frozen=True)
class LayerBlock:
    """n pictures at L layers."""

    features: Tensor  # [L, n, N, D], float16
    norms: Tensor  # [L, n, N], block norms
    hints: Tensor  # [n, N, k], float16, spread 1: the last layer's principal components


@dataclass(frozen=True)
class LayerStream:
    """Block k of varied pictures [n, 3, H, W] uint8, with block norms from ``num_probes`` backward passes."""

    probe: ProbeMap  # its layer plays no part
    layers: tuple[int, ...]
    pictures: Tensor
    size: int
    block: int = 4096
    variation: Variation = STRONG
    num_probes: int = 2
    num_hints: int = 64
    batch: int = 256
    seed: int = 0

    def __call__(self, number: int) -> LayerBlock:
        generator = Streams.from_seed(self.seed, 1, first=number).generators[0]
        mean, directions = self._components
        held: LayerBlock | None = None
        for start in range(0, self.block, self.batch):
            tokens, lengths, last = self._part(generator)
            hints = ((last - mean) @ directions).clamp(-6, 6)
            if held is None:  # one block from the start: joining parts would take twice the memory
                held = LayerBlock(
                    tokens.new_empty(len(tokens), self.block, *tokens.shape[2:], dtype=torch.float16),
                    lengths.new_empty(len(lengths), self.block, lengths.shape[2]),
                    hints.new_empty(self.block, *hints.shape[1:], dtype=torch.float16),
                )
            rows = slice(start, min(start + self.batch, self.block))
            count = rows.stop - rows.start
            held.features[:, rows], held.norms[:, rows] = tokens[:, :count].half(), lengths[:, :count]
            held.hints[rows] = hints[:count].half()
        assert held is not None
        return held

    @cached_property
    def _components(self) -> tuple[Tensor, Tensor]:
        """Mean and directions of the hints, from pictures of their own: a run that goes on has the same ones."""
        if self.num_hints > self.probe.backbone.dim:
            raise PullbackError(f"num_hints: expected at most {self.probe.backbone.dim}, got {self.num_hints}.")
        generator = Streams.from_seed(self.seed, 1, first=-1).generators[0]
        return principal_components(self._part(generator)[2], self.num_hints)

    def _part(self, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        images = _varied_pictures(self, generator)
        draws = torch.Generator(self.probe.device).manual_seed(int(torch.randint(1 << 62, (), generator=generator)))
        return block_norms_of_layers(self.probe, images, self.layers, num_probes=self.num_probes, generator=draws)


def _varied_pictures(stream: FreshCrops | LayerStream, generator: torch.Generator) -> Tensor:
    """Draw the next ``batch`` pictures with replacement, varied and normalised for the backbone: [batch, 3, H, W]."""
    rows = torch.randint(len(stream.pictures), (stream.batch,), generator=generator)
    chosen = stream.pictures[rows.to(stream.pictures.device)]
    return varied_pixels(stream.probe.backbone, chosen, stream.size, stream.variation, generator)


def block_norms_of_layers(
    probe: ProbeMap, images: Tensor, layers: Sequence[int], *, num_probes: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (F^l [L, B, N, D], block norms [L, B, N], the normed last layer [B, N, D]) of images [B, 3, H, W].

    On a GPU the blocks run in bf16 with a float32 residual stream: the products lose 1e-2, far less than their noise.
    """
    backbone, decoder = probe.backbone, probe.decoder
    layout = backbone.token_layout(images)
    rope, top = backbone.tables(layout, images), backbone.depth - 1
    if not layers or list(layers) != sorted(set(layers)) or layers[-1] > max(decoder.layers):
        raise PullbackError(
            f"layers: expected different layers in ascending order, none above the last that the decoder reads "
            f"({max(decoder.layers)}), got {list(layers)}."
        )
    with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
        with torch.no_grad():
            # what the decoder reads below the first layer does not depend on it
            below = [layer for layer in decoder.layers if layer < layers[0]]
            states = {layer: tokens.float() for layer, tokens in backbone.features(images, [*below, layers[0]]).items()}
        first = states[layers[0]].requires_grad_()
        with torch.enable_grad():
            for layer in range(layers[0] + 1, top + 1):
                states[layer] = backbone.blocks[layer](states[layer - 1], rope)
            output = decoder.output([states[layer] for layer in decoder.layers], layout, backbone.norm).flatten(1)
            wanted = [states[layer] for layer in layers]
            energy = torch.zeros(len(layers), *first.shape[:2], device=images.device)
            for count in range(num_probes):
                signs = 2.0 * torch.randint(0, 2, output.shape, generator=generator, device=images.device) - 1
                pulled = torch.autograd.grad(
                    output, wanted, signs.to(output.dtype), retain_graph=count < num_probes - 1
                )
                energy += torch.stack([part.float().square().sum(-1) for part in pulled])
        last = backbone.norm(states[top].detach()).float()
    return torch.stack([state.detach() for state in wanted]).float(), (energy / num_probes).sqrt(), last


def principal_components(tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return mean [D] and directions [D, count] of tokens [..., D], scaled so that every coordinate has spread 1."""
    flat = tokens.flatten(0, -2).double()
    mean = flat.mean(0)
    values, vectors = torch.linalg.eigh((flat - mean).mT @ (flat - mean) / len(flat))
    scale = values[-count:].clamp_min(1e-12 * float(values[-1])).rsqrt()
    return mean.to(tokens.dtype), (vectors[:, -count:] * scale).to(tokens.dtype)
