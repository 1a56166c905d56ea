"""What can be drawn, and from which ranges: classes, shapes, textures, `SceneRange`, and seeds kept for evaluation."""

from __future__ import annotations

from dataclasses import dataclass, fields

from pullback.errors import PullbackError

HELD_OUT = 1 << 40
"""First seed of the scenes that no embedded model was trained on; the demo and the bank of neighbours start here."""
QUERIES = 2 * HELD_OUT
"""First seed of the scenes that embedded models are evaluated on."""

SETTINGS = ("room", "open ground")
ARRANGEMENTS = ("row of {}s", "ring of {}s", "tower of {}s", "one giant {}")
SHAPES = ("sphere", "box", "cylinder")
SPHERE, BOX, CYLINDER = range(len(SHAPES))

CLASSES: tuple[str, ...] = tuple(
    f"{setting}: {arrangement.format(shape)}".replace("boxs", "boxes")
    for setting in SETTINGS
    for arrangement in ARRANGEMENTS
    for shape in SHAPES
)
"""Where the main objects stand and what shape they have; smaller objects of other shapes may stand around them."""

TEXTURES = ("plain", "gradient", "checker", "stripes", "bricks", "noise", "dots", "zigzag")

MAX_MAIN = 8  # objects of the arrangement
MAX_DISTRACTORS = 3
MAX_LIGHTS = 3

Range = tuple[float, float]
Count = tuple[int, int]


@dataclass(frozen=True)
class SceneRange:
    """Ranges (low, high) in metres and degrees; counts include both ends.

    Sizes, textures and the field of view vary little by default: they are what tells a single picture's scale, and
    with it metric depth. Camera heights, distances, rooms, colours and lights vary freely.
    """

    camera_height: Range = (0.8, 1.9)
    fov_degrees: Range = (52.0, 66.0)  # over the shorter side of the image
    framing: Range = (1.0, 1.6)  # distance, as a multiple of the least at which the whole arrangement is in view
    steepest_degrees: float = 40.0  # camera 0 looks down on the middle of the arrangement no more steeply
    pitch_degrees: Range = (-7.0, 7.0)  # tilt and pan away from the arrangement, cut to what keeps it in view
    roll_degrees: Range = (-4.0, 4.0)
    orbit_degrees: Range = (8.0, 40.0)  # how far further views turn around the arrangement, to either side

    object_size: Range = (0.42, 0.58)  # diameter
    giant_size: Range = (1.2, 1.7)
    row_count: Count = (4, 6)
    ring_count: Count = (5, 7)
    tower_count: Count = (3, 4)
    distractors: Count = (0, 3)  # smaller objects of another shape, beside and behind the arrangement

    room_margin: Range = (0.2, 2.2)  # free space between what must fit into a room and each of its walls
    room_height: Range = (2.4, 3.4)
    ground_radius: float = 30.0  # where open ground ends and the sky begins

    textures: tuple[str, ...] = ("plain", "gradient", "checker", "stripes", "bricks", "noise")
    texture_scale: Range = (3.0, 4.5)  # cells per metre on objects; floors and walls have cells twice as large

    lights: Count = (1, 3)
    sun_degrees: Range = (25.0, 65.0)  # above the horizon

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple) and field.name != "textures":
                _check_range(field.name, value)
        unknown = [name for name in self.textures if name not in TEXTURES]
        if unknown or not self.textures:
            raise PullbackError(f"textures={self.textures!r}: expected some of {', '.join(TEXTURES)}.")
        limits = {"row_count": MAX_MAIN, "ring_count": MAX_MAIN, "tower_count": MAX_MAIN}
        limits |= {"distractors": MAX_DISTRACTORS, "lights": MAX_LIGHTS}
        for name, most in limits.items():
            least = 0 if name == "distractors" else 2 if name == "ring_count" else 1
            low, high = getattr(self, name)
            if not (least <= low and high <= most):
                raise PullbackError(f"{name}={(low, high)}: expected counts from {least} to {most}.")
        for name in ("camera_height", "object_size", "giant_size", "texture_scale", "framing", "room_height"):
            if getattr(self, name)[0] <= 0:
                raise PullbackError(f"{name}={getattr(self, name)}: expected positive numbers.")
        if self.fov_degrees[0] <= 0 or self.fov_degrees[1] >= 170:
            raise PullbackError(f"fov_degrees={self.fov_degrees}: expected angles between 0 and 170 degrees.")


def _check_range(name: str, value: tuple[float, ...]) -> None:
    if len(value) != 2 or not value[0] <= value[1]:
        raise PullbackError(f"{name}={value!r}: expected (low, high) with low not above high.")


TRAINING = SceneRange()
SHIFTED = SceneRange(camera_height=(2.2, 3.0), textures=("dots", "zigzag"), texture_scale=(6.0, 10.0))
"""Out of range on purpose: cameras above every training camera, textures and scales that training never shows."""
