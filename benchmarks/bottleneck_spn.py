"""The Spectral Pullback Network in the latent of a bottleneck: the paper's table `tab:spn_vae_variants`.

    python benchmarks/bottleneck_spn.py --bottleneck runs/bottleneck/model --work runs/bottleneck-spn --device cuda

The network reads the last layer that the task's head reads, after the final norm, as the head sees it, and predicts U
in R^(M' x r). It is judged by V_1 = |U^T V|_F^2 / r on held-out scenes, against the leading modes V of the Jacobian of
z -> head(G(z)) at z = E(x), converged to --rtol; with the paired lead over the best constant subspace and its 95 %
interval, and the share of |J|_F^2 in the predicted subspace (natural ratio), which cannot exceed kappa.

Every network begins with the same weights and sees the same scenes in the same order; the supervisions differ in the
modes that it is compared with. RandNLA: a fresh sketch for every scene of every step, one round of power iteration
(Algorithm 2). Neither kind of target depends on the network, so both are computed beforehand, many scenes at a time,
and both starts learn from the same ones. Networks are judged as the last step left them.

--work keeps latents, modes, sketches, checkpoints and finished rows: the same command goes on. --rows computes some
rows; several processes may do so side by side once the parts are there (--rows without names makes them).
"""

from __future__ import annotations

import argparse
import io
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import machine, save
from torch import Tensor

import pullback as pb
from pullback.evaluation.statistics import mean_and_error
from pullback.geometry.spectrum import as_token_maps
from pullback.learning.bottleneck import latent_probe
from pullback.learning.fit import FitConfig, fit
from pullback.learning.losses import alignment
from pullback.learning.s2vae import S2VAE
from pullback.learning.spn import SpectralPullbackNetwork
from pullback.learning.train_spn import (
    KnownModes,
    MetricNetwork,
    SpnExamples,
    SpnTask,
    comparison_row,
    constant_network,
    constant_subspace,
    example_scores,
    natural_sensitivity_ratio,
    read_by_network,
)
from pullback.operators import JacobianOperator
from pullback.probes import ProbeMap
from pullback.randnla import Streams, leading_modes, power_iteration
from pullback.runs.files import make_folder, read_json, write_atomic, write_json
from pullback.runs.provenance import weights_hash
from pullback.runs.settings import check_settings
from pullback.scenes import render
from pullback.scenes.splits import HELD_OUT, QUERIES
from pullback.targets.recipe import targets_of

TRAIN = 4 * HELD_OUT
"""The first training seed, beside those of the embedded models and of every evaluation. Networks are judged by scenes
from `QUERIES` on, by which no bottleneck was chosen either."""
CONSTANT, UNTRAINED, RANDNLA, SPECTRAL = "best constant subspace", "random init", "RandNLA q=1", "Spectral"
FROM_CONSTANT = " from constant"
ROWS = (CONSTANT, UNTRAINED, RANDNLA, SPECTRAL, RANDNLA + FROM_CONSTANT, SPECTRAL + FROM_CONSTANT)
PAPER = {UNTRAINED: 0.005, RANDNLA: 0.713, SPECTRAL: 0.710}


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bottleneck", required=True, help="folder of an S2VAE")
    parser.add_argument("--work", type=Path, required=True, help="folder to go on from")
    parser.add_argument("--model", default="tiny-scenes")
    parser.add_argument("--decoder", default="depth", help="depth is the full map; depth-32x32 a cheaper one")
    parser.add_argument("--space", default="ambient", choices=["ambient", "sphere"], help="where z may move")
    parser.add_argument("--views", type=int, default=1, help="of a scene, for models of several views")
    parser.add_argument("--size", type=int, default=None, help="of the pictures; default: the model's own")
    parser.add_argument("--train", type=int, default=1000, help="scenes")
    parser.add_argument("--held-out", type=int, default=100, help="scenes")
    parser.add_argument("--rank", type=int, default=20)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=16, help="scenes per step")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--rtol", type=float, default=1e-4, help="of the energies of exact modes, in float32")
    parser.add_argument("--precision", default="tf32", help="of the sketches' products")
    parser.add_argument("--chunk", type=int, default=48, help="scenes whose products are taken together")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=ROWS, help="which to compute")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no part after so many seconds")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="folder of the JSON file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    table = SpnTable(options, Parts(make_folder(options.work), options.seconds))
    print(json.dumps(table.facts), flush=True)
    file = f"bottleneck_spn_{Path(options.model).name}_{options.decoder}_{options.space}_{options.device}"
    for name in options.rows:
        row = table.parts.document(f"row-{slug(name)}", lambda name=name: table.row(name))
        print(json.dumps(row), flush=True)
    stored = {name: table.parts.folder / f"row-{slug(name)}.json" for name in ROWS}
    content = {
        "machine": machine(torch.device(options.device)),
        "settings": table.settings,
        **table.facts,
        "rows": [read_json(path) for path in stored.values() if path.is_file()],
    }
    print(f"written: {save(file, content, options.out)}")


def slug(name: str) -> str:
    return name.lower().replace(" ", "-").replace("=", "")


class Parts:
    """Files of a working folder: what is there is read, what is missing is computed and written."""

    def __init__(self, folder: Path, seconds: float = float("inf")) -> None:
        self.folder, self._until = folder, time.monotonic() + seconds

    def check(self, settings: Mapping[str, Any]) -> None:
        """Refuse a folder with other settings."""
        path = self.folder / "settings.json"
        if path.is_file():
            check_settings(read_json(path), settings, self.folder, holds="a table")
        else:
            write_json(path, settings)

    def document(self, name: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return a small JSON document."""
        path = self.folder / f"{name}.json"
        if not path.is_file():
            self._in_time(name)
            write_json(path, compute())
        return read_json(path)

    def tensors(
        self, name: str, count: int, chunk: int, compute: Callable[[slice], dict[str, Tensor]], device: str
    ) -> tuple[dict[str, Tensor], float]:
        """Return tensors whose first axis counts examples, made and kept by ``chunk`` of them, and the seconds that
        they took when they were made."""
        parts, seconds = [], 0.0
        for first in range(0, count, chunk):
            path = self.folder / f"{name}-{first:06d}.pt"
            if not path.is_file():
                self._in_time(f"{name} {first} of {count}")
                begun = time.perf_counter()
                end = min(count, first + chunk)
                made = {key: value.cpu() for key, value in compute(slice(first, end)).items()}
                took = time.perf_counter() - begun
                write_tensors(path, {**made, "seconds": took})
                print(f"{name}: {end} of {count}, {took:.1f} s", flush=True)
            parts.append(torch.load(path, weights_only=True, map_location=device))
            seconds += parts[-1].pop("seconds")
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}, seconds

    def _in_time(self, name: str) -> None:
        if time.monotonic() > self._until:
            raise SystemExit(f"time is up before {name}; the same command goes on from there")


def write_tensors(path: Path, content: dict[str, Any]) -> None:
    packed = io.BytesIO()
    torch.save(content, packed)
    write_atomic(path, lambda file: file.write(packed.getbuffer()))


@dataclass(frozen=True, eq=False)
class Scenes:
    """What is held of some scenes."""

    latents: Tensor  # z [n, K, d], as the latent probe returned it
    inputs: Tensor  # [n, N, D], float16: the last layer that the head reads, as it sees it

    def latent_rows(self, rows: Tensor) -> Tensor:
        return self.latents[rows.to(self.latents.device)]

    def input_rows(self, rows: Tensor) -> Tensor:
        return self.inputs[rows.to(self.inputs.device)].float()


@dataclass(frozen=True)
class InOrder(SpnTask):
    """A task whose training examples are in the order in which the steps take them."""

    def rows(self, step: int, batch: int, generator: torch.Generator) -> Tensor:
        return torch.arange(step * batch, (step + 1) * batch)


class SpnTable:
    """One latent probe, its scenes and targets, and the rows that they give."""

    def __init__(self, options: argparse.Namespace, parts: Parts) -> None:
        self.options, self.parts = options, parts
        own = pb.multi_layer_probe(options.model, options.decoder, device=options.device)
        vae = S2VAE.from_pretrained(options.bottleneck).to(own.device).eval()
        self.settings = settings_of(options) | {
            "weights": weights_hash(own.backbone.model),
            "bottleneck": weights_hash(vae),
        }
        parts.check(self.settings)
        self.probe = latent_probe(own, vae, space=options.space)
        self.train = scenes(self.probe, TRAIN, options.train, options)
        self.held_out = scenes(self.probe, QUERIES, options.held_out, options)
        device, chunk = options.device, options.chunk
        exact, took = parts.tensors("modes", options.train, chunk, self._modes, device)
        self.modes, self.values = exact["modes"], exact["singular_values"]
        judged, judging = parts.tensors("held-out", options.held_out, chunk, self._judged, device)
        self.examples = SpnExamples(
            self.held_out.latent_rows,
            judged["modes"],
            judged["singular_values"],
            judged["total"],
            prefix=0,
            inputs=self.held_out.input_rows,
        )
        generator = torch.Generator().manual_seed(options.seed)
        self.order = torch.randint(options.train, (options.steps * options.batch,), generator=generator)
        sketched, sketching = parts.tensors("sketches", len(self.order), chunk, self._sketches, device)
        self.sketches = KnownModes(sketched["modes"], sketched["singular_values"])
        self.subspace = constant_subspace(self.modes, options.rank)
        self.of_constant = example_scores(constant_network(self.subspace), self.examples)
        self.facts = self._facts() | {
            "sketch_v1": float(sketched["alignment"].double().mean()),
            "krylov_products": int(exact["products"].max()),
            "seconds": {
                "modes": round(took, 1),
                "held-out modes": round(judging, 1),
                "sketches": round(sketching, 1),
            },
        }

    # Targets

    def _modes(self, rows: slice) -> dict[str, Tensor]:
        """The modes of training scenes, converged to rtol in float32."""
        latents, own = self.train.latents[rows], self.options
        operator = JacobianOperator(self.probe, latents)
        streams = Streams.from_seed(own.seed, len(latents), latents.device, rows.start)
        found = leading_modes(operator, own.rank, rtol=own.rtol, streams=streams).svd
        return {
            "modes": as_token_maps(found.right, latents.shape[1:]).half(),  # rounding costs V_1 less than 1e-6
            "singular_values": found.singular_values,
            "products": torch.full((len(latents),), found.products.jvp + found.products.vjp),
        }

    def _judged(self, rows: slice) -> dict[str, Tensor]:
        latents, own = self.held_out.latents[rows], self.options
        seeds = range(own.seed + rows.start, own.seed + rows.start + len(latents))
        found = targets_of(
            self.probe,
            latents,
            own.rank,
            seeds=list(seeds),
            rtol=own.rtol,
            keep_modes=True,
            batch_size=len(latents),
        )
        assert found.modes is not None
        return {"modes": found.modes, "singular_values": found.singular_values, "total": found.total.value}

    def _sketches(self, places: slice) -> dict[str, Tensor]:
        """Algorithm 2 with q = 1 for the examples of several steps, a sketch of its own for each."""
        rows, own = self.order[places], self.options
        latents = self.train.latent_rows(rows)
        operator = JacobianOperator(self.probe, latents, precision=own.precision)
        streams = Streams.from_seed(own.seed + 1, len(rows), latents.device, places.start)
        found = power_iteration(operator, own.rank, power_iters=1, streams=streams)
        modes = as_token_maps(found.right, latents.shape[1:])
        exact = self.modes[rows.to(self.modes.device)].to(modes)
        return {
            "modes": modes.half(),
            "singular_values": found.singular_values,
            "alignment": alignment(modes, exact),
        }

    def _facts(self) -> dict[str, Any]:
        own = self.examples
        kappa, kappa_se = mean_and_error(own.singular_values.double().square().sum(1) / own.total.double())
        relative = (own.singular_values / own.singular_values[:, :1]).double().mean(0)
        registers, dim = own.modes.shape[2:]
        return {
            "probe": self.probe.name,
            "latent": [registers, dim],
            "random_v1": self.options.rank / (registers * dim),
            "kappa": kappa,
            "kappa_se": kappa_se,
            "relative_singular_values": [float(f"{value:.4g}") for value in relative],
        }

    # Rows

    def row(self, name: str) -> dict[str, Any]:
        """What is measured of one network."""
        begun = time.perf_counter()
        network = constant_network(self.subspace) if name == CONSTANT else self._network(name)
        scores = example_scores(network, self.examples)
        row = comparison_row(name, scores, self.of_constant)
        row = {key: value for key, value in row.items() if "patches" not in key}  # a latent has none
        ratio, ratio_se = mean_and_error(natural_sensitivity_ratio(network, self.probe, self.examples))
        return {
            **row,
            "v1_se": mean_and_error(scores.v1)[1],
            "natural_ratio": ratio,
            "natural_ratio_se": ratio_se,
            "paper_v1": PAPER.get(name),
            "seconds": round(time.perf_counter() - begun, 1),
        }

    def _network(self, name: str) -> MetricNetwork:
        own, network = self.options, self.new_network()
        if name == UNTRAINED:
            return network.eval()
        if name.endswith(FROM_CONSTANT):
            network.start_at(self.subspace)
        config = FitConfig(
            steps=own.steps,
            batch=own.batch,
            learning_rate=own.learning_rate,
            warmup=min(100, own.steps // 10),
            validate_every=own.steps,  # once, at the end, so that nothing is chosen by held-out scenes
            precision="bf16" if self.probe.device.type == "cuda" else "float32",
            seed=own.seed,
        )
        order = self.order.to(self.modes.device)
        exact = KnownModes(self.modes[order], self.values[order])
        teacher = self.sketches if name.startswith(RANDNLA) else exact
        task = InOrder(
            lambda rows: self.train.latent_rows(self.order[rows]),
            len(self.order),
            teacher,
            self.examples,
            inputs=lambda rows: self.train.input_rows(self.order[rows]),
        )
        fit(network, task, config, out=self.parts.folder / slug(name), settings=self.settings)
        return network.eval()

    def new_network(self) -> SpectralPullbackNetwork:
        """Make a network with the same weights every time, scaled to the training scenes."""
        first = torch.arange(min(64, self.options.train))  # enough for means and spreads
        inputs, registers, dim = self.train.input_rows(first), *self.modes.shape[2:]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.options.seed)
            network = SpectralPullbackNetwork(
                inputs.shape[-1], self.options.rank, self.options.width, latent=(registers, dim)
            )
        return network.to(inputs.device).start_from(inputs, self.values[first.to(self.values.device)])


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What decides the rows, apart from weights."""
    apart = ("bottleneck", "work", "rows", "seconds", "device", "out")
    return {name: value for name, value in vars(options).items() if name not in apart}


def scenes(probe: ProbeMap, first: int, count: int, options: argparse.Namespace) -> Scenes:
    """Draw scenes and compute their latents and what the network reads: quick beside their modes, so not kept."""
    own, size = probe.backbone, options.size or probe.backbone.preprocessing.size
    pictures = []
    for start in range(first, first + count, 64):
        seeds = range(start, min(start + 64, first + count))
        drawn = (255 * render(seeds, size=size, views=options.views, device=probe.device).rgb).round().byte()
        pictures.append(drawn if own.views else drawn[:, 0])
    images = torch.cat(pictures)
    return Scenes(probe.features(images), read_by_network(probe).features(images).as_subclass(Tensor).half())


if __name__ == "__main__":
    main()
