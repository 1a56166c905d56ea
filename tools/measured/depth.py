"""The depth head of DINOv2-S on held-out photographs."""

from __future__ import annotations

from typing import Any

from .common import joined, pm, read, said, signed, source, table

RESULT = "dinov2_depth_evaluation.json"
HEAD, SCENES = "head trained on scenes and photographs", "head trained on scenes alone"
CONSTANT, PIXEL = "mean depth", "mean depth of the pixel"
ALL, SOURCES, OWN = "all images", "mean of sources", "training pairs"
SCORES = ("raw_delta1", "raw_abs_rel", "delta1", "abs_rel")
COLUMNS = ["photographs", "depth from", "δ1 in metres ↑", "AbsRel in metres ↓", "δ1, scaled ↑", "AbsRel, scaled ↓"]
NAMES = {
    "7scenes": "7-Scenes, one kitchen",
    "sunrgbd": "SUN RGB-D, single frames",
    "nyuv2": "NYUv2, single frames",
    SOURCES: "mean of the three",
}


def rows(of: tuple[str, ...]) -> list[list[str]]:
    document = read(RESULT)
    places = [*document["images"], SOURCES, ALL]
    found = []
    for place in places:
        count = document["images"].get(place)
        for number, name in enumerate(of):
            scores = document["depth"][name][place]
            where = f"{NAMES.get(place, place)}{f' ({count})' if count else ''}"
            found.append([where if not number else "", name, *(cell(scores[score]) for score in SCORES)])
    return found


def cell(value: dict[str, float] | float) -> str:
    return pm(value, 3) if isinstance(value, dict) else f"{value:.3f}"


def evaluation() -> str:
    document = read(RESULT)

    def gain(of: str, place: str, score: str = "raw_delta1") -> Any:
        return document["ahead_of"][of][place][score]

    def level(name: str, score: str) -> float:
        return float(document["depth"][name][ALL][score]["mean"])

    def ahead(of: str, place: str, score: str = "raw_delta1") -> str:
        found = gain(of, place, score)
        return signed(found["mean"], found["se"], 3) if isinstance(found, dict) else f"{found:+.3f}".replace("-", "−")

    own, held = document["depth"][HEAD][OWN], document["depth"][HEAD][ALL]
    scale = {place: document["depth"][HEAD][place]["log_scale"] for place in document["images"]}
    training = {name: document["training"][name] for name in (HEAD, SCENES)}
    total = sum(document["images"].values())
    return joined(
        table(COLUMNS, rows((HEAD, SCENES, CONSTANT, PIXEL))),
        source(RESULT),
        f"{total} held-out photographs at 224 pixels, mean ± standard error over images; frames of one sequence show "
        "one room, so their errors are too small, and the mean of the three sources counts each of them once. “In "
        "metres” is as predicted, “scaled” is after median scaling. The two guesses do not see the picture: they are "
        f"geometric means over the {document['training_pairs']} training pairs. A constant after median scaling knows "
        "the true median.",
        [
            said(
                all(
                    gain(other, ALL, score)["mean"] > 4 * gain(other, ALL, score)["se"]
                    for other in (CONSTANT, PIXEL)
                    for score in ("raw_delta1", "delta1")
                ),
                f"Image by image its δ1 in metres is {ahead(CONSTANT, ALL)} above that of the mean depth and "
                f"{ahead(PIXEL, ALL)} above that of the mean depth of the pixel ({ahead(CONSTANT, SOURCES)} and "
                f"{ahead(PIXEL, SOURCES)} in the mean of the three); after median scaling "
                f"{ahead(CONSTANT, ALL, 'delta1')} and {ahead(PIXEL, ALL, 'delta1')}.",
            ),
            said(
                gain(SCENES, ALL, "delta1")["mean"] > 4 * gain(SCENES, ALL, "delta1")["se"]
                and all(level(name, "delta1") < level(SCENES, "delta1") for name in (CONSTANT, PIXEL))
                and all(level(name, "raw_delta1") > level(SCENES, "raw_delta1") for name in (CONSTANT, PIXEL)),
                "Scenes alone teach shapes, not metres: over all images that head is better than the guesses after "
                "median scaling and worse before it. With the photographs δ1 rises by "
                f"{ahead(SCENES, ALL)} in metres and by {ahead(SCENES, ALL, 'delta1')} after scaling.",
            ),
            said(
                own["raw_delta1"]["mean"] > 0.95 > held["raw_delta1"]["mean"] + 0.1,
                f"It knows its training pairs nearly by heart: δ1 {pm(own['raw_delta1'], 3)} in metres and "
                f"{pm(own['delta1'], 3)} scaled there, {pm(held['raw_delta1'], 3)} and {pm(held['delta1'], 3)} on the "
                "held-out ones.",
            ),
            "- Its scale, log(median depth / true median), is "
            + ", ".join(f"{pm(found, 3).replace('-', '−')} ({NAMES[place]})" for place, found in scale.items())
            + ".",
            "- Training took "
            + " and ".join(f"{end['seconds']:.0f} s for {end['step']:,} steps" for end in training.values())
            + " (with photographs, on scenes alone), beside each other and other work on one H200.",
        ],
    )


def card() -> str:
    return table(COLUMNS, rows((HEAD, CONSTANT)))


BLOCKS = {"dinov2-depth": evaluation, "dinov2-depth-card": card}
