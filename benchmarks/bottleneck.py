"""What a bottleneck between features and decoder does to the pullback: how rich it is before and after, and how alike.

    python benchmarks/bottleneck.py --bottlenecks runs/ --cases scenes-depth views-depth --device cuda --work work/
    python benchmarks/bottleneck.py --bottlenecks runs/ --cases saliency-L08 --model saliency=DIR --images photos=DIR

A case is a model, a decoder, a place and a bottleneck (`CASES`; `--list` shows them). For each: the spectrum of the
original probe, of the compressed one at the same features, and of the latent one on the spheres and in the ambient
space (r_eff, r_0.90, kappa, CV); the task's output and the features with and without the bottleneck; the agreement of
the two pullbacks; and for small bottlenecks the numerical rank of the compressed Jacobian, in float64. Modes come from
a Krylov space that is converged to 1e-4, or from the dense Jacobian where that is cheaper.

Every step of a case is kept in --work as soon as it is done and not measured again, so a stopped run goes on, and
several processes may do different cases. Each process writes what --work holds by then to the one result file; without
--cases nothing is measured, and the file is written of what is there.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import machine, save
from torch import Tensor

import pullback as pb
from pullback.backbones import load_any_backbone
from pullback.decoders import build_decoder
from pullback.decoders.dense import depth_decoder, load_depth_head
from pullback.evaluation.fidelity import depth_errors, relative_l2
from pullback.evaluation.ranking import spearman
from pullback.evaluation.statistics import mean_and_error
from pullback.geometry.agreement import principal_angles
from pullback.geometry.diagnosis import coefficient_of_variation, rank_for
from pullback.geometry.spectrum import as_token_maps, in_batches, output_size, samples_that_fit, sketch_in_batches
from pullback.geometry.summary import summarize
from pullback.learning.bottleneck import compressed_probe, latent_probe
from pullback.learning.s2vae import S2VAE
from pullback.learning.train_bottleneck import FeatureSet, bottleneck_scores
from pullback.operators import JacobianOperator, LowRankMetric
from pullback.randnla import Estimate, Streams
from pullback.runs.files import make_folder, write_json
from pullback.scenes.render import normalised, render
from pullback.scenes.splits import QUERIES

SCENES, PHOTOS = "scenes", "photos"
RANKS = (20, 50)  # at which kappa is stated, and the agreement
RTOL = 1e-4
ZERO = 1e-10
"""A singular value below this share of the largest counts as none, in float64."""


@dataclass(frozen=True)
class Case:
    """``model`` and ``bottleneck`` are names that --model and --bottleneck, or --bottlenecks, turn into folders."""

    model: str
    decoder: str
    place: int | str  # a layer, or "inputs"
    bottleneck: str
    data: str = SCENES  # rendered scenes, or a name that --images turns into a folder
    role: str = "rich"  # or "control", "size", "kind", "weight"
    spaces: tuple[str, ...] = ("sphere", "ambient")  # in which the latent is probed


INPUTS = "inputs"
SIZES = (256, 512, 1024, 2048, 4096, 8192)
WEIGHTS = (0, 1, 10, 100, 1000)  # of the task, in the metric of the start; nothing is learned after it
CASES: dict[str, Case] = {
    **{f"saliency-L{layer:02d}": Case("saliency", "saliency", layer, "saliency", PHOTOS) for layer in (8, 10, 11)},
    "saliency-L11-small": Case("saliency", "saliency", 11, "saliency-512", PHOTOS),
    "dinov2-depth": Case("dinov2", "depth", INPUTS, "dinov2-depth", PHOTOS),
    "dinov2-depth-L08": Case("dinov2", "depth", 8, "dinov2-depth", PHOTOS),
    "views-depth": Case("tiny-views", "depth", INPUTS, "tiny-views-depth"),
    "scenes-depth": Case("tiny-scenes", "depth", INPUTS, "tiny-scenes", role="control"),
    "views-points": Case("tiny-views", "points", INPUTS, "tiny-views-points", role="control"),
    **{f"size-{size}": Case("tiny-scenes", "depth", INPUTS, f"tiny-scenes-{size}", role="size") for size in SIZES},
    **{
        kind: Case("tiny-scenes", "depth", INPUTS, f"tiny-scenes-{kind}", role="kind", spaces=("ambient",))
        for kind in ("gaussian", "deterministic", "no-cells")
    },
    **{
        f"weight-{weight}": Case("tiny-scenes", "depth", INPUTS, f"tiny-scenes-w{weight}", role="weight", spaces=())
        for weight in WEIGHTS
    },
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=[], choices=list(CASES), metavar="CASE", help="which to measure")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    add_places(parser)
    parser.add_argument("--samples", type=int, default=8, help="held-out samples whose spectra are measured")
    parser.add_argument("--quality-samples", type=int, default=64, help="held-out samples of outputs and features")
    parser.add_argument("--rank", type=int, default=100, help="leading modes; r_0.90 is known up to it")
    parser.add_argument("--slq-probes", type=int, default=8)
    parser.add_argument("--lanczos-steps", type=int, default=25)
    parser.add_argument("--rank-up-to", type=int, default=1024, help="largest M' whose numerical rank is counted")
    parser.add_argument("--precision", default="tf32", help="of the products")
    parser.add_argument("--no-latent", action="store_true", help="leave the spectra at the registers out")
    parser.add_argument("--only", default=None, help="one step of a case, such as changes, which takes few products")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{name:18s} {case}" for name, case in CASES.items()))
        return
    work = make_folder(options.work or (options.out or Path("runs")) / "bottleneck")
    known: dict[str, Measured] = {}
    file = "bottleneck" if options.only is None else f"bottleneck_{options.only}"
    for name in sorted(options.cases, key=lambda name: _original(CASES[name])):  # those of one probe together
        begun = time.perf_counter()
        measure(name, CASES[name], options, work, known)
        print(f"{name}: {time.perf_counter() - begun:.0f} s", flush=True)
        write_result(file, CASES, work, options)
    if not options.cases:
        write_result(file, CASES, work, options)


def write_result(name: str, names: Iterable[str], work: Path, options: argparse.Namespace) -> None:
    """Write the cases that a folder holds, in the order of ``names``, with the origin of the newest."""
    files = {case: work / f"{case}.json" for case in names}
    cases = {case: json.loads(path.read_text()) for case, path in files.items() if path.is_file()}
    if not cases:
        raise SystemExit(f"{work} holds no case yet: choose some with --cases.")
    newest = max(cases.values(), key=lambda case: str(case["machine"]["date"]))
    precision = newest["settings"].get("precision", "float32")
    content = {"machine": newest["machine"], "precision": precision, "cases": cases}
    print(f"written: {save(f'{name}_{options.device}', content, options.out)}", flush=True)


def kept(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what a file holds of a case, or the settings alone where there is none; other settings are refused."""
    stored: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"settings": settings}
    if stored["settings"] != settings:
        raise SystemExit(f"{path} holds other settings: {stored['settings']}. Choose another --work.")
    return stored


# Where models, bottlenecks and pictures are


def add_places(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where things are, and on what they run."""
    parser.add_argument("--bottlenecks", type=Path, default=Path(), help="folder that holds the bottlenecks by name")
    parser.add_argument("--bottleneck", nargs="+", default=[], metavar="NAME=FOLDER", help="those that lie elsewhere")
    parser.add_argument("--model", nargs="+", default=[], metavar="NAME=MODEL", help="where a model of the cases is")
    parser.add_argument("--depth-head", type=Path, help="of DINOv2, in place of the one that ships for its weights")
    parser.add_argument("--images", nargs="+", default=[], metavar="NAME=FOLDER", help="where pictures are")
    parser.add_argument("--views", type=int, default=2, help="of a scene")
    parser.add_argument("--size", type=int, default=None, help="of pictures, in pixels (default: the model's)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=None, help="folder of what is done so far")
    parser.add_argument("--out", type=Path, default=None, help="folder of the JSON file")


def named(entries: Sequence[str], name: str, otherwise: str | Path) -> str | Path:
    """Return the value of NAME=VALUE among the entries."""
    return dict(entry.split("=", 1) for entry in entries).get(name, otherwise)


def loaded(case: Case, options: argparse.Namespace, dtype: torch.dtype | None = None) -> tuple[S2VAE, pb.ProbeMap]:
    """Return the bottleneck of a case, and the original probe at the inputs of its decoder."""
    folder = named(options.bottleneck, case.bottleneck, options.bottlenecks / case.bottleneck)
    vae = S2VAE.from_pretrained(folder, device=options.device).to(dtype or torch.float32).requires_grad_(False)
    backbone = load_any_backbone(named(options.model, case.model, case.model), device=options.device, dtype=dtype)
    if case.model == "dinov2" and options.depth_head is not None:
        decoder = depth_decoder(load_depth_head(options.depth_head, backbone.device, backbone.dtype))
    else:
        decoder = build_decoder(case.decoder, backbone)
    return vae, pb.ProbeMap(backbone, decoder, INPUTS)


def pictures(backbone: Any, data: str, count: int, options: argparse.Namespace, *, first: int = QUERIES) -> Tensor:
    """Return so many pictures as the backbone takes them, [n, 3, H, W] or of several views: rendered scenes from seed
    ``first`` on, or the first in a folder."""
    size = int(options.size or backbone.preprocessing.size)
    if data != SCENES:
        return backbone.read_images(str(named(options.images, data, data)), size, count).pixels.to(backbone.device)
    views = options.views if backbone.views else 1
    seeds = range(first, first + count)
    parts = [seeds[k : k + 64] for k in range(0, count, 64)]
    rgb = torch.cat([render(part, size=size, views=views, device=backbone.device).rgb for part in parts])
    wanted = backbone.preprocessing
    return rgb if backbone.views else normalised(rgb[:, 0], wanted.mean, wanted.std)


# A case, step by step


def measure(name: str, case: Case, options: argparse.Namespace, work: Path, known: dict[str, Measured]) -> None:
    """Do the steps of a case that its file does not hold yet. ``known``: spectra of original probes, by probe."""
    path = work / f"{name}.json"
    settings = {key: getattr(options, key) for key in ("samples", "quality_samples", "rank", "precision", "seed")}
    settings |= {
        "slq_probes": options.slq_probes,
        "lanczos_steps": options.lanczos_steps,
        "size": options.size,
        "views": options.views,
    }
    stored = kept(path, settings)

    def wanted(part: str) -> bool:
        return part not in stored and (options.only is None or part in ("case", options.only))

    def step(part: str, compute: Callable[[], Any]) -> None:
        if not wanted(part):
            return
        begun = time.perf_counter()
        stored[part] = compute()
        stored.setdefault("seconds", {})[part] = time.perf_counter() - begun
        stored["machine"] = machine(torch.device(options.device))
        write_json(path, stored)
        spectrum = "" if "r_eff" not in stored[part] else f", r_eff {stored[part]['r_eff']['mean']:.1f}"
        print(f"  {name} {part}: {stored['seconds'][part]:.1f} s{spectrum}", flush=True)

    vae, at_inputs = loaded(case, options)
    backbone = at_inputs.backbone
    probe = replace(at_inputs, at=case.place)
    images = pictures(backbone, case.data, max(options.samples, options.quality_samples), options)
    features = probe.features(images[: options.samples], normalized=True)
    layout = probe.token_layout(features)
    views = layout.views

    def about() -> dict[str, Any]:
        own = asdict(vae.config)
        size = {key: own[key] for key in ("registers", "latent", "width", "blocks", "posterior", "scores")}
        parameters = sum(parameter.numel() for parameter in vae.parameters())
        inputs, outputs = features[0].numel(), output_size(probe, features)
        sizes = {"views": views, "bound": views * vae.size, "inputs": inputs, "outputs": outputs}
        return {**asdict(case), **size, **sizes, "parameters": parameters, "pixels": list(images.shape[-2:])}

    spectrum = partial(measured, options=options)
    step("case", about)
    step("quality", lambda: quality(at_inputs, vae, images[: options.quality_samples]))
    original = _original(case)
    if (wanted("before") or wanted("agreement")) and original not in known:
        known.clear()  # one at a time: modes are large
        known[original] = spectrum(probe, features)
    step("before", lambda: known[original].summary(layout))
    compressed = compressed_probe(probe, vae)
    if wanted("after") or wanted("agreement"):
        after = spectrum(compressed, features)
        step("after", lambda: after.summary(layout))
        step("agreement", lambda: agreement(probe, features, known[original], after, layout, options))
        del after
    changed = [change(images[: options.samples]) for change in CHANGES.values()]
    step("changes", lambda: changes(probe, compressed, images[: options.samples], changed, features, options))
    for space in () if options.no_latent else case.spaces:
        latent = latent_probe(probe, vae, space=space)
        step(f"latent, {space}", lambda latent=latent: latent_summary(latent, images[: options.samples], spectrum))
    if vae.size * views <= options.rank_up_to:
        step("rank", lambda: numerical_rank(case, options, images[:1], vae.size * views))


def _original(case: Case) -> str:
    return f"{case.model} {case.decoder} {case.place} {case.data}"


# Spectra


@dataclass(frozen=True)
class Measured:
    """The leading modes of B samples and what is known of the rest of J."""

    values: Tensor  # [B, r]
    modes: Tensor  # [B, r, N, D]
    kappa: Estimate  # [B, r]
    effective_rank: Estimate  # [B]
    full: Tensor | None  # [B, min(M, N D)], every singular value where they are known
    method: str
    products: int  # JVPs and VJPs of a sample together, of the part that took most
    seconds: float  # of all samples

    def summary(self, layout: pb.TokenLayout) -> dict[str, Any]:
        """Return means over samples with their standard errors; r_0.90 is the median, as in a diagnosis."""
        rank = self.values.shape[1]
        captured = self.kappa.value
        if self.full is not None:
            energies = self.full.double().square()
            captured = energies.cumsum(1) / energies.sum(1, keepdim=True)
        reached = sorted(rank_for(row, 0.90) for row in captured)
        modes = self.modes[:, : RANKS[0]]
        found: dict[str, Any] = {
            "r_eff": _summary(self.effective_rank.pairs()),
            "r90": dict(zip(("median", "bound"), reached[len(reached) // 2], strict=True)),
            "cv": _plain(coefficient_of_variation(modes)),
            "cv_patches": _plain(coefficient_of_variation(modes, layout.patch_mask().to(modes.device))),
            "method": self.method,
            "products": self.products,
            "seconds": self.seconds,
        }
        for own in (*RANKS, rank):
            at = min(own, rank) - 1
            found[f"kappa_{own}"] = _summary(Estimate(self.kappa.value[:, at], self.kappa.se[:, at]).pairs())
        return found


def measured(probe: pb.ProbeMap, features: Tensor, *, options: argparse.Namespace) -> Measured:
    """Compute the leading modes to `RTOL`, kappa and the effective rank at these features."""
    begun = time.perf_counter()
    rank = min(options.rank, output_size(probe, features), features[0].numel())
    knobs = {"modes_rtol": RTOL, "slq_probes": options.slq_probes, "lanczos_steps": options.lanczos_steps}
    sketches = sketch_in_batches(probe, features, rank, seed=options.seed, precision=options.precision, **knobs)
    parts = [part.sketch for part in sketches]
    ranks = [part.effective_rank for part in parts if part.effective_rank is not None]
    spectra = [part.spectrum for part in parts if part.spectrum is not None]
    if features.is_cuda:
        torch.cuda.synchronize(features.device)
    return Measured(
        values=torch.cat([part.singular_values for part in parts]),
        modes=torch.cat([as_token_maps(part.right, features.shape[1:]) for part in parts]),
        kappa=Estimate.join([part.kappa for part in parts]),
        effective_rank=Estimate.join(ranks),
        full=torch.cat(spectra) if len(spectra) == len(parts) else None,
        method=parts[0].method,
        products=max(part.products.jvp + part.products.vjp for part in parts),
        seconds=time.perf_counter() - begun,
    )


def latent_summary(probe: pb.ProbeMap, images: Tensor, spectrum: Callable[..., Measured]) -> dict[str, Any]:
    features = probe.features(images, normalized=True)
    found = spectrum(probe, features).summary(probe.token_layout(features))
    return {**found, "inputs": features[0].numel()}


# The two pullbacks side by side


def agreement(
    probe: pb.ProbeMap,
    features: Tensor,
    before: Measured,
    after: Measured,
    layout: pb.TokenLayout,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Compare the original and the compressed pullback at the same features, at each of `RANKS`.

    ``captured``: the share of |J|_F^2 in the leading directions of the compressed one, which is at most kappa.
    """
    rank = after.values.shape[1]
    pushed = list(
        in_batches(partial(_pushed, probe, after, options), features, samples_that_fit(probe, features, rank))
    )
    energies = torch.cat(pushed).double()  # [B, r], |J v~_j|^2
    top = before.values[:, 0].double().square()
    total = top / before.kappa.value[:, 0]
    patches = layout.patch_mask()
    found: dict[str, Any] = {}
    for own in RANKS:
        r = min(own, rank)
        angles = principal_angles(*(one.modes[:, :r].flatten(2).mT for one in (before, after)))
        kappa = before.kappa.value[:, r - 1]
        captured = energies[:, :r].sum(1) / total
        first, second = (_importance(one, r).cpu() for one in (before, after))
        found[str(own)] = {
            "captured": _plain(captured),
            "kappa": _plain(kappa),
            "share": _plain(captured / kappa),
            "angles": angles.rad2deg().mean(0).tolist(),
            "alignment": _plain(angles.cos().square().mean(1)),  # |V^T V~|_F^2 / r
            "spearman": _plain(spearman(first, second)),
            "spearman_patches": _plain(spearman(first[:, patches], second[:, patches])),
        }
    return found


def _pushed(probe: pb.ProbeMap, after: Measured, options: argparse.Namespace, part: Tensor, first: int) -> Tensor:
    modes = after.modes[first : first + len(part)].flatten(2).mT
    image = JacobianOperator(probe, part, precision=options.precision) @ modes
    return torch.linalg.vector_norm(image, dim=1, dtype=torch.float64).square()


def _importance(found: Measured, rank: int) -> Tensor:
    return LowRankMetric(found.modes[:, :rank], found.values[:, :rank].square()).importance()


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "contrast": lambda images: 1.1 * images,
    "blur": lambda images: F.avg_pool2d(images.flatten(0, -4), 3, 1, 1).view_as(images),
    "a pixel to the right": lambda images: images.roll(1, -1),
    "another picture": lambda images: images.roll(1, 0),
}
"""What happens to pictures [B, ..., 3, H, W]: small changes, and all of them replaced by the next."""


def changes(
    probe: pb.ProbeMap,
    compressed: pb.ProbeMap,
    images: Tensor,
    changed: Sequence[Tensor],
    features: Tensor,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Compare J and J~ on directions that pictures really move in: delta = features of the changed picture - features.

    ``cosine``: of J delta and J~ delta, whether both predict the same change of the output; ``ratio``: |J~ delta| over
    |J delta|. The leading directions of J need not be ones that any picture moves in.
    """
    moved = [probe.features(own, normalized=True).as_subclass(Tensor) - features.as_subclass(Tensor) for own in changed]
    directions = torch.stack([own.flatten(1) for own in moved], -1)  # [B, N D, K]
    directions = directions / torch.linalg.vector_norm(directions, dim=1, keepdim=True)
    pushed = []
    for one in (probe, compressed):
        parts = in_batches(partial(_moved, one, directions, options), features, samples_that_fit(one, features, 8))
        pushed.append(torch.cat(list(parts)).double())  # [B, M, K]
    first, second = (torch.linalg.vector_norm(one, dim=1) for one in pushed)  # [B, K]
    cosine = (pushed[0] * pushed[1]).sum(1) / (first * second)
    return {
        name: {"cosine": _plain(cosine[:, k]), "ratio": _plain(second[:, k] / first[:, k])}
        for k, name in enumerate(CHANGES)
    }


def _moved(probe: pb.ProbeMap, directions: Tensor, options: argparse.Namespace, part: Tensor, first: int) -> Tensor:
    return JacobianOperator(probe, part, precision=options.precision) @ directions[first : first + len(part)]


# Output and features


@torch.no_grad()
def quality(probe: pb.ProbeMap, vae: S2VAE, images: Tensor, batch: int = 16) -> dict[str, Any]:
    """Compare output and features with the bottleneck to those without; ``probe`` sits at the decoder's inputs."""
    x = probe.features(images, normalized=True)
    depth = probe.decoder.name.startswith("depth")
    compressed = compressed_probe(probe, vae)
    rows = [compared(compressed(part), probe(part), depth=depth) for part in in_parts(x, batch)]
    scores = bottleneck_scores(vae, vae, probe, FeatureSet.of(x), batch=batch)
    lost = {name.removeprefix("unexplained_"): value for name, value in scores.items() if "unexplained_L" in name}
    found = {key: _plain(torch.cat([row[key] for row in rows])) for key in rows[0]}
    return {**found, "images": len(images), "unexplained": lost}


def in_parts(features: Tensor, batch: int) -> list[Tensor]:
    """Cut features [n, N, D] into parts that keep their layout."""
    return [features[first : first + batch] for first in range(0, len(features), batch)]


def compared(changed: Tensor, full: Tensor, *, depth: bool) -> dict[str, Tensor]:
    """Return, image by image, relative L2 and correlation of two outputs [B, ...]; of depth also AbsRel and delta_1."""
    a, b = (output.double().flatten(1) for output in (changed, full))
    centred = [x - x.mean(1, keepdim=True) for x in (a, b)]
    correlation = (centred[0] * centred[1]).sum(1) / (centred[0].norm(dim=1) * centred[1].norm(dim=1))
    found = {"relative_l2": relative_l2(a, b) / 100, "correlation": correlation}
    if depth:
        errors = depth_errors(a, b, b > 0, median_scaling=False)
        found |= {"abs_rel": errors.abs_rel, "delta1": errors.delta1}
    return found


# The rank


def numerical_rank(
    case: Case, options: argparse.Namespace, images: Tensor, bound: int, more: int = 32
) -> dict[str, Any]:
    """Count the singular values of the compressed Jacobian in float64, from its products with more random directions
    than the bound allows it to have."""
    vae, at_inputs = loaded(case, options, torch.float64)
    probe = compressed_probe(replace(at_inputs, at=case.place), vae)
    features = probe.features(images.double(), normalized=True)
    op = JacobianOperator(probe, features)
    columns = min(bound + more, op.rows, op.cols)
    image = op @ Streams.from_seed(0, 1, images.device).gaussian(op.cols, columns, op.dtype)
    values = torch.linalg.svdvals(image[0])
    count = int((values > ZERO * values[0]).sum())
    beyond = float(values[bound] / values[0]) if columns > bound else None
    return {"bound": bound, "numerical": count, "columns": columns, "first_beyond_the_bound": beyond, "zero": ZERO}


def _summary(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return mean and standard error over samples, and the part of the latter that is the estimates' own."""
    found = summarize(pairs)
    se = found.estimation_se if found.count == 1 else found.se
    return {"mean": found.mean, "se": se, "own_se": found.estimation_se}


def _plain(values: Tensor) -> dict[str, float]:
    mean, se = mean_and_error(values)
    return {"mean": mean, "se": se}


if __name__ == "__main__":
    main()
