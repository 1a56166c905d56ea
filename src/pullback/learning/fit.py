"""The training loop: validation, early stopping, checkpoints, exact resume, several processes.

`fit` trains the small networks. `Training` is what it shares with the recipes of the embedded models: a step (rate,
gradients, clipping, optimisers, averaged weights) and the state to go on from. Everything random in step s follows from
(seed, s), so a run that was stopped goes on exactly as it would have, and W processes with batch / W examples each take
the same steps as one process with all of them. Process 0 alone reads, validates, decides and writes; the others hear of
it. Checkpoints are written after every validation and every `SAVE_EVERY` seconds: so much a killed run may lose.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from pullback.checks import finite_number, whole_number
from pullback.errors import FileError, PullbackError, first_line
from pullback.randnla import Streams
from pullback.runs.documents import CHECKPOINT, METRICS
from pullback.runs.files import SAVE_EVERY, remove_unfinished, write_atomic
from pullback.runs.folder import claim_folder
from pullback.runs.progress import Progress
from pullback.runs.rows import Rows, finite
from pullback.runs.settings import check_settings

PRECISIONS = ("float32", "bf16")


class Trainable(nn.Module):
    """A network that `fit` trains; ``kind`` and ``config``, a dataclass, say which one a checkpoint is of."""

    kind: ClassVar[str]
    config: Any


_Value = TypeVar("_Value")
_Network = TypeVar("_Network", bound=nn.Module)
_Config = TypeVar("_Config", bound="StepConfig")


@dataclass(frozen=True)
class StepConfig:
    """What decides the steps of any training run."""

    steps: int
    batch: int
    learning_rate: float  # the highest
    warmup: int  # steps
    weight_decay: float  # of matrices alone
    clip: float  # of the gradient's norm
    ema: float  # decay of the averaged weights
    seed: int

    def rate(self, step: int) -> float:
        """Return the learning rate of a step: linear warm-up, then half a cosine to zero."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class FitConfig(StepConfig):
    """What decides the weights of a small network, apart from the data."""

    steps: int = 3000
    batch: int = 64
    learning_rate: float = 2e-3
    warmup: int = 100
    weight_decay: float = 0.05
    clip: float = 1.0
    ema: float = 0.99  # of the weights that are validated and kept
    seed: int = 0
    validate_every: int = 250
    patience: int | None = None  # validations without a better score before it stops
    precision: str = "float32"

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "validate_every"):
            whole_number(name, getattr(self, name))
        if self.patience is not None:
            whole_number("patience", self.patience, expected="at least 1 validation, or None for no limit")
        whole_number("warmup", self.warmup, least=0)
        whole_number("seed", self.seed, least=None)
        for name in ("learning_rate", "weight_decay", "clip", "ema"):
            finite_number(name, getattr(self, name), least=0, expected="a number that is not negative")
        if self.ema >= 1:
            raise PullbackError(f"ema: expected a share below 1, got {self.ema}.")
        if self.precision not in PRECISIONS:
            raise PullbackError(f"precision: expected one of {', '.join(PRECISIONS)}, got {self.precision!r}.")


class Task(Protocol):
    """What is learned: a loss on a batch of examples, and scores on held-out ones."""

    def loss(self, network: Network, step: int, share: Share, generator: torch.Generator) -> Losses:
        """The loss of this process's share of step ``step``; ``generator`` is the same in every process."""

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
        """Return the rows of this process: [batch] -> [batch / world]."""
        return rows[self.rank :: self.world]


@dataclass(frozen=True)
class Fitted:
    """How a run ended. The best weights are in the network."""

    scores: Mapping[str, float]
    step: int  # of the best weights
    steps: int  # taken in all


def check_going_on(network: Trainable, config: FitConfig, out: Path | None, settings: Mapping[str, Any]) -> bool:
    """Return whether `fit` would go on in the folder ``out``, or raise the error with which it would refuse to: before
    long preparations, not after them. Of ``network`` only its configuration matters."""
    if out is None:
        return False
    checkpoint = claim_folder(out, "train") / CHECKPOINT
    stored = _stored(checkpoint)
    if stored is not None:
        _check_same(stored, _configuration(network, config, settings), checkpoint)
    return stored is not None


def fit(
    network: Trainable,
    task: Task,
    config: FitConfig,
    *,
    out: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    tensorboard: bool = False,
    progress: Progress | None = None,
    on_step: Callable[[int, Mapping[str, float]], None] | None = None,
    seconds: float = math.inf,
) -> Fitted:
    """Train ``network`` where it lies and leave its best weights in it. With ``out``, go on from its checkpoint.

    A checkpoint is refused where ``config``, the network's, or ``settings`` have changed: plain JSON, whatever else
    decides the weights. ``on_step`` is called with the number of steps taken and the numbers of the last one.
    ``seconds``: stop after about so long, with a checkpoint to go on from.

    Under torchrun (an initialised process group) gradients are averaged over the processes; process 0 writes, and logs
    the loss of its own share.
    """
    if tensorboard and out is None:
        raise PullbackError("tensorboard: expected a folder to write to, got out=None. Pass out=..., or leave it out.")
    if seconds != math.inf:
        finite_number("seconds", seconds, least=0, expected="a number of seconds, or math.inf for no limit")
    run = _Run(network, task, config, out, settings or {}, tensorboard)
    progress = progress or Progress()
    progress.work("training", config.steps, "steps", run.step)
    try:
        while run.step < config.steps and not run.out_of_patience:
            if run.older_than(seconds):
                run.save()
                break
            numbers = run.advance()
            if run.step % config.validate_every == 0 or run.step == config.steps:
                numbers = {**numbers, **run.validate()}
                run.log.write(run.step, numbers)
                run.save()
            elif run.late:
                run.save()
            progress.advance(1)
            if on_step is not None:
                on_step(run.step, numbers)
    finally:
        run.log.close()
    network.load_state_dict(run.best_weights)
    return Fitted(run.best, run.best_step, run.step)


class Training(Generic[_Network, _Config]):
    """A network in training: its optimisers, the running average of its weights, and how many steps it has taken."""

    def __init__(
        self, network: _Network, config: _Config, optimizers: Sequence[torch.optim.Optimizer] | None = None
    ) -> None:
        self.network, self.config, self.step = network, config, 0
        self.average = deepcopy(network).requires_grad_(False)
        self.optimizers = optimizers or [adamw(network.parameters(), config)]

    def take_step(self, gradients: Callable[[], _Value]) -> tuple[_Value, Tensor]:
        """Move the weights once. ``gradients`` fills every parameter's ``grad``; what it returns comes back, with the
        norm of the gradient. Nothing in here waits for the device."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.config.rate(self.step)
        numbers = gradients()
        norm = nn.utils.clip_grad_norm_(self.network.parameters(), self.config.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        # not `AveragedModel`, which forgets the initial weights at its first step and knows no warm-up of the decay
        decay = min(self.config.ema, (1 + self.step) / (10 + self.step))
        averaged, current = list(self.average.parameters()), list(self.network.parameters())
        get_ema_multi_avg_fn(decay)(averaged, current, self.step)
        for own, new in zip(self.average.buffers(), self.network.buffers(), strict=True):
            own.copy_(new)
        self.step += 1
        return numbers, norm

    def state(self) -> dict[str, Any]:
        """Return everything that a run needs to go on exactly."""
        return {
            "step": self.step,
            "network": self.network.state_dict(),
            "average": self.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to what `state` returned."""
        self.network.load_state_dict(state["network"])
        self.average.load_state_dict(state["average"])
        stored = state["optimizers"] if "optimizers" in state else [state["optimizer"]]  # once there was one
        for optimizer, own in zip(self.optimizers, stored, strict=True):
            optimizer.load_state_dict(own)
        self.step = state["step"]


def adamw(parameters: Iterable[nn.Parameter], config: StepConfig, *, fused: bool | None = None) -> torch.optim.AdamW:
    """Make an AdamW under which matrices decay, and biases, scales and other vectors do not."""
    own = list(parameters)
    groups = [
        {"params": [p for p in own if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in own if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.99), fused=fused)


class _Run(Training[Trainable, FitConfig]):
    """A run of `fit` between two steps."""

    def __init__(
        self,
        network: Trainable,
        task: Task,
        config: FitConfig,
        out: Path | None,
        settings: Mapping[str, Any],
        tensorboard: bool,
    ) -> None:
        self.share, self.parallel = _parallel(network, config.batch)  # which gives all processes the same weights
        super().__init__(network, config)
        self.task, self.out, self.settings = task, out, dict(settings)
        self.device = next(network.parameters()).device
        self.best_step, self.waited = 0, 0
        self.best: Mapping[str, float] = {"score": -math.inf}
        self.best_weights = self._averaged()
        self._begun = self._saved = time.perf_counter()
        self._slowest = 0.0
        if out is not None:
            if self.share.rank == 0:
                remove_unfinished(claim_folder(out, "train"))
            state = self._from_first(lambda: _stored(self.checkpoint))
            if state is not None:
                self._resume(state)
        self.log = Log(out if self.share.rank == 0 else None, self.step, tensorboard)

    @property
    def checkpoint(self) -> Path:
        assert self.out is not None
        return self.out / CHECKPOINT

    @property
    def out_of_patience(self) -> bool:
        return self.config.patience is not None and self.waited >= self.config.patience

    @property
    def late(self) -> bool:
        """Whether another step as slow as the slowest would take the work at stake beyond `SAVE_EVERY`."""
        return time.perf_counter() - self._saved + self._slowest > SAVE_EVERY

    def older_than(self, seconds: float) -> bool:
        """Whether this call has gone on for so long; all processes agree."""
        if seconds == math.inf:
            return False
        return self._from_first(lambda: time.perf_counter() - self._begun >= seconds)

    def advance(self) -> dict[str, float]:
        begun = time.perf_counter()
        numbers = self.take_step(self._gradients)[0]
        self._slowest = max(self._slowest, time.perf_counter() - begun)
        return numbers

    def _gradients(self) -> dict[str, float]:
        # mixed: of a plain seed, a CPU generator takes the lowest 32 bits only
        generator = Streams.from_seed(self.config.seed, 1, first=self.step).generators[0]
        self.network.train()
        loss, numbers = self.task.loss(self._called(self.parallel), self.step, self.share, generator)
        self.network.zero_grad(set_to_none=True)
        loss.backward()
        return {"loss": loss.item(), **numbers}

    def validate(self) -> Mapping[str, float]:
        """Score the averaged weights, and keep them if they are the best so far."""
        scores = self._from_first(self._scores)  # of one process, so that all of them stop at the same step
        if math.isnan(scores["score"]):
            raise PullbackError(
                f"score: NaN after {self.step} steps. Lower the learning rate, or look for NaN in the data."
            )
        self.waited += 1
        if scores["score"] > self.best["score"]:
            self.best, self.best_step, self.waited = dict(scores), self.step, 0
            self.best_weights = self._averaged()
        return scores

    def _scores(self) -> Mapping[str, float]:
        current = {name: value.detach().clone() for name, value in self.network.state_dict().items()}
        self.network.load_state_dict(self.average.state_dict())
        self.network.eval()
        with torch.no_grad():
            scores = self.task.validate(self._called(self.network))
        self.network.load_state_dict(current)
        return scores

    def _averaged(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.average.state_dict().items()}

    def save(self) -> None:
        if self.out is None or self.share.rank != 0:
            return
        state = {
            "config": _configuration(self.network, self.config, self.settings),
            **self.state(),
            "best": dict(self.best),
            "best_step": self.best_step,
            "best_weights": self.best_weights,
            "waited": self.waited,
        }
        packed = io.BytesIO()  # on a full disk torch's own writer hides the reason
        torch.save(state, packed)
        write_atomic(self.checkpoint, lambda file: file.write(packed.getbuffer()), durable=True)
        self._saved = time.perf_counter()

    def _resume(self, state: Mapping[str, Any]) -> None:
        _check_same(state, _configuration(self.network, self.config, self.settings), self.checkpoint)
        self.restore(state)
        self.best_weights = {name: value.to(self.device) for name, value in state["best_weights"].items()}
        self.best, self.best_step, self.waited = state["best"], state["best_step"], state["waited"]

    def _from_first(self, compute: Callable[[], _Value]) -> _Value:
        """Return in every process what process 0 computes; they may share neither a folder nor a score's last digit."""
        if self.share.world == 1:
            return compute()
        box: list[Any] = [compute() if self.share.rank == 0 else None]
        torch.distributed.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def _called(self, network: nn.Module) -> Network:
        """Return the network in the precision of the run: features, products and losses around it keep theirs."""

        def call(features: Tensor) -> Any:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
                return network(features)

        return call


def _stored(checkpoint: Path) -> Mapping[str, Any] | None:
    """Read a checkpoint; None where there is none."""
    if not checkpoint.exists():
        return None
    try:
        return torch.load(checkpoint, map_location="cpu", weights_only=True)
    except Exception as error:  # torch, pickle and zipfile have many words for a damaged file
        raise FileError(
            f"{checkpoint}: cannot be read ({first_line(error)}). Delete it to train from the start."
        ) from None


def _configuration(network: Trainable, config: FitConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run and of its network, which must be the same when the run goes on."""
    of_network = {"kind": network.kind, **asdict(network.config)}
    named = {f"network.{key}": value for key, value in of_network.items() if key != "scores"}
    return asdict(config) | dict(settings) | named


def _check_same(state: Mapping[str, Any], asked: Mapping[str, Any], checkpoint: Path) -> None:
    # what the network was made for decides no weight, and each version of the package says more about it
    check_settings(state["config"], asked, checkpoint, holds="a training run", ignore=("network.origin",))


def _parallel(network: nn.Module, batch: int) -> tuple[Share, nn.Module]:
    """Return this process's share, and the network as it is to be called in training."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return Share(batch), network
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if batch % world:
        raise PullbackError(f"batch: expected a multiple of the {world} processes, got {batch}.")
    return Share(batch, rank, world), nn.parallel.DistributedDataParallel(network)


class Log:
    """The numbers of a run: a line of metrics.jsonl for each validation, and TensorBoard where it is wanted."""

    def __init__(self, folder: Path | None, step: int, tensorboard: bool) -> None:
        self.rows = None if folder is None else Rows(folder / METRICS)
        self.board = _summary_writer(folder, step) if tensorboard and folder is not None else None
        if self.rows is not None:
            self.rows.keep(lambda row: row["step"] <= step)  # those after the checkpoint will be written again

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        if self.rows is not None:
            self.rows.add([{"step": step, **{name: finite(value) for name, value in numbers.items()}}])
        if self.board is not None:
            for name, value in numbers.items():
                self.board.add_scalar(name, value, step)

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


def _summary_writer(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise PullbackError("tensorboard: the package is missing: pip install tensorboard, or leave it out.") from None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)


Block = TypeVar("Block")


class CurrentBlock(Generic[Block]):
    """Examples that come in blocks, one of which is held at a time: ``make`` gives block k, and steps k s, ...,
    (k + 1) s - 1 use it, s = ``steps_per_block``."""

    def __init__(self, make: Callable[[int], Block], steps_per_block: int) -> None:
        if steps_per_block < 1:
            raise PullbackError(f"steps_per_block: expected at least 1, got {steps_per_block}.")
        self._make, self._steps = make, steps_per_block
        self._held: tuple[int, Block] | None = None

    def at(self, step: int) -> Block:
        """Return the block of a step; a new one is made when the last is used up."""
        number = step // self._steps
        if self._held is None or self._held[0] != number:
            self._held = None  # its memory is needed
            self._held = number, self._make(number)
        return self._held[1]
