"""An image's features in a few thousand bytes: depth from a stored latent, and from what else fits into as many.

    python benchmarks/bottleneck_storage.py --bottlenecks runs/ --cases scenes --device cuda
    python benchmarks/bottleneck_storage.py --bottlenecks runs/ --cases dinov2 --model dinov2=facebook/dinov2-small \
        --images photos=others/ train=photos/ --device cuda

The latent of a bottleneck in float16 and in int8, against the same bytes spent on the features by PCA (of each patch
token, and of whole images), by product quantisation of the tokens, and on something else than features: the picture as
a JPEG, which costs the backbone again, and the depth map itself, which serves no other head. Depth from each is
compared with depth from the full features on held-out images: delta_1 and AbsRel, mean and standard error, and the
paired difference to the latent. Beside it the bytes that all images share: codebook, basis, network.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bottleneck import INPUTS, PHOTOS, SCENES, Case, add_places, kept, loaded, pictures, write_result
from measure import machine
from PIL import Image
from torch import Tensor

import pullback as pb
from pullback.data.images import to_tensor
from pullback.evaluation.fidelity import depth_errors
from pullback.evaluation.statistics import mean_and_error
from pullback.learning.s2vae import S2VAE
from pullback.runs.files import make_folder, write_json

CASES = {
    "scenes": Case("tiny-scenes", "depth", INPUTS, "tiny-scenes", SCENES),
    "dinov2": Case("dinov2", "depth", INPUTS, "dinov2-depth", PHOTOS),
}
TRAIN = {SCENES: SCENES, PHOTOS: "train"}  # where the pictures are that bases and codebooks are fitted to
CODES = 256
"""Centroids of a codebook: a code is a byte."""
FLOAT16, INT8 = "float16", "int8"
BYTES = {FLOAT16: 2, INT8: 1}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    add_places(parser)
    parser.add_argument("--train-images", type=int, default=4096, help="that bases and codebooks are fitted to")
    parser.add_argument("--tokens", type=int, default=65_536, help="of them that codebooks are fitted to")
    parser.add_argument("--rounds", type=int, default=20, help="of k-means")
    parser.add_argument("--held-out", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args(arguments)
    work = make_folder(options.work or (options.out or Path("runs")) / "bottleneck_storage")
    names = ("train_images", "tokens", "rounds", "held_out", "size", "seed")
    settings = {name: getattr(options, name) for name in names}
    for name in options.cases:
        path, begun = work / f"{name}.json", time.perf_counter()
        stored = kept(path, settings)
        if "rows" not in stored:
            stored |= measure(CASES[name], options)
            stored |= {"machine": machine(torch.device(options.device)), "seconds": time.perf_counter() - begun}
            write_json(path, stored)
        write_result("bottleneck_storage", CASES, work, options)


@dataclass(frozen=True)
class Subject:
    """What is stored and read again: the features of a probe at its decoder's inputs, through a bottleneck or not."""

    probe: pb.ProbeMap
    vae: S2VAE
    images: Tensor  # [n, 3, H, W], held out
    layout: pb.TokenLayout
    batch: int

    def patches(self, images: Tensor) -> Tensor:
        """Return the patch tokens of what the decoder reads, [n, P, D]."""
        parts = [self.probe.features(part, normalized=True).as_subclass(Tensor) for part in images.split(self.batch)]
        return torch.cat([part[:, self.layout.prefix :] for part in parts])

    def whole(self, patches: Tensor) -> Tensor:
        """Return patch tokens with zeros in place of the prefix: [b, N, D]."""
        return F.pad(patches, (0, 0, self.layout.prefix, 0))

    def depth(self, patches: Tensor) -> Tensor:
        """Decode patch tokens [b, P, D] to depth [b, H, W]."""
        taps = self.whole(patches).chunk(len(self.probe.layers), -1)
        return self.probe.output(taps, self.layout).float()


@dataclass(frozen=True)
class Way:
    """A way to store an image. ``depth``: what is read again, [b, H, W], of the held-out images first, first + 1, ...,
    given their patch tokens [b, P, D] and the depth [b, H, W] that these give."""

    name: str
    bytes: float  # of an image
    shared: int  # bytes that all images share
    depth: Callable[[int, Tensor, Tensor], Tensor]
    note: str = ""


@torch.no_grad()
def measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of a case, one for each way to store an image."""
    vae, probe = loaded(case, options)
    images = pictures(probe.backbone, case.data, options.held_out, options)
    subject = Subject(probe, vae, images, probe.backbone.token_layout(images), options.batch)
    learned = pictures(probe.backbone, TRAIN[case.data], options.train_images, options, first=0)
    train = torch.cat([subject.patches(part).half() for part in learned.split(options.batch)])
    tests = subject.patches(images)
    full = torch.cat([subject.depth(part) for part in tests.split(options.batch)])
    rows: list[dict[str, Any]] = []
    for kind in (FLOAT16, INT8):
        latent: dict[str, Tensor] | None = None
        for way in ways(kind, subject, train, options):
            starts = range(0, len(tests), options.batch)
            parts = [(k, tests[k : k + options.batch], full[k : k + options.batch]) for k in starts]
            depth = torch.cat([way.depth(*part) for part in parts])
            found = depth_errors(depth, full, full > 0, median_scaling=False)
            values = {"delta1": found.delta1.double(), "abs_rel": found.abs_rel.double()}
            latent = values if latent is None else latent
            row: dict[str, Any] = {"kind": kind, "way": way.name, "bytes": way.bytes, "shared_bytes": way.shared}
            for key, value in values.items():
                row[key], row[f"{key} more than the latent"] = _mean(value), _mean(value - latent[key])
            rows.append(row | {"note": way.note})
            print(f"{kind} {way.name}: {way.bytes:.0f} bytes, delta1 {row['delta1']['mean']:.4f}", flush=True)
    sizes = {"latent": vae.size, "features_bytes": 2 * tests[0].numel(), "patches": tests.shape[1]}
    return {**sizes, "width": tests.shape[2], "images": len(images), "train_images": len(train), "rows": rows}


def ways(kind: str, subject: Subject, train: Tensor, options: argparse.Namespace) -> Iterator[Way]:
    """Yield the ways to store an image in as many bytes as its latent takes, the latent first. ``train`` [n, P, D]."""
    budget = BYTES[kind] * subject.vae.size
    patches, width = train.shape[1:]
    yield latent_way(kind, subject, train)
    count = min(width, budget // (BYTES[kind] * patches))
    yield pca_way(f"PCA of tokens, {count} components", kind, subject, train.flatten(0, 1), count)
    whole, wanted = train.flatten(1), budget // BYTES[kind]
    count = min(len(whole) - 1, wanted)
    note = "" if count == wanted else f"no more directions in {len(whole):,} training images"
    yield pca_way(f"PCA of images, {count:,} components", kind, subject, whole, count, note)
    yield quantised_way(budget // patches, subject, train.flatten(0, 1), options)
    yield jpeg_way(budget, subject)
    yield depth_way(kind, budget, subject)


# Features


def latent_way(kind: str, subject: Subject, train: Tensor) -> Way:
    """The location of the posterior; rounded registers are put back on their spheres."""
    vae, layout = subject.vae, subject.layout

    def encode(patches: Tensor) -> Tensor:
        return vae.encode(subject.whole(patches), layout)

    scale = step_of(torch.cat([encode(part.float()) for part in train.split(subject.batch)]))

    def depth(first: int, patches: Tensor, full: Tensor) -> Tensor:
        z = rounded(encode(patches), kind, scale)
        z = F.normalize(z, dim=-1) if vae.spherical else z
        return subject.depth(vae.decode(z, layout)[:, layout.prefix :])

    shared = sum(value.numel() * value.element_size() for value in vae.state_dict().values())
    return Way("latent", BYTES[kind] * vae.size, shared + (4 * vae.size if kind == INT8 else 0), depth)


def pca_way(name: str, kind: str, subject: Subject, train: Tensor, count: int, note: str = "") -> Way:
    """The leading principal components of samples [n, d]: single tokens, or whole images."""
    mean, basis = principal(train, count)
    size = train.shape[1]
    scale = step_of(torch.cat([(part.float() - mean) @ basis for part in train.split(4096)]))

    def depth(first: int, patches: Tensor, full: Tensor) -> Tensor:
        samples = patches.reshape(-1, size)
        restored = rounded((samples - mean) @ basis, kind, scale) @ basis.mT + mean
        return subject.depth(restored.reshape(patches.shape))

    numbers = subject.layout.patches * sum(subject.vae.config.dims) // size * count
    return Way(name, BYTES[kind] * numbers, 4 * (basis.numel() + size), depth, note)


def principal(samples: Tensor, count: int, chunk: int = 1 << 26) -> tuple[Tensor, Tensor]:
    """Return mean [d] and leading directions [d, count] of samples [n, d], from the smaller Gram matrix.

    ``chunk``: numbers that are copied to float32 at a time."""
    total, size = samples.shape
    rows, columns = max(1, chunk // size), max(1, chunk // total)
    mean = torch.zeros(size, dtype=torch.float64, device=samples.device)
    for part in samples.split(rows):
        mean += part.double().sum(0) / total
    centre = mean.float()
    gram = torch.zeros(min(total, size), min(total, size), dtype=torch.float64, device=samples.device)
    if size <= total:
        for part in samples.split(rows):
            own = part.float() - centre
            gram += own.mT @ own
        return centre, torch.linalg.eigh(gram).eigenvectors[:, -count:].flip(-1).float()
    pieces = [(samples[:, k : k + columns], centre[k : k + columns]) for k in range(0, size, columns)]
    for part, own_centre in pieces:
        own = part.float() - own_centre
        gram += own @ own.mT
    weights = torch.linalg.eigh(gram).eigenvectors[:, -count:].flip(-1).float()
    basis = torch.cat([(part.float() - own_centre).mT @ weights for part, own_centre in pieces])
    return centre, F.normalize(basis, dim=0)


def quantised_way(codes: int, subject: Subject, train: Tensor, options: argparse.Namespace) -> Way:
    """A byte for each of ``codes`` parts of a token: the nearest of `CODES` centroids (Jegou et al. 2011)."""
    width = train.shape[1]
    if not codes or width % codes:
        raise SystemExit(f"product quantisation: {codes} codes do not divide a token of width {width}")
    generator = torch.Generator().manual_seed(options.seed)
    rows = torch.randperm(len(train), generator=generator)[: options.tokens].to(train.device)
    points = train[rows].float().unflatten(1, (codes, -1)).transpose(0, 1)  # [m, n, d]
    centroids = k_means(points, min(CODES, points.shape[1]), options.rounds, generator)

    def depth(first: int, patches: Tensor, full: Tensor) -> Tensor:
        parts = patches.flatten(0, 1).unflatten(1, (codes, -1)).transpose(0, 1)
        restored = chosen(centroids, nearest(parts, centroids))
        return subject.depth(restored.transpose(0, 1).reshape(patches.shape))

    patches = subject.layout.patches
    return Way(f"product quantisation, {codes} codes a token", codes * patches, 4 * centroids.numel(), depth)


def k_means(points: Tensor, count: int, rounds: int, generator: torch.Generator) -> Tensor:
    """Return the centroids [m, count, d] of m sets of points [m, n, d], by Lloyd's rounds from random points.

    A centroid that nothing is nearest to moves to another random point."""

    def drawn() -> Tensor:
        return points[:, torch.randperm(points.shape[1], generator=generator)[:count].to(points.device)]

    centroids = drawn()
    for _ in range(rounds):
        own = nearest(points, centroids)
        sums = torch.zeros_like(centroids).scatter_add_(1, own[..., None].expand_as(points), points)
        sizes = points.new_zeros(centroids.shape[:2]).scatter_add_(1, own, torch.ones_like(own, dtype=points.dtype))
        centroids = torch.where(sizes[..., None] > 0, sums / sizes[..., None].clamp_min(1), drawn())
    return centroids


def nearest(points: Tensor, centroids: Tensor, chunk: int = 8192) -> Tensor:
    """Return the number of the nearest centroid [m, count, d] of each point [m, n, d]: [m, n]."""
    half = centroids.square().sum(-1)[:, None] / 2
    return torch.cat([(part @ centroids.mT - half).argmax(-1) for part in points.split(chunk, dim=1)], 1)


def chosen(centroids: Tensor, numbers: Tensor) -> Tensor:
    """Return the centroids [m, n, d] of these numbers [m, n]."""
    return centroids.gather(1, numbers[..., None].expand(-1, -1, centroids.shape[-1]))


def step_of(values: Tensor) -> Tensor:
    """Return what a step of int8 is worth in each coordinate of values [n, ...], so that the largest of them fits."""
    return values.abs().amax(0).clamp_min(1e-12) / 127


def rounded(values: Tensor, kind: str, step: Tensor) -> Tensor:
    """Return the values as they come back from the store."""
    if kind == FLOAT16:
        return values.half().float()
    return (values / step).round().clamp(-127, 127) * step


# Something else than features


def jpeg_way(budget: int, subject: Subject) -> Way:
    """The picture at the best quality that fits; the backbone runs again."""
    wanted = subject.probe.backbone.preprocessing
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (wanted.mean, wanted.std))
    files = [_jpeg((image.cpu() * std + mean).clamp(0, 1), budget) for image in subject.images]

    def depth(first: int, patches: Tensor, full: Tensor) -> Tensor:
        decoded = torch.stack([_pixels(file) for file in files[first : first + len(patches)]])
        return subject.depth(subject.patches(((decoded - mean) / std).to(patches.device)))

    size = sum(map(len, files)) / len(files)
    over = sum(len(file) > budget for file in files)
    note = "the backbone runs again" + (f"; {over} of {len(files)} pictures do not fit" if over else "")
    return Way("the picture as JPEG", size, 0, depth, note)


def _jpeg(image: Tensor, budget: int) -> bytes:
    """Return an image [3, H, W] in [0, 1] as JPEG, at the highest quality from 1 to 95 within so many bytes."""
    picture = Image.fromarray((255 * image).round().byte().permute(1, 2, 0).numpy())

    def written(quality: int) -> bytes:
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=quality, optimize=True)
        return file.getvalue()

    low, high = 1, 96
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if len(written(middle)) <= budget else (low, middle)
    return written(low)


def _pixels(file: bytes) -> Tensor:
    with Image.open(io.BytesIO(file)) as picture:
        return to_tensor(picture.convert("RGB"))


def depth_way(kind: str, budget: int, subject: Subject) -> Way:
    """The depth map itself, averaged down; in int8 from the least to the greatest of each map, which take 4 bytes."""
    side = int(((budget - (4 if kind == INT8 else 0)) / BYTES[kind]) ** 0.5)

    def depth(first: int, patches: Tensor, full: Tensor) -> Tensor:
        small = F.interpolate(full[:, None], (min(side, full.shape[1]), min(side, full.shape[2])), mode="area")
        if kind == INT8:
            low, high = small.amin((2, 3), keepdim=True).half().float(), small.amax((2, 3), keepdim=True).half().float()
            step = (high - low).clamp_min(1e-12) / 255
            small = ((small - low) / step).round().clamp(0, 255) * step + low
        else:
            small = small.half().float()
        return F.interpolate(small, full.shape[1:], mode="bilinear", align_corners=False)[:, 0]

    return Way(f"the depth map, {side} × {side}", budget, 0, depth, "serves no other head")


def _mean(values: Tensor) -> dict[str, float]:
    mean, se = mean_and_error(values)
    return {"mean": mean, "se": se}


if __name__ == "__main__":
    main()
