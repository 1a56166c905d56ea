"""The results of tiny-views that docs/results/vggt.md shows were measured on the weights that are shipped."""

import json
from pathlib import Path

from pullback.backbones import load_any_backbone
from pullback.runs.provenance import weights_hash

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def test_results_belong_to_the_shipped_weights():
    """Measure again where the weights have changed."""
    own = weights_hash(load_any_backbone("tiny-views", device="cpu").model)
    rows = (RESULTS / "scene_taxonomy_tiny_views_cuda.jsonl").read_text(encoding="utf-8").splitlines()
    assert {json.loads(row)["weights"] for row in rows} == {own}
    spn = json.loads((RESULTS / "camera_spn_tiny_views_cuda.json").read_text(encoding="utf-8"))
    assert spn["settings"]["weights"] == own
