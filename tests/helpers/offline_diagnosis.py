"""A small diagnosis of the embedded model with the network out of reach; run by `make wheel-check` and test_wheel.py.

    python tests/helpers/offline_diagnosis.py

Run it from an empty folder, with an installed wheel: it fails when pullback comes from a source tree, when anything
tries to reach another machine, or when the numbers are not what a trained model gives.
"""

import socket
from pathlib import Path


def refuse(*_: object, **__: object) -> None:
    raise OSError("offline: the embedded model must not need the network")


def main() -> None:
    for name in ("connect", "connect_ex", "sendto"):
        setattr(socket.socket, name, refuse)
    socket.getaddrinfo = socket.create_connection = refuse  # type: ignore[assignment]

    import pullback as pb
    from pullback.scenes.render import normalised, render

    place = Path(pb.__file__).resolve().parent
    assert not (place.parents[1] / "pyproject.toml").exists(), f"pullback comes from {place}, not from a wheel"
    for file in ("py.typed", "models/weights/tiny-scenes/README.md"):
        assert (place / file).is_file(), f"{file} is not in the wheel"
    scenes = render([1 << 40, 1 << 41])
    images = normalised(scenes.rgb[:, 0])
    probe = pb.load_probe("tiny-scenes", decoder="cls", layer=10)
    predicted, seen = probe.backbone.model(images).predicted_depth, ~scenes.sky[:, 0]
    error = (predicted[seen].log() - scenes.depth[:, 0][seen].log()).abs().mean()
    assert error < 0.25, f"depth is off by {error:.2f} in log metres: these are not the trained weights"
    report = pb.diagnose(probe, images, rank=10)
    assert 0 < report.kappa.mean < 1, report
    print(f"{report}\nfrom {place}")


if __name__ == "__main__":
    main()
