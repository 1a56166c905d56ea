"""What the recipes on drawn scenes share: blocks of scenes, a training run with exact resume, and its command line.

Scenes are drawn block by block, a block is seen a few times, and never again: drawing a picture takes longer than
learning from it. Everything follows from the recipe and the step number, so a run that was stopped goes on exactly
where its last checkpoint was written.
"""

from __future__ import annotations

import argparse
import io
import math
import re
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from pullback.errors import PullbackError
from pullback.learning.fit import CurrentBlock, StepConfig, Training
from pullback.runs.files import make_folder, write_bytes
from pullback.runs.rows import Rows, finite
from pullback.runs.settings import check_settings
from pullback.scenes.splits import HELD_OUT
from recipes.measurement import rounded
from recipes.optim import Gradients, GraphedGradients, eager_gradients, muon_and_adamw

SEEDS_PER_RUN = 1 << 30  # scenes that a run may see, so that runs with other seeds see others
PART_BYTES = 15_000_000
_PART = re.compile(r"checkpoint-(\d+)-(\d+)-of-(\d+)")


@dataclass(frozen=True)
class SceneRecipe(StepConfig):
    """What decides the weights. Stored in every checkpoint; another recipe does not continue it."""

    block: int  # scenes drawn at a time
    passes: int  # over each block
    size: int  # pixels

    def __post_init__(self) -> None:
        if self.block % self.batch:
            raise PullbackError(f"block={self.block}: expected a multiple of batch={self.batch}.")
        drawn = (max(0, self.steps - 1) // self.steps_per_block + 1) * self.block
        if not 0 <= self.seed < HELD_OUT // SEEDS_PER_RUN or drawn > SEEDS_PER_RUN:
            raise PullbackError(
                f"seed={self.seed}, steps={self.steps}, batch={self.batch}: expected a seed from 0 to "
                f"{HELD_OUT // SEEDS_PER_RUN - 1} and at most {SEEDS_PER_RUN} scenes, so that no held-out scene is "
                "seen."
            )

    @property
    def steps_per_block(self) -> int:
        return self.block * self.passes // self.batch

    def scenes(self, step: int) -> range:
        """The seeds of the block that this step draws from."""
        first = self.seed * SEEDS_PER_RUN + step // self.steps_per_block * self.block
        return range(first, first + self.block)

    def rows(self, step: int) -> Tensor:
        """Which scenes of its block [batch] a step sees: every pass has an order of its own."""
        turn, within = divmod(step * self.batch, self.block)
        order = torch.randperm(self.block, generator=self.generator(turn))
        return order[within : within + self.batch]

    def generator(self, number: int) -> torch.Generator:
        """A generator of this recipe's seed and a number. On the CPU it reads the lowest 32 bits alone."""
        return torch.Generator().manual_seed((number + 0x9E3779B9 * self.seed) % (1 << 32))


R = TypeVar("R", bound=SceneRecipe)
N = TypeVar("N", bound=nn.Module)
B = TypeVar("B")


class SceneRun(Training[N, R], ABC, Generic[R, N, B]):
    """A training run in a folder. R: the recipe, N: the network, B: a block of drawn scenes.

    ``graphed``: compiled runs replay a step as CUDA graphs, so its losses may not copy from the host.
    """

    graphed: ClassVar[bool] = False

    def __init__(self, recipe: R, out: Path, device: torch.device, *, compiled: bool = False) -> None:
        network = self.build(recipe).to(device).train()
        super().__init__(network, recipe, muon_and_adamw(network, self.matrices(network), recipe))
        self.out, self.device = make_folder(out), device
        self.gradients: Gradients = eager_gradients
        if compiled:
            self.compile(network)
            self.gradients = GraphedGradients() if self.graphed else eager_gradients
        self._blocks = CurrentBlock(
            lambda number: self.draw(recipe.scenes(number * recipe.steps_per_block)), recipe.steps_per_block
        )
        state = read_parts(out, device)
        if state is not None:
            check_settings(state["recipe"], asdict(recipe), out, holds="a training run")
            self.restore({"network": state.get("model"), **state})  # "model": its name in earlier checkpoints

    @staticmethod
    @abstractmethod
    def build(recipe: R) -> N:
        """The network with its initial weights, the same for the same seed on every device."""

    @staticmethod
    @abstractmethod
    def matrices(network: N) -> list[nn.Parameter]:
        """Those that Muon moves."""

    @staticmethod
    def compile(network: N) -> None:
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
        """The block of the current step."""
        return self._blocks.at(self.step)

    def advance(self) -> dict[str, Tensor]:
        """Take one step. What comes back is still on the device: reading it waits for the device, so read it rarely,
        and before the next step, which may overwrite it."""
        examples = self.examples(self.block())
        parameters = list(self.network.parameters())
        parts, norm = self.take_step(lambda: self.gradients(self.losses, parameters, examples))
        return parts | {"gradient_norm": norm}

    def train(self, *, log_every: int, save_every: int, seconds: float) -> None:
        """Advance to the last step, or for about so many seconds; log and checkpoint on the way."""
        begun, resumed_at = time.perf_counter(), self.step
        log = Rows(self.out / "log.jsonl")
        log.keep(lambda row: row["step"] <= resumed_at)  # those after the checkpoint will be written again
        while self.step < self.config.steps and time.perf_counter() - begun < seconds:
            numbers = self.advance()
            if self.step % log_every == 0 or self.step == self.config.steps:
                spent = time.perf_counter() - begun
                line: dict[str, Any] = {"step": self.step}
                line |= {name: finite(rounded(value)) for name, value in numbers.items()}
                line |= {"seconds": round(spent, 1), "ms_per_step": round(1e3 * spent / (self.step - resumed_at), 1)}
                log.add([line])
                print(line, flush=True)
            if self.step % save_every == 0:
                self.save()
        self.save()

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def save(self) -> None:
        write_parts({"recipe": asdict(self.config), **self.state()}, self.step, self.out)


def write_parts(state: dict[str, Any], step: int, folder: Path, *, part_bytes: int = PART_BYTES) -> list[Path]:
    """Write a checkpoint in parts of at most 15 MB, for file stores that refuse larger ones; delete older checkpoints.

    They go only after the newer one is complete: whatever stops a run, the last whole checkpoint can be read."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getbuffer()
    count = max(1, math.ceil(len(content) / part_bytes))
    written = []
    for index in range(count):
        path = folder / f"checkpoint-{step:06d}-{index + 1}-of-{count}"
        write_bytes(path, bytes(content[index * part_bytes : (index + 1) * part_bytes]))
        written.append(path)
    for path in folder.glob("checkpoint-*"):
        if path not in written:
            path.unlink()
    return written


def read_parts(folder: Path, device: torch.device) -> dict[str, Any] | None:
    """The state of the latest step of which all parts are there; None where there is none."""
    found: dict[tuple[int, int], dict[int, Path]] = {}
    for path in folder.glob("checkpoint-*"):
        name = _PART.fullmatch(path.name)
        if name:
            step, index, count = map(int, name.groups())
            found.setdefault((step, count), {})[index] = path
    whole = [(step, parts) for (step, count), parts in found.items() if len(parts) == count]
    if not whole:
        return None
    _, parts = max(whole, key=lambda entry: entry[0])
    content = b"".join(parts[index].read_bytes() for index in sorted(parts))
    state: dict[str, Any] = torch.load(io.BytesIO(content), map_location=device, weights_only=True)
    return state


_Run = TypeVar("_Run", bound=SceneRun[Any, Any, Any])


def train_from_command_line(
    description: str | None, recipe: type[SceneRecipe], run: type[_Run], *, evaluate: int
) -> tuple[_Run, int]:
    """Train as the command line says. Returns the run, and how many held-out scenes to evaluate it on."""
    parser = training_parser(description, recipe)
    parser.add_argument("--evaluate", type=int, default=evaluate, help="held-out scenes at the end")
    found = parser.parse_args()
    device, compiled = chosen_device(found)
    going = run(recipe(**chosen(found)), found.out, device, compiled=compiled)
    going.train(log_every=found.log_every, save_every=found.save_every, seconds=found.seconds)
    return going, found.evaluate


_CHOSEN = ("steps", "batch", "learning_rate", "seed")


def training_parser(description: str | None, recipe: type[SceneRecipe]) -> argparse.ArgumentParser:
    """Make the command line that all recipes share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in _CHOSEN:
        default = getattr(recipe, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--no-compile", action="store_true", help="on a GPU; on a CPU nothing is compiled")
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--save-every", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after about so long; call again to go on")
    return parser


def chosen(found: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the recipe that the command line sets."""
    return {name: getattr(found, name) for name in _CHOSEN}


def chosen_device(found: argparse.Namespace) -> tuple[torch.device, bool]:
    """Return the device, and whether the run is compiled on it."""
    device = torch.device(found.device)
    return device, device.type == "cuda" and not found.no_compile


@torch.no_grad()
def draw_weights(network: nn.Module, seed: int) -> torch.Generator:
    """Draw the weights of every linear map and convolution, and return the generator for what else is to be drawn."""
    generator = torch.Generator().manual_seed(seed)
    for module in network.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)):
            spread = 0.02 if isinstance(module, nn.Linear) else module.weight[0].numel() ** -0.5
            module.weight.normal_(0, spread, generator=generator)
            if module.bias is not None:
                module.bias.zero_()
    return generator


def signed(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform in [-1, 1)."""
    return 2 * torch.rand(shape, generator=generator) - 1


def relit(rgb: Tensor, generator: torch.Generator, strength: float = 1.0) -> Tensor:
    """Pictures [B, 3, H, W] in [0, 1] in another light: exposure, contrast and colour, each picture its own. Draws come
    from the CPU, so that they are the same on every device."""
    count = len(rgb)
    gain, contrast = (1 + 0.2 * strength * signed((count, 1, 1, 1), generator).to(rgb.device) for _ in range(2))
    tint = 1 + 0.1 * strength * signed((count, 3, 1, 1), generator).to(rgb.device)
    mean = rgb.mean((-3, -2, -1), keepdim=True)
    return (((rgb - mean) * contrast + mean * gain) * tint).clamp(0, 1)
