"""The target store: a folder of Parquet shards that a run may be killed over at any moment.

    targets.json             the configuration: what the targets were computed from, and how
    targets-00000.parquet    rows, with the configuration and the images that were skipped in the file's metadata
    .run                     which run may write here

A shard is written under a temporary name, flushed to disk and renamed, so it is there whole or not at all. Every run
puts its own mark into `.run` and a shard is only renamed while that mark stands: a worker that outlives its run, or a
second run beside the first, cannot write rows that are already there.

pyarrow is an extra: it is imported when a store is touched.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pullback import __version__
from pullback.checks import of_kind
from pullback.data.crops import RATIO, SCALE, Crop
from pullback.data.images import PixelFormat
from pullback.data.sources import LISTED, Source, open_source
from pullback.errors import FileError, PullbackError, first_line, naming
from pullback.operators import ProductCount
from pullback.probes import HOOKS, INPUTS, ProbeMap, load_probe, multi_layer_probe
from pullback.runs.documents import TARGETS as CONFIG
from pullback.runs.files import read_json, remove_unfinished, write_atomic, write_json
from pullback.runs.folder import claim_folder
from pullback.runs.provenance import weights_hash
from pullback.runs.settings import IDENTITY, check_settings
from pullback.targets.recipe import Recipe
from pullback.targets.table import Shard, SkippedItem, TargetTable

FORMAT = 1
RUN = ".run"
NOT_COMPARED = ("model", "pullback")
"""The weights' hash says which model it is, whatever its folder is called; another version may finish a store."""
_SHARD = re.compile(r"targets-(\d+)\.parquet")


@dataclass(frozen=True, eq=False)
class TargetStore:
    """A folder of targets, for reading. ``config`` is what decided the rows."""

    folder: Path
    config: dict[str, Any]

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> TargetStore:
        of_kind("folder", folder, (str, os.PathLike), "the folder that `pullback targets --out` wrote")
        path = Path(folder)
        if not (path / CONFIG).is_file():
            raise PullbackError(f"folder: expected {CONFIG} in {path}, which `pullback targets --out` writes there.")
        return cls(path, _read_config(path))

    @property
    def shards(self) -> list[Path]:
        """The shards that are there now, by number."""
        return sorted((path for path in self.folder.iterdir() if _SHARD.fullmatch(path.name)), key=number_of)

    @property
    def next_number(self) -> int:
        """The number of the next shard to be written."""
        return 1 + max(map(number_of, self.shards), default=-1)

    def __len__(self) -> int:
        """The number of rows."""
        _, parquet = load_arrow()
        return sum(_read(path, parquet.read_metadata).num_rows for path in self.shards)

    def __iter__(self) -> Iterator[TargetTable]:
        """Iterate over the tables of the shards; empty ones are left out."""
        return (table for path in self.shards if len(table := self._read(path)))

    def read(self, *, modes: bool = True) -> TargetTable:
        """Read all rows into one table, without the modes if they are not wanted."""
        tables = [table for path in self.shards if len(table := self._read(path, modes))]
        if not tables:
            raise PullbackError(f"folder: {self.folder} holds no rows yet. Run `pullback targets` to the end first.")
        return TargetTable.join(tables)

    @property
    def skipped(self) -> tuple[SkippedItem, ...]:
        """Images that could not be used."""
        return self.skipped_in(self.shards)

    def skipped_in(self, shards: Sequence[Path]) -> tuple[SkippedItem, ...]:
        """Return the images of these shards that could not be used."""
        return tuple(SkippedItem(*pair) for info in map(_info, shards) for pair in info["skipped"])

    @property
    def seconds(self) -> float:
        """Seconds spent on computing, over all shards and workers."""
        return sum(info["seconds"] for info in map(_info, self.shards))

    @property
    def products(self) -> ProductCount:
        """Products per row, of the shard that took most."""
        counts = [ProductCount(**info["products"]) for info in map(_info, self.shards)]
        return max(counts, key=lambda count: count.total, default=ProductCount())

    @property
    def method(self) -> str | None:
        """The method that was used: "auto" chooses from sizes alone, so it is the same for all shards."""
        return next((info["method"] for info in map(_info, self.shards) if info["method"]), None)

    def rows_done(self, shards: Sequence[Path] | None = None) -> set[tuple[str, int]]:
        """Return (key, crop number) of every row, or of the rows of these shards."""
        _, parquet = load_arrow()
        done: set[tuple[str, int]] = set()
        for path in self.shards if shards is None else shards:
            part = _read(path, partial(parquet.read_table, columns=["key", "crop"]))
            done.update(zip(part["key"].to_pylist(), part["crop"].to_pylist(), strict=True))
        return done

    def contents(self) -> dict[str, str]:
        """Return {sha256 of an image: its key} of every image with rows."""
        _, parquet = load_arrow()
        found: dict[str, str] = {}
        for path in self.shards:
            part = _read(path, partial(parquet.read_table, columns=["image_sha256", "key"]))
            found.update(zip(part["image_sha256"].to_pylist(), part["key"].to_pylist(), strict=True))
        return found

    def source(self) -> Source:
        """Open the images behind the rows: ``{item.key: item for item in store.source()}``."""
        if self.config["source"] == LISTED:
            raise PullbackError(
                f"source: the images of {self.folder} came as a Python list, which is not stored. "
                "Call open_source with that list."
            )
        return open_source(self.config["source"])

    def load_probe(self, model: str | None = None, *, device: str = "auto") -> ProbeMap:
        """Load the probe that the rows were computed with; ``model``: where its weights are now, if they were moved.

        Decoder and task distance are found by name. Functions of your own, and output metrics, are not stored.
        """
        name, decoder = model or self.config["model"], self.config["decoder"]
        distance, layer = self.config["distance"], self.config["layer"]
        if self.config.get("output_metric") is not None:
            raise self._not_stored("used an output metric, which is not stored", "output_metric")
        if layer == HOOKS:
            after_norm = self.config.get("after_norm", True)
            probe = multi_layer_probe(name, decoder, device=device, distance=distance, after_norm=after_norm)
        else:
            follows = self.config.get("read_probe_layer", True)
            probe = load_probe(name, decoder, layer, device=device, distance=distance, read_probe_layer=follows)
        same_model = weights_hash(probe.backbone.model) == self.config["weights"]  # of others, nothing is expected
        for part, identity in probe.identity.items():
            if same_model and self.config.get(part, identity) != identity:
                kind = part.removesuffix(IDENTITY)
                raise self._not_stored(f"{kind} {self.config[kind]!r} of it is not the one of that name", kind)
        return probe

    def _not_stored(self, reason: str, argument: str) -> PullbackError:
        return PullbackError(
            f"probe: {self.folder} has targets whose probe cannot be loaded by names: {reason}. Load it in Python, "
            f"load_probe(..., {argument}=...), and pass it on."
        )

    def _read(self, path: Path, modes: bool = True) -> TargetTable:
        _, parquet = load_arrow()
        names = _read(path, parquet.read_schema).names
        wanted = [name for name in names if modes or name != "modes"]
        return from_arrow(_read(path, partial(parquet.read_table, columns=wanted)), self.config)


def number_of(shard: Path) -> int:
    """Return the number in the name of a shard."""
    match = _SHARD.fullmatch(shard.name)
    assert match is not None, shard
    return int(match[1])


def _info(shard: Path) -> dict[str, Any]:
    """Return what the metadata of a shard say of how it was made."""
    _, parquet = load_arrow()
    return json.loads(_read(shard, parquet.read_schema).metadata[b"pullback.shard"])


def _read(shard: Path, read: Callable[[Path], Any]) -> Any:
    """Read something of a shard, or raise an error that names it if it is damaged."""
    pa, _ = load_arrow()
    try:
        return read(shard)
    except (pa.ArrowException, OSError) as error:
        raise FileError(
            f"{shard}: cannot be read ({first_line(error)}). Delete it, and run `pullback targets` again to "
            "have its rows computed anew; the other shards stay."
        ) from None


class StaleRun(PullbackError):
    """Another run has taken this store over."""


@dataclass(frozen=True)
class StoreWriter:
    """The right to add shards to a store, until another run claims it. Small, and may travel to other processes."""

    folder: Path
    config: dict[str, Any]
    mark: str

    @classmethod
    def claim(cls, folder: Path, config: dict[str, Any]) -> StoreWriter:
        """Make the store, or take over one of the same configuration; leftovers of a killed run are removed."""
        load_arrow()
        claim_folder(folder, "targets")
        if (folder / CONFIG).is_file():
            with naming("out"):
                stored = _read_config(folder)
            check_settings(stored, config, folder, holds="targets", ignore=NOT_COMPARED, places=("source",))
        elif any(_SHARD.fullmatch(path.name) for path in folder.iterdir()):
            raise PullbackError(f"out: {folder} holds shards but no {CONFIG}. Choose another folder.")
        writer = cls(folder.absolute(), config, uuid.uuid4().hex)
        write_atomic(folder / RUN, lambda file: file.write(writer.mark.encode()), durable=True)
        if not (folder / CONFIG).is_file():
            write_json(folder / CONFIG, config, durable=True)
        remove_unfinished(folder)
        return writer

    def write(self, shard: Shard) -> Path:
        """Add a shard; the same one a second time takes the place of the first."""
        pa, parquet = load_arrow()
        path = self.folder / f"targets-{shard.number:05d}.parquet"
        table = to_arrow(pa, shard, self.config)
        # floats hardly repeat: a dictionary of them would make the file half as large again
        options = {"compression": "zstd", "use_dictionary": False}
        write_atomic(
            path, lambda file: parquet.write_table(table, file, **options), durable=True, check=self._still_ours
        )
        return path

    def _still_ours(self) -> None:
        if (self.folder / RUN).read_text() != self.mark:
            raise StaleRun(f"out: another run has taken over {self.folder}; this one stops, and its shards are kept.")


def _read_config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / CONFIG)
    if config.get("format") != FORMAT:
        raise PullbackError(
            f"folder: {folder} has format {config.get('format')!r}, this version reads {FORMAT}. Compute it anew."
        )
    return config


def configuration(
    probe: ProbeMap, recipe: Recipe, pixels: PixelFormat, *, crops: int, seed: int, source: str
) -> dict[str, Any]:
    """Return everything that decides the rows, as plain JSON."""
    backbone = probe.backbone
    height, width = pixels.size
    layout = backbone.token_layout(torch.empty(0, 3, height, width))
    return {
        "format": FORMAT,
        "pullback": __version__,
        "model": backbone.name,
        "family": backbone.family,
        "weights": weights_hash(backbone.model),
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "decoder": probe.decoder.name,
        "distance": part_name(probe.distance),
        "layer": probe.layer,
        **probe_choices(probe),
        **probe.identity,
        **asdict(recipe),
        "tokens": layout.tokens,
        "dim": backbone.dim * len(probe.layers),
        "grid": list(layout.grid),
        "prefix": layout.prefix,
        "size": [height, width],
        "mean": list(pixels.mean),
        "std": list(pixels.std),
        "interpolation": pixels.interpolation,
        "crops": crops,
        "crop_scale": list(SCALE) if crops else None,
        "crop_ratio": list(RATIO) if crops else None,
        "seed": seed,
        "source": source,
    }


def probe_choices(probe: ProbeMap) -> dict[str, Any]:
    """Return the choices of a probe at its place that decide the rows, besides decoder and task distance."""
    if probe.at == INPUTS:
        metric = {} if probe.output_metric is None else {"output_metric": part_name(probe.output_metric)}
        return {"after_norm": probe.after_norm, **metric}
    return {"read_probe_layer": probe.read_probe_layer, "output_metric": part_name(probe.output_metric)}


def part_name(part: object) -> str | None:
    """Return the name of a task distance or an output metric: a function's own, or the hash of a fixed matrix."""
    if part is None or isinstance(part, str):
        return part
    if isinstance(part, torch.Tensor):
        return hashlib.sha256(part.detach().cpu().double().numpy().tobytes()).hexdigest()
    return getattr(part, "__name__", type(part).__name__)


_FLOATS = ("singular_values", "importance", "block_energy", "block_energy_se")
_DOUBLES = ("kappa", "kappa_se", "total", "total_se")


def load_arrow() -> tuple[Any, Any]:
    """Import pyarrow and pyarrow.parquet, or raise an error that says how to install them."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise PullbackError(
            "out: target stores are Parquet files, for which pyarrow is needed: pip install 'pullback[targets]'. "
            "`pb.compute_table` keeps targets in memory without it."
        ) from None
    return pyarrow, pyarrow.parquet


def to_arrow(pa: Any, shard: Shard, config: dict[str, Any]) -> Any:
    """Return the Arrow table of a shard, with the configuration and the skipped images in its metadata."""
    info = {
        "skipped": [[item.key, item.reason] for item in shard.skipped],
        "seconds": shard.seconds,
        "method": shard.method,
        "products": {"jvp": shard.products.jvp, "vjp": shard.products.vjp},
    }
    metadata = {b"pullback.config": json.dumps(config).encode(), b"pullback.shard": json.dumps(info).encode()}
    schema = _schema(pa, config).with_metadata(metadata)
    table = shard.table
    if table is None:
        return schema.empty_table()
    columns = {
        "key": list(table.keys),
        "image_sha256": list(table.image_sha256),
        "crop": list(table.crop_index),
        "box": [None if crop is None else list(crop.box) for crop in table.crops],
        "flip": [crop is not None and crop.flip for crop in table.crops],
        **{name: _fixed_lists(pa, getattr(table, name)) for name in _FLOATS},
        **{name: getattr(table, name).numpy() for name in _DOUBLES},
    }
    if table.modes is not None:
        columns["modes"] = [row.numpy().tobytes() for row in table.modes]
    return pa.table(columns, schema=schema)


def _schema(pa: Any, config: dict[str, Any]) -> Any:
    """Return the columns, from the configuration alone: a shard without a readable image has the same ones."""
    lengths = _lengths(config)
    fields = [
        ("key", pa.string()),
        ("image_sha256", pa.string()),
        ("crop", pa.int32()),
        ("box", pa.list_(pa.int32())),  # four or null: some versions of Arrow cannot read null lists of fixed size
        ("flip", pa.bool_()),
        *((name, pa.list_(pa.float32(), lengths[name])) for name in _FLOATS),
        *((name, pa.float64()) for name in _DOUBLES),
    ]
    if config["keep_modes"]:
        fields.append(("modes", pa.binary(2 * config["rank"] * config["tokens"] * config["dim"])))  # float16 [r, N, D]
    return pa.schema(fields)


def _lengths(config: dict[str, Any]) -> dict[str, int]:
    return dict.fromkeys(_FLOATS, config["tokens"]) | {"singular_values": config["rank"]}


def _fixed_lists(pa: Any, values: Tensor) -> Any:
    flat = pa.array(values.contiguous().numpy().reshape(-1), pa.float32())
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def from_arrow(table: Any, config: dict[str, Any]) -> TargetTable:
    """Return the rows of a shard's Arrow table as tensors."""
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    rows, lengths = table.num_rows, _lengths(config)

    def floats(name: str) -> Tensor:
        flat = columns[name].flatten().to_numpy(zero_copy_only=False)
        return torch.from_numpy(flat.copy()).view(rows, lengths[name])

    boxes, flips = columns["box"].to_pylist(), columns["flip"].to_pylist()
    modes = None
    if "modes" in columns:
        packed = b"".join(columns["modes"].to_pylist())
        shape = (rows, config["rank"], config["tokens"], config["dim"])
        modes = torch.from_numpy(np.frombuffer(packed, np.float16).reshape(shape).copy())
    return TargetTable(
        keys=tuple(columns["key"].to_pylist()),
        image_sha256=tuple(columns["image_sha256"].to_pylist()),
        crop_index=tuple(columns["crop"].to_pylist()),
        crops=tuple(None if box is None else Crop(tuple(box), flip) for box, flip in zip(boxes, flips, strict=True)),
        **{name: floats(name) for name in _FLOATS},
        **{name: torch.from_numpy(columns[name].to_numpy(zero_copy_only=False).copy()) for name in _DOUBLES},
        modes=modes,
    )
