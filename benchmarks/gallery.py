"""How fast a gallery is searched, exactly and by candidates, how much it takes, and what candidates miss.

    python benchmarks/gallery.py                                   # 100,000 items on this CPU, 2 GB below --work
    python benchmarks/gallery.py --items 1000000 --device cuda     # a million, which never leave the GPU

Items are synthetic: every token is that of one of three real images at the same place, plus noise of a tenth of each
channel's spread. The images share the picture in regions, of sizes that are random for each item (--mix regions), or
token by token at random, as no image does (--mix tokens): weights and projections then vary from token to token, which
candidates have a hard time with. Queries are more of the same, not in the gallery.
The images are rendered scenes, or those of --images; the metric is trained here, on the decoder's distances of these
images, unless --drm names one, such as tiny-scenes-drm, which comes with the package.

On a CPU the gallery is a folder, with everything that a user pays; on a GPU the same index is filled in its memory.
Exact search is compared with a loop over pairs, which is timed on a sample. Candidates are compared with exact search,
from several counts on, and with the nearest embeddings alone: how many of the true neighbours these hold.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import machine, milliseconds, save
from torch import Tensor

import pullback as pb
from pullback.learning.distilled_metric import DistilledMetric, MetricItems, pairwise_distances
from pullback.learning.train_drm import MetricExamples, MetricOptions, averaged_output, drm_config, fit_drm
from pullback.retrieval.records import Form, Records
from pullback.retrieval.search import PER_RESULT, WIDER, Index

MIXED = 3
BATCH = {"cpu": 256, "cuda": 4096}
SCENE_BATCH = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--candidates", type=int, nargs="+", default=[50, 100, 200])
    parser.add_argument("--model", default="tiny-scenes")
    parser.add_argument("--decoder", default="depth")
    parser.add_argument("--layer", type=int, default=8)
    parser.add_argument("--images", type=Path, default=None, help="folder of photos; none: rendered scenes")
    parser.add_argument("--limit", type=int, default=256, help="images that items are mixed from")
    parser.add_argument("--size", type=int, default=None, help="pixels, by default the model's own")
    parser.add_argument("--drm", type=Path, default=None, help="folder of a metric for this model and layer")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200, help="of training the metric, where none is given")
    parser.add_argument("--mix", choices=["regions", "tokens"], default="regions")
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--pairs", type=int, default=2000, help="of the loop over pairs")
    parser.add_argument("--rounds", type=int, default=15, help="in turns, of which the median time is taken")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, default=Path("runs/gallery"), help="folder for the gallery of a CPU")
    parser.add_argument("--reuse", action="store_true", help="search the gallery that an earlier run left in --work")
    parser.add_argument("--out", type=Path, default=None, help="folder of the JSON file")
    options = parser.parse_args()
    device = torch.device(options.device)

    probe = pb.load_probe(options.model, options.decoder, options.layer, device=device)
    features, outputs = real_images(probe, options)
    if options.reuse:
        options.drm = gallery_of(options) / "metric"
    metric = trained(probe, features, outputs, options) if options.drm is None else loaded(options.drm, device)
    mix = Mixer(features, probe.token_layout(features), options)
    with torch.no_grad():
        index, row = (on_disk if device.type == "cpu" else on_gpu)(metric, mix, options)
        queries = MetricItems.join([metric(part).half() for part in mix(options.queries, queries=True)])
    row |= compared(index, queries, options)
    content: dict[str, Any] = {
        "machine": machine(device),
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        "real_images": len(features),
        "metric": {"rank": metric.config.rank, "rho": metric.config.scores.get("rho")},
        "tokens": index.form.tokens,
        **row,
    }
    print(f"written: {save(f'gallery_{device.type}', content, options.out)}")


# What is searched


def real_images(probe: pb.ProbeMap, options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """The features and outputs that items are mixed from."""
    features, outputs = [], []
    for start in range(0, options.limit, SCENE_BATCH):
        if options.images is None:
            side = probe.pixel_format(options.size).size[0]
            seeds = range(options.seed + start, options.seed + min(start + SCENE_BATCH, options.limit))
            pixels = pb.normalised(pb.render(seeds, size=side).rgb[:, 0])
        elif start == 0:
            everything = probe.load_images(str(options.images), options.size, options.limit)
            pixels = everything[:SCENE_BATCH]
        else:
            pixels = everything[start : start + SCENE_BATCH]
        if len(pixels):
            of_batch = probe.features(pixels)
            with torch.no_grad():
                outputs.append(averaged_output(probe(of_batch), 16))
            features.append(of_batch.as_subclass(Tensor))
    return torch.cat(features), torch.cat(outputs)


def trained(probe: pb.ProbeMap, features: Tensor, outputs: Tensor, options: argparse.Namespace) -> DistilledMetric:
    """A small metric of these images: good enough to have the spectra of a real one."""
    held_out = max(3, len(features) // 8)
    parts = [MetricExamples.of(features[part], outputs[part]) for part in (slice(held_out, None), slice(held_out))]
    config = drm_config(steps=options.steps, validate_every=max(1, options.steps // 4), seed=options.seed)
    begun = time.perf_counter()
    metric = fit_drm(probe, *parts, None, MetricOptions(rank=options.rank, distill_weight=0.0), config=config)
    print(f"metric: rho {metric.config.scores['rho']:.3f}, {time.perf_counter() - begun:.0f} s", flush=True)
    return metric


def loaded(folder: Path, device: torch.device) -> DistilledMetric:
    return DistilledMetric.from_pretrained(folder, device=device)


class Mixer:
    """Draw items of real ones: the same ones for the same seed and device."""

    def __init__(self, features: Tensor, layout: pb.TokenLayout, options: argparse.Namespace) -> None:
        self.features, self.layout, self.seed = features.float(), layout, options.seed
        self.regions = options.mix == "regions"
        self.spread = options.noise * self.features.std((0, 1))

    def __call__(self, count: int, *, queries: bool = False) -> Iterator[Tensor]:
        """Iterate over batches [b, N, D] of ``count`` items, or of so many others."""
        device = self.features.device
        draw = torch.Generator(device).manual_seed(2 * self.seed + queries)
        places = torch.arange(self.features.shape[1], device=device)
        for start in range(0, count, BATCH[device.type]):
            size = min(BATCH[device.type], count - start)
            images = torch.randint(len(self.features), (size, MIXED), generator=draw, device=device)
            shares = -torch.rand(size, MIXED, generator=draw, device=device).log()  # uniform, once divided by the sum
            chosen = images.gather(1, (self._in_regions if self.regions else self._by_token)(shares, draw))
            mixed = self.features[chosen, places]
            yield mixed + self.spread * torch.randn(mixed.shape, generator=draw, device=device)

    def _by_token(self, shares: Tensor, draw: torch.Generator) -> Tensor:
        """Choose one of the images for each token, [b, N], by their shares [b, MIXED]."""
        return torch.multinomial(shares, self.features.shape[1], replacement=True, generator=draw)

    def _in_regions(self, shares: Tensor, draw: torch.Generator) -> Tensor:
        """Choose the image whose share, times a smooth random field, is largest; of tokens without a place the one with
        the largest share."""
        field = torch.randn(*shares.shape, 4, 4, generator=draw, device=shares.device)
        field = F.interpolate(field, self.layout.grid, mode="bicubic").flatten(2)
        field = F.pad(field, (self.layout.prefix, 0))
        return (field + 2 * shares.log()[..., None]).argmax(1)


def gallery_of(options: argparse.Namespace) -> Path:
    """The folder of the gallery on a CPU; what filling it took is in a file beside it."""
    return options.work / f"gallery-{options.items}"


def on_disk(metric: DistilledMetric, mix: Mixer, options: argparse.Namespace) -> tuple[Index, dict[str, Any]]:
    """Fill a gallery, open it again, and say what that took."""
    folder = gallery_of(options)
    if options.reuse:
        return pb.Gallery.open(folder, device="cpu").index, json.loads(folder.with_suffix(".json").read_text())
    shutil.rmtree(folder, ignore_errors=True)
    gallery = pb.Gallery.create(folder, metric, device="cpu")
    adding, added = 0.0, 0
    for batch in mix(options.items):
        names = [f"{number:07d}" for number in range(added, added + len(batch))]
        begun = time.perf_counter()
        gallery.add_features(names, batch, sha256=names)
        adding, added = adding + time.perf_counter() - begun, added + len(batch)
    opening, opened = _seconds(lambda: pb.Gallery.open(folder, device="cpu"))
    print(f"added {added:,} items in {adding:.0f} s, opened in {opening:.2f} s", flush=True)
    info = opened.info()
    row = {
        "items": added,
        "bytes": info["bytes"],
        "bytes_per_item": info["bytes_per_item"],
        "log_bytes": (folder / "items.jsonl").stat().st_size,
        "adding_seconds": adding,
        "opening_seconds": opening,
    }
    folder.with_suffix(".json").write_text(json.dumps(row))
    return opened.index, row


def on_gpu(metric: DistilledMetric, mix: Mixer, options: argparse.Namespace) -> tuple[Index, dict[str, Any]]:
    """Fill one block of records in the memory of a GPU."""
    device, form = metric.mean.device, Form.of(metric)
    parts = {
        part: torch.empty(options.items, words, dtype=torch.float16, device=device)
        for part, words in form.words.items()
    }
    filled, begun = 0, time.perf_counter()
    for batch in mix(options.items):
        for part, values in form.pack(metric(batch).half()).parts.items():
            parts[part][filled : filled + len(batch)] = values
        filled += len(batch)
    torch.cuda.synchronize(device)
    print(f"made {filled:,} items in {time.perf_counter() - begun:.0f} s", flush=True)
    size = sum(part.nbytes for part in parts.values())
    row = {"items": filled, "bytes": size, "bytes_per_item": size // filled}
    row["making_seconds"] = time.perf_counter() - begun  # type: ignore[assignment]
    nothing = torch.empty(0, dtype=torch.long)
    return Index(form, [Records(form, **parts)], nothing, device), row


# How it is searched


def compared(index: Index, queries: MetricItems, options: argparse.Namespace) -> dict[str, Any]:
    """Time both ways and the loop, and count what candidates find."""
    device, k, rounds = index.device, options.k, options.rounds
    building, _ = _seconds(lambda: index.nearest, device)
    whole = index.exact(queries, k)
    one, many = queries[:1], queries[: min(32, len(queries))]
    ways = {"exact": lambda part: index.exact(part, k)}
    ways |= {str(count): lambda part, c=count: index.candidates(part, k, c) for count in options.candidates}
    single = milliseconds({name: on_one(way, queries) for name, way in ways.items()}, device, rounds)
    batch = milliseconds({name: partial(way, many) for name, way in ways.items()}, device, max(3, rounds // 4))
    exact = {"ms_1": single["exact"], "ms_32": batch["exact"] / len(many)}
    print(f"exact: {exact['ms_1']:.1f} ms a query, {exact['ms_32']:.1f} ms in a batch of {len(many)}", flush=True)
    loop = loop_over_pairs(index, one, options.pairs)
    embedded = index.form.embedding(index.form.sketch_of(queries))
    rows = []
    for count in options.candidates:
        found = index.candidates(queries, k, count)
        shares = _shares(found.rows, whole.rows)
        way = on_one(ways[str(count)], queries)
        mean = 1e3 * _seconds(lambda way=way: [way() for _ in range(len(queries))], device)[0] / len(queries)
        pool = index.nearest(embedded, min(len(index), WIDER * count))
        row = {
            "candidates": count,
            "default": count == PER_RESULT * k,
            "ms_1": single[str(count)],
            "ms_32": batch[str(count)] / len(many),
            "ms_mean": mean,
            "compared_mean": found.compared,
            "faster_1": single["exact"] / single[str(count)],
            "faster_mean": single["exact"] / mean,
            "faster_32": batch["exact"] / batch[str(count)],
            "recall": float(shares.mean()),
            "recall_se": float(shares.std() / len(shares) ** 0.5),
            "recall_of_embeddings": float(_shares(pool, whole.rows).mean()),
            "embeddings": pool.shape[1],
        }
        rows.append(row)
        print(
            f"from {count} candidates on: {row['ms_1']:.1f} ms a query (mean {row['ms_mean']:.1f}), "
            f"{row['faster_1']:.1f} times faster (mean {row['faster_mean']:.1f}, {row['faster_32']:.1f} in a batch), "
            f"{row['compared_mean']} compared, recall@{k} {row['recall']:.4f} ± {row['recall_se']:.4f}; the "
            f"{row['embeddings']} nearest embeddings hold {row['recall_of_embeddings']:.4f}",
            flush=True,
        )
    memory = {"peak_process_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        index.exact(many, k)
        memory |= {"held_gb": held / 1e9, "search_gb": (torch.cuda.max_memory_allocated(device) - held) / 1e9}
    return {
        "queries": len(queries),
        "embedding": embedded.shape[1],
        "sketch": len(index.form.scales),
        "building_seconds": building,
        "exact": exact,
        "loop": loop | {"slower_1": loop["ms_1"] / exact["ms_1"], "slower_32": loop["ms_1"] / exact["ms_32"]},
        "by_candidates": rows,
        "memory": memory,
    }


def on_one(way: Callable[[MetricItems], Any], queries: MetricItems) -> Callable[[], Any]:
    """Search for another one of the queries each time."""
    numbers = cycle(range(len(queries)))

    def search() -> Any:
        number = next(numbers)
        return way(queries[number : number + 1])

    return search


def loop_over_pairs(index: Index, query: MetricItems, pairs: int) -> dict[str, float]:
    """The time of one query by a loop over all items, from that of so many of them."""
    count = min(pairs, len(index))
    items = index.items(torch.arange(count))
    plain = MetricItems(items.projected.float(), items.weights.float(), items.aggregates)
    one = MetricItems(query.projected.float(), query.weights.float(), query.aggregates)

    def loop() -> list[float]:
        return [float(pairwise_distances(one, plain[number : number + 1])) for number in range(count)]

    loop()
    seconds = _seconds(loop, index.device)[0]
    print(f"loop: {1e6 * seconds / count:.0f} µs a pair", flush=True)
    return {"pairs": count, "us_pair": 1e6 * seconds / count, "ms_1": 1e3 * seconds / count * len(index)}


def _shares(found: Tensor, wanted: Tensor) -> Tensor:
    """The share of the wanted rows [Q, k] that are among those found, for each query."""
    return (wanted.cpu()[:, :, None] == found.cpu()[:, None, :]).any(-1).double().mean(1)


def _seconds(call: Callable[[], Any], device: torch.device | None = None) -> tuple[float, Any]:
    cuda = device is not None and device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    result = call()
    if cuda:
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun, result


if __name__ == "__main__":
    main()
