"""The jobs that `compare_checkouts.py` runs in both checkouts. Each returns plain numbers, texts and arrays by name.

    PYTHONPATH=<checkout>/src python tools/compare_jobs.py inputs INPUTS
    PYTHONPATH=<checkout>/src python tools/compare_jobs.py run INPUTS OUT JOB [JOB ...] [--device cuda] [--weights DIR]

A job reaches `pullback` through `python -m pullback` (in this process, so that torch is imported once), through names
of `pb.` and through files on disk. The few names that are not public are imported between `renderer` and `held_in`.
A job that fails leaves its traceback in place of a result. Results are pickles of {name: number, text or array}.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import pickle
import re
import runpy
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SIZE = 112
IGNORED = {"date", "seconds", "machine", "versions", "pullback", "commit", "torch", "python", "transformers"}
"""Keys of JSON documents that say when, where and by which release, and may differ."""


@dataclass(frozen=True)
class Place:
    """``inputs``: shared by both checkouts. ``out``: the job's own folder. ``weights``: has models/ and data/."""

    inputs: Path
    out: Path
    device: str
    weights: Path | None

    @property
    def photos(self) -> str:
        return str(self.inputs / "photos")

    @property
    def others(self) -> str:
        return str(self.inputs / "others")


Job = Callable[[Place], dict[str, Any]]
JOBS: dict[str, Job] = {}
TOLERANCE: dict[str, float] = {}
NEEDS_WEIGHTS: set[str] = set()


def job(name: str, tolerance: float = 2e-5, weights: bool = False) -> Callable[[Job], Job]:
    """Register a job. ``tolerance``: the largest relative difference that counts as round-off."""

    def register(function: Job) -> Job:
        JOBS[name], TOLERANCE[name] = function, tolerance
        if weights:
            NEEDS_WEIGHTS.add(name)
        return function

    return register


# Names that a refactoring may move


def renderer() -> Callable[..., Any]:
    """The renderer of procedural scenes, wherever it lives."""
    for module in ("pullback.scenes", "pullback.data.scenes"):
        with contextlib.suppress(ModuleNotFoundError, AttributeError):
            return importlib.import_module(module).render
    raise ImportError("no module of this checkout has the renderer of scenes: add its place to compare_jobs.renderer")


FORMER = {
    "scores": {"bipartite": "tome", "class-attention": "evit"},
    "presets": {"bipartite": "tome", "attention-drop": "evit"},
}
"""What older checkouts call scores and presets of one stage. Jobs and their results have the newer names."""


def has_former_names() -> bool:
    return "bipartite" not in importlib.import_module("pullback.registry").SCORES


def names_here(kind: str, names: str) -> str:
    """Scores or presets, by commas, as this checkout calls them."""
    former = FORMER[kind] if has_former_names() else {}
    return ",".join(former.get(name, name) for name in names.split(","))


def with_newer_names(value: Any) -> Any:
    """A part of a comparison with the newer names, whatever this checkout calls them."""
    if not has_former_names():
        return value
    scores, presets = ({old: new for new, old in former.items()} for former in FORMER.values())
    newer = {"score": scores, "scores": scores, "reference": scores, "preset": presets, "presets": presets}

    def named(part: Any, names: dict[str, str]) -> Any:
        if isinstance(part, dict):
            return {key: named(own, newer.get(key, {})) for key, own in part.items()}
        if isinstance(part, list):
            return [named(own, names) for own in part]
        return names.get(part, part) if isinstance(part, str) else part

    return named(value, {})


def held_in(pruned: Any) -> dict[str, Any]:
    """What a pruned model did to its tokens is not public; its plan is."""
    return dict(vars(pruned.plan))


# Inputs, made once by the old checkout


def make_inputs(folder: Path) -> None:
    """photos/ and others/ (pictures), classes/ (one folder a class), scenes/ (views), models/, head/ and spn/."""
    import torch

    import pullback as pb

    for name, seeds in {"photos": range(6), "others": range(50, 53)}.items():
        save_pictures(folder / name, renderer()(list(seeds), size=128).rgb[:, 0])
    for name, seeds in {"a": range(60, 64), "b": range(70, 74)}.items():
        save_pictures(folder / "classes" / name, renderer()(list(seeds), size=128).rgb[:, 0])
    for name, views in zip(("first", "second"), renderer()([80, 81], size=112, views=3).rgb, strict=True):
        save_pictures(folder / "scenes" / name, views)
    for name, model in random_models().items():
        model.save_pretrained(folder / "models" / name)
    torch.manual_seed(0)
    pb.ImportanceHead(192, 32, 2).eval().save_pretrained(folder / "head")
    pb.SpectralPullbackNetwork(192, 4, 32, 2).eval().save_pretrained(folder / "spn")


def save_pictures(folder: Path, pictures: Any) -> None:
    from PIL import Image

    folder.mkdir(parents=True)
    for number, picture in enumerate(pictures):
        pixels = (255 * picture).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(folder / f"{number:02d}.png")


def random_models() -> dict[str, Any]:
    """Small networks of transformers with weights that matter: every parameter is drawn anew."""
    import torch
    import transformers as tf

    common = {"hidden_size": 48, "num_hidden_layers": 5, "num_attention_heads": 3}
    dino = {**common, "patch_size": 14, "image_size": 112, "mlp_ratio": 2}
    clip = tf.CLIPVisionConfig(**common, patch_size=16, image_size=112, intermediate_size=96, projection_dim=24)
    dense = tf.DepthAnythingConfig(
        backbone_config=tf.Dinov2Config(
            **dino, out_indices=[1, 2, 4, 5], apply_layernorm=True, reshape_hidden_states=False
        ),
        reassemble_hidden_size=48,
        neck_hidden_sizes=[8, 8, 12, 12],
        fusion_hidden_size=8,
        head_hidden_size=6,
        patch_size=14,
    )
    models = {
        "dinov2": tf.Dinov2Model(tf.Dinov2Config(**dino)),
        "clip": tf.CLIPVisionModelWithProjection(clip),
        "vit": tf.ViTModel(tf.ViTConfig(**common, patch_size=16, image_size=112, intermediate_size=96)),
        "depth-anything": tf.DepthAnythingForDepthEstimation(dense),
    }
    generator = torch.Generator().manual_seed(0)
    for model in models.values():
        for name, value in sorted(model.named_parameters()):
            draw = torch.randn(value.shape, generator=generator)
            if value.ndim > 1 and not any(part in name for part in ("token", "position")):
                value.data.copy_(draw * value[0].numel() ** -0.5)
            elif name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "lambda1")):
                value.data.copy_(1 + 0.3 * draw)
            else:
                value.data.copy_(0.3 * draw)
        model.eval().requires_grad_(False)
    models["depth-anything"].head.conv3.bias.data.fill_(1.0)
    return models


# Commands and files


def command(place: Place, *arguments: str | Path) -> str:
    """`pullback ...` with the device of the comparison; what it printed. Raises where it ends in an error."""
    words = ["pullback", *map(str, arguments), "--device", place.device]
    place.out.mkdir(parents=True, exist_ok=True)
    log, before = place.out / "log.txt", sys.argv
    with open(log, "a+", encoding="utf-8") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        print("$", *words, flush=True)
        begun = file.tell()
        sys.argv = words
        try:
            runpy.run_module("pullback", run_name="__main__", alter_sys=False)
            code: Any = 0
        except SystemExit as exit:
            code = exit.code
        finally:
            sys.argv = before
    printed = log.read_text(encoding="utf-8")[begun:]
    if code:
        raise RuntimeError(f"{' '.join(words)} ended with {code}:\n{printed}")
    return printed


def documents(folder: Path, *wanted: str) -> dict[str, Any]:
    """JSON files by name, without what may differ."""
    return {name: plain(json.loads((folder / name).read_text(encoding="utf-8"))) for name in wanted}


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items() if key not in IGNORED}
    return [plain(part) for part in value] if isinstance(value, list) else value


def arrays(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


def rows_by(path: Path, *names: str) -> dict[str, Any]:
    """JSON lines by what identifies a row, so that their order does not count."""
    rows = [with_newer_names(plain(json.loads(line))) for line in path.read_text(encoding="utf-8").splitlines()]
    return {" ".join(str(row[name]) for name in names): row for row in rows}


def parquet(folder: Path) -> dict[str, Any]:
    """All rows of a target store, column by column, and its configuration."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.concat_tables([pq.read_table(path) for path in sorted(folder.glob("*.parquet"))])
    table = table.sort_by([("key", "ascending"), ("crop", "ascending")])
    columns: dict[str, Any] = {}
    for name in table.column_names:
        values = table[name].to_pylist()
        if values and isinstance(values[0], bytes):
            columns[name] = np.stack([np.frombuffer(value, dtype="<f2") for value in values])
        elif values and isinstance(values[0], list) and isinstance(values[0][0], float):
            columns[name] = np.array(values)
        else:
            columns[name] = values
    return {"columns": columns, "config": documents(folder, "targets.json")["targets.json"]}


def network(folder: Path) -> dict[str, Any]:
    """The weights and the configuration of a folder of save_pretrained."""
    from safetensors.numpy import load_file

    return {"weights": load_file(folder / "model.safetensors"), **documents(folder, "config.json")}


# Renderer


@job("render", 1e-6)
def render_scenes(place: Place) -> dict[str, Any]:
    batch = renderer()([3, 4], size=56, views=2, device=place.device)
    return {name: getattr(batch, name) for name in ("rgb", "depth", "normals", "instance", "label", "pose")}


# Diagnoses


def diagnosis(place: Place, *arguments: str | Path) -> dict[str, Any]:
    folder = place.out / "diagnosis"
    command(place, "diagnose", *arguments, "--out", folder)
    return {**documents(folder, "diagnosis.json"), "importance.npz": arrays(folder / "importance.npz")}


@job("diagnose-cls")
def diagnose_cls(place: Place) -> dict[str, Any]:
    options = ("--decoder", "cls", "--layer", 10, "--layer", 6, "--rank", 20, "--rank", 5, "--limit", 3, "--size", SIZE)
    return diagnosis(place, "tiny-scenes", "--images", place.photos, *map(str, options))


@job("diagnose-depth")
def diagnose_depth(place: Place) -> dict[str, Any]:
    options = ("--decoder", "depth-8x8", "--layer", "4", "--layer", "hooks", "--limit", "2", "--size", "56")
    return diagnosis(place, "tiny-scenes", "--images", place.photos, *options)


@job("diagnose-paper")
def diagnose_paper(place: Place) -> dict[str, Any]:
    options = ("--layer", "10", "--method", "paper", "--rank", "8", "--limit", "2", "--size", str(SIZE))
    return diagnosis(place, "tiny-scenes", "--images", place.photos, *options)


@job("diagnose-krylov")
def diagnose_krylov(place: Place) -> dict[str, Any]:
    options = ("--layer", "9", "--method", "krylov", "--rank", "8", "--limit", "2", "--size", str(SIZE))
    return diagnosis(place, "tiny-scenes", "--images", place.photos, *options, "--distance", "cosine", "--seed", "3")


@job("diagnose-camera")
def diagnose_camera(place: Place) -> dict[str, Any]:
    options = ("--decoder", "camera", "--layer", "4", "--layer", "hooks", "--rank", "10", "--size", "56")
    return diagnosis(place, "tiny-views", "--images", place.inputs / "scenes", *options)


@job("diagnose-points")
def diagnose_points(place: Place) -> dict[str, Any]:
    options = ("--decoder", "points-32", "--layer", "6", "--rank", "5", "--limit", "1", "--size", "32")
    return diagnosis(place, "tiny-views", "--images", place.inputs / "scenes", *options)


# Targets


def targets(place: Place, *arguments: str | Path) -> dict[str, Any]:
    command(place, "targets", *arguments, "--out", place.out / "store")
    return parquet(place.out / "store")


@job("targets-exact")
def targets_exact(place: Place) -> dict[str, Any]:
    options = ("--layer", "10", "--rank", "6", "--size", str(SIZE), "--crops", "2", "--keep-modes", "--limit", "3")
    return targets(place, "tiny-scenes", "--images", place.photos, *options, "--method", "exact", "--shard-size", "4")


@job("targets-krylov")
def targets_krylov(place: Place) -> dict[str, Any]:
    options = ("--decoder", "depth-8x8", "--layer", "8", "--rank", "4", "--size", str(SIZE), "--limit", "2")
    return targets(place, "tiny-scenes", "--images", place.photos, *options, "--method", "krylov")


@job("targets-paper")
def targets_paper(place: Place) -> dict[str, Any]:
    options = ("--layer", "10", "--rank", "4", "--size", str(SIZE), "--limit", "2", "--method", "paper")
    return targets(place, "tiny-scenes", "--images", place.photos, *options)


@job("targets-hooks")
def targets_hooks(place: Place) -> dict[str, Any]:
    options = ("--decoder", "depth-4x4", "--layer", "hooks", "--rank", "4", "--size", str(SIZE), "--limit", "2")
    return targets(place, "tiny-scenes", "--images", place.photos, *options, "--distance", "silog")


@job("compute-table")
def compute_table(place: Place) -> dict[str, Any]:
    import pullback as pb

    probe = pb.load_probe("tiny-scenes", "cls", 10, device=place.device)
    found = pb.compute_table(probe, place.photos, rank=5, size=SIZE, limit=2)
    table = found[0] if isinstance(found, tuple) else found
    names = ("importance", "singular_values", "keys")
    return {name: getattr(table, name) for name in names}


# Training


@job("train-head", 1e-4)
def train_head(place: Place) -> dict[str, Any]:
    store, run = place.out / "store", place.out / "run"
    command(place, "targets", "tiny-scenes", *small_targets(place), "--out", store)
    options = ("--steps", "20", "--batch", "4", "--width", "32", "--heads", "2", "--validate-every", "10")
    command(place, "train", "head", "--targets", store, "--held-out", "0.34", *options, "--out", run)
    return {**network(run / "model"), "metrics": metrics(run)}


@job("train-head-block-norm", 1e-4)
def train_head_block_norm(place: Place) -> dict[str, Any]:
    store, run = place.out / "store", place.out / "run"
    command(place, "targets", "tiny-scenes", *small_targets(place), "--out", store)
    options = ("--steps", "8", "--batch", "4", "--target", "block-norm", "--start", place.inputs / "head")
    more = ("--validate-every", "4", "--rank-weight", "0", "--recompute-features")
    command(place, "train", "head", "--targets", store, "--held-out", store, *options, *more, "--out", run)
    return {**network(run / "model"), "metrics": metrics(run)}


@job("train-spn", 1e-4)
def train_spn(place: Place) -> dict[str, Any]:
    supervisions = ("randnla", "spectral", "distances", "directions")
    return {supervision: spn(place, place.out / supervision, supervision) for supervision in supervisions}


def spn(place: Place, run: Path, supervision: str) -> dict[str, Any]:
    options = ("--layer", "10", "--rank", "4", "--width", "32", "--heads", "2", "--size", "56", "--steps", "4")
    more = ("--batch", "3", "--validate-every", "2", "--supervision", supervision)
    images = ("--images", place.photos, "--held-out", place.others)
    command(place, "train", "spn", "tiny-scenes", *images, *options, *more, "--out", run)
    return {**network(run / "model"), "metrics": metrics(run)}


def small_targets(place: Place) -> tuple[str, ...]:
    return ("--images", place.photos, "--layer", "10", "--rank", "4", "--size", "56")


def metrics(run: Path) -> list[Any]:
    return [plain(json.loads(line)) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


# Pruning


def comparison(place: Place, *arguments: str | Path, presets: str, scores: str) -> dict[str, Any]:
    folder = place.out / "comparison"
    named = ("--preset", names_here("presets", presets), "--scores", names_here("scores", scores))
    command(place, "prune", *arguments, *named, "--time", "none", "--out", folder)
    rows = rows_by(folder / "rows.jsonl", "preset", "score", "ratio", "image")
    return {"rows": rows, **with_newer_names(documents(folder, "summary.json"))}


@job("prune-cls")
def prune_cls(place: Place) -> dict[str, Any]:
    presets = "best,paper,drop,bipartite,attention-drop,strided"
    scores = "importance,spn,exact,block-norm,random,bipartite,strided,class-attention,norm,cls-similarity"
    networks = ("--head", place.inputs / "head", "--spn", place.inputs / "spn", "--bank", place.inputs / "classes")
    images = ("--images", place.inputs / "classes", "--size", str(SIZE), "--limit", "5", "--batch", "3")
    options = ("--ratios", "0.3,0.6", "--stages", "6", "--rank", "6")
    return comparison(place, "tiny-scenes", *images, *networks, *options, presets=presets, scores=scores)


@job("prune-depth")
def prune_depth(place: Place) -> dict[str, Any]:
    options = ("--decoder", "depth-8x8", "--ratios", "0.4", "--stages", "4", "--rank", "6")
    images = ("--images", place.photos, "--size", "56", "--limit", "2")
    presets, scores = "best,paper,drop,bipartite", "exact,norm,random"
    return comparison(place, "tiny-scenes", *images, *options, presets=presets, scores=scores)


@job("prune-stages")
def prune_stages(place: Place) -> dict[str, Any]:
    options = ("--decoder", "depth", "--ratios", "0.5", "--stages", "4,8")
    images = ("--images", place.photos, "--size", str(SIZE), "--limit", "2")
    return comparison(place, "tiny-scenes", *images, *options, presets="best,drop", scores="norm,random")


@job("plan")
def plan(place: Place) -> dict[str, Any]:
    folder = place.out / "planned"
    images = ("--images", place.photos, "--limit", "2", "--size", "56")
    heads = f"4=norm,6={place.inputs / 'head'},8={names_here('scores', 'class-attention')}"
    printed = command(place, "plan", "tiny-scenes", *images, "--heads", heads, "--flops", "0.85", "--out", folder)
    found = documents(folder, "pruned.json")["pruned.json"]
    shutil.rmtree(folder)
    printed = re.sub(r"[\d.e+]+ ms", "T ms", printed.replace(str(folder), "OUT"))  # times differ
    return {"plan": found["plan"], "printed": printed}


# Pruned models in Python


def images_of(probe: Any, place: Place, size: int = SIZE, limit: int = 3) -> Any:
    return probe.load_images(place.photos, size, limit=limit).to(probe.device)


def outputs(model: Any, images: Any) -> dict[str, Any]:
    """Every tensor that a model returns, by name."""
    import torch

    with torch.no_grad():
        found = model(images)
    if hasattr(found, "_asdict"):
        found = found._asdict()
    named = dict(found) if hasattr(found, "keys") else vars(found)
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}


def pruned_outputs(
    model: Any, images: Any, place: Place, stages: list[int], networks: tuple[Any, ...]
) -> dict[str, Any]:
    """Outputs of every preset with every score that fits it, and of one that was saved and loaded again."""
    import torch

    import pullback as pb

    own = {"bipartite": ["bipartite"], "attention-drop": ["class-attention"], "strided": ["strided"]}
    names: list[Any] = ["random", "norm", "class-attention", "cls-similarity", "bipartite", "strided", *networks]
    found: dict[str, Any] = {"unpruned": outputs(model, images)}
    for preset in ("best", "drop", "paper", "bipartite", "attention-drop", "strided"):
        for score in own.get(preset, names):
            label = score if isinstance(score, str) else type(score).__name__
            choice = names_here("scores", score) if isinstance(score, str) else score
            try:
                pruned = pb.prune(model, choice, ratio=0.5, stages=stages, preset=names_here("presets", preset))
            except pb.PullbackError:  # paper on class tokens needs a metric
                found[f"{preset} {label}"] = "refused"
                continue
            found[f"{preset} {label}"] = {"plan": held_in(pruned), **outputs(pruned, images)}
            assert pb.restore(pruned) is model
    kept = pb.prune(model, networks[0] if networks else "norm", ratio=0.3, stages=stages)
    folder = kept.save_pretrained(place.out / "saved")
    again = pb.PrunedModel.from_pretrained(folder, device=place.device)
    found["saved"], found["loaded"] = outputs(kept, images), outputs(again, images)
    for name, value in found["saved"].items():
        assert torch.equal(value, found["loaded"][name]), f"{name} of the loaded model differs from the saved one's"
    shutil.rmtree(folder)
    return found


@job("pruned-tiny-scenes")
def pruned_tiny_scenes(place: Place) -> dict[str, Any]:
    import pullback as pb

    probe = pb.load_probe("tiny-scenes", "cls", device=place.device)
    head = pb.ImportanceHead.from_pretrained(place.inputs / "head", device=place.device)
    metric = pb.SpectralPullbackNetwork.from_pretrained(place.inputs / "spn", device=place.device)
    return pruned_outputs(probe.backbone.model, images_of(probe, place), place, [4, 7], (head, metric))


@job("pruned-random")
def pruned_random(place: Place) -> dict[str, Any]:
    import torch
    import transformers as tf

    import pullback as pb

    models = {
        name: pb.load_probe(place.inputs / "models" / name, "mean", device=place.device).backbone.model
        for name in ("dinov2", "clip", "vit", "depth-anything")
    }
    there = next(models["clip"].parameters()).device
    own = tf.Dinov2Model.from_pretrained(place.inputs / "models" / "dinov2").to(there).eval().requires_grad_(False)
    found = {}
    for name, model in {**models, "dinov2 of transformers": own}.items():
        images = torch.randn(3, 3, 112, 112, generator=torch.Generator().manual_seed(1)).to(there)
        torch.manual_seed(2)
        networks = (pb.ImportanceHead(48, 32, 2), pb.SpectralPullbackNetwork(48, 3, 32, 2))
        found[name] = pruned_outputs(model, images, place, [1, 2], tuple(net.to(there).eval() for net in networks))
    return found


# VGGT


def view_images(place: Place, device: Any, size: int = 112) -> Any:
    """Two scenes of three views [2, 3, 3, size, size]."""
    import torch
    from PIL import Image

    files = sorted((place.inputs / "scenes").glob("*/*.png"))
    pictures = [torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1) / 255 for path in files]
    return torch.stack(pictures).unflatten(0, (2, 3))[..., :size, :size].to(device)


@job("vggt")
def vggt(place: Place) -> dict[str, Any]:
    import pullback as pb

    model = pb.VGGT.from_pretrained("tiny-views").to("cuda" if place.device == "cuda" else "cpu")
    model = model.eval().requires_grad_(False)
    scenes = view_images(place, next(model.parameters()).device)
    found: dict[str, Any] = {"unpruned": outputs(model, scenes)}
    for scope in ("global", "view"):
        for preset, score in (("best", "norm"), ("best", "random"), ("drop", "norm"), ("strided", "strided")):
            with contextlib.suppress(pb.PullbackError):  # what a scope has no plan for
                pruned = pb.prune_views(model, score, ratio=0.5, stages=[2, 5], preset=preset, scope=scope)
                found[f"{scope} {preset} {score}"] = outputs(pruned, scenes)
    return found


@job("vggt-products", 1e-5)
def vggt_products(place: Place) -> dict[str, Any]:
    import pullback as pb

    found = {}
    for name, choices in {
        "camera": {"decoder": "camera"},
        "camera-1 official": {"decoder": "camera-1", "layer": 3, "pose_derivative": "official"},
        "camera so3": {"decoder": "camera", "layer": 5, "output_metric": pb.CameraMetric()},
        "depth-8x8, not read": {"decoder": "depth-8x8", "layer": 3, "read_probe_layer": False},
        "points": {"decoder": "points", "layer": 4},
        "depth-8x8": {"decoder": "depth-8x8", "layer": 2},
    }.items():
        probe = pb.load_probe("tiny-views", device=place.device, **choices)
        found[name] = products(probe, view_images(place, probe.device, 56))
    for name in ("camera", "depth-8x8"):
        probe = pb.multi_layer_probe("tiny-views", name, device=place.device)
        found[f"{name} inputs"] = products(probe, view_images(place, probe.device, 56)[:1])
    return found


# Jacobian products and what is made of them


def products(probe: Any, images: Any, columns: int = 3) -> dict[str, Any]:
    """F, psi(F), J V and J^T W for random V and W."""
    import torch

    import pullback as pb

    features = probe.features(images)
    operator = pb.JacobianOperator(probe, features)

    def draw(length: int, seed: int) -> Any:
        shape = (len(features), length, columns)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(features)

    across, back = draw(operator.cols, 0), draw(operator.rows, 1)
    pushed, pulled = operator @ across, operator.T @ back
    return {"features": features, "output": operator.output, "pushed": pushed, "pulled": pulled}


def image_products(place: Place, dtype_name: str) -> dict[str, Any]:
    import torch

    import pullback as pb

    dtype = getattr(torch, dtype_name)
    factor = torch.randn(192, 20, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    found = {}
    for name, choices in {
        "cls L10": {"decoder": "cls", "layer": 10},
        "cls L02": {"decoder": "cls", "layer": 2},
        "mean L06": {"decoder": "mean", "layer": 6},
        "depth-8x8 L04": {"decoder": "depth-8x8", "layer": 4},
        "depth L09": {"decoder": "depth", "layer": 9},
        "depth-8x8 L05, not read": {"decoder": "depth-8x8", "layer": 5, "read_probe_layer": False},
        "cls L08 cosine": {"decoder": "cls", "layer": 8, "distance": "cosine"},
        "depth-8x8 L08 log": {"decoder": "depth-8x8", "layer": 8, "distance": "log"},
        "depth-8x8 L08 silog": {"decoder": "depth-8x8", "layer": 8, "distance": "silog"},
        "cls L10 output metric": {"decoder": "cls", "layer": 10, "output_metric": factor.to(dtype)},
    }.items():
        probe = pb.load_probe("tiny-scenes", device=place.device, dtype=dtype, **choices)
        found[name] = products(probe, images_of(probe, place, limit=2).to(dtype))
    for name, options in {"hooks": {}, "hooks raw": {"after_norm": False}, "hooks log": {"distance": "log"}}.items():
        probe = pb.multi_layer_probe("tiny-scenes", "depth-8x8", device=place.device, dtype=dtype, **options)
        found[name] = products(probe, images_of(probe, place, limit=2).to(dtype))
    for name, decoder in {"dinov2": "cls", "clip": "projection", "vit": "pool", "depth-anything": "depth-8x8"}.items():
        probe = pb.load_probe(place.inputs / "models" / name, decoder, 2, device=place.device, dtype=dtype)
        found[f"{name} {decoder}"] = products(probe, images_of(probe, place, limit=2).to(dtype))
    return found


@job("products-float32", 1e-5)
def products_float32(place: Place) -> dict[str, Any]:
    return image_products(place, "float32")


@job("products-float64", 1e-11)
def products_float64(place: Place) -> dict[str, Any]:
    return image_products(place, "float64")


@job("spectrum")
def spectrum(place: Place) -> dict[str, Any]:
    """`pb.spectrum` by every method, importance, the operator's low-rank metric, and K_eff."""
    import pullback as pb

    probe = pb.load_probe("tiny-scenes", "cls", 9, device=place.device)
    images = images_of(probe, place, limit=2)
    found: dict[str, Any] = {}
    for name, options in {
        "exact": {},
        "krylov": {"with_effective_rank": True},
        "paper": {"power_iters": 2, "sketch_width": 12},
        "paper ritz": {"sketch_width": 12, "rayleigh_ritz": True},
    }.items():
        own = pb.spectrum(probe, images, rank=6, method=name.partition(" ")[0], **options)
        found[name] = {
            "singular_values": own.singular_values,
            "modes": own.modes.abs(),  # their sign is free
            "kappa": own.kappa.value,
            "kappa_se": own.kappa.se,
            "importance": pb.token_importance(own),
        }
    several = pb.multi_layer_probe("tiny-scenes", "depth-8x8", device=place.device)
    multiplicity = pb.layer_multiplicity(several, images, num_probes=4)
    found["K_eff"] = {"value": multiplicity.value, "se": multiplicity.se}
    head = pb.ImportanceHead.from_pretrained(place.inputs / "head", device=place.device)
    metric = pb.SpectralPullbackNetwork.from_pretrained(place.inputs / "spn", device=place.device)(
        probe.features(images)
    )
    found["head"], found["spn"] = head(probe.features(images)), metric.importance()
    return found


# DINOv2-S


def dinov2s(place: Place) -> tuple[str, str]:
    assert place.weights is not None
    return str(place.weights / "models" / "dinov2-small"), str(place.weights / "data" / "imagenet_val")


@job("dinov2s-diagnose", weights=True)
def dinov2s_diagnose(place: Place) -> dict[str, Any]:
    model, images = dinov2s(place)
    return diagnosis(place, model, "--images", images, "--layer", "10", "--limit", "4")


@job("dinov2s-targets", weights=True)
def dinov2s_targets(place: Place) -> dict[str, Any]:
    model, images = dinov2s(place)
    return targets(place, model, "--images", images, "--layer", "10", "--limit", "4", "--rank", "8")


@job("dinov2s-prune", weights=True)
def dinov2s_prune(place: Place) -> dict[str, Any]:
    model, images = dinov2s(place)
    options = ("--images", images, "--limit", "4", "--stages", "6", "--ratios", "0.3,0.5")
    return comparison(place, model, *options, presets="best,bipartite,drop", scores="class-attention,norm,random")


@job("dinov2s-embeddings", weights=True)
def dinov2s_embeddings(place: Place) -> dict[str, Any]:
    import pullback as pb

    model, images = dinov2s(place)
    probe = pb.load_probe(model, "cls", 10, device=place.device)
    pixels = probe.load_images(images, 224, limit=4).to(probe.device)
    return {
        "pruned": pruned_outputs(probe.backbone.model, pixels, place, [3, 6], ()),
        "products": products(probe, pixels[:2]),
    }


# Running them


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by their path; tensors, and lists of numbers, become arrays."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, dict):
        for key, part in value.items():
            yield from flat(part, f"{name}/{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        numbers = [isinstance(part, int | float) and not isinstance(part, bool) for part in value]
        if value and all(numbers):
            yield name, np.array(value)
        else:
            for index, part in enumerate(value):
                yield from flat(part, f"{name}[{index}]")
    else:
        yield name, value


def run(names: list[str], place: Place) -> None:
    """Every job into a folder and a pickle of its own; whatever goes wrong in one does not stop the others."""
    for name in names:
        folder = place.out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        begun = time.process_time()
        document: dict[str, Any] = {}
        try:
            document["leaves"] = dict(flat(JOBS[name](Place(place.inputs, folder, place.device, place.weights))))
        except Exception:
            document["error"] = traceback.format_exc()
        document["seconds"] = time.process_time() - begun  # of the processor: others may use the machine
        with open(place.out / f"{name}.tmp", "wb") as file:
            pickle.dump(document, file)
        os.replace(place.out / f"{name}.tmp", place.out / f"{name}.pickle")
        print(f"  {name:24} {document['seconds']:6.1f} s{'  FAILED' if 'error' in document else ''}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("inputs", "run"))
    parser.add_argument("inputs", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("jobs", nargs="*")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--src", type=Path, help="refuse a package that does not come from here")
    options = parser.parse_args()
    sys.modules["matplotlib"] = None  # type: ignore[assignment]  # no figures: they are not compared, and take time
    import pullback

    found = Path(pullback.__file__).resolve().parents[1]
    if options.src is not None and found != options.src.resolve():
        raise SystemExit(f"pullback comes from {found}, expected {options.src}: set PYTHONPATH")
    if options.what == "inputs":
        make_inputs(options.inputs)
    else:
        run(options.jobs, Place(options.inputs, options.out, options.device, options.weights))


if __name__ == "__main__":
    main()
