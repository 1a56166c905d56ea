"""What `pullback search` does, without the terminal: search a gallery for a picture, and keep what was found with its
pictures in a folder."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pullback.data.images import PixelFormat, centre_crop, find_images
from pullback.errors import PullbackError, counted, naming
from pullback.retrieval.gallery import Gallery, Matches
from pullback.runs import documents as files
from pullback.runs.files import write_arrays, write_json
from pullback.runs.folder import check_kind, claim_folder
from pullback.runs.progress import Progress, in_words
from pullback.runs.provenance import provenance

SHOWN = 50
"""Pictures of a long list that are shown; `matches.json` names them all."""


@dataclass(frozen=True)
class SearchRequest:
    """Everything that decides what is found."""

    gallery: str
    image: str
    k: int = 10
    method: str = "auto"
    candidates: int | None = None
    device: str = "auto"


def run_search(request: SearchRequest, out: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Write what was found to `matches.json`, which is also returned, and the pictures as the model sees them to
    `matches.npz`: the query, then the first of what was found."""
    progress = progress or Progress()
    check_kind(out, "search")
    with naming("query"):
        query = _only(find_images(request.image), request.image)
    progress.stage(f"opening {request.gallery}")
    with naming("gallery", instead_of="folder"):
        gallery = Gallery.open(request.gallery, device=request.device)
    progress.stage("searching")
    found = gallery.search(str(query), request.k, method=request.method, candidates=request.candidates)
    info, wanted = gallery.info(), gallery.pixel_format()
    contents = {item.key: item.sha256 for item in gallery if item.key in set(found.keys[0])}
    matches: list[dict[str, Any]] = []
    pictures = [np.asarray(centre_crop(query, wanted))]
    columns = zip(found.keys[0], found.distances[0].tolist(), found.places[0], strict=True)
    for rank, (key, distance, place) in enumerate(columns, start=1):
        matches.append({"rank": rank, "key": key, "distance": distance, "place": place, "state": "not shown"})
        if rank <= SHOWN:
            matches[-1]["state"], picture = _seen(place, contents[key], wanted)
            pictures.append(np.zeros_like(pictures[0]) if picture is None else picture)
    document = {
        "gallery": request.gallery,
        "query": str(query),
        "searched": len(gallery),
        **{name: info[name] for name in ("model", "decoder", "layer", "reference")},
        "method": found.method,
        "compared": found.compared,
        "seconds": found.seconds,
        "how": _how(found, len(gallery)),
        "matches": matches,
        **provenance(gallery.device),
    }
    claim_folder(out, "search")
    write_arrays(out / files.MATCHES_ARRAYS, {"pictures": np.stack(pictures)})
    write_json(out / files.MATCHES, document)
    return document


def _only(found: Sequence[Path], asked: str) -> Path:
    if len(found) != 1:
        raise PullbackError(f"query: expected one image, got {asked!r} with {len(found)} of them.")
    return found[0]


def _seen(place: str | None, sha256: str, wanted: PixelFormat) -> tuple[str, np.ndarray | None]:
    """Return the picture of an item as the model saw it, or why it cannot be shown."""
    if place is None:
        return "unknown", None
    if not Path(place).is_file():
        return "gone", None
    try:
        data = Path(place).read_bytes()
        if hashlib.sha256(data).hexdigest() != sha256:
            return "changed", None
        return "seen", np.asarray(centre_crop(io.BytesIO(data), wanted))
    except Exception:  # whatever a file raises that somebody is just replacing
        return "unreadable", None


def _how(found: Matches, items: int) -> str:
    """Write how much was compared, and how long it took."""
    took = f"in {1000 * found.seconds:.0f} ms" if found.seconds < 1 else f"in {in_words(found.seconds)}"
    if found.method == "candidates":
        return f"{found.compared:,} candidates of {counted(items, 'image')} compared {took}"
    by = ", by optimal transport," if found.method == "transport" else ""
    return f"all {counted(items, 'image')} compared{by} {took}"
