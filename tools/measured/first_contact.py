"""What a new user meets: the README's jobs, typed as they stand, and commands that are killed."""

from __future__ import annotations

from .common import digits, joined, read, said, source, table

JOBS, KILLED, KILLED_LATER = "readme_jobs_cpu.json", "crash_cpu.json", "crash_30s.json"
EXPERIMENTS = "crash_reproduce_cpu.json"


def jobs() -> str:
    found = read(JOBS)
    rows = [
        [row["job"], row["language"], "works" if row["worked"] else "**fails**", f"{digits(row['seconds'], 2)} s"]
        for row in found["rows"]
    ]
    return joined(
        table(["job", "typed into", "outcome", "time"], rows),
        [said(all(row["worked"] for row in found["rows"]), f"{found['pictures']} photographs lie in `photos/`.")],
        source(JOBS),
    )


def crashes() -> str:
    files = (KILLED, KILLED_LATER)
    rows = []
    for name in files:
        found = read(name)
        rows += [
            [
                f"`{command}`",
                str(found["images"]),
                f"{outcome['seconds']:.0f} s",
                f"{found['save_every']:g} s",
                str(outcome["kills"]),
                "**no**" if outcome["differences"] else "yes",
                f"{max(outcome['losses']):.1f} s",
            ]
            for command, outcome in found["commands"].items()
        ]
    header = ["command", "images", "run", "saves every", "kills", "the same, bit for bit", "a kill cost at most"]
    later = read(KILLED_LATER)
    losses = [loss for outcome in later["commands"].values() for loss in outcome["losses"]]
    same = not any(outcome["differences"] for name in files for outcome in read(name)["commands"].values())
    return joined(
        table(header, rows),
        [
            said(same, "Every run that was killed and went on ended with the rows or weights of one that was not."),
            said(max(losses) <= later["save_every"], "At the usual interval no kill cost more than it."),
        ],
        source(*files),
    )


def experiments() -> str:
    found = read(EXPERIMENTS)
    rows = [
        [
            f"`{command.removeprefix('reproduce:')}`",
            f"{outcome['seconds']:.0f} s",
            str(outcome["kills"]),
            "**no**" if outcome["differences"] else "yes",
            f"{max(outcome['losses']):.1f} s",
        ]
        for command, outcome in found["commands"].items()
    ]
    same = not any(outcome["differences"] for outcome in found["commands"].values())
    return joined(
        table(["experiment", "run", "kills", "the same rows, byte for byte", "a kill cost at most"], rows),
        [said(same, "Every experiment that was killed and went on has the rows and verdicts of one that was not.")],
        source(EXPERIMENTS),
    )


BLOCKS = {"readme-jobs": jobs, "crashes": crashes, "crashes-experiments": experiments}
