"""What a task sees along the straight segment between the features of two rooms, and along the geodesic.

python benchmarks/plot_geodesic.py --out docs/images/geodesic.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

import pullback as pb
from pullback.report.canvas import LIGHT, PictureGrid, corner_note, png, style, title_at_the_top
from pullback.runs.files import write_bytes
from pullback.scenes.splits import QUERIES

SHOWN = 7  # maps of a path


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the picture, a PNG file")
    parser.add_argument("--rooms", type=int, nargs=2, default=(0, 1), help="of the held-out scenes")
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--size", type=int, default=224, help="of the rooms, in pixels")
    parser.add_argument("--segments", type=int, default=6, help=f"a multiple of {SHOWN - 1}")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(arguments)
    if options.segments % (SHOWN - 1):
        raise SystemExit(f"--segments: expected a multiple of {SHOWN - 1}, got {options.segments}.")
    rgb = pb.render([QUERIES + room for room in options.rooms], size=options.size).rgb[:, 0]
    probe = pb.load_probe("tiny-scenes", "depth", options.layer, device="cpu")
    features = probe.features(pb.normalised(rgb), normalized=True)
    paths = [
        pb.geodesic(probe, features[:1], features[1:], segments=options.segments, steps=steps)
        for steps in (0, options.steps)
    ]
    maps = [path.outputs[0].numpy() for path in paths]  # type: ignore[index]
    apart = float(paths[0].output_distance)  # type: ignore[arg-type]
    rooms = [(255 * room).round().byte().permute(1, 2, 0).numpy() for room in rgb]
    draw(options.out, rooms, maps, [float(path.length) / apart for path in paths], apart, options.layer)
    print(f"{options.out}: {paths[1]}, lengths {[float(path.length) for path in paths]}, outputs {apart:.1f} apart")


def draw(
    out: Path,
    rooms: Sequence[np.ndarray],
    maps: Sequence[np.ndarray],
    lengths: Sequence[float],
    apart: float,
    layer: int,
) -> None:
    """Draw depth maps [K + 1, H, W] of several paths below each other, between the pictures of their ends.

    ``lengths``: of the paths, in units of the distance ``apart`` of the outputs at their ends."""
    about = f"Depth on the way from one room to another, through the features of layer {layer} of tiny-scenes"
    step = (len(maps[0]) - 1) // (SHOWN - 1)
    ends = np.concatenate([maps[0][:1], maps[0][-1:]])
    low, high = float(ends.min()), float(ends.max())
    with style(LIGHT):
        grid = PictureGrid(len(maps), SHOWN + 2, 0.95, 1.0, (0.1, 0.1, 0.32, 0.30))
        title_at_the_top(grid.figure, about)
        for row, (path, name, length) in enumerate(zip(maps, ("straight segment", "geodesic"), lengths, strict=True)):
            gone = np.concatenate([[0], np.linalg.norm(np.diff(path.reshape(len(path), -1), axis=0), axis=1).cumsum()])
            for place in range(SHOWN):
                axes = grid.cells[row][place + 1]
                axes.imshow(path[place * step], cmap="viridis", vmin=low, vmax=high)
                corner_note(axes, f"{gone[place * step] / apart:.2f}")
            y = grid.corner(row, 0)[1] + (grid.tall if row == 0 else 0)
            words = {"va": "top" if row == 0 else "bottom", "fontsize": 8}
            grid.figure.text(0.16 / grid.width, y / grid.height, f"{name}\nlength {length:.2f}", **words)
        for room, column in zip(rooms, (0, SHOWN + 1), strict=True):
            x, y = grid.corner(len(maps) - 1, column)
            middle = y + (len(maps) - 1) * (grid.tall + grid.GAP) / 2
            axes = grid.place(x, middle, grid.side, grid.tall)
            axes.imshow(np.asarray(Image.fromarray(room).resize((160, 160))))
            axes.set_axis_off()
        note = "in the corner: the way gone, in units of the distance between the depth maps at the two ends"
        grid.figure.text(0.5, 0.06 / grid.height, note, ha="center", fontsize=8)
        write_bytes(out, png(grid.figure, 110))


if __name__ == "__main__":
    main()
