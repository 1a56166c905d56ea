"""Wrong arguments to the public functions: each row is one mistake and the message that it must meet.

No mistake may end in a traceback of another kind: every error is a `PullbackError` that names the argument. The
commands have a table of their own (tests/cli/test_bad_inputs.py), and images one that goes further
(tests/probes/test_pictures.py).
"""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import pullback as pb
from helpers.families import images_for, model_of
from helpers.pictures import SIZE, small_probe, write_pictures
from helpers.vggt_models import scenes, tiny
from pullback.data import read_crop
from pullback.errors import PullbackError


class Shared:
    """What the rows use; everything is made once, and small."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.probe, self.images, self.model = small_probe(), images_for("dinov2", (2, 2)), model_of("dinov2")
        self.backbone = self.probe.backbone
        self.pixels = torch.full((1, 3, 28, 28), 7, dtype=torch.uint8)

    @cached_property
    def photos(self) -> Path:
        return write_pictures(self.folder / "photos", 3, broken=False)

    @cached_property
    def features(self) -> torch.Tensor:
        return self.probe.features(self.images)

    @cached_property
    def spectrum(self) -> pb.Spectrum:
        return pb.spectrum(self.probe, self.images, rank=2)

    @cached_property
    def store(self) -> pb.TargetStore:
        return pb.compute_targets(self.probe, self.photos, out=self.folder / "targets", rank=2, size=SIZE)

    @cached_property
    def several(self) -> pb.ProbeMap:
        return pb.multi_layer_probe(model_of("depth-v2"), "depth-2x2")

    @cached_property
    def vggt(self) -> pb.VGGT:
        return tiny()

    @cached_property
    def pruned(self) -> pb.PrunedModel:
        return pb.prune(self.model, "norm", ratio=0.5, stages=[1])

    @cached_property
    def text(self) -> Path:
        path = self.folder / "notes.txt"
        path.write_text("hello")
        return path

    def decoded(self, decoder: Any, **options: Any) -> pb.Spectrum:
        return pb.spectrum(pb.load_probe(self.model, decoder, 1), self.images, rank=1, **options)


Row = tuple[str, Callable[[Shared], Any], str]

MODELS: list[Row] = [
    ("load_probe: None", lambda s: pb.load_probe(None), r"model: "),
    ("load_probe: number", lambda s: pb.load_probe(5), r"model: "),
    ("load_probe: tensor", lambda s: pb.load_probe(s.images), r"model: "),
    ("load_probe: list", lambda s: pb.load_probe(["tiny-scenes"]), r"model: "),
    ("load_probe: bytes", lambda s: pb.load_probe(b"tiny-scenes"), r"model: "),
    ("load_probe: empty name", lambda s: pb.load_probe(""), r"model: "),
    ("load_probe: a probe", lambda s: pb.load_probe(s.probe), r"model: "),
    ("load_probe: a backbone", lambda s: pb.load_probe(s.backbone), r"model: "),
    ("load_probe: a class", lambda s: pb.load_probe(type(s.model)), r"model: "),
    ("load_probe: a file", lambda s: pb.load_probe(s.text), r"model: "),
    ("load_probe: a folder of pictures", lambda s: pb.load_probe(s.photos), r"model: "),
    ("load_probe: another module", lambda s: pb.load_probe(nn.Linear(3, 3)), r"model: "),
    ("load_probe: layer too high", lambda s: pb.load_probe(s.model, layer=99), r"layer: "),
    ("load_probe: layer as text", lambda s: pb.load_probe(s.model, layer="2"), r"layer: "),
    ("load_probe: layer 1.5", lambda s: pb.load_probe(s.model, layer=1.5), r"layer: "),
    ("load_probe: layer list", lambda s: pb.load_probe(s.model, layer=[1]), r"layer: "),
    ("load_probe: decoder unknown", lambda s: pb.load_probe(s.model, "nope"), r"decoder: "),
    ("load_probe: decoder number", lambda s: pb.load_probe(s.model, 5), r"decoder: "),
    ("load_probe: decoder tensor", lambda s: pb.load_probe(s.model, s.images), r"decoder: "),
    ("load_probe: decoder class", lambda s: pb.load_probe(s.model, nn.Linear), r"decoder: "),
    ("load_probe: swapped layer and decoder", lambda s: pb.load_probe(s.model, 1, "cls"), r"(layer|decoder): "),
    ("load_probe: head in train mode", lambda s: pb.load_probe(s.model, nn.Dropout()), r"decoder: "),
    ("load_probe: device unknown", lambda s: pb.load_probe("tiny-scenes", device="gpu"), r"device: "),
    ("load_probe: device number", lambda s: pb.load_probe("tiny-scenes", device=1.5), r"device: "),
    ("load_probe: dtype text", lambda s: pb.load_probe("tiny-scenes", dtype="float32"), r"dtype: "),
    ("load_probe: dtype whole numbers", lambda s: pb.load_probe("tiny-scenes", dtype=torch.int32), r"dtype: "),
    ("load_probe: distance unknown", lambda s: pb.load_probe(s.model, distance="nope"), r"distance: "),
    ("load_probe: distance number", lambda s: pb.load_probe(s.model, distance=5), r"distance: "),
    ("load_probe: distance list", lambda s: pb.load_probe(s.model, distance=["log"]), r"distance: "),
    ("load_probe: metric text", lambda s: pb.load_probe(s.model, "cls", 1, output_metric="euclid"), r"output_metric: "),
    ("load_probe: pose_derivative", lambda s: pb.load_probe(s.model, pose_derivative="x"), r"pose_derivative: "),
    ("load_backbone: None", lambda s: pb.load_backbone(None), r"model: "),
    ("load_backbone: a VGGT", lambda s: pb.load_backbone(s.vggt), r"model: "),
    ("load_backbone: a probe", lambda s: pb.load_backbone(s.probe), r"model: "),
    ("multi_layer_probe: None", lambda s: pb.multi_layer_probe(None), r"model: "),
    ("multi_layer_probe: no depth", lambda s: pb.multi_layer_probe(s.model), r"decoder: "),
    ("ProbeMap: backbone is a model", lambda s: pb.ProbeMap(s.model, s.probe.decoder, 1), r"backbone: "),
    ("ProbeMap: decoder by name", lambda s: pb.ProbeMap(s.backbone, "cls", 1), r"decoder: "),
    ("ProbeMap: at unknown", lambda s: pb.ProbeMap(s.backbone, s.probe.decoder, "outputs"), r"(at|layer): "),
    ("ProbeMap: at None", lambda s: pb.ProbeMap(s.backbone, s.probe.decoder, None), r"(at|layer): "),
    ("Decoder: layers a number", lambda s: pb.Decoder("x", 1, lambda taps, layout: taps[0]), r"layers: "),
    ("Decoder: decode not callable", lambda s: pb.Decoder("x", (1,), "mean"), r"decode: "),
    ("Decoder: layer not there", lambda s: pb.load_probe(s.model, pb.Decoder("x", (9,), len)), r"decoder: "),
]


def under_no_grad(tokens):
    with torch.no_grad():
        return tokens.mean(1)


def random_output(tokens):
    return tokens.mean(1) + torch.rand(len(tokens), 1)


DECODERS: list[Row] = [
    ("decoder: conv without PatchGrid", lambda s: s.decoded(nn.Conv2d(24, 2, 1).double().eval()), r"decoder: .*PatchGrid"),
    ("decoder: wrong width", lambda s: s.decoded(nn.Linear(7, 2).double().eval()), r"decoder: "),
    ("decoder: float32 head on float64", lambda s: s.decoded(nn.Linear(24, 2).eval()), r"decoder: "),
    ("decoder: PatchGrid of text", lambda s: s.decoded(pb.PatchGrid("conv")), r"decoder: "),
    ("decoder: PatchGrid of a linear", lambda s: s.decoded(pb.PatchGrid(nn.Linear(7, 2).double().eval())), r"decoder: "),
    ("decoder: returns None", lambda s: s.decoded(lambda tokens: None), r"decoder: expected it to return one tensor"),
    ("decoder: returns a tuple", lambda s: s.decoded(lambda tokens: (tokens, tokens)), r"decoder: expected it to return one"),
    ("decoder: no batch axis", lambda s: s.decoded(lambda tokens: tokens.mean()), r"decoder: expected an output with the batch"),
    ("decoder: argmax", lambda s: s.decoded(lambda tokens: tokens.mean(1).argmax(-1)), r"decoder: expected a floating-point"),
    ("decoder: no_grad", lambda s: s.decoded(under_no_grad), r"decoder: its output does not depend .*no_grad"),
    ("decoder: detach", lambda s: s.decoded(lambda tokens: tokens.detach().mean(1)), r"decoder: its output does not depend"),
    ("decoder: constant", lambda s: s.decoded(lambda tokens: tokens.new_ones(len(tokens), 2)), r"decoder: its output does not"),
    ("decoder: functional dropout", lambda s: s.decoded(lambda tokens: F.dropout(tokens.mean(1))), r"decoder: .*random"),
    ("decoder: random numbers", lambda s: s.decoded(random_output), r"decoder: .*random"),
    ("decoder: numpy inside", lambda s: s.decoded(lambda tokens: torch.from_numpy(tokens.numpy()).mean(1)), r"decoder: "),
    ("decoder: item inside", lambda s: s.decoded(lambda tokens: tokens.mean(1) * tokens.max().item()), r"decoder: "),
    ("decoder: own error", lambda s: s.decoded(lambda tokens: tokens[:, 999]), r"decoder: "),
    ("decoder: takes two arguments", lambda s: s.decoded(lambda tokens, layout: tokens), r"decoder: "),
    ("decoder: complex output", lambda s: s.decoded(lambda tokens: torch.fft.fft(tokens.mean(1))), r"decoder: "),
    ("decoder: NaN output", lambda s: s.decoded(lambda tokens: tokens.mean(1) * torch.nan), r"decoder: its output holds NaN"),
    ("distance: returns None", lambda s: pb.spectrum(pb.load_probe(s.model, "cls", 1, distance=lambda y: None), s.images, 1), r"(decoder|distance): "),
    ("metric: wrong shape", lambda s: pb.spectrum(pb.load_probe(s.model, "cls", 1, output_metric=torch.eye(3)), s.images, 1), r"output_metric: "),
    ("metric: returns None", lambda s: pb.spectrum(pb.load_probe(s.model, "cls", 1, output_metric=lambda y: None), s.images, 1), r"output_metric: "),
]

SPECTRA: list[Row] = [
    ("spectrum: swapped", lambda s: pb.spectrum(s.images, s.probe), r"probe: "),
    ("spectrum: model name", lambda s: pb.spectrum("tiny-scenes", s.images), r"probe: "),
    ("spectrum: None", lambda s: pb.spectrum(None, s.images), r"probe: "),
    ("spectrum: model", lambda s: pb.spectrum(s.model, s.images), r"probe: "),
    ("spectrum: backbone", lambda s: pb.spectrum(s.backbone, s.images), r"probe: "),
    ("spectrum: path", lambda s: pb.spectrum(s.probe, s.photos), r"images: .*load_images"),
    ("spectrum: features", lambda s: pb.spectrum(s.probe, s.features), r"images: "),
    ("spectrum: raw floats", lambda s: pb.spectrum(s.probe, s.images.abs()), r"images: .*normalized=True"),
    ("spectrum: rank 2.5", lambda s: pb.spectrum(s.probe, s.images, rank=2.5), r"rank: expected .* got 2\.5"),
    ("spectrum: rank 0", lambda s: pb.spectrum(s.probe, s.images, rank=0), r"rank: expected .* got 0"),
    ("spectrum: rank text", lambda s: pb.spectrum(s.probe, s.images, rank="3"), r"rank: expected .* got '3'"),
    ("spectrum: rank None", lambda s: pb.spectrum(s.probe, s.images, rank=None), r"rank: expected .* got None"),
    ("spectrum: rank list", lambda s: pb.spectrum(s.probe, s.images, rank=[1, 2]), r"rank: expected .* got \[1, 2\]"),
    ("spectrum: rank True", lambda s: pb.spectrum(s.probe, s.images, rank=True), r"rank: expected .* got True"),
    ("spectrum: rank too large", lambda s: pb.spectrum(s.probe, s.images, rank=10**6), r"rank: expected 1 <= rank <= 24"),
    ("spectrum: method", lambda s: pb.spectrum(s.probe, s.images, 2, "svd"), r"method: expected one of"),
    ("spectrum: method number", lambda s: pb.spectrum(s.probe, s.images, 2, 5), r"method: expected one of"),
    ("spectrum: method list", lambda s: pb.spectrum(s.probe, s.images, 2, ["exact"]), r"method: expected one of"),
    ("spectrum: seed text", lambda s: pb.spectrum(s.probe, s.images, 2, seed="a"), r"seed: "),
    ("spectrum: seed 1.5", lambda s: pb.spectrum(s.probe, s.images, 2, seed=1.5), r"seed: "),
    ("spectrum: seed None", lambda s: pb.spectrum(s.probe, s.images, 2, seed=None), r"seed: "),
    ("spectrum: rtol text", lambda s: pb.spectrum(s.probe, s.images, 2, rtol="small"), r"rtol: "),
    ("spectrum: rtol 0", lambda s: pb.spectrum(s.probe, s.images, 2, rtol=0), r"rtol: "),
    ("spectrum: rtol nan", lambda s: pb.spectrum(s.probe, s.images, 2, rtol=float("nan")), r"rtol: "),
    ("spectrum: power_iters", lambda s: pb.spectrum(s.probe, s.images, 2, "paper", power_iters=-1), r"power_iters: "),
    ("spectrum: power_iters 1.5", lambda s: pb.spectrum(s.probe, s.images, 2, "paper", power_iters=1.5), r"power_iters: "),
    ("spectrum: sketch_width", lambda s: pb.spectrum(s.probe, s.images, 2, "paper", sketch_width=1), r"sketch_width: "),
    ("spectrum: sketch_width 2.5", lambda s: pb.spectrum(s.probe, s.images, 2, "paper", sketch_width=2.5), r"sketch_width: "),
    ("spectrum: num_probes 0", lambda s: pb.spectrum(s.probe, s.images, 2, "krylov", num_probes=0), r"num_probes: "),
    ("spectrum: num_probes 2.5", lambda s: pb.spectrum(s.probe, s.images, 2, "krylov", num_probes=2.5), r"num_probes: "),
    ("spectrum: precision", lambda s: pb.spectrum(s.probe, s.images, 2, precision="fp8"), r"precision: "),
    ("spectrum: precision dtype", lambda s: pb.spectrum(s.probe, s.images, 2, precision=torch.float16), r"precision: "),
    ("spectrum: batch_size 0", lambda s: pb.spectrum(s.probe, s.images, 2, batch_size=0), r"batch_size: expected at least 1"),
    ("spectrum: batch_size 1.5", lambda s: pb.spectrum(s.probe, s.images, 2, batch_size=1.5), r"batch_size: .* got 1\.5"),
    ("spectrum: on_progress", lambda s: pb.spectrum(s.probe, s.images, 2, on_progress="bar"), r"on_progress: "),
    ("metric floor", lambda s: s.spectrum.metric(-1), r"floor: "),
    ("metric floor text", lambda s: s.spectrum.metric("a"), r"floor: "),
    ("metric of tokens", lambda s: s.spectrum.metric() @ s.images, r"v: expected a feature map"),
    ("token_importance: tensor", lambda s: pb.token_importance(s.images), r"spectrum: expected what pb\.spectrum"),
    ("token_importance: None", lambda s: pb.token_importance(None), r"spectrum: expected what pb\.spectrum"),
    ("token_importance: singular values", lambda s: pb.token_importance(s.spectrum.singular_values), r"spectrum: expected"),
    ("diagnose: swapped", lambda s: pb.diagnose(s.images, s.probe), r"probe: expected a probe map"),
    ("diagnose: path", lambda s: pb.diagnose(s.probe, str(s.photos)), r"images: .*load_images"),
    ("diagnose: uint16", lambda s: pb.diagnose(s.probe, np.zeros((28, 28, 3), np.uint16)), r"images: expected uint8"),
    ("diagnose: rank list empty", lambda s: pb.diagnose(s.probe, s.images, []), r"rank: expected one or several"),
    ("diagnose: rank 2.5", lambda s: pb.diagnose(s.probe, s.images, (2, 2.5)), r"rank: expected one or several .* got 2\.5"),
    ("diagnose: rank None", lambda s: pb.diagnose(s.probe, s.images, None), r"rank: expected one or several .* got None"),
    ("diagnose: rank text", lambda s: pb.diagnose(s.probe, s.images, "20"), r"rank: expected one or several .* got '20'"),
    ("diagnose: rank tensor", lambda s: pb.diagnose(s.probe, s.images, s.images), r"rank: expected one or several"),
    ("diagnose: unknown option", lambda s: pb.diagnose(s.probe, s.images, ranks=3), r"ranks: "),
    ("diagnose: convergence", lambda s: pb.diagnose(s.probe, s.images, 2, convergence_samples=1.5), r"convergence_samples: "),
    ("diagnose: thresholds", lambda s: pb.diagnose(s.probe, s.images, 2, thresholds={"kappa": 1}), r"thresholds: "),
    ("diagnose: lanczos_steps", lambda s: pb.diagnose(s.probe, s.images, 2, "krylov", lanczos_steps=0), r"lanczos_steps: "),
    ("multiplicity: one layer", lambda s: pb.layer_multiplicity(s.probe, s.images), r"probe: expected one of several"),
    ("multiplicity: swapped", lambda s: pb.layer_multiplicity(s.images, s.several), r"probe: expected"),
    ("multiplicity: num_probes", lambda s: pb.layer_multiplicity(s.several, s.images, num_probes=1), r"num_probes: expected at"),
    ("exact_importance: None", lambda s: pb.exact_importance(None), r"probe: expected a ProbeMap"),
    ("exact_importance: rank", lambda s: pb.exact_importance(s.probe, 2.5), r"rank: "),
    ("exact_importance: method", lambda s: pb.exact_importance(s.probe, 2, method="x"), r"method: "),
    ("exact_importance: several", lambda s: pb.exact_importance(s.several), r"probe: expected a ProbeMap at a layer"),
    ("exact_modes: images", lambda s: pb.exact_modes(s.images), r"probe: expected a ProbeMap"),
    ("exact_modes: rank", lambda s: pb.exact_modes(s.probe, 0), r"rank: "),
    ("Jacobian: None", lambda s: pb.JacobianOperator(s.probe, None), r"features: "),
    ("Jacobian: images", lambda s: pb.JacobianOperator(s.probe, s.images), r"features: expected \[B, N, 24\]"),
    ("Jacobian: not a function", lambda s: pb.JacobianOperator("probe", s.features), r"probe: "),
    ("Jacobian: chunk_size", lambda s: pb.JacobianOperator(s.probe, s.features, chunk_size=0), r"chunk_size: "),
    ("Jacobian: whole numbers", lambda s: pb.JacobianOperator(torch.sin, torch.ones(2, 3, dtype=torch.long)), r"features: "),
    ("Jacobian: product", lambda s: pb.JacobianOperator(s.probe, s.features) @ s.images, r"V in A @ V: expected shape"),
    ("Jacobian: product of a list", lambda s: pb.JacobianOperator(s.probe, s.features) @ [1.0], r"V in A @ V: expected"),
    ("Dense: list", lambda s: pb.DenseOperator([[1.0]]), r"matrix: "),
    ("Dense: vector", lambda s: pb.DenseOperator(torch.ones(3)), r"matrix: expected \[m, n\]"),
    ("LowRank: shapes", lambda s: pb.LowRankMetric(torch.ones(1, 2, 3, 4), torch.ones(1, 3)), r"modes, energies: expected"),
    ("LowRank: lists", lambda s: pb.LowRankMetric([1.0], [1.0]), r"modes, energies: expected"),
    ("probe: image as features", lambda s: s.probe(s.images), r"features: expected \[B, N, 24\]"),
    ("probe: None as features", lambda s: s.probe(None), r"features: expected"),
    ("probe: features not square", lambda s: s.probe(s.features[:, :4]), r"features: 4 tokens"),
]

TARGETS: list[Row] = [
    ("targets_of: images", lambda s: pb.targets_of(s.probe, s.images), r"features: expected \[B, N, 24\]"),
    ("targets_of: swapped", lambda s: pb.targets_of(s.features, s.probe), r"probe: expected a probe map"),
    ("targets_of: None", lambda s: pb.targets_of(s.probe, None), r"features: expected"),
    ("targets_of: rank 2.5", lambda s: pb.targets_of(s.probe, s.features, 2.5), r"rank: expected .* got 2\.5"),
    ("targets_of: method", lambda s: pb.targets_of(s.probe, s.features, 2, "svd"), r"method: expected one of"),
    ("targets_of: seeds", lambda s: pb.targets_of(s.probe, s.features, 2, seeds=[1]), r"seeds: expected one per sample"),
    ("targets_of: seeds number", lambda s: pb.targets_of(s.probe, s.features, 2, seeds=3), r"seeds: expected one per sample"),
    ("targets_of: num_probes", lambda s: pb.targets_of(s.probe, s.features, 2, "krylov", num_probes=1), r"num_probes: "),
    ("targets_of: rtol", lambda s: pb.targets_of(s.probe, s.features, 2, "krylov", rtol="x"), r"rtol: "),
    ("targets_of: batch_size", lambda s: pb.targets_of(s.probe, s.features, 2, batch_size="2"), r"batch_size: "),
    ("compute_table: swapped", lambda s: pb.compute_table(s.photos, s.probe), r"probe: expected"),
    ("compute_table: None", lambda s: pb.compute_table(s.probe, None), r"path: expected a file, a folder"),
    ("compute_table: number", lambda s: pb.compute_table(s.probe, 5), r"path: expected a file, a folder"),
    ("compute_table: tensor", lambda s: pb.compute_table(s.probe, s.images), r"path: expected a file, a folder"),
    ("compute_table: nowhere", lambda s: pb.compute_table(s.probe, s.folder / "nowhere"), r"no such file or folder"),
    ("compute_table: empty list", lambda s: pb.compute_table(s.probe, []), r"no image found"),
    ("compute_table: limit 1.5", lambda s: pb.compute_table(s.probe, s.photos, size=SIZE, rank=2, limit=1.5), r"limit: .* got 1\.5"),
    ("compute_table: limit 0", lambda s: pb.compute_table(s.probe, s.photos, size=SIZE, rank=2, limit=0), r"limit: .* got 0"),
    ("compute_table: crops 1.5", lambda s: pb.compute_table(s.probe, s.photos, size=SIZE, rank=2, crops=1.5), r"crops: .* got 1\.5"),
    ("compute_table: crops -1", lambda s: pb.compute_table(s.probe, s.photos, size=SIZE, rank=2, crops=-1), r"crops: .* got -1"),
    ("compute_table: size", lambda s: pb.compute_table(s.probe, s.photos, size=30), r"30x30 pixels are not divisible"),
    ("compute_table: size text", lambda s: pb.compute_table(s.probe, s.photos, size="28"), r"size='28': expected a positive"),
    ("compute_table: rank 2.5", lambda s: pb.compute_table(s.probe, s.photos, size=SIZE, rank=2.5), r"rank: expected .* got 2\.5"),
    ("compute_table: seed", lambda s: pb.compute_table(s.probe, s.photos, size=SIZE, rank=2, seed="a"), r"seed: "),
    ("compute_table: num_probes", lambda s: pb.compute_table(s.probe, s.photos, size=SIZE, rank=2, num_probes=1.5), r"num_probes: "),
    ("compute_table: batch_size", lambda s: pb.compute_table(s.probe, s.photos, size=SIZE, rank=2, batch_size=0), r"batch_size: "),
    ("compute_table: precision", lambda s: pb.compute_table(s.probe, s.photos, size=SIZE, rank=2, precision="fp8"), r"precision: "),
    ("compute_table: scenes", lambda s: pb.compute_table(pb.load_probe(s.vggt), s.photos), r"probe: expected one of single"),
    ("compute_targets: out None", lambda s: pb.compute_targets(s.probe, s.photos, out=None), r"out: "),
    ("compute_targets: out a file", lambda s: pb.compute_targets(s.probe, s.photos, out=s.text, rank=2, size=SIZE), r"out: |folder"),
    ("compute_targets: engine", lambda s: pb.compute_targets(s.probe, s.photos, out=s.folder / "a", engine="spark"), r"engine: "),
    ("compute_targets: shard_size", lambda s: pb.compute_targets(s.probe, s.photos, out=s.folder / "a", rank=2, size=SIZE, shard_size=2.5), r"shard_size: "),
    ("TargetStore: nowhere", lambda s: pb.TargetStore.open(s.folder / "nowhere"), r"nowhere"),
    ("TargetStore: None", lambda s: pb.TargetStore.open(None), r"(folder|out|targets): "),
    ("TargetStore: pictures", lambda s: pb.TargetStore.open(s.photos), r"photos"),
    ("open_source: None", lambda s: pb.open_source(None), r"path: expected a file, a folder"),
    ("open_source: numbers", lambda s: pb.open_source([1, 2]), r"path: expected a file, a folder"),
    ("load_images: None", lambda s: pb.load_images(None), r"path: expected a file, a folder"),
    ("load_images: nowhere", lambda s: pb.load_images("nowhere"), r"no such file or folder"),
    ("load_images: empty text", lambda s: pb.load_images(""), r"path=''"),
    ("load_images: null byte", lambda s: pb.load_images("a\0b"), r"path="),
    ("load_images: long name", lambda s: pb.load_images("a" * 5000), r"path="),
    ("load_images: text file", lambda s: pb.load_images(s.text), r"none of the 1 files could be used"),
    ("load_images: size 2.5", lambda s: pb.load_images(s.photos, size=2.5), r"size=2\.5: expected a positive"),
    ("load_images: limit 1.5", lambda s: pb.load_images(s.photos, limit=1.5), r"limit=1\.5: expected a positive"),
    ("load_images: pixels", lambda s: pb.load_images(s.pixels), r"path: expected a file, a folder"),
    ("load_images: swapped", lambda s: pb.load_images(s.probe, s.photos), r"(path|probe): expected"),
    ("probe.load_images: size", lambda s: s.probe.load_images(s.photos, size="28"), r"size='28': expected"),
    ("PixelFormat: size", lambda s: pb.PixelFormat.of(0), r"size=0: expected a positive"),
    ("PixelFormat: mean", lambda s: pb.PixelFormat.of(28, mean=0.5), r"mean"),
    ("PixelFormat: filter", lambda s: pb.PixelFormat.of(28, interpolation=3), r"interpolation"),
    ("normalised: uint8", lambda s: pb.normalised(s.pixels), r"rgb: "),
    ("normalised: PIL", lambda s: pb.normalised(Image.new("RGB", (28, 28))), r"rgb: "),
    ("normalised: channels", lambda s: pb.normalised(torch.rand(28, 28, 3)), r"rgb: "),
    ("read_crop: empty", lambda s: read_crop(b"", None, s.probe.pixel_format()), r"data: "),
    ("read_crop: no picture", lambda s: read_crop(b"hello", None, s.probe.pixel_format()), r"data: "),
    ("read_crop: path", lambda s: read_crop("a.png", None, s.probe.pixel_format()), r"data: "),
]

LEARNING: list[Row] = [
    ("FitConfig: steps", lambda s: pb.FitConfig(steps=0), r"steps"),
    ("FitConfig: steps 1.5", lambda s: pb.FitConfig(steps=1.5), r"steps"),
    ("FitConfig: batch", lambda s: pb.FitConfig(batch="64"), r"batch"),
    ("FitConfig: rate", lambda s: pb.FitConfig(learning_rate=-1), r"learning_rate"),
    ("FitConfig: rate text", lambda s: pb.FitConfig(learning_rate="fast"), r"learning_rate"),
    ("FitConfig: precision", lambda s: pb.FitConfig(precision="fp8"), r"precision"),
    ("FitConfig: ema", lambda s: pb.FitConfig(ema=2), r"ema"),
    ("head: dim 0", lambda s: pb.ImportanceHead(0), r"dim"),
    ("head: dim text", lambda s: pb.ImportanceHead("24"), r"dim"),
    ("head: heads", lambda s: pb.ImportanceHead(24, width=30, heads=4), r"heads"),
    ("head: rounds", lambda s: pb.ImportanceHead(24, rounds=1.5), r"rounds"),
    ("head: features", lambda s: pb.ImportanceHead(24)(torch.randn(1, 5, 7)), r"features: |tokens: "),
    ("head: images", lambda s: pb.ImportanceHead(24)(s.images), r"features: |tokens: "),
    ("head: None", lambda s: pb.ImportanceHead(24)(None), r"features: |tokens: "),
    ("head: from nowhere", lambda s: pb.ImportanceHead.from_pretrained(s.folder / "nowhere"), r"nowhere"),
    ("head: from None", lambda s: pb.ImportanceHead.from_pretrained(None), r"folder: "),
    ("head: from pictures", lambda s: pb.ImportanceHead.from_pretrained(s.photos), r"photos"),
    ("spn: rank", lambda s: pb.SpectralPullbackNetwork(24, rank=0), r"rank"),
    ("spn: rank 2.5", lambda s: pb.SpectralPullbackNetwork(24, rank=2.5), r"rank"),
    ("spn: features", lambda s: pb.SpectralPullbackNetwork(24, rank=2)(torch.randn(1, 5, 7)), r"features: |tokens: "),
    ("spn: from nowhere", lambda s: pb.SpectralPullbackNetwork.from_pretrained(s.folder / "nowhere"), r"nowhere"),
    ("train_head: no stores", lambda s: pb.train_head(s.probe, []), r"train: "),
    ("train_head: a path", lambda s: pb.train_head(s.probe, "targets"), r"train: "),
    ("train_head: one store", lambda s: pb.train_head(s.probe, s.store, 1.5), r"(train|held_out): "),
    ("train_head: held_out 1.5", lambda s: pb.train_head(s.probe, [s.store], 1.5), r"held_out: "),
    ("train_head: held_out text", lambda s: pb.train_head(s.probe, [s.store], "0.1"), r"held_out: "),
    ("train_head: swapped", lambda s: pb.train_head([s.store], s.probe), r"probe: "),
    ("train_head: config", lambda s: pb.train_head(s.probe, [s.store], config={"steps": 1}), r"config: "),
    ("train_head: target", lambda s: pb.train_head(s.probe, [s.store], target="depth"), r"target: "),
    ("train_spn: None", lambda s: pb.train_spn(s.probe, None, None), r"path: expected|images: "),
    ("train_spn: swapped", lambda s: pb.train_spn(s.photos, s.probe, s.photos), r"probe: "),
    ("train_spn: supervision", lambda s: pb.train_spn(s.probe, s.photos, s.photos, supervision="x"), r"supervision: "),
    ("train_spn: rank", lambda s: pb.train_spn(s.probe, s.photos, s.photos, rank=2.5, size=SIZE), r"rank: "),
    ("train_spn: limit", lambda s: pb.train_spn(s.probe, s.photos, s.photos, rank=2, limit=1.5, size=SIZE), r"limit"),
]

PRUNING: list[Row] = [
    ("prune: name", lambda s: pb.prune("tiny-scenes", "norm", ratio=0.5, stages=[1]), r"model: expected a module"),
    ("prune: None", lambda s: pb.prune(None, "norm", ratio=0.5, stages=[1]), r"model: expected a module"),
    ("prune: probe", lambda s: pb.prune(s.probe, "norm", ratio=0.5, stages=[1]), r"model: expected a module"),
    ("prune: pruned", lambda s: pb.prune(s.pruned, "norm", ratio=0.5, stages=[1]), r"model: it is pruned already"),
    ("prune: score unknown", lambda s: pb.prune(s.model, "nope", ratio=0.5, stages=[1]), r"score: "),
    ("prune: score None", lambda s: pb.prune(s.model, None, ratio=0.5, stages=[1]), r"score: "),
    ("prune: score number", lambda s: pb.prune(s.model, 5, ratio=0.5, stages=[1]), r"score: "),
    ("prune: no score", lambda s: pb.prune(s.model, [], ratio=0.5, stages=[1]), r"score"),
    ("prune: head of another width", lambda s: pb.prune(s.model, pb.ImportanceHead(7), ratio=0.5, stages=[1]), r"score|head"),
    ("prune: ratio 1.5", lambda s: pb.prune(s.model, "norm", ratio=1.5, stages=[1]), r"ratio|shares"),
    ("prune: ratio text", lambda s: pb.prune(s.model, "norm", ratio="half", stages=[1]), r"ratio: "),
    ("prune: ratio None", lambda s: pb.prune(s.model, "norm", ratio=None, stages=[1]), r"ratio: "),
    ("prune: ratios", lambda s: pb.prune(s.model, "norm", ratio=[0.1, 0.2], stages=[1]), r"shares|ratio"),
    ("prune: stages number", lambda s: pb.prune(s.model, "norm", ratio=0.5, stages=1), r"stages: "),
    ("prune: no stages", lambda s: pb.prune(s.model, "norm", ratio=0.5, stages=[]), r"stages"),
    ("prune: stage too late", lambda s: pb.prune(s.model, "norm", ratio=0.5, stages=[99]), r"stages"),
    ("prune: stage 1.5", lambda s: pb.prune(s.model, "norm", ratio=0.5, stages=[1.5]), r"stages: "),
    ("prune: preset", lambda s: pb.prune(s.model, "norm", ratio=0.5, stages=[1], preset="worst"), r"preset: "),
    ("pruned: text", lambda s: s.pruned("photo.png"), r"pixel_values: expected images"),
    ("pruned: uint8", lambda s: s.pruned(s.pixels), r"images: expected normalised floats, got torch\.uint8"),
    ("pruned: size", lambda s: s.pruned(torch.randn(1, 4, 28, 28)), r"images: expected \[B, 3, H, W\]"),
    ("restore: model", lambda s: pb.restore(s.model), r"pruned: expected what pb\.prune"),
    ("restore: None", lambda s: pb.restore(None), r"pruned: expected what pb\.prune"),
    ("plan: no budget", lambda s: pb.plan_pruning(s.model, {1: "norm"}, s.images), r"budget: expected one of"),
    ("plan: flops 75", lambda s: pb.plan_pruning(s.model, {1: "norm"}, s.images, flops=75), r"flops: expected a share"),
    ("plan: heads list", lambda s: pb.plan_pruning(s.model, ["norm"], s.images, flops=0.5), r"heads: expected the score"),
    ("plan: images path", lambda s: pb.plan_pruning(s.model, {1: "norm"}, s.photos, flops=0.5), r"images: "),
    ("plan: images uint8", lambda s: pb.plan_pruning(s.model, {1: "norm"}, s.pixels, flops=0.9), r"images: "),
    ("plan: batch", lambda s: pb.plan_pruning(s.model, {1: "norm"}, s.images, flops=0.5, batch=0), r"batch: "),
    ("plan: stages", lambda s: pb.plan_pruning(s.model, {1: "norm"}, s.images, flops=0.5, stages=1.5), r"stages: "),
    ("plan: rounds", lambda s: pb.plan_pruning(s.model, {1: "norm"}, s.images, milliseconds=99.0, rounds=0), r"rounds: "),
    ("plan: model None", lambda s: pb.plan_pruning(None, {1: "norm"}, s.images, flops=0.5), r"model: "),
    ("plan: stage not there", lambda s: pb.plan_pruning(s.model, {99: "norm"}, s.images, flops=0.5), r"stages"),
    ("PrunePlan: shares", lambda s: pb.PrunePlan((1,), (0.5, 0.2)), r"shares"),
    ("PrunePlan: stages number", lambda s: pb.PrunePlan(1, 0.5), r"stages"),
    ("PrunePlan: select", lambda s: pb.PrunePlan((1,), (0.5,), select="x"), r"select"),
    ("PrunePlan: gates", lambda s: pb.PrunePlan((1,), (0.5,), gates=(0.1, 0.2)), r"gates"),
    ("PrunedModel: plan", lambda s: pb.PrunedModel(s.model, 0.5, ["norm"]), r"plan: "),
    ("PrunedModel: from nowhere", lambda s: pb.PrunedModel.from_pretrained(s.folder / "nowhere"), r"nowhere"),
]

MEASURES: list[Row] = [
    ("cosine: shapes", lambda s: pb.cosine_degradation(torch.ones(2, 3), torch.ones(3, 3)), r"expected"),
    ("cosine: lists", lambda s: pb.cosine_degradation([1.0], [1.0]), r"expected"),
    ("relative_l2: shapes", lambda s: pb.relative_l2(torch.ones(2, 3), torch.ones(2, 4)), r"expected"),
    ("silog: shapes", lambda s: pb.silog(torch.ones(2, 3), torch.ones(2, 4)), r"expected"),
    ("silog: weight", lambda s: pb.silog(torch.ones(2, 3), torch.ones(2, 3), weight="x"), r"weight: "),
    ("spearman: shapes", lambda s: pb.spearman(torch.ones(2, 3), torch.ones(2, 4)), r"expected"),
    ("spearman: lists", lambda s: pb.spearman([1.0, 2.0], [1.0, 2.0]), r"expected"),
    ("depth_errors: shapes", lambda s: pb.depth_errors(torch.ones(1, 2, 2), torch.ones(1, 3, 3), torch.ones(1, 2, 2) > 0, median_scaling=False), r"expected"),
    ("neighbours: k", lambda s: pb.neighbour_accuracy(torch.ones(4, 2), torch.arange(4), torch.ones(1, 2), torch.zeros(1), k=0), r"k: "),
    ("neighbours: labels", lambda s: pb.neighbour_accuracy(torch.ones(4, 2), torch.arange(3), torch.ones(1, 2), torch.zeros(1)), r"labels"),
    ("flops: no function", lambda s: pb.flops(s.images), r"function: "),
    ("milliseconds: no function", lambda s: pb.milliseconds(3, "cpu"), r"function: "),
    ("milliseconds: rounds", lambda s: pb.milliseconds(lambda: None, "cpu", 0), r"rounds: "),
    ("compare_paired: lengths", lambda s: pb.compare_paired([1.0], [1.0, 2.0], generator=np.random.default_rng(0)), r"expected"),
    ("compare_paired: generator", lambda s: pb.compare_paired([1.0, 2.0], [1.0, 3.0], generator=0), r"generator: "),
    ("render: seeds None", lambda s: pb.render(None), r"seeds: "),
    ("render: seeds text", lambda s: pb.render("abc"), r"seeds: "),
    ("render: seeds 1.5", lambda s: pb.render([1.5]), r"seeds: "),
    ("render: no seeds", lambda s: pb.render([]), r"seeds: "),
    ("render: size 0", lambda s: pb.render([0], size=0), r"size"),
    ("render: size text", lambda s: pb.render([0], size="28"), r"size"),
    ("render: views", lambda s: pb.render([0], size=28, views=1.5), r"views: "),
    ("render: device", lambda s: pb.render([0], size=28, device="gpu"), r"device: "),
    ("render: ranges", lambda s: pb.render([0], size=28, ranges={"lights": 1}), r"ranges: "),
    ("SceneRange: order", lambda s: pb.SceneRange(lights=(3, 1)), r"lights"),
    ("TokenLayout: square", lambda s: pb.TokenLayout.square(7, 1), r"do not make a square grid"),
    ("register_score: text", lambda s: pb.register_score("norm"), r"entry: "),
    ("register_decoder: None", lambda s: pb.register_decoder(None), r"entry: "),
    ("register_backbone: a class", lambda s: pb.register_backbone(pb.BackboneEntry), r"entry: "),
    ("register_score: taken", lambda s: pb.register_score(pb.ScoreEntry("norm", len, "x")), r"norm"),
    ("VGGT: config", lambda s: pb.VGGT("tiny"), r"config: "),
    ("VGGT: from nowhere", lambda s: pb.VGGT.from_pretrained(s.folder / "nowhere"), r"nowhere"),
    ("VGGTConfig: depth", lambda s: pb.VGGTConfig(depth=1.5), r"depth"),
    ("VGGTConfig: heads", lambda s: pb.VGGTConfig(heads=("nose",)), r"heads"),
    ("vggt: PIL", lambda s: pb.load_probe(s.vggt).features(Image.new("RGB", (28, 28))), r"images: expected views"),
    ("vggt: normalised", lambda s: pb.load_probe(s.vggt).features(pb.normalised(scenes(2, 3, 28, 28))), r"images: .*\[0, 1\]"),
    ("prune_views: a ViT", lambda s: pb.prune_views(s.model, "random", ratio=0.5, stages=[1]), r"model: "),
    ("prune_views: scope", lambda s: pb.prune_views(s.vggt, "random", ratio=0.5, stages=[1], scope="x"), r"scope: "),
    ("load_views: mode", lambda s: pb.load_views(s.photos, mode="fit"), r"mode: expected 'crop' or 'pad'"),
    ("load_views: size", lambda s: pb.load_views(s.photos, size=30), r"size=30: expected a multiple"),
    ("load_views: None", lambda s: pb.load_views(None), r"path: expected a file, a folder"),
    ("decode_pose: shape", lambda s: pb.decode_pose(torch.ones(3), (28, 28)), r"encoding: "),
    ("decode_pose: size", lambda s: pb.decode_pose(torch.ones(1, 9), 28), r"image_size: "),
    ("unproject: shape", lambda s: pb.unproject_depth(torch.ones(5, 5), torch.ones(3, 4), torch.eye(3)), r"depth: expected"),
    ("CameraMetric: unit", lambda s: pb.CameraMetric(translation_unit=0), r"translation_unit: "),
    ("CameraMetric: text", lambda s: pb.CameraMetric(fov_unit="degrees"), r"fov_unit: "),
    ("CameraMetric: cls", lambda s: pb.load_probe(s.model, "cls", 1, output_metric=pb.CameraMetric()), r"output_metric: "),
]

ROWS = [*MODELS, *DECODERS, *SPECTRA, *TARGETS, *LEARNING, *PRUNING, *MEASURES]


@pytest.fixture(scope="module")
def shared_inputs(tmp_path_factory) -> Shared:
    return Shared(tmp_path_factory.mktemp("bad-inputs"))


def test_each_mistake_is_listed_once():
    assert len({name for name, _, _ in ROWS}) == len(ROWS) >= 150


@pytest.mark.parametrize(("call", "message"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_a_wrong_argument_is_refused_with_a_message_that_names_it(shared_inputs, call, message):
    with pytest.raises(PullbackError, match=message):
        call(shared_inputs)
