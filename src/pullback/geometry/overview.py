"""Spectra and diagnoses in the plain numbers that `report` draws, for `plot` and for notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from pullback.geometry.diagnosis import Tractability
from pullback.geometry.document import layer_result, number, summary
from pullback.geometry.spectrum import Spectrum, token_importance
from pullback.geometry.summary import summarize
from pullback.randnla import Estimate
from pullback.tokens import TokenLayout

if TYPE_CHECKING:
    from pullback.report.notebook import Overview

MAX_MAPS = 8


def spectrum_overview(spectrum: Spectrum) -> Overview:
    """Return the numbers of a spectrum, with one mean over its samples for each."""
    from pullback.report import wording
    from pullback.report.notebook import Overview

    kappa = summary(summarize(Estimate(spectrum.kappa.value[:, -1], spectrum.kappa.se[:, -1]).pairs()))
    values = spectrum.singular_values.tolist()
    layer = {
        "layer": "",
        "rank_used": spectrum.rank,
        "kappa": kappa,
        "in_picture": spectrum.token_layout.in_picture,
        "per_image": [
            {"singular_values": own, "energy": number(energy), "energy_se": number(se)}
            for own, (energy, se) in zip(values, spectrum.total.pairs(), strict=True)
        ],
    }
    unit = spectrum.token_layout.unit
    return Overview(
        name=spectrum.probe,
        unit=unit,
        layer=layer,
        energy=lambda: _energy(token_importance(spectrum), spectrum.token_layout),
        facts={
            "samples": wording.counted(len(spectrum), unit),
            f"captured energy κ({spectrum.rank})": wording.percent(kappa),
            "products per sample": f"{spectrum.products.total:,} {spectrum.method}",
        },
    )


def report_overview(report: Tractability) -> Overview:
    """Return the numbers of a diagnosis, worded as on its page."""
    from pullback.report import wording
    from pullback.report.notebook import Overview

    layer = layer_result(report, [""] * len(report.samples))
    unit = report.token_layout.unit
    cv, over_patches = layer["cv"], layer["regime_over_patches"]
    return Overview(
        name=report.probe,
        unit=unit,
        layer={**layer, "layer": ""},
        energy=lambda: _energy(report.importance, report.token_layout),
        facts={
            "samples": wording.counted(len(report.samples), unit) + wording.no_error(len(report.samples), unit),
            f"captured energy κ({layer['rank_used']})": wording.percent(layer["kappa"]),
            "rank for 90 % of it": wording.lower_bound(layer["r90"]),
            "effective rank": wording.plus_minus(layer["r_eff_slq"]["mean"], layer["r_eff_slq"]["se"]),
            "CV over tokens": f"{wording.plus_minus(cv['mean'], cv['se'])} (null {wording.plain(cv['null'], 2)})",
            "regime": wording.regime(layer),
            **({} if over_patches is None else {"regime over patches": wording.regime(over_patches)}),
        },
        advice=report.advice,
    )


def _energy(importance: Tensor, layout: TokenLayout) -> np.ndarray:
    """Return the energies of patches [n, rows, columns] of the first samples, or views, over their mean per sample.

    Samples with fewer tokens than others, which have NaN behind them, sit on another grid and are left out.
    """
    whole = importance[~importance.isnan().any(1)][:MAX_MAPS]
    energy = layout.patch_map(whole.detach().cpu().double().square())  # [b, views, rows, columns]
    return (energy / energy.mean((1, 2, 3), keepdim=True).clamp_min(1e-300)).flatten(0, 1)[:MAX_MAPS].numpy()
