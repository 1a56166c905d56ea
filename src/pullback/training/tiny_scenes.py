"""The recipe of `tiny-scenes`: depth and scene class from freshly drawn scenes.

    python -m pullback.training.tiny_scenes --steps 3696 --batch 256 --device cuda --out runs/tiny-scenes

Scenes are drawn block by block, each block is seen three times, mirrored and relit at random, and never again: drawing
a picture takes longer than learning from it. Held-out seeds start at `HELD_OUT`. Everything follows from ``--seed`` and
the step number, so a run that was stopped goes on exactly where its last checkpoint was written: call
the same command again. `log.jsonl` holds a line every ``--log-every`` steps; the averaged weights end up in `model/`, a
folder that `load_probe` takes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.backbones.checkpoint import write_network
from pullback.data.scenes import CLASSES, SceneBatch, normalised, render
from pullback.errors import PullbackError
from pullback.models.tiny_scenes import TinyScenes, TinyScenesConfig
from pullback.training.block_schedule import BlockSchedule
from pullback.training.evaluate_tiny_scenes import HELD_OUT as HELD_OUT
from pullback.training.evaluate_tiny_scenes import evaluate


@dataclass(frozen=True)
class Recipe(BlockSchedule):
    """What decides the weights. Stored in every checkpoint; another recipe does not continue it."""

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
    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, 0.02, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
                fan_in = module.weight[0].numel()
                module.weight.normal_(0, fan_in**-0.5, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
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
        gain, contrast = (1 + spread * _signed((count, 1, 1, 1), generator).to(device) for spread in (0.2, 0.2))
        tint = 1 + 0.1 * _signed((count, 3, 1, 1), generator).to(device)
        mean = self.rgb.mean((-3, -2, -1), keepdim=True)
        rgb = ((self.rgb - mean) * contrast + mean * gain) * tint
        pictures = torch.where(mirrored[:, None, None, None], rgb.flip(-1), rgb).clamp(0, 1)
        where = mirrored[:, None, None]
        depth = torch.where(where, self.depth.flip(-1), self.depth)
        return Examples(pictures, depth, torch.where(where, self.valid.flip(-1), self.valid), self.label)


def _signed(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform in [-1, 1)."""
    return 2 * torch.rand(shape, generator=generator) - 1


def losses(model: TinyScenes, examples: Examples, recipe: Recipe) -> dict[str, Tensor]:
    """Log-depth error, its edges, and the class."""
    output = model(normalised(examples.rgb))
    error = (output.predicted_depth.log() - examples.depth.clamp_min(1e-3).log()) * examples.valid
    depth = error.abs().sum() / examples.valid.sum()
    edges = _differences(error, examples.valid)
    classes = F.cross_entropy(output.logits, examples.label, label_smoothing=0.05)
    total = depth + recipe.gradient_weight * edges + recipe.class_weight * classes
    return {"loss": total, "depth": depth, "edges": edges, "class": classes}


def _differences(error: Tensor, valid: Tensor) -> Tensor:
    """Mean |difference of neighbouring errors|, along rows and columns, at distances 1, 4 and 16."""
    total = error.new_zeros(())
    for step in (1, 4, 16):
        for axis in (1, 2):
            length = error.shape[axis] - step
            both = valid.narrow(axis, 0, length) & valid.narrow(axis, step, length)
            change = (error.narrow(axis, step, length) - error.narrow(axis, 0, length)).abs() * both
            total = total + change.sum() / both.sum().clamp_min(1)
    return total / 6


def _optimizers(model: TinyScenes, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon (orthogonalised momentum) for the matrices of the blocks, AdamW for everything else.

    After 400 steps on an H200 AdamW alone (1e-3) had an AbsRel of 0.133, both together (3e-3) one of 0.097.
    """
    blocks = [p for p in model.backbone.encoder.parameters() if p.ndim == 2]
    own = {id(p) for p in blocks}
    rest = [p for p in model.parameters() if id(p) not in own]
    groups = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.99))
    # Its step is scaled to the size that AdamW's would have, so that both share one learning rate.
    muon = torch.optim.Muon(
        blocks, lr=recipe.learning_rate, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, adamw]


class Run:
    """Model, optimiser and running average of the weights at some step, in a folder."""

    def __init__(self, recipe: Recipe, out: Path, device: torch.device) -> None:
        self.recipe, self.out, self.device, self.step = recipe, out, device, 0
        self.model = build(recipe).to(device)
        self.average = build(recipe).to(device).requires_grad_(False)
        self.optimizers = _optimizers(self.model, recipe)
        self.drawn: tuple[range, Examples] | None = None  # the block in use
        out.mkdir(parents=True, exist_ok=True)
        if self.checkpoint.exists():
            self._resume()

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.pt"

    def save(self) -> None:
        """Written under another name first: a run that is killed leaves the last whole checkpoint."""
        state = {
            "step": self.step,
            "recipe": asdict(self.recipe),
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        unfinished = self.checkpoint.with_suffix(".tmp")
        torch.save(state, unfinished)
        os.replace(unfinished, self.checkpoint)

    def _resume(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        stored = {name: tuple(v) if isinstance(v, list) else v for name, v in state["recipe"].items()}
        if stored != asdict(self.recipe):
            changed = [name for name, value in asdict(self.recipe).items() if stored.get(name) != value]
            raise PullbackError(
                f"out: {self.checkpoint} was made by another recipe ({', '.join(changed)} differ). Choose another "
                "folder, or the recipe it was made with."
            )
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        for optimizer, stored_state in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(stored_state)
        self.step = state["step"]

    def examples(self) -> Examples:
        """Those of the current step; a new block is drawn when the last one is used up."""
        seeds = self.recipe.scenes(self.step)
        if self.drawn is None or self.drawn[0] != seeds:
            self.drawn = None  # its memory is needed
            self.drawn = seeds, Examples.of(render(seeds, size=self.recipe.size, device=self.device))
        rows = self.recipe.rows(self.step).to(self.device)
        return self.drawn[1].rows(rows).varied(self.recipe.generator((1 << 31) + self.step))

    def advance(self) -> dict[str, float]:
        """One step."""
        recipe, examples = self.recipe, self.examples()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(self.step)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            parts = losses(self.model, examples, recipe)
        self.model.zero_grad(set_to_none=True)
        parts["loss"].backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        decay = min(recipe.ema, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            for mean, value in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(value, 1 - decay)
        self.step += 1
        return {name: part.item() for name, part in parts.items()} | {"gradient_norm": norm.item()}


def train(recipe: Recipe, out: Path, device: torch.device, *, log_every: int, save_every: int, seconds: float) -> Run:
    """Advance to the last step, or for about so many seconds; log and checkpoint on the way."""
    run = Run(recipe, out, device)
    begun = time.perf_counter()
    while run.step < recipe.steps and time.perf_counter() - begun < seconds:
        numbers = run.advance()
        if run.step % log_every == 0 or run.step == recipe.steps:
            line: dict[str, Any] = {"step": run.step, **numbers, "seconds": round(time.perf_counter() - begun, 1)}
            with (out / "log.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")
            print(line, flush=True)
        if run.step % save_every == 0:
            run.save()
    run.save()
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--batch", type=int, default=Recipe.batch)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after about so long; call again to go on")
    parser.add_argument("--evaluate", type=int, default=1000, help="held-out scenes at the end")
    options = parser.parse_args()
    recipe = Recipe(steps=options.steps, batch=options.batch, seed=options.seed)
    device = torch.device(options.device)
    run = train(
        recipe,
        options.out,
        device,
        log_every=options.log_every,
        save_every=options.save_every,
        seconds=options.seconds,
    )
    write_network(run.average.eval().half(), options.out / "model")
    if options.evaluate:
        # of what was written
        print(evaluate(run.average.float(), count=options.evaluate, bank=2000, size=recipe.size, device=device))


if __name__ == "__main__":
    main()
