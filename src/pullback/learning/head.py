"""The importance head: one positive score per token from features alone (section 5.4 of the paper)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.backbones import attention
from pullback.checks import of_kind, whole_number
from pullback.errors import ModelError, ShapeError
from pullback.learning.pretrained import Origin, Pretrained

if TYPE_CHECKING:
    from pullback.probes import ProbeMap
    from pullback.targets.store import TargetStore


@dataclass(frozen=True)
class HeadConfig:
    """The size of a head, what it was trained for, and how well it does."""

    dim: int
    width: int = 256
    heads: int = 4  # of the attention
    target: str = "importance"  # or "block-norm"
    rounds: int = 1
    origin: Origin = field(default_factory=Origin)
    scores: Mapping[str, float] = field(default_factory=dict)


class ImportanceHead(Pretrained):
    """A network that scores tokens by how much the task's output depends on them, without any Jacobian.

    Linear D -> H; pre-norm attention over all tokens with inner width H/4, residual; pre-norm MLP H -> 3H/4 -> 1 with
    GELU; Softplus. 313,409 parameters at D = 768, H = 256. With ``rounds`` = 2, 3, ... there are that many rounds of
    attention and MLP in all: better at early layers, where a token's part must be worked out, and twice the time.
    """

    kind, title = "importance-head", "Importance head"

    def __init__(
        self, dim: int, width: int = 256, heads: int = 4, rounds: int = 1, *, config: HeadConfig | None = None
    ) -> None:
        super().__init__()
        for name, size in {"dim": dim, "width": width, "heads": heads, "rounds": rounds}.items():
            whole_number(name, size, error=ModelError)
        if width % 4 or (width // 4) % heads:
            raise ModelError(f"width, heads: expected width / 4 to be a multiple of heads, got {width} and {heads}.")
        self.config = config or HeadConfig(dim, width, heads, rounds=rounds)
        self.project = nn.Linear(dim, width)
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * (width // 4))
        self.out = nn.Linear(width // 4, width)
        self.norm2 = nn.LayerNorm(width)
        self.first = nn.Linear(width, 3 * width // 4)
        self.second = nn.Linear(3 * width // 4, 1)
        self.before = nn.ModuleList(Round(width, heads) for _ in range(rounds - 1))

    @classmethod
    def config_from_dict(cls, stored: Mapping[str, Any]) -> HeadConfig:
        values = {name: stored[name] for name in ("dim", "width", "heads", "target")}
        rounds = stored.get("rounds", 1)  # heads of before there was a choice
        origin = Origin.from_dict(stored["origin"])
        return HeadConfig(**values, rounds=rounds, origin=origin, scores=dict(stored["scores"]))

    @classmethod
    def from_config(cls, config: HeadConfig) -> ImportanceHead:
        return cls(config.dim, config.width, config.heads, config.rounds, config=config)

    @classmethod
    def fit(cls, targets: TargetStore | Sequence[TargetStore], probe: ProbeMap, **options: Any) -> ImportanceHead:
        """Train a head on one or more target stores (`compute_targets`); the options are those of `train_head`."""
        from pullback.learning.train_head import train_head
        from pullback.targets.store import TargetStore

        return train_head(probe, [targets] if isinstance(targets, TargetStore) else targets, **options)

    @property
    def layer(self) -> int | None:
        """The layer whose features it scores, where that is known."""
        return self.config.origin.layer

    def forward(self, features: Tensor) -> Tensor:
        """Score features [B, N, D], any N: [B, N] > 0."""
        return self.scores_of(self.state(features))

    def logits(self, features: Tensor) -> Tensor:
        """Return what goes into the Softplus [B, N]: it orders tokens as their scores do."""
        return self._logits_of(self.state(features))

    def state(self, features: Tensor) -> Tensor:
        """Return what the last MLP reads of every token: [B, N, H]."""
        of_kind("features", features, Tensor, f"[B, N, {self.config.dim}]", ShapeError)
        if features.ndim != 3 or features.shape[-1] != self.config.dim:
            raise ShapeError(f"features: expected [B, N, {self.config.dim}], got {list(features.shape)}.")
        x = self.project(features.to(self.project.weight.dtype))
        for earlier in self.before:
            x = earlier(x)
        x = x + self.out(attend(self.qkv(self.norm1(x)), self.config.heads))
        return self.norm2(x)

    def scores_of(self, state: Tensor) -> Tensor:
        """Return the scores [B, N] > 0 of a state [B, N, H]."""
        return F.softplus(self._logits_of(state)).clamp_min(torch.finfo(torch.float32).tiny)

    def _logits_of(self, state: Tensor) -> Tensor:
        scores = self.second(F.gelu(self.first(state))).squeeze(-1)
        return scores.to(torch.promote_types(scores.dtype, torch.float32))  # the order of many tokens needs its digits

    @torch.no_grad()
    def start_from(self, features: Tensor, target: Tensor) -> ImportanceHead:
        """Fold the spread of these features [n, N, D] and the level of these targets [n, N] into the first and last
        layer: ViT features have channels that are a hundred times larger than others, and the head has no norm of
        its own in front (it would cost parameters)."""
        standardise_inputs(self.project, features)
        level = target.double().clamp_min(torch.finfo(torch.float32).tiny).log().mean().exp()
        self.second.bias.fill_(inverse_softplus(level))
        return self


class Round(nn.Module):
    """One more pre-norm round in front of the head's own: attention with inner width H/4, then an MLP H -> H -> H."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * (width // 4))
        self.out = nn.Linear(width // 4, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(attend(self.qkv(self.norm1(x)), self.heads))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def attend(qkv: Tensor, heads: int) -> Tensor:
    """Attend with queries, keys and values side by side, [B, N, 3 I] -> [B, N, I]."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return attention.attend(q, k, v).transpose(1, 2).flatten(2)


@torch.no_grad()
def standardise_inputs(layer: nn.Linear, features: Tensor) -> None:
    """Make the layer give for these features [n, N, D] what it gave for the same ones with mean 0 and spread 1 in each
    channel. A channel that hardly varies gets the weight of an average one: dividing by its spread would magnify
    round-off here, and any change of it in other images."""
    mean, spread = features.float().mean((0, 1)), features.float().std((0, 1), correction=0)
    average = torch.where(spread.any(), spread.mean(), 1)
    layer.weight.div_(torch.where(spread > 1e-3 * average, spread, average))
    layer.bias.sub_(layer.weight @ mean.to(layer.weight.dtype))


def inverse_softplus(value: Tensor) -> Tensor:
    """Return log(exp(value) - 1), for values > 0 of any size."""
    return value + torch.log(-torch.expm1(-value))
