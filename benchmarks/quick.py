"""Run a short version of every benchmark on this CPU, a few minutes in all, and print the commands of the full ones.

    python benchmarks/quick.py                  # what `make bench` does
    python benchmarks/quick.py products vggt    # some of them

Models are embedded or random, pictures are drawn, results go to a temporary folder: benchmarks/results/ stays as it is.
Short runs show that a script works, and nothing else. `python benchmarks/NAME.py --help` says what a script measures;
docs/results/ shows what the full commands gave.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
WORKERS = 2  # scripts at a time: short runs measure nothing, so they may disturb one another
# PHOTOS, OTHERS, HEAD, MODEL and BOTTLENECK stand for folders that `prepare` fills; OUT for the folder of the results.
QUICK = {
    "products": "--layers 10 --tangents 2 --quick",
    "accuracy": "--model tiny-scenes --images PHOTOS --layers 10 --limit 2",
    "coverage": "--model tiny-scenes --images PHOTOS --layers 10 --limit 1 --size 56 --rank 10",
    "cold_start": "--size small --images PHOTOS --limit 2 --device cpu --repeats 1",
    "targets": "--cases tiny-scenes:10 --images 1 --methods krylov",
    "scenes": "--batch 4 --rounds 2",
    "heads": "--layer 10 --train PHOTOS --held-out OTHERS --size 112 --width 32 --exact-steps 4 --block 8 "
    "--steps-per-block 2 --batch 4 --validate-every 4 --precision float32",
    "layer_heads": "--heads 8:32 10:32 --refine --train PHOTOS --held-out OTHERS --size 112 --steps 4 --batch 4 "
    "--block 8 --steps-per-block 2 --validate-every 4 --work OUT/heads",
    "spn": "--train PHOTOS --held-out OTHERS --size 112 --rank 4 --width 32 --steps 4 --batch 2 --constant-images 4 "
    "--precision float32",
    "bottleneck_spn": "--bottleneck BOTTLENECK --work OUT/bottleneck-spn --size 56 --train 6 --held-out 3 --rank 3 "
    "--width 32 --steps 4 --batch 2 --chunk 4 --precision float32",
    "bottleneck": "--bottleneck tiny-scenes=BOTTLENECK --cases scenes-depth --samples 1 --quality-samples 2 "
    "--size 56 --rank 4 --slq-probes 2 --lanczos-steps 4 --precision float32",
    "bottleneck_storage": "--bottleneck tiny-scenes=BOTTLENECK --cases scenes --train-images 12 --tokens 64 --rounds 2 "
    "--held-out 4 --size 56",
    "bottleneck_pruning": "--bottleneck tiny-scenes=BOTTLENECK --cases scenes --train-images 6 --steps 4 "
    "--width 32 --held-out 3 --size 56 --ratios 0.5 --precision float32",
    "retrieval": "--cells scenes:10 --size 56 --train 12 --validation 4 --test 12 --crops 1 --importance 2 --steps 4 "
    "--batch 4 --validate-every 2 --width 32 --sample 2 4 --work OUT/retrieval",
    "geodesics": "--cases scenes-L10 cls-L10 --floors 0 0.1 --model dinov2=MODEL --images photos=PHOTOS --held-out 4 "
    "--pairs 3 --segments 3 --steps 2 --num-probes 2 --size 56 --precision float32",
    "plot_geodesic": "--size 56 --layer 10 --segments 6 --steps 2 --out OUT/geodesic.png",
    "gallery": "--items 300 --queries 8 --limit 12 --steps 4 --size 56 --rounds 1 --pairs 20 --candidates 50 "
    "--work OUT/gallery",
    "pruning_choices": "--model MODEL --images PHOTOS --heads 6=HEAD --limit 2 --ratios 0.5",
    "pruning_planner": "--model MODEL --heads 6=HEAD --calibration PHOTOS --held-out OTHERS --limit 2 --batch 2 "
    "--rounds 1",
    "pruning_precision": "--model MODEL --images PHOTOS --head HEAD --stage 6 --limit 2 --batch 2",
    "pruning_schedules": "--images PHOTOS --limit 2 --batch 2 --score norm --ratios 0.3",
    "frontier": "all --quick --model MODEL --train PHOTOS --judges OTHERS --work OUT/frontier",
    "pruning_speed": "--device cpu --size small --cases 224:1 --no-compile --rounds 1",
    "attention_sizes": "--device cpu --quick --rounds 1",
    "stage_kernel": "--device cpu --case 1:50:64 --rounds 1",
    "kernel_choice": "--check",
    "vggt": "",
    "vggt_pruning": "--ratios 0.5 --rounds 1",
    "vggt_rules": "--scenes 2 --views 2 --scores random",
    "vggt_spectra": "--scenes 1",
    "plot_training": "--out OUT/training.png",
    "plot_bottleneck": "--out OUT/bottleneck.png",
}
FULL = {
    "products": "--size base --device cuda --precision tf32",
    "accuracy": "--model facebook/dinov2-small --images photos/ --limit 50 --seeds 3 --device cuda",
    "coverage": "--model facebook/dinov2-small --images photos/ --device cuda",
    "cold_start": "--images photos/ --limit 50 --device cuda",
    "targets": "--device cuda --precision tf32 float32",
    "layer_heads": "--model facebook/dinov2-small --train train/ --held-out others/ --device cuda --work runs/heads",
    "spn": "--model facebook/dinov2-small --train train/ --held-out others/ --device cuda",
    "bottleneck_spn": "--bottleneck runs/bottleneck/model --work runs/bottleneck-spn --device cuda",
    "bottleneck": "--bottlenecks runs/ --cases scenes-depth views-depth --device cuda",
    "bottleneck_storage": "--bottlenecks runs/ --cases scenes --device cuda",
    "bottleneck_pruning": "--bottlenecks runs/ --cases scenes --device cuda",
    "retrieval": "--cells scenes:4 scenes:8 scenes:10 --device cuda --work runs/retrieval",
    "geodesics": "--model dinov2=facebook/dinov2-small saliency=FOLDER --images photos=others/ --device cuda",
    "gallery": "--items 1000000 --device cuda",
    "pruning_choices": "--model facebook/dinov2-small --images train/ --heads 3=heads/L03 6=heads/L06 10=heads/L10",
    "pruning_planner": "--model facebook/dinov2-small --heads 3=heads/L03 6=heads/L06 10=heads/L10 "
    "--calibration train/ --held-out others/ --device cuda",
    "pruning_precision": "--model facebook/dinov2-small --images photos/ --head heads/L06 --stage 6",
    "pruning_schedules": "--images scenes/ --device cuda",
    "frontier": "tune --model facebook/dinov2-small --train train/ --work local/frontier --minutes 9",
    "pruning_speed": "--device cuda --heads 256x1 512x2",
    "attention_sizes": "--device cuda",
    "stage_kernel": "--device cuda",
    "kernel_choice": "",
    "scenes": "--device cuda --batch 1024",
    "vggt": "--size full --device cuda --layers 16 hooks",
    "vggt_pruning": "--model full --views 32 --pixels 518 --device cuda",
}


def prepare(folder: Path) -> dict[str, str]:
    """Draw pictures and write a DINOv2-S, a head and a bottleneck with random weights."""
    from measure import random_dinov2
    from PIL import Image
    from transformers.utils.logging import disable_progress_bar

    import pullback as pb
    from pullback.learning.s2vae import S2VAE, S2VAEConfig
    from pullback.scenes import render

    for name, seeds in (("photos", range(6)), ("others", range(100, 103))):
        (folder / name).mkdir()
        for seed, picture in zip(seeds, render(seeds, size=256).rgb[:, 0], strict=True):
            pixels = (255 * picture).byte().permute(1, 2, 0).numpy()
            Image.fromarray(pixels).save(folder / name / f"{seed:03d}.png")
    disable_progress_bar()
    model = random_dinov2("small")
    model.save_pretrained(folder / "model")
    pb.ImportanceHead(model.config.hidden_size, 32).save_pretrained(folder / "head")
    hooks = pb.load_probe("tiny-scenes", "depth", "hooks", device="cpu")
    widths = (hooks.backbone.dim,) * len(hooks.layers)
    small = S2VAEConfig(widths, hooks.layers, registers=4, latent=8, width=32, heads=2, blocks=1)
    S2VAE(small).save_pretrained(folder / "bottleneck")
    return {name.upper(): str(folder / name) for name in ("photos", "others", "model", "head", "bottleneck")}


def main() -> None:
    chosen = sys.argv[1:] or list(QUICK)
    unknown = [name for name in chosen if name not in QUICK]
    if unknown:
        raise SystemExit(f"no benchmark {unknown[0]!r}; there are {', '.join(QUICK)}")
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        places = prepare(Path(folder)) | {"OUT": f"{folder}/results"}
        (Path(folder) / "results").mkdir()
        with ThreadPoolExecutor(WORKERS) as pool:
            failed = [
                name
                for name, works in zip(chosen, pool.map(lambda n: run(n, places), chosen), strict=True)
                if not works
            ]
    if failed:
        raise SystemExit(f"[bench] failed: {', '.join(failed)}")
    print(f"[bench] all of it works, {time.perf_counter() - begun:.0f} s. With weights, pictures or a GPU:")
    for name in chosen:
        if name in FULL:
            print(f"  python benchmarks/{name}.py {FULL[name]}")


def run(name: str, places: dict[str, str]) -> bool:
    """Run one script with one thread, say how long it took, and show what it printed if it failed."""
    words = QUICK[name].split()
    if not words or not words[-1].endswith(".png"):
        words += ["--out", "OUT"]
    command = [sys.executable, str(HERE / f"{name}.py"), *(filled(word, places) for word in words)]
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    print(f"[bench] {time.perf_counter() - begun:4.0f} s  {name}.py {QUICK[name]}", flush=True)
    if done.returncode != 0:
        print(f"{done.stdout}{done.stderr}\n{name}.py failed with exit code {done.returncode}", flush=True)
    return done.returncode == 0


def filled(word: str, places: dict[str, str]) -> str:
    """Put the folders in place of the capital words."""
    for name, place in places.items():
        word = word.replace(name, place)
    return word


if __name__ == "__main__":
    main()
