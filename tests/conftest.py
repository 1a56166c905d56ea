"""Where the tests find real weights and images, and what happens when they are not there."""

import os
from pathlib import Path

import pytest

# Models and images too large for the repository lie beside the checkout, or where PULLBACK_SHARED points.
SHARED = Path(os.environ.get("PULLBACK_SHARED", Path(__file__).resolve().parents[2] / "shared"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real models and images; only for tests marked `weights`."""
    return SHARED


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("weights")
    if marker is None:
        return
    missing = [path for path in (marker.args or ("models",)) if not (SHARED / path).exists()]
    if missing:
        pytest.skip(
            f"real weights needed: {', '.join(missing)} not in {SHARED} (set PULLBACK_SHARED to look elsewhere)"
        )
