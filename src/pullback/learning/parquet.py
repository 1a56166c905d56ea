"""Target tables as Arrow tables and back. pyarrow is an extra: it is imported when a store is touched."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pullback.data.crops import Crop
from pullback.errors import PullbackError
from pullback.learning.shards import Shard
from pullback.learning.table import TargetTable

_FLOATS = ("singular_values", "importance", "block_energy", "block_energy_se")
_DOUBLES = ("kappa", "kappa_se", "total", "total_se")


def load_arrow() -> tuple[Any, Any]:
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
    """The rows of a shard; configuration and skipped images go into the metadata, so one file holds all or nothing."""
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
    """From the configuration alone: a shard without a readable image has the same columns."""
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
