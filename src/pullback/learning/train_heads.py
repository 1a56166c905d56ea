"""Train the heads of all layers of a model at once: what `pullback train heads` does.

From the outside in: `train_heads`, for images; `fit_heads`, for pictures from anywhere and heads of any sizes; the
held-out pictures that judge them (`held_out_targets`). The heads as one network, and their task, are in `head_group`.

The pictures are varied anew all the time, and one stream has the block norms of every layer (`target_streams`), which
rank tokens nearly as importance does and cost a fifteenth of it. Beside its target every head predicts, from the state
in front of its MLP, what the last layer will make of each token: where pictures are few this says more about each of
them. That part is thrown away afterwards. What judges is the importance itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pullback.backbones import Backbone
from pullback.checks import finite_number, of_kind, whole_number
from pullback.data.crops import STRONG, Variation
from pullback.data.images import ImageSource, PixelFormat
from pullback.data.sources import Source
from pullback.errors import ImageError, ModelError, PullbackError, naming
from pullback.evaluation.cost import flops
from pullback.learning.fit import FitConfig, Fitted, check_going_on, fit
from pullback.learning.head import ImportanceHead
from pullback.learning.head_group import GroupConfig, GroupTask, HeadGroup
from pullback.learning.target_streams import LayerStream
from pullback.learning.train_head import (
    HeadExamples,
    ImageRow,
    hash_of,
    head_scores,
    origin_of,
    pictures_to_vary,
    readable_rows,
)
from pullback.probes import ProbeMap
from pullback.runs.documents import HEADS, SETTINGS, layer_name
from pullback.runs.files import SAVE_EVERY, make_folder, read_arrays, write_arrays, write_json
from pullback.runs.progress import Progress
from pullback.runs.provenance import weights_hash
from pullback.runs.settings import keep_settings
from pullback.targets.recipe import targets_of

JUDGES = "held_out"
"""The folder, in that of a run, with the importance of the held-out pictures."""
_RANK = 20
_FEW_OUTPUTS = 2048
"""Up to so many numbers of output the exact route is taken, and what judges is free of any tolerance."""
_GPU_SHARE = 1 / 6
"""Of a GPU's memory that a block of features may take."""


@dataclass(frozen=True)
class StreamConfig:
    """What decides the pictures that heads learn from."""

    block: int  # pictures whose features are held at a time
    steps_per_block: int
    at_once: int  # pictures per forward and backward pass
    variation: Variation = STRONG
    hints: int = 64  # principal components of the last layer that heads predict beside their target
    hint_weight: float = 0.3
    dropout: float = 0.0  # of the entries of the features

    def __post_init__(self) -> None:
        for name in ("block", "steps_per_block", "at_once", "hints"):
            whole_number(name, getattr(self, name))
        finite_number("hint_weight", self.hint_weight, least=0, expected="a number that is not negative")


class HeadSize(NamedTuple):
    """A head of a group."""

    name: str
    layer: int
    width: int = 256
    rounds: int = 1


class Judge(NamedTuple):
    """Held-out pictures at one layer: features with their importance, and their block norms [n, N]."""

    examples: HeadExamples
    norms: Tensor


def train_heads(
    probe: ProbeMap,
    images: ImageSource | Source,
    held_out: ImageSource | Source | float = 0.1,
    *,
    layers: Sequence[int] | None = None,
    width: int = 256,
    rounds: int = 1,
    judges: int | None = None,
    size: int | tuple[int, int] | None = None,
    limit: int | None = None,
    stream: StreamConfig | None = None,
    config: FitConfig | None = None,
    half: bool = False,
    out: str | Path | None = None,
    tensorboard: bool = False,
    progress: Progress | None = None,
    seconds: float = math.inf,
    on_step: Callable[[int, Mapping[str, float]], None] | None = None,
) -> dict[int, ImportanceHead]:
    """Train an importance head for each of these layers, {layer: head}, for the decoder of a probe on any layer.

    ``held_out``: pictures that judge, or the share of the images that is set aside for it. No picture is on both sides.
    ``judges``: at most so many of them, chosen at random: each takes its importance at every layer. ``layers``: all
    from 1 to the last but one. ``stream`` and ``config``: see `stream_config` and `heads_config`, whose defaults are
    much smaller on a CPU. ``limit``: use the first so many images. ``half``: round the weights to float16 before they
    are judged in the end, so that storing them so loses nothing.

    ``out``: folder of a head for each layer (L01, L02, ...), heads.json, metrics.jsonl and the checkpoint that a second
    call goes on from. ``seconds``: stop after about so many seconds of training, with a checkpoint to go on from.
    The rho of each head and its share of the operations of the blocks end up in its config and in heads.json.
    """
    backbone = _checked(probe)
    layers = heads_layers(probe) if layers is None else tuple(layers)
    stream, config = stream or stream_config(probe, layers, size), config or heads_config(probe.device)
    judges = whole_number("judges", _JUDGES[_place(probe.device)] if judges is None else judges)
    progress, folder = progress or Progress(), None if out is None else Path(out)
    wanted = _square(probe.pixel_format(size))
    backbone.check_size(wanted.size)
    heads = [HeadSize(layer_name(layer), layer, width, rounds) for layer in layers]
    group_of(probe, heads, stream.hints, "meta")  # whose errors shall come before anything is read
    progress.stage("reading the images")
    rows, others = _divided(images, held_out, judges, wanted, limit, config.seed)
    settings = {**made_for(probe), "images": _contents(rows), "held_out": _contents(others)}
    check_heads(probe, heads, stream, config, folder, settings, size=wanted.size[0])
    plain = torch.stack([row.pixels(wanted) for row in others])
    found = held_out_targets(probe, layers, plain, folder=folder, settings=settings, progress=progress)
    pictures = pictures_to_vary(rows, wanted, progress)
    group, fitted = fit_heads(
        probe,
        pictures.to(probe.device),
        heads,
        [judge.examples for judge in found],
        stream,
        config,
        size=wanted.size[0],
        out=folder,
        settings=settings,
        tensorboard=tensorboard,
        progress=progress,
        seconds=seconds,
        on_step=on_step,
    )
    counts = {"training_images": len(rows), "held_out_images": len(others), "steps": fitted.steps}
    counts |= {"best_step": fitted.step}
    trained = described(probe, group, heads, [judge.examples for judge in found], wanted.size[0], counts, half=half)
    if folder is not None:
        write_heads(folder, trained)
    return {head.layer: trained[head.name] for head in heads}


def fit_heads(
    probe: ProbeMap,
    pictures: Tensor,
    heads: Sequence[HeadSize],
    held_out: Sequence[HeadExamples],
    stream: StreamConfig,
    config: FitConfig,
    *,
    size: int,
    out: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    start: Mapping[str, ImportanceHead] | None = None,
    tensorboard: bool = False,
    progress: Progress | None = None,
    seconds: float = math.inf,
    on_step: Callable[[int, Mapping[str, float]], None] | None = None,
) -> tuple[HeadGroup, Fitted]:
    """Train heads on pictures [n, 3, S, S] uint8, which are varied to ``size`` pixels, judged by ``held_out``: an
    entry for each layer of the heads, in ascending order. ``start``: heads to go on from, by name. ``settings``: plain
    JSON, what else decides the weights, such as `made_for` and hashes of the pictures."""
    layers = layers_of(heads)
    blocks = LayerStream(
        probe,
        layers,
        pictures,
        size,
        stream.block,
        stream.variation,
        num_hints=min(stream.hints, probe.backbone.dim),
        batch=min(stream.at_once, stream.block),
        seed=config.seed,
    )
    goes_on = check_heads(probe, heads, stream, config, out, settings or {}, size=size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        group = group_of(probe, heads, stream.hints).to(probe.device)
    task = GroupTask(blocks, held_out, group, stream.steps_per_block, stream.hint_weight, stream.dropout)
    if not goes_on:
        task.start()
        for name, head in (start or {}).items():
            group.head(name).load_state_dict(head.state_dict())
    fitted = fit(
        group,
        task,
        config,
        out=out,
        settings=_settings(heads, stream, settings or {}, size),
        tensorboard=tensorboard,
        progress=progress,
        seconds=seconds,
        on_step=on_step,
    )
    return group, fitted


def check_heads(
    probe: ProbeMap,
    heads: Sequence[HeadSize],
    stream: StreamConfig,
    config: FitConfig,
    out: Path | None,
    settings: Mapping[str, Any],
    *,
    size: int,
) -> bool:
    """Return whether `fit_heads` would go on in the folder ``out``, or raise the error with which it would refuse."""
    group = group_of(probe, heads, stream.hints, "meta")
    return check_going_on(group, config, out, _settings(heads, stream, settings, size))


def held_out_targets(
    probe: ProbeMap,
    layers: Sequence[int],
    images: Tensor,
    *,
    method: str | None = None,
    folder: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> list[Judge]:
    """Compute the importance of images [n, 3, H, W], normalised for the backbone, at each of these layers.

    ``method``: that of `targets_of`; None: exact where the output is an embedding, auto where it is a map. With
    ``folder``, what is computed is kept there, and a second call with the same ``settings`` goes on from it.
    """
    progress = progress or Progress()
    images = images.to(probe.device)
    taken = [replace(probe, at=layer) for layer in layers]
    outputs = _outputs(taken[0], images[:1])
    method = method or ("exact" if outputs <= _FEW_OUTPUTS else "auto")
    precision = "tf32" if probe.device.type == "cuda" else "float32"
    kept = None if folder is None else make_folder(folder / JUDGES)
    if kept is not None:
        known = {**(settings or {}), "method": method, "precision": precision}
        known |= {"size": list(images.shape[2:]), "images": len(images)}
        keep_settings(kept / SETTINGS, known, holds="importance of held-out pictures")
    progress.work("importance of held-out pictures", len(layers) * len(images), "maps")
    return [_judge(own, images, min(_RANK, outputs), method, precision, kept, progress) for own in taken]


def _judge(
    probe: ProbeMap, images: Tensor, rank: int, method: str, precision: str, kept: Path | None, progress: Progress
) -> Judge:
    """Compute the targets of one layer; ``kept`` holds those of an earlier run."""
    path = None if kept is None else kept / f"{layer_name(probe.layer)}.npz"
    found = read_arrays(path) if path is not None and path.is_file() else {}
    importance, norms = ([found[name]] if found else [] for name in ("importance", "block_norms"))
    done = len(importance[0]) if importance else 0
    progress.advance(done)
    saved, features = time.perf_counter(), []

    def save() -> None:
        if path is not None:
            write_arrays(path, {"importance": np.concatenate(importance), "block_norms": np.concatenate(norms)})

    for rows in torch.arange(len(images)).split(32 if images.is_cuda else 4):
        part = probe.features(images[rows], normalized=True)
        features.append(part.as_subclass(Tensor).half())
        if int(rows[-1]) < done:
            continue
        new = rows[rows >= done]
        targets = targets_of(probe, part[len(rows) - len(new) :], rank, method, seeds=new.tolist(), precision=precision)
        importance.append(targets.importance.float().cpu().numpy())
        norms.append(targets.block_energy.value.clamp_min(0).sqrt().float().cpu().numpy())
        progress.advance(len(new))
        if time.perf_counter() - saved > SAVE_EVERY:
            save()
            saved = time.perf_counter()
    save()
    prefix = probe.backbone.token_layout(images[:1]).prefix
    importance_of, norms_of = (torch.from_numpy(np.concatenate(parts)) for parts in (importance, norms))
    return Judge(HeadExamples.kept(torch.cat(features), importance_of.to(images.device), prefix), norms_of)


def described(
    probe: ProbeMap,
    group: HeadGroup,
    heads: Sequence[HeadSize],
    held_out: Sequence[HeadExamples],
    size: int,
    counts: Mapping[str, float],
    *,
    half: bool = False,
) -> dict[str, ImportanceHead]:
    """Return the heads of a group by name, each with what it was made for, its rho and its cost, and the ``counts``.

    ``half`` as in `train_heads`."""
    layers = layers_of(heads)
    own = replace(probe, at=layers[0])
    rank = min(_RANK, _outputs(own, torch.zeros(1, 3, size, size, device=probe.device)))
    origin = origin_of(own, rank, (size, size))
    whole = _block_operations(probe, size)
    found = {}
    for size_of in heads:
        head = group.head(size_of.name).eval()
        if half:
            head.half().float()
        examples = held_out[layers.index(size_of.layer)]
        scores = {name: value for name, value in head_scores(head, examples).items() if name != "score"}
        features = examples.features(torch.arange(1))
        scores["operations_share"] = flops(lambda head=head, x=features: head.logits(x)) / whole  # type: ignore[misc]
        scores |= {name: float(value) for name, value in counts.items()}
        found[size_of.name] = head.describe(
            origin=replace(origin, layer=size_of.layer), scores=scores, target="block-norm"
        )
    return found


def write_heads(folder: Path, heads: Mapping[str, ImportanceHead]) -> Path:
    """Write each head into a folder of its name, and what they do and cost into heads.json."""
    for name, head in heads.items():
        head.save_pretrained(folder / name)
    table = {
        name: {
            "layer": head.layer,
            "parameters": sum(parameter.numel() for parameter in head.parameters()),
            **head.config.scores,
        }
        for name, head in heads.items()
    }
    write_json(folder / HEADS, {"decoder": next(iter(heads.values())).config.origin.decoder, "heads": table})
    return folder


# Defaults


_JUDGES = {"cuda": 200, "cpu": 16}


def heads_layers(probe: ProbeMap) -> tuple[int, ...]:
    """Return the layers after which tokens may be removed: from 1 to the last but one, and none above the decoder's."""
    return tuple(range(1, min(probe.backbone.depth - 2, max(probe.decoder.layers)) + 1))


def stream_config(
    probe: ProbeMap, layers: Sequence[int], size: int | tuple[int, int] | None = None, **changes: Any
) -> StreamConfig:
    """Return the stream for the device of a probe, with these ``changes``: blocks of 8,192 pictures on a GPU, or half
    as many where they would fill its memory; blocks of 256 on a CPU."""
    if _place(probe.device) == "cpu":
        return StreamConfig(**{"block": 256, "steps_per_block": 8, "at_once": 16, **changes})
    height, width = probe.pixel_format(size).size
    tokens = probe.backbone.token_layout(torch.empty(0, 3, height, width)).tokens
    each = 2 * len(layers) * tokens * probe.backbone.dim
    room = _GPU_SHARE * torch.cuda.get_device_properties(probe.device).total_memory / each
    block = min(8192, 2 ** int(math.log2(max(256, room))))
    return StreamConfig(**{"block": block, "steps_per_block": 32, "at_once": 256, **changes})


def heads_config(device: torch.device, **changes: Any) -> FitConfig:
    """Return the training of heads on a device, with these ``changes``: 960 steps of 512 in bf16 on a GPU, 240 steps of
    64 on a CPU."""
    known: dict[str, dict[str, Any]] = {
        "cuda": {"steps": 960, "batch": 512, "validate_every": 160, "precision": "bf16"},
        "cpu": {"steps": 240, "batch": 64, "validate_every": 40, "warmup": 30},
    }
    return FitConfig(**{"ema": 0.995, **known[_place(device)], **changes})


def _place(device: torch.device) -> str:
    return "cuda" if device.type == "cuda" else "cpu"


# What is compared, and what is read


def layers_of(heads: Sequence[HeadSize]) -> tuple[int, ...]:
    """Return the layers of these heads, each once, in ascending order."""
    return tuple(sorted({head.layer for head in heads}))


def group_of(probe: ProbeMap, heads: Sequence[HeadSize], hints: int, device: str | torch.device = "cpu") -> HeadGroup:
    """Return these heads for the features of a probe as one network, with random weights."""
    layers = layers_of(heads)
    if len({head.name for head in heads}) < len(heads) or not heads:
        raise PullbackError(f"layers: expected at least one, each once, got {[head.layer for head in heads]}.")
    for layer in layers:
        probe.backbone.check_layer(layer)
    if layers[-1] > max(probe.decoder.layers):
        raise PullbackError(
            f"layers: expected none above the last that the decoder reads ({max(probe.decoder.layers)}), got "
            f"{list(layers)}."
        )
    places = tuple((head.name, layers.index(head.layer), head.width, head.rounds) for head in heads)
    with torch.device(device):
        return HeadGroup(GroupConfig(probe.backbone.dim, min(hints, probe.backbone.dim), places))


def _checked(probe: ProbeMap) -> Backbone:
    of_kind("probe", probe, ProbeMap, "a probe map, such as pb.load_probe(model, decoder)")
    if not isinstance(probe.backbone, Backbone):
        raise ModelError(f"probe: expected one of a ViT of single images, got {probe.backbone.name}.")
    return probe.backbone


def _square(wanted: PixelFormat) -> PixelFormat:
    if wanted.size[0] != wanted.size[1]:
        raise PullbackError(
            f"size: expected a square, since pictures are varied by square crops, got {wanted.size[0]}x"
            f"{wanted.size[1]}. Heads score tokens of images of any shape."
        )
    return wanted


def _divided(
    images: ImageSource | Source,
    held_out: ImageSource | Source | float,
    judges: int,
    wanted: PixelFormat,
    limit: int | None,
    seed: int,
) -> tuple[list[ImageRow], list[ImageRow]]:
    """Return (training rows, those that judge); no content is among both."""
    generator = torch.Generator().manual_seed(seed)
    rows = _each_once(readable_rows(images, wanted, limit))
    if isinstance(held_out, (int, float)):
        share = finite_number("held_out", held_out, expected="a share between 0 and 1, or images of their own")
        count = round(share * len(rows))
        if not 0 < count < len(rows):
            raise PullbackError(
                f"held_out: {len(rows)} different images cannot be divided by a share of {share:g}. Give more images, "
                "another share, or images of their own."
            )
        order = torch.randperm(len(rows), generator=generator).tolist()
        others, rows = [rows[place] for place in order[:count]], [rows[place] for place in sorted(order[count:])]
    else:
        with naming("held_out"):
            others = _each_once(readable_rows(held_out, wanted))
        apart = {row.sha256 for row in others}
        rows = [row for row in rows if row.sha256 not in apart]
        if not rows:
            raise ImageError("held_out: all training images are among the held-out ones. Give others.")
        others = [others[place] for place in torch.randperm(len(others), generator=generator).tolist()]
    return rows, others[:judges]


def _each_once(rows: Sequence[ImageRow]) -> list[ImageRow]:
    """Return the rows without further copies of an image."""
    return list({row.sha256: row for row in reversed(rows)}.values())[::-1]


def _contents(rows: Sequence[ImageRow]) -> str:
    return hash_of([row.sha256 for row in rows])


def made_for(probe: ProbeMap) -> dict[str, Any]:
    """Return the settings of a run that tell the model and the decoder apart from others."""
    return {"weights": weights_hash(probe.backbone.model), "decoder": probe.decoder.name, **probe.identity}


def _settings(
    heads: Sequence[HeadSize], stream: StreamConfig, settings: Mapping[str, Any], size: int
) -> dict[str, Any]:
    """Return whatever decides the weights of heads, beside the configuration of the group and of the training loop."""
    of_stream = {f"stream.{name}": value for name, value in asdict(stream).items()}
    of_stream["stream.variation"] = hash_of(of_stream["stream.variation"])
    return {**settings, **of_stream, "size": size, "layers": list(layers_of(heads))}


@torch.no_grad()
def _outputs(probe: ProbeMap, image: Tensor) -> int:
    """Return how many numbers the output for an image [1, 3, H, W] has."""
    return probe(probe.features(image, normalized=True)).numel()


@torch.no_grad()
def _block_operations(probe: ProbeMap, size: int) -> int:
    """Count the operations of all blocks for one image of this size."""
    backbone = probe.backbone
    assert isinstance(backbone, Backbone)
    layout = backbone.token_layout(torch.empty(0, 3, size, size))
    tokens = torch.zeros(1, layout.tokens, backbone.dim, device=backbone.device, dtype=backbone.dtype)
    return flops(lambda: backbone.run(tokens, 0, backbone.depth, layout=layout))
