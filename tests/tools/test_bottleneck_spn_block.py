"""The table of networks in a latent says plainly where they are, whichever way the measurement came out."""

import json

import pytest

from measured import bottleneck_spn, common


def document(leads: dict[str, float]) -> dict:
    def row(name: str) -> dict:
        lead = leads.get(name, 0.0)
        value = 0.002 if name == bottleneck_spn.UNTRAINED else 0.5 + lead
        known = {"network": name, "v1": value, "v1_se": 0.01, "v1_lead": lead, "v1_lead_half_width": 0.02}
        return known | {"natural_ratio": 0.4, "natural_ratio_se": 0.01, "paper_v1": 0.71 if name in kinds else None}

    kinds = (bottleneck_spn.RANDNLA, bottleneck_spn.SPECTRAL)
    trained = [kind + start for start in bottleneck_spn.STARTS.values() for kind in kinds]
    return {
        "machine": {"device": "NVIDIA H200", "date": "2026-11-16"},
        "settings": {
            **{"decoder": "depth", "rank": 20, "steps": 600, "batch": 16, "train": 1000, "held_out": 100},
            **{"rtol": 1e-4, "precision": "tf32", "space": "ambient"},
        },
        "latent": [32, 128],
        "kappa": 0.8,
        "random_v1": 20 / 4096,
        "sketch_v1": 0.75,
        "rows": [row(name) for name in (bottleneck_spn.CONSTANT, bottleneck_spn.UNTRAINED, *trained)],
    }


@pytest.fixture
def block(tmp_path, monkeypatch):
    def made(**leads: float) -> str:
        named = {name.replace("_", " "): lead for name, lead in leads.items()}
        text = json.dumps(document({name.replace("RandNLA", "RandNLA q=1"): lead for name, lead in named.items()}))
        (tmp_path / bottleneck_spn.SPN).write_text(text)
        monkeypatch.setattr(common, "RESULTS", tmp_path)
        return bottleneck_spn.spn()

    return made


def test_every_network_has_its_line_and_the_table_its_source(block):
    text = block()
    assert "| RandNLA q=1, from the constant | 0.500 ± 0.010 | +0.0000 ± 0.0200" in text
    assert "z ∈ R^(32×128), κ(20) = 0.80" in text and "NVIDIA H200" in text and "r/M' = 0.005" in text


def test_it_says_who_is_ahead_and_who_is_not(block):
    text = block(RandNLA=0.1, Spectral=0.11, RandNLA_from_constant=0.01, Spectral_from_constant=-0.1)
    assert "From a random start, RandNLA q=1 and Spectral are ahead of the constant subspace, judged" in text
    assert "From the constant, RandNLA q=1 is level with the constant subspace and Spectral is behind the" in text


def test_it_says_whether_one_round_is_enough(block):
    assert "comes within 0.02 of exact modes: −0.010 from a random start" in block(RandNLA=0.1, Spectral=0.11)
    assert "does not come within 0.02 of exact modes: −0.050" in block(RandNLA=0.1, Spectral=0.15)
