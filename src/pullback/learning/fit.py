"""The training loop of the small networks: validation, early stopping, checkpoints, exact resume, several processes.

Everything random in step s follows from (seed, s), so a run that was stopped goes on exactly as it would have, and W
processes with batch / W examples each take the same steps as one process with all of them. Process 0 alone reads,
validates, decides and writes; the others hear of it.

The numbers of a run, line by line, in a form that survives being killed.

Examples that come in blocks: one at a time is held, for so many steps.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from pullback.errors import PullbackError
from pullback.learning.pretrained import Pretrained
from pullback.randnla import Streams

PRECISIONS = ("float32", "bf16")
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class FitConfig:
    """What decides the weights, apart from the data."""

    steps: int = 3000
    batch: int = 64
    learning_rate: float = 2e-3
    warmup: int = 100
    weight_decay: float = 0.05
    clip: float = 1.0
    ema: float = 0.99  # of the weights that are validated and kept
    validate_every: int = 250
    patience: int | None = None  # validations without a better score before it stops
    precision: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "validate_every"):
            if getattr(self, name) < 1:
                raise PullbackError(f"{name}: expected at least 1, got {getattr(self, name)}.")
        if self.patience is not None and self.patience < 1:
            raise PullbackError(f"patience: expected at least 1 validation, or None for no limit, got {self.patience}.")
        if self.precision not in PRECISIONS:
            raise PullbackError(f"precision: expected one of {', '.join(PRECISIONS)}, got {self.precision!r}.")

    def rate(self, step: int) -> float:
        """Linear warm-up, then half a cosine to zero."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


class Task(Protocol):
    """What is learned: a loss on a batch of examples, and scores on held-out ones."""

    def loss(self, network: Network, step: int, share: Share, generator: torch.Generator) -> Losses:
        """Of this process's share of step ``step``; ``generator`` is the same in every process."""

    def validate(self, network: Network) -> Mapping[str, float]:
        """Scores; the one called "score" decides which weights are kept, higher is better."""


Network = Callable[[Tensor], Any]
"""Features [B, N, D] to what the network predicts, in the arithmetic of the run."""

Losses = tuple[Tensor, Mapping[str, float]]
"""The number to go down, and what else is worth a line in the log."""


@dataclass(frozen=True)
class Share:
    """Which part of every batch belongs to this process."""

    batch: int
    rank: int = 0
    world: int = 1

    def of(self, rows: Tensor) -> Tensor:
        """rows [batch] -> [batch / world]."""
        return rows[self.rank :: self.world]


@dataclass(frozen=True)
class Fitted:
    """How a run ended. The best weights are in the network."""

    scores: Mapping[str, float]
    step: int  # of the best weights
    steps: int  # taken in all


def fit(
    network: Pretrained,
    task: Task,
    config: FitConfig,
    *,
    out: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    tensorboard: bool = False,
    on_step: Callable[[int, Mapping[str, float]], None] | None = None,
) -> Fitted:
    """Train ``network`` where it lies and leave its best weights in it. With ``out``, go on from its checkpoint.

    A checkpoint is refused where ``config``, the network's, or ``settings`` have changed: plain JSON, whatever else
    decides the weights.

    Under torchrun (an initialised process group) gradients are averaged over the processes; process 0 writes, and logs
    the loss of its own share.
    """
    if tensorboard and out is None:
        raise PullbackError("tensorboard: expected a folder to write to, got out=None. Pass out=..., or leave it out.")
    run = _Run(network, task, config, out, settings or {}, tensorboard)
    try:
        while run.step < config.steps and not run.out_of_patience:
            numbers = run.advance()
            if run.step % config.validate_every == 0 or run.step == config.steps:
                numbers = {**numbers, **run.validate()}
                run.log.write(run.step, numbers)
                run.save()
            if on_step is not None:
                on_step(run.step, numbers)
    finally:
        run.log.close()
    network.load_state_dict(run.best_weights)
    return Fitted(run.best, run.best_step, run.step)


class _Run:
    """The state between two steps."""

    def __init__(
        self,
        network: Pretrained,
        task: Task,
        config: FitConfig,
        out: Path | None,
        settings: Mapping[str, Any],
        tensorboard: bool,
    ) -> None:
        self.task, self.config, self.out, self.network, self.settings = task, config, out, network, dict(settings)
        self.device = next(network.parameters()).device
        self.share, self.parallel = _parallel(network, config.batch)
        self.average = {name: value.detach().clone() for name, value in network.state_dict().items()}
        groups = [
            {"params": [p for p in network.parameters() if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in network.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.99))
        self.step, self.best_step, self.waited = 0, 0, 0
        self.best: Mapping[str, float] = {"score": -math.inf}
        self.best_weights = {name: value.clone() for name, value in self.average.items()}
        if out is not None:
            self._resume(self._from_first(self._stored))
            if self.share.rank == 0:
                out.mkdir(parents=True, exist_ok=True)
        self.log = Log(out if self.share.rank == 0 else None, self.step, tensorboard)

    @property
    def checkpoint(self) -> Path:
        assert self.out is not None
        return self.out / "checkpoint.pt"

    @property
    def out_of_patience(self) -> bool:
        return self.config.patience is not None and self.waited >= self.config.patience

    def advance(self) -> dict[str, float]:
        config = self.config
        # mixed: of a plain seed, a CPU generator takes the lowest 32 bits only
        generator = Streams.from_seed(config.seed, 1, first=self.step).generators[0]
        for group in self.optimizer.param_groups:
            group["lr"] = config.rate(self.step)
        self.network.train()
        loss, numbers = self.task.loss(self._called(self.parallel), self.step, self.share, generator)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), config.clip)
        self.optimizer.step()
        decay = min(config.ema, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            for name, value in self.network.state_dict().items():
                self.average[name].lerp_(value, 1 - decay)
        self.step += 1
        return {"loss": loss.item(), **numbers}

    def validate(self) -> Mapping[str, float]:
        """Scores of the averaged weights, which become the best ones where they are."""
        scores = self._from_first(self._scores)  # of one process, so that all of them stop at the same step
        if math.isnan(scores["score"]):
            raise PullbackError(
                f"score: NaN after {self.step} steps. Lower the learning rate, or look for NaN in the data."
            )
        self.waited += 1
        if scores["score"] > self.best["score"]:
            self.best, self.best_step, self.waited = dict(scores), self.step, 0
            self.best_weights = {name: value.clone() for name, value in self.average.items()}
        return scores

    def _scores(self) -> Mapping[str, float]:
        current = {name: value.detach().clone() for name, value in self.network.state_dict().items()}
        self.network.load_state_dict(self.average)
        self.network.eval()
        with torch.no_grad():
            scores = self.task.validate(self._called(self.network))
        self.network.load_state_dict(current)
        return scores

    def save(self) -> None:
        """Written under another name first: a run that is killed leaves the last whole checkpoint."""
        if self.out is None or self.share.rank != 0:
            return
        state = {
            "config": self._configuration(),
            "step": self.step,
            "network": self.network.state_dict(),
            "average": self.average,
            "optimizer": self.optimizer.state_dict(),
            "best": dict(self.best),
            "best_step": self.best_step,
            "best_weights": self.best_weights,
            "waited": self.waited,
        }
        unfinished = self.checkpoint.with_suffix(".tmp")
        torch.save(state, unfinished)
        os.replace(unfinished, self.checkpoint)

    def _stored(self) -> Mapping[str, Any] | None:
        return torch.load(self.checkpoint, map_location="cpu", weights_only=True) if self.checkpoint.exists() else None

    def _resume(self, state: Mapping[str, Any] | None) -> None:
        if state is None:
            return
        stored, asked = state["config"], self._configuration()
        changed = [name for name in sorted({*stored, *asked}) if stored.get(name) != asked.get(name)]
        if changed:
            raise PullbackError(
                f"out: {self.checkpoint} was made with another configuration ({', '.join(changed)} differ). Choose "
                "another folder, or the configuration it was made with."
            )
        self.network.load_state_dict(state["network"])
        for name in ("average", "best_weights"):
            setattr(self, name, {key: value.to(self.device) for key, value in state[name].items()})
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.best_step, self.waited = state["step"], state["best_step"], state["waited"]
        self.best = state["best"]

    def _configuration(self) -> dict[str, Any]:
        """Of the run and of the network, which must be the same when the run goes on."""
        network = {"kind": self.network.kind, **asdict(self.network.config)}
        of_network = {f"network.{key}": value for key, value in network.items() if key != "scores"}
        return asdict(self.config) | self.settings | of_network

    def _from_first(self, compute: Callable[[], _Value]) -> _Value:
        """What process 0 computes, in every process: they share neither a folder nor the last digit of a score."""
        if self.share.world == 1:
            return compute()
        box: list[Any] = [compute() if self.share.rank == 0 else None]
        torch.distributed.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def _called(self, network: nn.Module) -> Network:
        """Only the network itself runs in bf16: features, products and losses around it keep their precision."""

        def call(features: Tensor) -> Any:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
                return network(features)

        return call


def _parallel(network: nn.Module, batch: int) -> tuple[Share, nn.Module]:
    """This process's share, and the network as it is to be called in training."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return Share(batch), network
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if batch % world:
        raise PullbackError(f"batch: expected a multiple of the {world} processes, got {batch}.")
    return Share(batch, rank, world), nn.parallel.DistributedDataParallel(network)


class Log:
    """metrics.jsonl, and TensorBoard where it is wanted."""

    def __init__(self, folder: Path | None, step: int, tensorboard: bool) -> None:
        self.path = None if folder is None else folder / "metrics.jsonl"
        self.board = _summary_writer(folder, step) if tensorboard and folder is not None else None
        if self.path is not None and self.path.exists():  # lines after the checkpoint will be written again
            kept = self.path.with_suffix(".tmp")
            kept.write_text("".join(_lines_until(step, self.path.read_text("utf-8"))), encoding="utf-8")
            os.replace(kept, self.path)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **numbers}) + "\n")
        if self.board is not None:
            for name, value in numbers.items():
                self.board.add_scalar(name, value, step)

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


def _lines_until(step: int, text: str) -> Iterator[str]:
    for line in text.splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step:
                yield line
        except json.JSONDecodeError:  # the run was killed while it wrote this one
            return


def _summary_writer(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise PullbackError("tensorboard: the package is missing: pip install tensorboard, or leave it out.") from None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)


Block = TypeVar("Block")


class CurrentBlock(Generic[Block]):
    """``make`` gives block k; steps k s, ..., (k + 1) s - 1 use it, s = ``steps_per_block``."""

    def __init__(self, make: Callable[[int], Block], steps_per_block: int) -> None:
        if steps_per_block < 1:
            raise PullbackError(f"steps_per_block: expected at least 1, got {steps_per_block}.")
        self._make, self._steps = make, steps_per_block
        self._held: tuple[int, Block] | None = None

    def at(self, step: int) -> Block:
        number = step // self._steps
        if self._held is None or self._held[0] != number:
            self._held = None  # its memory is needed
            self._held = number, self._make(number)
        return self._held[1]
