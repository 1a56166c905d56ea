"""The Spectral Pullback Network on the camera of scenes: the paper's controlled case, where J has 9 rows a view.

    python -m pullback.experiments.camera_spn --model runs/tiny-views/model --layer 4 --views 2 --train-scenes 1000 \
        --held-out 100 --steps 600 --batch 16 --device cuda --out spn.json

V_1 = |U^T V|_F^2 / r on held-out scenes (over all tokens, and over patch tokens alone) of the network before training,
of the best constant subspace, and of the network after equally many steps under each supervision, all from the same
weights; with the paired lead over the constant subspace, and the natural ratio sum_j |J u_j|^2 / |J|_F^2, which cannot
exceed kappa_cap. Networks are judged as the last step left them: no scene that judges them chose among their weights.
Scenes are drawn and their features computed once; neither the backbone nor the judges saw those that train.

The file is written after every row; the same command goes on with the rows that it does not hold.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table
from torch import Tensor

from pullback.backbones import load_any_backbone
from pullback.decoders import build_decoder
from pullback.errors import DecoderError, PullbackError, RankError
from pullback.evaluation.statistics import mean_and_error
from pullback.experiments.command import Device, Row, Vggt, explained
from pullback.experiments.scene_taxonomy import draw_scenes
from pullback.geometry.spectrum import output_size
from pullback.learning.fit import FitConfig, fit
from pullback.learning.losses import alignment
from pullback.learning.spn import SpectralPullbackNetwork, SpnConfig
from pullback.learning.train_spn import (
    MetricNetwork,
    RandNLA,
    Spectral,
    SpnExamples,
    SpnTask,
    Supervision,
    comparison_row,
    constant_network,
    constant_subspace,
    example_scores,
    natural_sensitivity_ratio,
)
from pullback.probes import ProbeMap
from pullback.report.console import console
from pullback.report.wording import UNKNOWN, plain, short_name
from pullback.runs.files import make_folder, read_json, write_json
from pullback.runs.progress import Lines
from pullback.runs.provenance import provenance, weights_hash
from pullback.runs.settings import check_settings
from pullback.scenes.splits import HELD_OUT
from pullback.targets.recipe import targets_of

TRAIN = 4 * HELD_OUT
"""The first training seed, beside those of the backbone's training and of every evaluation."""
RANK = 20
CONSTANT, UNTRAINED = "best constant subspace", "random init"
SUPERVISIONS = ("RandNLA q=1", "RandNLA q=2", "Spectral")
FROM_CONSTANT = " from constant"  # after a supervision's name: the network starts at the constant subspace
PAPER = {UNTRAINED: 0.005, "RandNLA q=1": 0.713, "Spectral": 0.710}
"""V_1 in tab:spn_vae_variants. That probe is another one, VGGT's depth through a VAE; the paper calls the camera a
controlled setting for the SPN and states no V_1 for it."""


@dataclass(frozen=True)
class Settings:
    """What decides the rows, apart from the weights of the backbone."""

    decoder: str = "camera"
    layer: int | None = None  # None: the middle
    views: int = 2
    size: int | None = None  # None: the model's own
    train_scenes: int = 1000
    held_out: int = 100
    rank: int | None = None  # None: all rows of J, at most `RANK`
    width: int = 256
    steps: int = 600
    batch: int = 16
    learning_rate: float = 1e-3
    precision: str = "float32"
    seed: int = 0


def run(
    model: str,
    settings: Settings,
    *,
    runs: Sequence[str] = SUPERVISIONS,
    device: str = "auto",
    out: Path | None = None,
) -> Iterator[Row]:
    """Row after row, old and new; with ``out``, from and to a JSON file that also holds settings and facts."""
    probe = camera_probe(model, settings, device)
    for name in runs:
        supervision_of(name.removesuffix(FROM_CONSTANT), probe, settings.precision)
    asked = {**asdict(settings), "weights": weights_hash(probe.backbone.model)}
    rows: list[Row] = []
    if out is not None:
        make_folder(out.parent)
        rows = stored_rows(out, asked)
    known = {row["network"]: row for row in rows}
    experiment: CameraSpn | None = None
    for name in (CONSTANT, UNTRAINED, *runs):
        if name in known:
            yield known[name]
            continue
        if experiment is None:  # a file that holds every row needs no scenes
            experiment = CameraSpn(probe, settings)
        row = experiment.row(name)
        rows.append(row)
        if out is not None:
            write_json(out, {"settings": asked, **provenance(probe.device), **experiment.facts(), "rows": rows})
        yield row


def stored_rows(path: Path, asked: Mapping[str, Any]) -> list[Row]:
    """The rows of a file that was made with these settings; none where there is no file."""
    if not path.is_file():
        return []
    stored = read_json(path, "out")
    if not {"settings", "rows"} <= stored.keys():
        raise PullbackError(f"out: {path} is no result of this experiment. Choose another file.")
    check_settings(stored["settings"], asked, path, holds="rows")
    rows: list[Row] = stored["rows"]
    return rows


class CameraSpn:
    """One probe, its training and held-out scenes, and the rows that they give."""

    def __init__(self, probe: ProbeMap, settings: Settings) -> None:
        self.probe, self.settings = probe, settings
        trained = self._images(TRAIN, settings.train_scenes)
        judged = self._images(HELD_OUT, settings.held_out)
        self.rank = rank_of(probe, judged, settings.rank)
        self.train = scene_set(probe, trained, self.rank)
        self.held_out = scene_set(probe, judged, self.rank)
        subspace = constant_subspace(self.train.examples.modes, self.rank)
        self.subspace, self.constant = subspace, constant_network(subspace)
        self.of_constant = example_scores(self.constant, self.held_out.examples)

    def _images(self, first: int, count: int) -> Tensor:
        size = self.settings.size or self.probe.backbone.preprocessing.size
        return draw_scenes(range(first, first + count), size=size, views=self.settings.views, device=self.probe.device)

    def facts(self) -> Row:
        """What is known of the held-out scenes: the ceilings of the natural ratio and of V_1 (below 1 where J has fewer
        than r directions: those that it lacks are zeros), and how unequal the directions are."""
        own = self.held_out.examples
        energies = own.singular_values.double().square()
        layout = self.probe.token_layout(self.held_out.features)
        relative = (own.singular_values / own.singular_values[:, :1]).double().mean(0)
        return {
            "probe": self.probe.name,
            "layer": self.probe.layer,
            "rank": self.rank,
            "tokens": layout.tokens,
            "patch_tokens": layout.views * layout.patches,
            "kappa": float((energies.sum(1) / own.total.double()).mean()),
            "v1_ceiling": float(alignment(own.modes, own.modes).mean()),
            "relative_singular_values": [float(f"{value:.4g}") for value in relative],
        }

    def row(self, name: str) -> Row:
        """What is measured of one network: the constant, the untrained one, or one trained under a supervision."""
        begun = time.perf_counter()
        network = self.constant if name == CONSTANT else self._network(name)
        found = comparison_row(name, example_scores(network, self.held_out.examples), self.of_constant)
        ratio = natural_sensitivity_ratio(network, self.probe, self.held_out.examples)
        mean, error = mean_and_error(ratio)
        return {
            **found,
            "natural_ratio": mean,
            "natural_ratio_se": error if len(ratio) > 1 else None,
            "paper_v1_of_compressed_depth": PAPER.get(name),
            "seconds": round(time.perf_counter() - begun, 2),
        }

    def _network(self, name: str) -> MetricNetwork:
        network = self.new_network()
        if name == UNTRAINED:
            return network.eval()
        if name.endswith(FROM_CONSTANT):
            network.start_at(self.subspace)
        own = self.settings
        config = FitConfig(
            steps=own.steps,
            batch=own.batch,
            learning_rate=own.learning_rate,
            warmup=min(100, own.steps // 10),
            validate_every=own.steps,  # once, at the end, so that nothing is chosen by held-out scenes
            precision="bf16" if self.probe.device.type == "cuda" else "float32",
            seed=own.seed,
        )
        features = self.train.features
        teacher = supervision_of(name.removesuffix(FROM_CONSTANT), self.probe, own.precision)
        fit(network, SpnTask(lambda rows: features[rows], len(features), teacher, self.held_out.examples), config)
        return network.eval()

    def new_network(self) -> SpectralPullbackNetwork:
        """Make a network with the same weights every time, scaled to the training scenes."""
        features, examples = self.train.features, self.train.examples
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.seed)
            network = SpectralPullbackNetwork.from_config(SpnConfig(features.shape[-1], self.rank, self.settings.width))
        first = slice(0, 64)  # enough for means and spreads
        return network.to(features.device).start_from(features[first], examples.singular_values[first])


@dataclass(frozen=True, eq=False)
class SceneSet:
    """Scenes with the exact modes of J there. Features [n, N, C] carry the layout of their views."""

    features: Tensor
    examples: SpnExamples


def scene_set(probe: ProbeMap, images: Tensor, rank: int) -> SceneSet:
    """Compute features and modes of these scenes. Modes are exact and in float32 whatever the supervision's products
    are: they judge it."""
    features = probe.features(images)
    targets = targets_of(probe, features, rank=rank, method="exact", keep_modes=True)
    assert targets.modes is not None
    layout = probe.token_layout(features)
    known = targets.modes, targets.singular_values, targets.total.value
    return SceneSet(features, SpnExamples(lambda rows: features[rows], *known, layout.prefix, layout.views))


def supervision_of(name: str, probe: ProbeMap, precision: str) -> Supervision:
    """The supervision that a row of the paper's table is named after."""
    choices: dict[str, Supervision] = {
        "RandNLA q=1": RandNLA(probe, 1, precision=precision, signal_probes=0),
        "RandNLA q=2": RandNLA(probe, 2, precision=precision, signal_probes=0),
        "Spectral": Spectral(probe, precision=precision),
    }
    if name not in choices:
        known = ", ".join(choices)
        raise PullbackError(f"runs: expected some of {known}, each also with '{FROM_CONSTANT}', got {name!r}.")
    return choices[name]


def rank_of(probe: ProbeMap, images: Tensor, rank: int | None) -> int:
    """The rank of the networks: ``rank``, or as many directions as J has rows, at most `RANK`."""
    rows = output_size(probe, probe.features(images[:1]))
    if rank is not None and not 1 <= rank <= rows:
        raise RankError(
            f"rank: expected 1 to {rows}, the rows of J (9 a view) of {probe.name}, got {rank}. More directions than "
            "that have no meaning here."
        )
    return min(RANK, rows) if rank is None else rank


def camera_probe(model: str, settings: Settings, device: str) -> ProbeMap:
    """The cameras of a VGGT at the layer of the settings."""
    if not re.fullmatch(r"camera(-\d+)?", settings.decoder):
        raise DecoderError(
            f"decoder: expected 'camera' (of all views) or one such as 'camera-1' (of one view), got "
            f"{settings.decoder!r}. Exact modes of every scene are taken here, which needs the few rows of a camera."
        )
    backbone = replace(load_any_backbone(model, device=device), name=short_name(model))
    layer = backbone.depth // 2 if settings.layer is None else settings.layer
    return ProbeMap(backbone, build_decoder(settings.decoder, backbone), layer)


def table(rows: Sequence[Row]) -> Table:
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    titles = ("V_1", "lead", "V_1, patches", "lead", "natural ratio", "paper*")
    found.add_column("network", no_wrap=True)
    for title in titles:
        found.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        cells = [text for name in ("v1", "v1_patches") for text in (plain(row[name]), _lead(row, name))]
        stated = plain(row["paper_v1_of_compressed_depth"])
        found.add_row(row["network"], *cells, plain(row["natural_ratio"]), stated)
    found.caption = "lead: over the constant subspace, 95 % interval.  *V_1 of VGGT's depth through a VAE"
    return found


def _lead(row: Row, name: str) -> str:
    if row["network"] == CONSTANT:
        return UNKNOWN
    half = row[f"{name}_lead_half_width"]
    return f"{row[f'{name}_lead']:+.3f}" + ("" if half is None else f" ± {half:.3f}")


_RUNS = "A supervision, or one with ' from constant'. Several times for several."


def main(
    model: Vggt,
    layer: Annotated[int | None, typer.Option(help="Of the aggregator.", show_default="the middle")] = None,
    views: Annotated[int, typer.Option(min=1, help="Of each scene.")] = 2,
    size: Annotated[int | None, typer.Option(help="Side of the views.", show_default="the model's own")] = None,
    decoder: Annotated[str, typer.Option(help="camera: of all views; camera-1: of one.")] = "camera",
    train_scenes: Annotated[int, typer.Option(min=1, help="Procedural scenes to learn from.")] = 1000,
    held_out: Annotated[int, typer.Option(min=1, help="Scenes that judge.")] = 100,
    rank: Annotated[int | None, typer.Option(help="Of the metric.", show_default="9 a view, at most 20")] = None,
    width: Annotated[int, typer.Option(min=4, help="Of the network.")] = 256,
    steps: Annotated[int, typer.Option(min=1, help="Of each run.")] = 600,
    batch: Annotated[int, typer.Option(min=1, help="Scenes per step.")] = 16,
    learning_rate: Annotated[float, typer.Option(help="After warm-up.")] = 1e-3,
    runs: Annotated[list[str] | None, typer.Option(help=_RUNS, show_default="the three supervisions")] = None,
    precision: Annotated[str, typer.Option(help="Of the products: float32 or tf32.")] = "float32",
    seed: Annotated[int, typer.Option(help="Of weights and sketches.")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file; rows that it holds are kept.")] = None,
    device: Device = "auto",
) -> None:
    """The Spectral Pullback Network on the camera of scenes."""
    with explained():
        settings = Settings(
            decoder=decoder,
            layer=layer,
            views=views,
            size=size,
            train_scenes=train_scenes,
            held_out=held_out,
            rank=rank,
            width=width,
            steps=steps,
            batch=batch,
            learning_rate=learning_rate,
            precision=precision,
            seed=seed,
        )
        progress, rows = Lines(), []
        for row in run(model, settings, runs=runs or SUPERVISIONS, device=device, out=out):
            rows.append(row)
            line = f"{row['network']}: V_1 {plain(row['v1'])}, lead {_lead(row, 'v1')}, {row['seconds']:.0f} s"
            progress.finished(row["network"], line)
        console().print(table(rows))


if __name__ == "__main__":
    typer.run(main)
