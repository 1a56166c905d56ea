"""Learning the importance head from targets (`eq:conformal_loss`), and what to compare it with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pullback.errors import ModelError, PullbackError, ShapeError
from pullback.evaluation import spearman
from pullback.learning.fit import Losses, Network, Share
from pullback.learning.losses import conformal_loss
from pullback.operators import LowRankMetric


@dataclass(frozen=True, eq=False)
class HeadExamples:
    """n examples of one token count: how to get features, and what the scores should be.

    ``features`` takes row numbers [b] and returns [b, N, D]: indexing a tensor where features are kept, a forward
    pass where they are recomputed.
    """

    features: Callable[[Tensor], Tensor]
    target: Tensor  # [n, N] > 0
    prefix: int = 1  # tokens in front of the patches

    def __len__(self) -> int:
        return len(self.target)

    @classmethod
    def kept(cls, features: Tensor, target: Tensor, prefix: int = 1) -> HeadExamples:
        """With features [n, N, D] in memory, in any floating dtype."""
        return cls(lambda rows: features[rows.to(features.device)].to(target.dtype), target, prefix)


@dataclass(frozen=True)
class HeadTask:
    """A step takes its batch from one of ``train``, chosen by size, so that token counts may differ between them."""

    train: Sequence[HeadExamples]
    held_out: HeadExamples
    rank_weight: float = 0.5
    batch: int = 64  # of validation
    sizes: Tensor = field(init=False)

    def __post_init__(self) -> None:
        for name, parts in (("train", self.train), ("held_out", [self.held_out])):
            if not parts or min(map(len, parts)) == 0:
                raise PullbackError(f"{name}: expected at least one example in every set of targets, got none.")
            if not all(part.target.isfinite().all() for part in parts):
                raise PullbackError(
                    f"{name}: expected finite targets, got NaN or infinity. Compute these targets again."
                )
        object.__setattr__(self, "sizes", torch.tensor([len(examples) for examples in self.train]).double())

    def loss(self, network: Network, step: int, share: Share, generator: torch.Generator) -> Losses:
        examples = self.train[int(torch.multinomial(self.sizes, 1, generator=generator))]
        rows = share.of(torch.randint(len(examples), (share.batch,), generator=generator))
        scores = network(examples.features(rows))
        target = examples.target[rows.to(examples.target.device)].to(scores.device)
        loss = conformal_loss(scores, target, rank_weight=self.rank_weight, generator=generator)
        return loss, {}

    def validate(self, network: Network) -> Mapping[str, float]:
        return head_scores(network, self.held_out, batch=self.batch)


@torch.no_grad()
def head_scores(network: Network, examples: HeadExamples, *, batch: int = 64) -> dict[str, float]:
    """Spearman's rho over the tokens of each image, mean and standard error over images; all tokens and patches."""
    everything, patches = [], []
    for rows in torch.arange(len(examples)).split(batch):
        scores = network(examples.features(rows)).float()
        target = examples.target[rows.to(examples.target.device)].to(scores.device)
        everything.append(spearman(scores, target))
        patches.append(spearman(scores[:, examples.prefix :], target[:, examples.prefix :]))
    return rho_summary(torch.cat(everything), torch.cat(patches))


def rho_summary(everything: Tensor, patches: Tensor) -> dict[str, float]:
    """From the rho [n] of each image over all tokens and over patches."""
    error = everything.std() / len(everything) ** 0.5 if len(everything) > 1 else everything.new_tensor(0.0)
    rho = float(everything.mean())
    return {"score": rho, "rho": rho, "rho_se": float(error), "rho_patches": float(patches.mean())}


def mean_map_scores(train: HeadExamples, held_out: HeadExamples) -> dict[str, float]:
    """The baseline that looks at no image: the mean of the training maps, each with mean 1 so that none dominates."""
    if train.target.shape[1] != held_out.target.shape[1]:
        raise ShapeError(
            f"held_out: expected the {train.target.shape[1]} tokens of the training maps, got "
            f"{held_out.target.shape[1]}: a mean map has no meaning on another grid."
        )
    maps = train.target / train.target.mean(1, keepdim=True)
    guess = maps.mean(0, keepdim=True).expand_as(held_out.target)
    prefix = held_out.prefix
    everything = spearman(guess, held_out.target)
    return rho_summary(everything, spearman(guess[:, prefix:], held_out.target[:, prefix:]))


@torch.no_grad()
def distilled_examples(
    spn: Callable[[Tensor], LowRankMetric],
    features: Callable[[Tensor], Tensor],
    count: int,
    *,
    prefix: int = 1,
    batch: int = 64,
) -> HeadExamples:
    """Examples 0, ..., count - 1 whose target is the importance that an SPN predicts, sqrt(sum_j lambda_j |u_j^(t)|^2),
    in place of the exact one: they need no Jacobian. ``features`` as in `HeadExamples`."""
    if count < 1:
        raise PullbackError(f"count: expected at least one example, got {count}.")
    parts = []
    for rows in torch.arange(count).split(batch):
        inputs = features(rows)
        target = spn(inputs).importance()
        if target.shape != inputs.shape[:2]:
            raise ModelError(
                f"spn: expected modes on the {inputs.shape[1]} tokens of the features, got {target.shape[1]}. Modes of "
                "a latent space say nothing about single tokens: use a network without one."
            )
        parts.append(target.cpu())
    return HeadExamples(features, torch.cat(parts), prefix)
