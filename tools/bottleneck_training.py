"""What the trainings of bottlenecks took and where they ended, of all runs in a folder.

python -m recipes.bottleneck --model tiny-scenes --out runs/tiny-scenes     # and so on
python tools/bottleneck_training.py --runs runs/ --ships tiny-scenes
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from measured.common import RESULTS
from pullback.runs.files import write_json

VALIDATED = ("step", "unexplained", "task_unexplained", "delta1", "relative_l2")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder of runs of recipes.bottleneck")
    parser.add_argument("--ships", help="name of the run whose bottleneck comes with the package")
    parser.add_argument("--processes", type=int, default=1, help="that shared the machine")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    options = parser.parse_args(arguments)
    found = {path.parent.name: json.loads(path.read_text()) for path in sorted(options.runs.glob("*/result.json"))}
    if not found:
        raise SystemExit(f"{options.runs} holds no result.json: train with python -m recipes.bottleneck first.")
    runs, last = {}, max(found.values(), key=lambda run: str(run["date"]))
    for name, run in found.items():
        validations = [{key: row[key] for key in VALIDATED if key in row} for row in run["validations"]]
        kept = {key: run[key] for key in ("command", "settings", "scores", "seconds", "bytes", "commit", "date")}
        runs[name] = kept | {"validations": validations, "ships": name == options.ships}
    content = {key: last[key] for key in ("machine", "threads", "date", "commit", "versions")}
    content = {"machine": {"device": content.pop("machine"), **content}, "precision": last["settings"]["precision"]}
    content |= {"processes": options.processes, "runs": runs}
    path = options.out / f"bottleneck_training_{last['device']}.json"
    write_json(path, content)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
