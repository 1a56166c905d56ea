"""The recipe of `tiny-scenes`: depth and scene class from freshly drawn scenes.

    python -m recipes.tiny_scenes --steps 3696 --batch 256 --device cuda --out runs/tiny-scenes

Scenes are drawn block by block (see `scene_run`), and each block is seen three times, mirrored and relit at random.
Held-out seeds start at `HELD_OUT`. A run that was stopped goes on exactly where its last checkpoint was written: call
the same command again. `log.jsonl` holds a line every ``--log-every`` steps; the averaged weights end up in `model/`, a
folder that `load_probe` takes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.models.tiny_scenes import TinyScenes, TinyScenesConfig
from pullback.runs.files import write_network
from pullback.scenes.render import CLASSES, SceneBatch, normalised, render
from pullback.scenes.splits import HELD_OUT as HELD_OUT
from recipes.evaluate_tiny_scenes import evaluate
from recipes.scene_run import SceneRecipe, SceneRun, draw_weights, relit, train_from_command_line


@dataclass(frozen=True)
class Recipe(SceneRecipe):
    """How the embedded `tiny-scenes` was trained."""

    steps: int = 3_696
    batch: int = 256
    block: int = 2048  # scenes drawn at a time
    passes: int = 3  # over each block
    size: int = 224
    seed: int = 0
    learning_rate: float = 3e-3
    warmup: int = 500
    weight_decay: float = 0.05
    clip: float = 1.0
    ema: float = 0.999
    gradient_weight: float = 0.5  # of the loss on depth edges
    class_weight: float = 0.2
    width: int = 192
    layers: int = 12
    heads: int = 3
    hooks: tuple[int, ...] = (2, 5, 8, 11)
    channels: int = 64

    def model(self) -> TinyScenesConfig:
        return TinyScenesConfig(
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            hooks=self.hooks,
            channels=self.channels,
            image_size=self.size,
            classes=len(CLASSES),
        )


def build(recipe: Recipe) -> TinyScenes:
    """The network with its initial weights, the same for the same seed on every device."""
    model = TinyScenes(recipe.model())
    generator = draw_weights(model, recipe.seed)
    with torch.no_grad():
        if model.head.second.bias is not None:
            model.head.second.bias.fill_(1.5)  # log depth of about 4.5 m, the middle of a scene
        embeddings = model.backbone.embeddings
        for token in (embeddings.cls_token, embeddings.position_embeddings):
            token.normal_(0, 0.02, generator=generator)
    return model


@dataclass(frozen=True)
class Examples:
    """What a step learns from: the first views of some scenes."""

    rgb: Tensor  # [B, 3, H, W] in [0, 1]
    depth: Tensor  # [B, H, W], metres
    valid: Tensor  # [B, H, W] bool: no sky
    label: Tensor  # [B]

    @classmethod
    def of(cls, scenes: SceneBatch) -> Examples:
        return cls(scenes.rgb[:, 0], scenes.depth[:, 0], ~scenes.sky[:, 0], scenes.label)

    def rows(self, rows: Tensor) -> Examples:
        return Examples(self.rgb[rows], self.depth[rows], self.valid[rows], self.label[rows])

    def varied(self, generator: torch.Generator) -> Examples:
        """Half of the pictures mirrored (no class knows left from right), all with another light: exposure, contrast
        and colour. Draws come from the CPU, so that they are the same on every device."""
        count, device = len(self.label), self.label.device
        mirrored = (torch.rand(count, generator=generator) < 0.5).to(device)
        rgb = relit(self.rgb, generator)
        pictures = torch.where(mirrored[:, None, None, None], rgb.flip(-1), rgb)
        where = mirrored[:, None, None]
        depth = torch.where(where, self.depth.flip(-1), self.depth)
        return Examples(pictures, depth, torch.where(where, self.valid.flip(-1), self.valid), self.label)


def losses(model: TinyScenes, examples: Examples, recipe: Recipe) -> dict[str, Tensor]:
    """Log-depth error, its edges, and the class."""
    output = model(normalised(examples.rgb))
    error = (output.predicted_depth.log() - examples.depth.clamp_min(1e-3).log()) * examples.valid
    depth = error.abs().sum() / examples.valid.sum()
    edges = differences(error, examples.valid)
    classes = F.cross_entropy(output.logits, examples.label, label_smoothing=0.05)
    total = depth + recipe.gradient_weight * edges + recipe.class_weight * classes
    return {"loss": total, "depth": depth, "edges": edges, "class": classes}


def differences(error: Tensor, valid: Tensor) -> Tensor:
    """Mean |difference of neighbouring errors|, along rows and columns, at distances 1, 4 and 16."""
    total = error.new_zeros(())
    for step in (1, 4, 16):
        for axis in (1, 2):
            length = error.shape[axis] - step
            both = valid.narrow(axis, 0, length) & valid.narrow(axis, step, length)
            change = (error.narrow(axis, step, length) - error.narrow(axis, 0, length)).abs() * both
            total = total + change.sum() / both.sum().clamp_min(1)
    return total / 6


class Run(SceneRun[Recipe, TinyScenes, Examples]):
    build = staticmethod(build)

    @staticmethod
    def matrices(network: TinyScenes) -> list[nn.Parameter]:
        return [p for p in network.backbone.encoder.parameters() if p.ndim == 2]

    def draw(self, seeds: range) -> Examples:
        return Examples.of(render(seeds, size=self.config.size, device=self.device))

    def examples(self, block: Examples) -> tuple[Tensor, ...]:
        rows = self.config.rows(self.step).to(self.device)
        seen = block.rows(rows).varied(self.config.generator((1 << 31) + self.step))
        return seen.rgb, seen.depth, seen.valid, seen.label

    def losses(self, *examples: Tensor) -> dict[str, Tensor]:
        with self.autocast():
            return losses(self.network, Examples(*examples), self.config)


def main() -> None:
    run, scenes = train_from_command_line(__doc__, Recipe, Run, evaluate=1000)
    network = run.average.eval().half()
    write_network(run.out / "model", network, asdict(network.config))
    if scenes:
        # of what was written
        print(evaluate(run.average.float(), count=scenes, bank=2000, size=run.config.size, device=run.device))


if __name__ == "__main__":
    main()
