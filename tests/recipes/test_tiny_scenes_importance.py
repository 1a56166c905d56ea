"""Importance maps against what is known about patches, at toy size."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from scipy.stats import spearmanr

import pullback as pb
from pullback.scenes.render import normalised, render
from recipes import tiny_scenes_importance as module
from recipes.tiny_scenes_importance import (
    ALL,
    LEADING,
    LOG,
    METRES,
    compare,
    importance_maps,
    main,
    patch_facts,
    table,
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def compared(maps: torch.Tensor, fact: torch.Tensor, counted: torch.Tensor | None = None) -> dict:
    everything = torch.ones_like(maps, dtype=torch.bool)
    return compare(maps, fact, everything if counted is None else counted, torch.Generator().manual_seed(0))


def test_both_scales_agree_with_the_library_s_own_importance(toy_model):
    images = normalised(render(range(2), size=56).rgb[:, 0])
    probe = pb.load_probe(toy_model, decoder="depth-2x2", layer=1)
    maps = importance_maps(probe, images, rank=3)
    for scale, distance in ((METRES, None), (LOG, "log")):
        twin = pb.load_probe(toy_model, decoder="depth-2x2", layer=1, distance=distance)
        for directions, rank in ((LEADING, 3), (ALL, 4)):
            expected = pb.token_importance(pb.spectrum(twin, images, rank=rank))[:, 1:]
            assert torch.allclose(maps.importance[scale, directions], expected, rtol=1e-3)
        kappa = pb.spectrum(twin, images, rank=3).kappa.value[:, 2]
        assert torch.allclose(maps.captured[scale].double(), kappa, rtol=1e-4)


def test_facts_of_a_patch_are_read_off_its_pixels():
    scenes = render([0], size=28)
    depth = torch.ones(1, 1, 28, 28)
    depth[..., 20:] = 2.0  # a step inside the right patches
    sky = torch.zeros_like(depth, dtype=torch.bool)
    sky[..., :14, :14] = True
    sky[..., 0, 14:] = True
    instance = torch.ones(1, 1, 28, 28, dtype=torch.int16)
    instance[..., 14:21, :14] = 10
    facts = patch_facts(replace(scenes, depth=depth, sky=sky, instance=instance), 14)
    step = torch.tensor(2.0).log()
    assert torch.allclose(facts["depth step"], torch.tensor([[0, step, 0, step]]))
    assert torch.allclose(facts["objects"], torch.tensor([[0, 0, 0.5, 0]]))
    assert torch.allclose(facts["sky"], torch.tensor([[1, 1 / 14, 0, 0]]))
    assert facts["distance"][0, 0] == torch.inf
    assert torch.allclose(facts["distance"][0, 3], step * 8 / 14)


def test_rho_is_spearmans_of_the_counted_tokens_scene_by_scene():
    maps, fact = normal(5, 30), normal(5, 30, seed=1).round()  # with ties
    counted = normal(5, 30, seed=2) > -0.5
    rho = [spearmanr(m[c], f[c]).statistic for m, f, c in zip(maps, fact, counted, strict=True)]
    row = compared(maps, fact, counted)
    assert row["rho"]["mean"] == pytest.approx(sum(rho) / 5, abs=1e-5)
    assert row["scenes"] == 5


def test_maps_that_know_only_the_usual_place_gain_nothing_over_other_scenes():
    place = normal(1, 60)
    fact = place + 0.3 * normal(20, 60, seed=1)
    prior_only = compared(place + 0.3 * normal(20, 60, seed=2), fact)
    assert prior_only["rho"]["mean"] > 0.7
    assert prior_only["p_permuted_tokens"] <= 0.001
    assert prior_only["p_other_scenes"] > 0.01
    informed = compared(fact + 0.3 * normal(20, 60, seed=3), fact)
    assert informed["gain"]["mean"] > 3 * informed["gain"]["se"]
    assert informed["p_other_scenes"] <= 0.001


def test_maps_without_any_relation_lie_within_the_permuted_ones():
    row = compared(normal(20, 60), normal(20, 60, seed=1))
    low, high = row["permuted_tokens_95"]
    assert low < 0 < high
    assert low < row["rho"]["mean"] < high
    assert row["p_permuted_tokens"] > 0.01


def test_a_scene_in_which_nothing_differs_is_left_out():
    fact = normal(4, 30, seed=1)
    fact[2] = 0
    assert compared(normal(4, 30), fact)["scenes"] == 3


def test_the_command_writes_every_combination(toy_model, tmp_path, monkeypatch, capsys):
    out = tmp_path / "importance.json"
    options = f"importance --model {toy_model} --decoder depth-2x2 --layers 1 2 --scenes 4 --device cpu --out {out}"
    monkeypatch.setattr(sys, "argv", options.split())
    monkeypatch.setattr(module, "_PERMUTATIONS", 99)
    main()
    result = json.loads(out.read_text())
    assert len(result["correlations"]) == 2 * 2 * 2 * 2 * 3  # layers, scales, directions, patches, facts
    assert len(result["overview"]) == 4
    assert capsys.readouterr().out.strip() == table(result)
