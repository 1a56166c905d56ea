"""The diagnosis of the real DINOv2 ViT-S/14, against what was measured before (notes/findings.md, section 1)."""

import pytest

import pullback as pb

pytestmark = pytest.mark.weights("models/dinov2-small", "data/imagenet_val/diag")


@pytest.fixture(scope="module")
def reports(shared):
    """CLS at layer 10, 4 images, by the exact route and by krylov."""
    probe = pb.load_probe(shared / "models" / "dinov2-small", decoder="cls", layer=10, device="cpu")
    images = probe.load_images(shared / "data" / "imagenet_val" / "diag", limit=4)
    return {method: pb.diagnose(probe, images, 20, method, convergence_samples=0) for method in ("exact", "krylov")}


def test_the_exact_route_reproduces_the_row(reports):
    report = reports["exact"]
    assert report.kappa.mean == pytest.approx(0.372, abs=0.05)
    assert 150 < report.r_eff_slq.mean < 195
    assert 4 < report.cv.mean < 6
    assert report.cv_null == pytest.approx(0.036, abs=1e-3)
    assert report.regime.label == "iii"
    assert report.products.vjp == 4 * 384 and report.products.jvp == 0


def test_krylov_is_within_its_printed_errors_of_exact_on_every_image(reports):
    for exact, krylov in zip(reports["exact"].samples, reports["krylov"].samples, strict=True):
        for truth, (value, se) in ((exact.kappa[20][0], krylov.kappa[20]), (exact.r_eff_slq[0], krylov.r_eff_slq)):
            assert abs(value - truth) <= 3 * se < 0.1 * truth
        assert krylov.cv[0] == pytest.approx(exact.cv[0], rel=0.02)
    assert reports["krylov"].regime == reports["exact"].regime
