"""Options that several commands share, each defined once. What can be chosen by name is read from the registry."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from pullback import registry


def decoder_help() -> str:
    """List the decoders of the registry: those for every model of single images, then those of one family alone."""
    families = list(dict.fromkeys(entry.family for entry in registry.DECODERS if entry.family is not None))
    listed = [_names(None), *(f"of {family}: {_names(family)}" for family in families)]
    return f"{'; '.join(listed)}. `pullback ls` explains them, and lists those of plugins."


def _names(family: str | None) -> str:
    return ", ".join(entry.name for entry in registry.DECODERS if entry.family == family)


Model = Annotated[str, typer.Argument(help="A hub id, a folder, or an embedded name (see `pullback ls`).")]
Images = Annotated[str, typer.Option(help="An image, a folder or a glob.")]
SOURCES = (
    "A folder, a glob, a text file of paths, webdataset tars (shards/{000..127}.tar), or a Hugging Face dataset "
    "(hf://name:split)."
)
Source = Annotated[str, typer.Option(help=SOURCES)]
Decoder = Annotated[str, typer.Option(help=decoder_help())]
_LAYER = (
    "`hooks`: all layers that a dense decoder reads, side by side; `latent`, `latent-ambient`: the registers of a "
    "bottleneck (--decoder depth@FOLDER), on their spheres or as plain vectors."
)
Layer = Annotated[  # a list, so that a second one is refused and does not replace the first
    list[str] | None, typer.Option(help=f"Block index; {_LAYER}", show_default="the last but one")
]
Layers = Annotated[
    list[str] | None,
    typer.Option(help=f"Block index, several times for several; {_LAYER}", show_default="the last but one"),
]
Rank = Annotated[int, typer.Option(min=1, help="Rank of the metric: how many modes of each Jacobian.")]
Size = Annotated[
    str | None,
    typer.Option(help="Crop in pixels, 224 or 224x308; of views, their width.", show_default="the backbone's"),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Use the first so many images, or scenes.", show_default="all")]
Method = Annotated[
    Literal["auto", "krylov", "paper", "exact"],
    typer.Option(help="auto: the cheaper of exact and krylov; paper: its Algorithms 1 and 2 literally."),
]
Precision = Annotated[Literal["float32", "tf32", "bf16"], typer.Option(help="Arithmetic of the products.")]
ModelPrecision = Annotated[
    Literal["float32", "tf32", "bf16"], typer.Option(help="Arithmetic of the model, pruned or not.")
]
Batch = Annotated[int, typer.Option(min=1, help="Images at a time.")]
Times = Annotated[
    str, typer.Option(help="Batch sizes to time, such as 1,8,64; auto: these on a GPU, 1,8 on a CPU; none.")
]
Distance = Annotated[
    str | None, typer.Option(help="Task distance on the output: cosine, log or silog.", show_default="Euclidean")
]
Seed = Annotated[int, typer.Option(help="Of everything random; the same seed gives the same numbers.")]
Device = Annotated[str, typer.Option(help="auto: the GPU where there is one.")]
