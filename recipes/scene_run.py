"""What every recipe on drawn scenes shares: blocks of scenes, two optimisers, averaged weights, exact resume.

Everything follows from the recipe and the step number, so a run that was stopped goes on exactly where its last
checkpoint was written.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from pullback.errors import PullbackError
from recipes.block_schedule import BlockSchedule
from recipes.checkpoint_parts import read_parts, write_parts
from recipes.measurement import rounded
from recipes.stacked_muon import StackedMuon
from recipes.step_gradients import Gradients, GraphedGradients, eager_gradients


@dataclass(frozen=True)
class SceneRecipe(BlockSchedule):
    """What decides the weights. Stored in every checkpoint; another recipe does not continue it."""

    weight_decay: float
    clip: float
    ema: float
    size: int  # pixels


R = TypeVar("R", bound=SceneRecipe)
N = TypeVar("N", bound=nn.Module)
B = TypeVar("B")


class SceneRun(ABC, Generic[R, N, B]):
    """Model, optimisers and running average of the weights at some step, in a folder. R: the recipe, N: the network,
    B: a block of drawn scenes.

    ``graphed``: compiled runs replay a step as CUDA graphs, so its losses may not copy from the host.
    """

    graphed: ClassVar[bool] = False

    def __init__(self, recipe: R, out: Path, device: torch.device, *, compiled: bool = False) -> None:
        self.recipe, self.out, self.device, self.step = recipe, out, device, 0
        self.model = self.build(recipe).to(device).train()
        self.average = self.build(recipe).to(device).requires_grad_(False)
        self.optimizers = _optimizers(self.model, self.matrices(self.model), recipe)
        self.gradients: Gradients = eager_gradients
        if compiled:
            self.compile(self.model)
            self.gradients = GraphedGradients() if self.graphed else eager_gradients
        self.drawn: tuple[range, B] | None = None  # the block in use
        out.mkdir(parents=True, exist_ok=True)
        state = read_parts(out, device)
        if state is not None:
            self._resume(state)

    @staticmethod
    @abstractmethod
    def build(recipe: R) -> N:
        """The network with its initial weights, the same for the same seed on every device."""

    @staticmethod
    @abstractmethod
    def matrices(model: N) -> list[nn.Parameter]:
        """Those that Muon moves."""

    @staticmethod
    def compile(model: N) -> None:
        """Fuse what can be fused, in place; recipes that gain nothing leave it."""

    @abstractmethod
    def draw(self, seeds: range) -> B:
        """A block of scenes."""

    @abstractmethod
    def examples(self, block: B) -> tuple[Tensor, ...]:
        """Those of the current step, on the device."""

    @abstractmethod
    def losses(self, *examples: Tensor) -> dict[str, Tensor]:
        """By name, "loss" among them. Nothing in it may wait for the device; blocks run in bf16 on a GPU."""

    def block(self) -> B:
        """That of the current step; a new one is drawn when the last is used up."""
        seeds = self.recipe.scenes(self.step)
        if self.drawn is None or self.drawn[0] != seeds:
            self.drawn = None  # its memory is needed
            self.drawn = seeds, self.draw(seeds)
        return self.drawn[1]

    def advance(self) -> dict[str, Tensor]:
        """One step. What comes back is still on the device: reading it waits for the device, so read it rarely, and
        before the next step, which may overwrite it."""
        recipe = self.recipe
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(self.step)
        parameters = list(self.model.parameters())
        parts = self.gradients(self.losses, parameters, self.examples(self.block()))
        norm = nn.utils.clip_grad_norm_(parameters, recipe.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        decay = min(recipe.ema, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 1 - decay)
        self.step += 1
        return parts | {"gradient_norm": norm}

    def train(self, *, log_every: int, save_every: int, seconds: float) -> None:
        """Advance to the last step, or for about so many seconds; log and checkpoint on the way."""
        begun, resumed_at = time.perf_counter(), self.step
        while self.step < self.recipe.steps and time.perf_counter() - begun < seconds:
            numbers = self.advance()
            if self.step % log_every == 0 or self.step == self.recipe.steps:
                line: dict[str, Any] = {"step": self.step, **{name: rounded(v) for name, v in numbers.items()}}
                spent = time.perf_counter() - begun
                line |= {"seconds": round(spent, 1), "ms_per_step": round(1e3 * spent / (self.step - resumed_at), 1)}
                with (self.out / "log.jsonl").open("a", encoding="utf-8") as log:
                    log.write(json.dumps(line) + "\n")
                print(line, flush=True)
            if self.step % save_every == 0:
                self.save()
        self.save()

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def save(self) -> None:
        state = {
            "step": self.step,
            "recipe": asdict(self.recipe),
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        write_parts(state, self.step, self.out)

    def _resume(self, state: dict[str, Any]) -> None:
        stored = {name: tuple(v) if isinstance(v, list) else v for name, v in state["recipe"].items()}
        if stored != asdict(self.recipe):
            changed = [name for name, value in asdict(self.recipe).items() if stored.get(name) != value]
            raise PullbackError(
                f"out: the checkpoint in {self.out} was made by another recipe ({', '.join(changed)} differ). Choose "
                "another folder, or the recipe it was made with."
            )
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        for optimizer, stored_state in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(stored_state)
        self.step = state["step"]


def _optimizers(model: nn.Module, matrices: Sequence[nn.Parameter], recipe: SceneRecipe) -> list[torch.optim.Optimizer]:
    """Muon (orthogonalised momentum) for the matrices of the blocks, AdamW for everything else.

    With tiny-scenes, after 400 steps on an H200, AdamW alone (1e-3) had an AbsRel of 0.133, both together (3e-3) 0.097.
    """
    own = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in own]
    groups = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},
    ]
    fused = rest[0].device.type == "cuda"
    adamw = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.99), fused=fused)
    # its step has the size that AdamW's would have, so both share one learning rate
    muon = StackedMuon(matrices, recipe.learning_rate, weight_decay=recipe.weight_decay)
    return [muon, adamw]


@dataclass(frozen=True)
class RunOptions:
    """What the command line of a recipe says beside the recipe."""

    device: torch.device
    out: Path
    log_every: int
    save_every: int
    seconds: float
    evaluate: int
    compiled: bool

    ARGUMENTS: ClassVar[tuple[str, ...]] = ("steps", "batch", "learning_rate", "seed")


def parse(description: str | None, defaults: type[SceneRecipe], evaluate: int) -> tuple[RunOptions, dict[str, Any]]:
    """The options of a run, and those of its recipe."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in RunOptions.ARGUMENTS:
        default = getattr(defaults, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--no-compile", action="store_true", help="on a GPU; on a CPU nothing is compiled")
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--save-every", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after about so long; call again to go on")
    parser.add_argument("--evaluate", type=int, default=evaluate, help="held-out scenes at the end")
    found = parser.parse_args()
    device = torch.device(found.device)
    options = RunOptions(
        device,
        found.out,
        found.log_every,
        found.save_every,
        found.seconds,
        found.evaluate,
        device.type == "cuda" and not found.no_compile,
    )
    return options, {name: getattr(found, name) for name in RunOptions.ARGUMENTS}
