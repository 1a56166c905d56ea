"""`pullback train head`, `heads`, `spn`, `drm` and `bottleneck`: small networks that predict the geometry from features
alone, or make it low-dimensional."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pullback.cli import options
from pullback.cli.common import kept, load_any_probe, one_layer, parse_size, refuse_scenes, running, say, say_page
from pullback.cli.targets import stored_rows
from pullback.errors import FileError, PullbackError, naming
from pullback.report.console import console, heads_table
from pullback.report.drawing import Drawing
from pullback.report.progress import ProgressDisplay
from pullback.runs.documents import CHECKPOINT, HEADS, OWN_TARGETS, layer_name

if TYPE_CHECKING:
    from pullback.learning.fit import FitConfig
    from pullback.learning.pretrained import Pretrained
    from pullback.targets.store import TargetStore

train = typer.Typer(
    name="train",
    help="Learn the geometry: an importance head, the whole metric, distances of images, or a bottleneck that bounds "
    "its rank.",
    no_args_is_help=True,
)

Steps = Annotated[int, typer.Option(min=1, help="Optimiser steps.")]
Batch = Annotated[int, typer.Option(min=1, help="Images per step, over all processes.")]
Rate = Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")]
Out = Annotated[Path, typer.Option(help="Folder for the model, metrics.jsonl and the checkpoint to go on from.")]
Arithmetic = Annotated[Literal["float32", "bf16"], typer.Option(help="Of the network in training.")]
ValidateEvery = Annotated[int, typer.Option(min=1, help="Steps between validations and checkpoints.")]
Patience = Annotated[
    int | None, typer.Option(min=1, help="Stop after so many validations without a better score.", show_default="never")
]
Recompute = Annotated[
    bool, typer.Option("--recompute-features", help="Compute features in every step instead of holding them in memory.")
]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard files too.")]


_OF_SCENES = "pb.targets_of(probe, probe.features(scenes)) and a loop of your own over them"
_DRM_OF_SCENES = "pullback.learning.train_drm.fit_drm with features and outputs of scenes"
_BOTTLENECK_OF_SCENES = "pullback.learning.train_bottleneck.fit_bottleneck with features of scenes"


@train.command()
def head(
    targets: Annotated[
        list[Path], typer.Option(help="A store of `pullback targets`; several for several resolutions.")
    ],
    out: Out,
    held_out: Annotated[
        str, typer.Option(help="A store for validation, or the share of images to hold out of the targets.")
    ] = "0.1",
    model: Annotated[str | None, typer.Option(help="The backbone.", show_default="as the store says")] = None,
    images: Annotated[str | None, typer.Option(help="Where the images are.", show_default="as the store says")] = None,
    width: Annotated[int, typer.Option(min=1, help="Of the head.")] = 256,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    target: Annotated[Literal["importance", "block-norm"], typer.Option(help="What is predicted.")] = "importance",
    rank_weight: Annotated[float, typer.Option(min=0.0, help="w_rank, the weight of the ranking loss.")] = 0.5,
    start: Annotated[
        str | None, typer.Option(help="A head to go on from, with its width and heads.", show_default="a random one")
    ] = None,
    steps: Steps = 3000,
    batch: Batch = 64,
    learning_rate: Rate = 2e-3,
    validate_every: ValidateEvery = 250,
    patience: Patience = None,
    precision: Arithmetic = "float32",
    recompute_features: Recompute = False,
    tensorboard: TensorBoard = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
) -> None:
    """Train an importance head on stored targets. The same command goes on from its checkpoint; torchrun works."""
    with _run(out, device, head) as (progress, place):
        from pullback.learning.head import ImportanceHead
        from pullback.learning.train_head import train_head

        config = _config(locals())
        with naming("targets"):
            stores = [_store(folder) for folder in targets]
        with naming("held_out"):
            judge = _held_out(held_out)
        with naming("start"):
            begun = None if start is None else ImportanceHead.from_pretrained(start)
        name = model or stores[0].config["model"]
        refuse_scenes(name, "train head", _OF_SCENES)
        progress.stage(f"loading {name}")
        probe = stores[0].load_probe(name, device=place)
        fitted = train_head(
            probe,
            stores,
            judge,
            images=images,
            width=width,
            heads=heads,
            target=target,
            rank_weight=rank_weight,
            start=begun,
            keep_features=not recompute_features,
            config=config,
            out=out,
            tensorboard=tensorboard,
            progress=progress,
        )
        _finish(fitted, out)


@train.command()
def heads(
    model: options.Model,
    images: Annotated[list[str], typer.Option(help=f"{options.SOURCES} Several folders by several options.")],
    out: Annotated[
        Path, typer.Option(help="Folder of a head for each layer, heads.json, and the checkpoint to go on from.")
    ],
    held_out: Annotated[
        str, typer.Option(help="Pictures that judge the heads, or the share of the images that is set aside for it.")
    ] = "0.1",
    decoder: options.Decoder = "cls",
    layers: Annotated[
        str | None, typer.Option(help="Block indices such as 3,6,9.", show_default="from 1 to the last but one")
    ] = None,
    width: Annotated[int, typer.Option(min=1, help="Of each head.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Of attention and MLP in each head.")] = 1,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimiser steps.", show_default="960 on a GPU, 240 on a CPU")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Pictures per step.", show_default="512 on a GPU, 64 on a CPU")
    ] = None,
    learning_rate: Rate = 2e-3,
    block: Annotated[
        int | None,
        typer.Option(min=1, help="Pictures drawn at a time.", show_default="8192 on a GPU, 256 on a CPU"),
    ] = None,
    steps_per_block: Annotated[
        int | None, typer.Option(min=1, help="Steps on each block.", show_default="32 on a GPU, 8 on a CPU")
    ] = None,
    judges: Annotated[
        int | None,
        typer.Option(min=1, help="Use so many of the held-out pictures.", show_default="200 on a GPU, 16 on a CPU"),
    ] = None,
    size: options.Size = None,
    limit: options.Limit = None,
    validate_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between validations.", show_default="160 on a GPU, 40 on a CPU")
    ] = None,
    patience: Patience = None,
    tensorboard: TensorBoard = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
) -> None:
    """Train the heads of all layers at once on pictures alone. The same command goes on from its checkpoint. Minutes on
    a GPU; on a CPU the defaults are much smaller, and so is what the heads learn."""
    with _run(out, device, heads) as (progress, place):
        refuse_scenes(model, "train heads", _OF_SCENES)
        from pullback.learning.train_heads import heads_config, heads_layers, stream_config, train_heads

        chosen, pixels = _block_indices(layers), parse_size(size)
        with naming("held_out"):
            judge = _share_or_images(held_out)
        progress.stage(f"loading {model}")
        probe = load_any_probe(model, decoder, None, place)
        of_stream = {"block": block, "steps_per_block": steps_per_block}
        of_fit = {name: value for name, value in _given(locals()).items() if value is not None}
        trained = train_heads(
            probe,
            images[0] if len(images) == 1 else list(images),
            judge,
            layers=chosen,
            width=width,
            rounds=rounds,
            judges=judges,
            size=pixels,
            limit=limit,
            stream=stream_config(
                probe,
                chosen or heads_layers(probe),
                pixels,
                **{name: value for name, value in of_stream.items() if value is not None},
            ),
            config=heads_config(probe.device, **of_fit),
            out=out,
            tensorboard=tensorboard,
            progress=progress,
        )
    console().print(heads_table({layer: dict(head.config.scores) for layer, head in trained.items()}))
    say(f"written to {out}/: a folder for each layer, {HEADS}", "bold")
    own = ",".join(f"{layer}={out / layer_name(layer)}" for layer in trained)
    say(f"to use them: pullback plan {model} --heads {own}")


@train.command()
def spn(
    model: options.Model,
    images: options.Source,
    held_out: Annotated[str, typer.Option(help="Images for validation, whose exact modes are computed first.")],
    out: Out,
    decoder: options.Decoder = "cls",
    layer: options.Layer = None,
    rank: options.Rank = 20,
    width: Annotated[int, typer.Option(min=1, help="Of the network.")] = 256,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    supervision: Annotated[
        Literal["randnla", "spectral", "distances", "directions"],
        typer.Option(help="Algorithm 2; exact modes in every step; the two naive ones of section 5.1."),
    ] = "randnla",
    power_iters: Annotated[int, typer.Option(min=0, help="Rounds q of randnla.")] = 1,
    sketch_width: Annotated[
        int | None, typer.Option(min=1, help="Columns r0 of randnla.", show_default="the rank")
    ] = None,
    size: options.Size = None,
    limit: options.Limit = None,
    constant_images: Annotated[
        int, typer.Option(min=0, help="Start at the best constant subspace of so many images; 0: at random.")
    ] = 0,
    steps: Steps = 2000,
    batch: Batch = 16,
    learning_rate: Rate = 1e-3,
    validate_every: ValidateEvery = 200,
    patience: Patience = None,
    precision: Arithmetic = "float32",
    recompute_features: Recompute = False,
    tensorboard: TensorBoard = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
) -> None:
    """Train a Spectral Pullback Network on Jacobian products. The same command goes on; torchrun works."""
    with _run(out, device, spn) as (progress, place):
        refuse_scenes(model, "train spn", _OF_SCENES)
        from pullback.data.sources import open_source
        from pullback.learning.train_spn import train_spn

        config = _config(locals())
        pixels, pictures = parse_size(size), open_source(images)
        with naming("held_out"):
            judge = open_source(held_out)
        progress.stage(f"loading {model}")
        probe = load_any_probe(model, decoder, one_layer(layer), place)
        fitted = train_spn(
            probe,
            pictures,
            judge,
            rank=rank,
            width=width,
            heads=heads,
            supervision=supervision,
            power_iters=power_iters,
            sketch_width=sketch_width,
            size=pixels,
            limit=limit,
            keep_features=not recompute_features,
            constant_images=constant_images,
            config=config,
            out=out,
            tensorboard=tensorboard,
            progress=progress,
        )
        _finish(fitted, out)


@train.command()
def drm(
    model: options.Model,
    images: options.Source,
    held_out: Annotated[str, typer.Option(help="Images for validation, of which the first 500 count.")],
    out: Out,
    decoder: options.Decoder = "cls",
    layer: options.Layer = None,
    rank: Annotated[int, typer.Option(min=1, help="k, the numbers that an image is compared by.")] = 32,
    reference: Annotated[
        Literal["relative_l1", "relative_l2"] | None,
        typer.Option(help="The distance of outputs that is learned.", show_default="relative_l1 for depth, else _l2"),
    ] = None,
    distill_weight: Annotated[
        float, typer.Option(min=0.0, help="Of the importance, to which weights of tokens are distilled; 0: without it.")
    ] = 0.01,
    targets: Annotated[
        Path | None,
        typer.Option(help="A store of `pullback targets` with that importance.", show_default="computed first"),
    ] = None,
    target_images: Annotated[
        int, typer.Option(min=1, help="Compute the importance of so many of the images, where no store is given.")
    ] = 200,
    target: Annotated[Literal["importance", "block-norm"], typer.Option(help="What is distilled.")] = "importance",
    crops: Annotated[
        int, typer.Option(min=0, help="Random crops of each image to train on too; with 16 take 4000 steps of 64.")
    ] = 0,
    width: Annotated[int, typer.Option(min=1, help="Of the head that weighs tokens.")] = 256,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Of attention and MLP in the head.")] = 1,
    size: options.Size = None,
    limit: options.Limit = None,
    steps: Steps = 1500,
    batch: Annotated[int, typer.Option(min=2, help="Images per step, all pairs of which are compared.")] = 32,
    learning_rate: Rate = 1e-3,
    validate_every: ValidateEvery = 100,
    patience: Patience = None,
    precision: Arithmetic = "float32",
    tensorboard: TensorBoard = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
) -> None:
    """Train a Distilled Riemannian Metric, which compares images as the decoder would. The same command goes on;
    torchrun works."""
    with _run(out, device, drm) as (progress, place):
        refuse_scenes(model, "train drm", _DRM_OF_SCENES)
        from pullback.data.sources import open_source
        from pullback.learning.train_drm import drm_config, train_drm

        config = drm_config(**_given(locals()))
        pixels, pictures = parse_size(size), open_source(images)
        with naming("held_out"):
            judge = open_source(held_out)
        with naming("targets"):
            store = None if targets is None else _store(targets)
        progress.stage(f"loading {model}")
        fitted = train_drm(
            load_any_probe(model, decoder, one_layer(layer), place),
            pictures,
            judge,
            store,
            target_images=target_images,
            rank=rank,
            width=width,
            heads=heads,
            rounds=rounds,
            reference=reference,
            distill_weight=distill_weight,
            target=target,
            crops=crops,
            size=pixels,
            limit=limit,
            config=config,
            out=out,
            tensorboard=tensorboard,
            progress=progress,
        )
        _finish(fitted, out, f"to use it: pullback index add GALLERY IMAGES --drm {out}")


@train.command()
def bottleneck(
    model: options.Model,
    images: options.Source,
    held_out: Annotated[str, typer.Option(help="Images for validation.")],
    out: Out,
    decoder: options.Decoder = "depth",
    distance: Annotated[
        str | None,
        typer.Option(help="In the task loss: cosine, log or silog.", show_default="log for depth, else none"),
    ] = None,
    registers: Annotated[int, typer.Option(min=1, help="R, tokens that an image is held in.")] = 32,
    latent: Annotated[int, typer.Option(min=1, help="d, numbers of each of them; the rank is at most R d.")] = 128,
    width: Annotated[int, typer.Option(min=1, help="Of encoder and decoder.")] = 256,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    blocks: Annotated[int, typer.Option(min=1, help="Of the encoder, and of the decoder.")] = 3,
    posterior: Annotated[
        Literal["power-spherical", "gaussian", "deterministic"], typer.Option(help="Of a register, given an image.")
    ] = "power-spherical",
    cells: Annotated[
        bool,
        typer.Option(
            "--cells/--no-cells",
            help="Start at the principal components of parts of the image, or without cells at random.",
        ),
    ] = True,
    task_weight: Annotated[float, typer.Option(min=0.0, help="Of the task's output; 0: features alone.")] = 10.0,
    kl_weight: Annotated[float, typer.Option(min=0.0, help="Of the KL divergence, per latent number.")] = 1e-3,
    kl_warmup: Annotated[int, typer.Option(min=0, help="Steps until the KL counts in full.")] = 500,
    vary: Annotated[
        bool, typer.Option("--vary/--no-vary", help="Other crops in every step, or the same features each time.")
    ] = True,
    size: options.Size = None,
    limit: options.Limit = None,
    steps: Steps = 500,
    batch: Batch = 16,
    learning_rate: Rate = 1e-3,
    validate_every: ValidateEvery = 100,
    patience: Patience = None,
    precision: Arithmetic = "float32",
    tensorboard: TensorBoard = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
) -> None:
    """Train an S2-VAE for what a dense decoder reads, so that its Jacobian has rank R d at most. The same command goes
    on; torchrun works."""
    with _run(out, device, bottleneck) as (progress, place):
        refuse_scenes(model, "train bottleneck", _BOTTLENECK_OF_SCENES)
        from pullback.data.crops import CROPS
        from pullback.data.sources import open_source
        from pullback.learning.train_bottleneck import bottleneck_config, default_distance, train_bottleneck

        config = bottleneck_config(**_given(locals()))
        pixels, pictures = parse_size(size), open_source(images)
        with naming("held_out"):
            judge = open_source(held_out)
        progress.stage(f"loading {model}")
        fitted = train_bottleneck(
            load_any_probe(model, decoder, "hooks", place, distance or default_distance(decoder)),
            pictures,
            judge,
            registers=registers,
            latent=latent,
            width=width,
            heads=heads,
            blocks=blocks,
            posterior=posterior,
            cells=cells,
            task_weight=task_weight,
            kl_weight=kl_weight,
            kl_warmup=kl_warmup,
            size=pixels,
            limit=limit,
            variation=CROPS if vary else None,
            config=config,
            out=out,
            tensorboard=tensorboard,
            progress=progress,
        )
        latent_layer = "latent" if fitted.spherical else "latent-ambient"
        _finish(fitted, out, f"to use it: --decoder {decoder}@{out}, --layer hooks or {latent_layer}")


def _block_indices(text: str | None) -> tuple[int, ...] | None:
    """Read block indices such as 3,6,9; None where they were left out."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise PullbackError(f"layers: expected block indices such as 3,6,9, got {text!r}.") from None


def _share_or_images(text: str) -> float | str:
    """Read the share of images to set aside, or leave the name of a folder as it is."""
    try:
        return float(text)
    except ValueError:
        return text


def _config(given: Mapping[str, Any]) -> FitConfig:
    """Return the training loop's settings by the options of a command with the same names."""
    from pullback.learning.fit import FitConfig as Config

    return Config(**_given(given))


def _given(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a command says of the training loop."""
    from pullback.learning.fit import FitConfig as Config

    return {field.name: given[field.name] for field in fields(Config) if field.name in given}


@contextmanager
def _run(out: Path, device: str, command: Callable[..., None]) -> Iterator[tuple[ProgressDisplay, str]]:
    """Surround a command: progress, messages, and the device of this process."""
    with running(out, command) as progress, _processes(device) as place:
        try:
            yield progress, place
        except (KeyboardInterrupt, OSError) as error:
            damaged = isinstance(error, FileError) and "cannot be read" in str(error)
            if (out / CHECKPOINT).is_file() and not damaged:
                progress.done.append("the last checkpoint; the same command goes on from there")
                progress.current = None
            elif rows := stored_rows(out / OWN_TARGETS):
                progress.done.append(kept(error, rows, "image", " with importance"))
                progress.current = None
            raise


@contextmanager
def _processes(device: str) -> Iterator[str]:
    """Join the other processes under torchrun; yield the device of this one."""
    import torch

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield device
        return
    on_gpu = torch.cuda.is_available() and device != "cpu"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu"
    finally:
        torch.distributed.destroy_process_group()


def _held_out(text: str) -> TargetStore | float:
    """Read a share such as 0.1, or open the store of targets in a folder."""
    try:
        share = float(text)
    except ValueError:
        if not Path(text).is_dir():
            raise PullbackError(
                f"held_out: expected a store of targets or a share such as 0.1, got {text!r}."
            ) from None
        return _store(Path(text))
    if not 0 < share < 1:
        raise PullbackError(f"held_out: expected a share between 0 and 1, or a store of its own, got {share}.")
    return share


def _store(folder: Path) -> TargetStore:
    """Open a store of targets that has rows."""
    from pullback.targets.store import TargetStore as Store

    store = Store.open(folder)
    if not len(store):
        raise PullbackError(f"folder: {folder} holds no rows yet. Run `pullback targets` to the end first.")
    return store


def _finish(model: Pretrained, out: Path, use: str = "") -> None:
    """Write the model and print its scores and how to use it, in one of the processes."""
    if int(os.environ.get("RANK", "0")) != 0:
        return
    folder = model.save_pretrained(out / "model")
    scores = dict(model.config.scores)
    if scores.get("held_out_rows") == 1:
        scores.pop("rho_se", None)  # one image has no error over images
    for name, value in scores.items():
        say(f"{name.replace('_', ' ')}: {value:.4g}")
    say(f"written to {folder}/", "bold")
    if use:
        say(use)
    with Drawing() as drawing:
        say_page(out, drawing.draw(out))
