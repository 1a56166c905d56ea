"""What the commands say to wrong input: a table of what is typed, the exit code and the words that must come back.

Every row ends with one message and no traceback, leaves every file as it was, and leaves no temporary file behind.
Exit codes: 2 for what was typed, 1 for what the machine did (a damaged file, a full disk).
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from typer.testing import CliRunner

import pullback as pb
from helpers.pictures import encoded, write_pictures
from pullback.cli import app
from pullback.cli.common import BAD_INPUT, FAILED
from pullback.learning.head import HeadConfig, ImportanceHead
from pullback.learning.pretrained import Origin
from pullback.models import EMBEDDED
from pullback.targets.compute import compute_targets

pytest.importorskip("pyarrow", reason="pyarrow is not installed (the extra pullback[targets])")

DIAGNOSE = "diagnose tiny-scenes --images {photos} --out {new} --size 56 --rank 2 --device cpu"
LOOK = "look tiny-scenes {photos} --out {new} --size 56 --device cpu"
TARGETS = "targets tiny-scenes --images {photos} --out {new} --size 56 --rank 2 --device cpu"
HEAD = "train head --targets {store} --out {new} --device cpu --steps 2"
SPN = (
    "train spn tiny-scenes --images {photos} --held-out {photos} --out {new} --size 56 --rank 2 --device cpu --steps 2"
)
BOTTLENECK = (
    "train bottleneck tiny-scenes --images {photos} --held-out {other} --out {new} --size 56 --device cpu --steps 2 "
    "--registers 2 --latent 4 --width 16 --heads 2 --blocks 1 --batch 2"
)
DRM = (
    "train drm tiny-scenes --images {photos} --held-out {other} --out {new} --size 56 --device cpu --steps 2 --rank 2 "
    "--distill-weight 0"
)
PRUNE = "prune tiny-scenes --images {photos} --out {new} --size 56 --device cpu --time none --scores norm --stages 4"
UNBOUND = "plan tiny-scenes --images {photos} --heads 4=norm --size 56 --device cpu"
PLAN = f"{UNBOUND} --flops 0.9"
PARETO = "pareto tiny-scenes --images {photos} --out {new} --size 56 --device cpu --time none --methods resize"
TUNE = "tune {pruned} --images {photos} --out {new} --held-out 0.5 --size 56 --device cpu --steps 2 --batch 2"

COMMANDS = (
    "DIAGNOSE",
    "LOOK",
    "TARGETS",
    "HEAD",
    "SPN",
    "DRM",
    "BOTTLENECK",
    "PRUNE",
    "PLAN",
    "UNBOUND",
    "TUNE",
    "PARETO",
)

# id, what is typed, words of the message; the exit code is 2, or 1 where the id says so in brackets
ROWS = """
no command at all | nonsense | No such command 'nonsense'
diagnose without images | diagnose tiny-scenes | Missing option '--images'
diagnose, images nowhere | {DIAGNOSE} --images nowhere | --images='nowhere': no such file or folder
diagnose, folder without images | {DIAGNOSE} --images {empty} | --images=.*no image found
diagnose, glob without a match | {DIAGNOSE} --images '{photos}/*.tiff' | --images=.*no image found
diagnose, unreadable image | {DIAGNOSE} --images {broken_image} | --images=.*none of 1 file could be used
diagnose, model nowhere | {DIAGNOSE:no/such} | model: 'no/such' is neither a folder
diagnose, model is a file | {DIAGNOSE:{text}} | model: expected a folder or a hub id, got the file
diagnose, empty model folder | {DIAGNOSE:{empty}} | model: .* has no config.json
diagnose, pickled model | {DIAGNOSE:{pickled}} | holds only a pickled checkpoint
diagnose, unknown decoder | {DIAGNOSE} --decoder words | --decoder: expected one of cls
diagnose, layer too deep | {DIAGNOSE} --layer 99 | --layer: expected a block index from 0 to 11
diagnose, layer in words | {DIAGNOSE} --layer last | --layer: expected a block index such as 10
diagnose, rank 0 | {DIAGNOSE} --rank 0 | Invalid value for '--rank'
diagnose, rtol below 0 | {DIAGNOSE} --rtol -1 | Invalid value for '--rtol'
diagnose, size no multiple | {DIAGNOSE} --size 57 | --size: 57x57 pixels are not divisible by the patch size 14
diagnose, size in words | {DIAGNOSE} --size large | --size: expected pixels such as 224
diagnose, limit 0 | {DIAGNOSE} --limit 0 | Invalid value for '--limit'
diagnose, unknown method | {DIAGNOSE} --method guess | Invalid value for '--method'
diagnose, unknown precision | {DIAGNOSE} --precision fp8 | Invalid value for '--precision'
diagnose, unknown device | {DIAGNOSE} --device abacus | --device: 'abacus' cannot be used here
diagnose, unknown distance | {DIAGNOSE} --distance manhattan | --distance: expected one of
diagnose, out is a file | {DIAGNOSE} --out {text} | --out: cannot make the folder .*is not a folder
diagnose, out below a file | {DIAGNOSE} --out {text}/deep/er | --out: cannot make the folder .*is not a folder
diagnose, out among the images | {DIAGNOSE} --out {photos}/results | --out: .* lies in .* searched for images
diagnose, out is the images | {DIAGNOSE} --out {photos} | --out: .* lies in .* searched for images
diagnose, out of targets | {DIAGNOSE} --out {store} | --out: .* holds targets .*belongs to one kind of run
diagnose, out of a model | {DIAGNOSE} --out {head} | --out: .* holds the weights of a model
diagnose, weights instead of the folder | {DIAGNOSE:{tiny}/model.safetensors} | For a 'dinov2' give the folder, .*tiny;
diagnose, a pruned model | {DIAGNOSE:{pruned}} | model: .*no config.json .*PrunedModel.from_pretrained
diagnose, one logit of no classifier | {DIAGNOSE} --decoder logit-5 | --decoder: .*no classifier. 'logit-5' needs
diagnose, diagnosis.json cut short [1] | {DIAGNOSE} --out {undiagnosed} | --out: .*diagnosis.json cannot be read as JSON
diagnose, model cut short [1] | {DIAGNOSE:{cut}} | model: the weights of .*model.safetensors' could not be loaded
diagnose, model of no bytes [1] | {DIAGNOSE:{hollow}} | model: the weights of .*model.safetensors' could not be loaded
diagnose, config.json cut short [1] | {DIAGNOSE:{torn}} | model: .*config.json is not a transformers configuration
diagnose, config.json of something else | {DIAGNOSE:{foreign}} | config.json is not a transformers configuration
look without an image | look tiny-scenes | Missing argument 'IMAGE...'
look, image nowhere | look tiny-scenes nowhere --out {new} | images='nowhere': no such file or folder
look, layer in words | {LOOK} --layer first | --layer: expected a block index such as 10
look, one probe | {LOOK} --probes 1 | Invalid value for '--probes'
look, unknown decoder | {LOOK} --decoder words | decoder: expected one of cls
look, out among the images | {LOOK} --out {photos}/look | --out: .* lies in .* searched for images
look, out of targets | {LOOK} --out {store} | --out: .* holds targets
demo, out is a file | demo --out {text} | --out: cannot make the folder
demo, negative seed | demo --seed -1 | Invalid value for '--seed'
demo, out of targets | demo --out {store} | --out: .* holds targets
targets without out | targets tiny-scenes --images {photos} | Missing option '--out'
targets, images nowhere | {TARGETS} --images nowhere | --images='nowhere': no such file or folder
targets, folder without images | {TARGETS} --images {empty} | --images=.*no image found
targets, compressed archive | {TARGETS} --images a.tar.gz | --images='a.tar.gz': compressed archives
targets, archive nowhere | {TARGETS} --images 'a-{{0..1}}.tar' | --images=.*no such archive: a-0.tar
targets, list without a line | {TARGETS} --images {no_lines} | --images=.*expected one path per line
targets, nothing readable | {TARGETS} --images {broken_image} | --images=.*expected at least one readable image
targets, rank too large | {TARGETS} --rank 9999 | --rank: expected 1 <= rank
targets, two layers | {TARGETS} --layer 4 --layer 8 | --layer: expected one, got 4, 8. Run the command for each
targets, crops below 0 | {TARGETS} --crops -1 | Invalid value for '--crops'
targets, shards of no rows | {TARGETS} --shard-size 0 | Invalid value for '--shard-size'
targets, unknown engine | {TARGETS} --engine spark | Invalid value for '--engine'
targets, a VGGT | {TARGETS:tiny-views} | expects a model of single images
targets, size in words | {TARGETS} --size big | --size: expected pixels such as 224
targets, another seed | {TARGETS} --out {store} --seed 3 | --out: .*holds targets with other settings .*seed: 0 there
targets, other images | {TARGETS} --out {store} --images {other} | --out: .*source: .* asked for
targets, out of a comparison | {TARGETS} --out {compared} | --out: .*holds a comparison of pruning rules
targets, out is a file | {TARGETS} --out {text} | --out: cannot make the folder
targets, empty Parquet [1] | {TARGETS} --out {emptied} | targets-00000.parquet: cannot be read .*Delete it
targets, Parquet cut short [1] | {TARGETS} --out {halved} | targets-00000.parquet: cannot be read .*Delete it
targets, targets.json cut short [1] | {TARGETS} --out {unset} | --out: .*targets.json cannot be read as JSON
train without a kind | train gallery | No such command 'gallery'
head without targets | train head --out {new} | Missing option '--targets'
head, targets nowhere | {HEAD} --targets nowhere | --targets: expected targets.json in nowhere
head, targets are images | {HEAD} --targets {photos} | --targets: expected targets.json in
head, no rows yet | {HEAD} --targets {rowless} | --targets: .* holds no rows yet
head, empty Parquet [1] | {HEAD} --targets {emptied} | targets-00000.parquet: cannot be read
head, held-out share of 1.5 | {HEAD} --held-out 1.5 | --held-out: expected a share between 0 and 1
head, held-out share of nan | {HEAD} --held-out nan | --held-out: expected a share between 0 and 1
head, held-out in words | {HEAD} --held-out some | --held-out: expected a store of targets or a share
head, held-out of images | {HEAD} --held-out {photos} | --held-out: expected targets.json in
head, held-out share of nothing | {HEAD} --held-out 0.000001 | --held-out: 6 rows cannot be split
head, width no multiple | {HEAD} --width 30 --heads 4 | --width, --heads: expected width / 4
head, no steps | {HEAD} --steps 0 | Invalid value for '--steps'
head, patience 0 | {HEAD} --patience 0 | Invalid value for '--patience'
head, unknown target | {HEAD} --target beauty | Invalid value for '--target'
head, start nowhere | {HEAD} --start no/head | --start: 'no/head' is neither a folder nor a hub id
head, start of another width | {HEAD} --start {head} | --start: expected a head for features of width 192, got 24
head, start is no head | {HEAD} --start {tiny} | --start: .* holds no model of this package
head, images nowhere | {HEAD} --images nowhere | --images='nowhere': no such file or folder
head, other images | {HEAD} --images {other} | --images: 6 of 6 images of these targets are not in it
head, another model | {HEAD} --model {tiny} | layer: expected a block index from 0 to 2
head, out of targets | {HEAD} --out {store} | --out: .* holds targets
head, another seed | {HEAD} --out {trained} --seed 3 | --out: .*holds a training run with other settings .*seed: 0 there
head, damaged checkpoint [1] | {HEAD} --out {uncheckpointed} | checkpoint.pt: cannot be read .*Delete it(?!.*goes on)
spn without held-out | train spn tiny-scenes --images {photos} --out {new} | Missing option '--held-out'
spn, images nowhere | {SPN} --images nowhere | --images='nowhere': no such file or folder
spn, held-out nowhere | {SPN} --held-out nowhere | --held-out='nowhere': no such file or folder
spn, width no multiple | {SPN} --width 30 --heads 4 | --width, --heads: expected width to be a multiple
spn, two layers | {SPN} --layer 4 --layer 8 | --layer: expected one, got 4, 8
spn, narrow sketch | {SPN} --sketch-width 1 | --sketch-width: expected rank <= width
spn, pairs of one | {SPN} --supervision distances --batch 1 | --batch: distance matching compares pairs
spn, unknown supervision | {SPN} --supervision love | Invalid value for '--supervision'
spn, out of a training of another kind | {SPN} --out {trained} | --out: .*holds a training run with other settings
drm without held-out | train drm tiny-scenes --images {photos} --out {new} | Missing option '--held-out'
drm, images nowhere | {DRM} --images nowhere | --images='nowhere': no such file or folder
drm, held-out nowhere | {DRM} --held-out nowhere | --held-out='nowhere': no such file or folder
drm, judged by its images | {DRM} --held-out {photos} | --held-out: expected images that the network is not trained on
drm, one image | {DRM} --limit 1 | --images: expected at least two, since pairs of them are compared, got 1
drm, one judge | {DRM} --held-out {other}/other-0.png | --held-out: expected at least three images, .* got 1
drm, all layers at once | {DRM} --decoder depth --layer hooks | probe: expected one at a layer
drm, rank too high | {DRM} --rank 999 | --rank: expected at most the width of the features, 192, got 999
drm, width no multiple | {DRM} --width 30 | --width, --heads: expected width / 4 to be a multiple of heads
drm, unknown reference | {DRM} --reference miles | Invalid value for '--reference'
drm, targets nowhere | {DRM} --targets nowhere | --targets: expected targets.json in nowhere
drm, targets that are not used | {DRM} --targets {store} | --targets: given, but distill_weight is 0
drm, targets without rows | {DRM} --targets {rowless} | --targets: .* holds no rows yet
drm, targets of another layer | {DRM} --targets {store} --distill-weight 1 --layer 4 | probe: .* targets of another
drm, size between patches | {DRM} --size 57 | --size: 57x57 pixels are not divisible by the patch size
drm, a VGGT | {DRM:tiny-views} | expects a model of single images.*fit_drm
drm, out of a training of another kind | {DRM} --out {trained} | --out: .*holds a training run with other settings
drm, out of targets | {DRM} --out {store} | --out: .* holds targets
bottleneck without held-out | train bottleneck tiny-scenes --images {photos} --out {new} | Missing option '--held-out'
bottleneck, images nowhere | {BOTTLENECK} --images nowhere | --images='nowhere': no such file or folder
bottleneck, held-out nowhere | {BOTTLENECK} --held-out nowhere | --held-out='nowhere': no such file or folder
bottleneck, judged by its images | {BOTTLENECK} --held-out {photos} | --held-out: expected images that the network
bottleneck, the class token | {BOTTLENECK} --decoder cls | --decoder: 'cls' reads class or register tokens
bottleneck, width no multiple | {BOTTLENECK} --width 30 | --width, --heads: expected width to be a multiple of 4 heads
bottleneck, a sphere of one number | {BOTTLENECK} --latent 1 | --latent: expected at least 2 numbers a register
bottleneck, no registers | {BOTTLENECK} --registers 0 | Invalid value for '--registers'
bottleneck, unknown posterior | {BOTTLENECK} --posterior cauchy | Invalid value for '--posterior'
bottleneck, KL below 0 | {BOTTLENECK} --kl-weight -1 | Invalid value for '--kl-weight'
bottleneck, unknown distance | {BOTTLENECK} --distance miles | --distance: expected one of cosine, log, silog
bottleneck, oblong crops | {BOTTLENECK} --size 56x84 | --size: expected a square.*Use a square size, or
bottleneck, no whole patches | {BOTTLENECK} --size 60 | --size: 60x60 pixels are not divisible by the patch size 14
bottleneck, of a bottleneck | {BOTTLENECK} --decoder depth@s2vae | --decoder: expected one without a bottleneck
bottleneck, log of an embedding | {BOTTLENECK} --decoder mean --distance log | --distance: 'log' takes the logarithm
bottleneck, a VGGT | {BOTTLENECK:tiny-views} | expects a model of single images.*fit_bottleneck
bottleneck, images without one | {BOTTLENECK} --images {empty} | --images=.*no image found
bottleneck, judges without one | {BOTTLENECK} --held-out {empty} | --held-out=.*no image found
bottleneck, judges that cannot be read | {BOTTLENECK} --held-out {broken_image} | --held-out: expected at least one read
bottleneck, size between patches | {BOTTLENECK} --size 57 | --size: 57x57 pixels are not divisible by the patch size
bottleneck, behind another | {BOTTLENECK} --decoder depth@{vae} | --decoder: expected one without a bottleneck, got 'dep
bottleneck, no saliency | {BOTTLENECK} --decoder saliency | --decoder: 'saliency' needs decoder.safetensors
bottleneck, KL without end | {BOTTLENECK} --kl-weight inf | --kl-weight: expected a number that is not negative, got inf
bottleneck, a rate that overflows | {BOTTLENECK} --learning-rate 1e30 | --learning-rate: the loss .* is NaN or infinite
bottleneck, other registers | {BOTTLENECK} --out {squeezed} --registers 3 | --out: .*other settings .network.registers:
bottleneck, other KL | {BOTTLENECK} --out {squeezed} --kl-weight 0.1 | --out: .*other settings .kl_weight: 0.001 there
bottleneck, other decoder | {BOTTLENECK} --out {squeezed} --decoder mean | --out: .*other settings .*probe.decoder: 'dep
decoder behind nowhere | {DIAGNOSE} --decoder depth@nowhere | --decoder: 'nowhere' is neither .* behind the @, or s2vae
decoder behind a half-way run | {DIAGNOSE} --decoder depth@{unfinished} | --decoder: the training in .* not come to
decoder behind nothing | {DIAGNOSE} --decoder depth@ | --decoder: expected one of .*DECODER@FOLDER.* got 'depth@'
no decoder before the @ | {DIAGNOSE} --decoder @s2vae | --decoder: expected one of .*DECODER@FOLDER.* got '@s2vae'
unknown decoder before the @ | {DIAGNOSE} --decoder words@{vae} | --decoder: expected one of .* got 'words'
class token behind a bottleneck | {DIAGNOSE} --decoder cls@{vae} | --decoder: 'cls' reads the first 1 token
bottleneck of other layers | {DIAGNOSE} --decoder mean@{vae} | --decoder: expected one of the layers .11., which decoder
bottleneck of another model | diagnose tiny-views --images {photos} --decoder depth@{vae} | --decoder: it was trained fo
bottleneck that does not ship | {DIAGNOSE} --decoder mean@s2vae | --decoder: no s2vae that comes with the package fits
bottleneck that is a head | {DIAGNOSE} --decoder depth@{head} | --decoder: .* holds importance-head, expected s2vae
bottleneck with half its config [1] | {DIAGNOSE} --decoder depth@{torn_vae} | --decoder: config.json in .* is no JSON
bottleneck with half its weights [1] | {DIAGNOSE} --decoder depth@{cut_vae} | --decoder: model.safetensors in .* cannot
latent without a bottleneck | {DIAGNOSE} --layer latent --decoder depth | --layer: only decoders with a bottleneck have
latent, misspelled | {DIAGNOSE} --layer Latent --decoder depth@{vae} | --layer: expected a block index .*'latent-ambient
latent, on spheres of a Gaussian | {DIAGNOSE} --layer latent --decoder depth@{gaussian} | --layer: .*expected 'ambient'
latent in bf16 | {DIAGNOSE} --layer latent --decoder depth@{vae} --precision bf16 | --precision: expected float32 or tf3
look at a latent | {LOOK} --layer latent --decoder depth@{vae} | --layer: .*registers have no place in the picture
targets in no latent | {TARGETS} --layer latent --decoder depth | --layer: only decoders with a bottleneck
spn in no latent | {SPN} --layer latent --decoder depth | --layer: only decoders with a bottleneck
bottleneck, out of a training of another kind | {BOTTLENECK} --out {trained} | --out: .*holds a training run with other
prune without out | prune tiny-scenes --images {photos} | Missing option '--out'
prune, images nowhere | {PRUNE} --images nowhere | --images='nowhere': no such file or folder
prune, ratio 1 | {PRUNE} --ratios 1 | --ratios: expected a share of the patch tokens
prune, ratios in words | {PRUNE} --ratios half | --ratios: expected a list such as 0.1,0.3
prune, a stage twice | {PRUNE} --stages 4,4 | --stages: expected ascending blocks, each once
prune, stages backwards | {PRUNE} --stages 8,4 | --stages: expected ascending blocks
prune, stage too deep | {PRUNE} --stages 11 | --stages: expected blocks from 0 to 10
prune, unknown score | {PRUNE} --scores wisdom | --scores: expected some of
prune, former score | {PRUNE} --scores evit | --scores: the single-stage score 'evit' is now called 'class-attention'
prune, head missing | {PRUNE} --scores importance | --scores: no importance head that comes with the package fits
prune, unknown preset | {PRUNE} --preset worst | --preset: expected one of best
prune, head nowhere | {PRUNE} --head no/head | --head: 'no/head' is neither a folder
prune, head of another width | {PRUNE} --head {head} | --head:
prune, head not trained to the end | {PRUNE} --head {unfinished} | --head: the training in .* has not come to its end
prune, time in words | {PRUNE} --time soon | --time: expected auto, none or batch sizes
prune, bank nowhere | {PRUNE} --bank nowhere | --bank='nowhere': no such file or folder
prune, images without classes | {PRUNE} --bank {photos} | --labels: .* lies in no class folder
prune, labels nowhere | {PRUNE} --bank {photos} --labels nowhere.csv | --labels: .*nowhere.csv
prune, labels without columns | {PRUNE} --bank {photos} --labels {text} | --labels: expected a column file
prune, another seed | {PRUNE} --out {compared} --seed 3 | --out: .*holds a comparison with other settings .*seed
prune, out among the images | {PRUNE} --out {photos}/x | --out: .* lies in .* searched for images
prune, out of targets | {PRUNE} --out {store} | --out: .* holds targets
prune, a row that is no JSON [1] | {PRUNE} --out {misread} | line 1 of .*rows.jsonl is no JSON
prune, settings cut short [1] | {PRUNE} --out {unsettled} | settings.json cannot be read as JSON
plan without a budget | {UNBOUND} | budget: expected one of flops, milliseconds and degradation, got none
plan with two budgets | {PLAN} --degradation 1 | budget: expected one of .*got flops, degradation
plan, flops above 1 | {PLAN} --flops 1.5 | --flops: expected a share of the model's own operations
plan, no milliseconds | {UNBOUND} --milliseconds 0 | --milliseconds: expected milliseconds for one batch
plan, heads without blocks | {PLAN} --heads norm | --heads: expected BLOCK=HEAD by commas
plan, a block twice | {PLAN} --heads 4=norm,4=class-attention | --heads: expected each block once
plan, former score | {PLAN} --heads 4=tome | --heads: the single-stage score 'tome' is now called 'bipartite'
plan, head nowhere | {PLAN} --heads 4=no/head | --heads: 'no/head' is neither a folder
plan, block too deep | {PLAN} --heads 11=norm | --heads: expected blocks from 0 to 10
plan, head of another layer | {PLAN} --heads 6={trained} | --heads: it was trained for layer 10
plan, size larger than the pictures | {PLAN} --sizes 70 | --sizes: expected at most the 56 pixels
plan, images to tune on nowhere | {PLAN} --tune nowhere --sizes own | --tune='nowhere': no such file or folder
plan, no stages | {PLAN} --stages 0 | Invalid value for '--stages'
plan, images nowhere | {PLAN} --images nowhere | --images='nowhere': no such file or folder
plan, out among the images | {PLAN} --out {photos}/x | --out: .* lies in .* searched for images
plan, out of targets | {PLAN} --out {store} | --out: .* holds targets
plan, out is a file | {PLAN} --out {text} | --out: cannot make the folder
pareto without out | pareto tiny-scenes --images {photos} | Missing option '--out'
pareto, images nowhere | {PARETO} --images nowhere | --images='nowhere': no such file or folder
pareto, folder without images | {PARETO} --images {empty} | --images=.*no image found
pareto, images that cannot be read | {PARETO} --images {broken_image} | --images: none of 1 file could be read
pareto, unknown method | {PARETO} --methods words | --methods: expected some of resize, tome
pareto, a larger picture | {PARETO} --sizes 70 | --sizes: expected multiples of the patch size 14 below the 56 pixels
pareto, a size between patches | {PARETO} --sizes 43 | --sizes: expected multiples of the patch size 14
pareto, plan of another model | {PARETO} --plan a={pruned} | --plan: .*pruned was made of other weights
pareto, plan that is none | {PARETO} --plan a={tiny} | --plan: .*tiny holds no pruned model that can be read
pareto, plan without a method | {PARETO} --plan {pruned} | --plan: expected METHOD=FOLDER by commas
pareto, head nowhere | {PARETO} --methods best --heads 4=no/head | --heads: 'no/head' is neither a folder
pareto, head of another width | {PARETO} --methods best --heads 4={head} | --heads:
pareto, images without classes | {PARETO} --neighbours 2 | --labels: .* lies in no class folder
pareto, labels without columns | {PARETO} --labels {text} | --labels: expected a column file
pareto, budget of nothing | {PARETO} --budgets 0 | --budgets: expected shares of the operations
pareto, out of a comparison of rules | {PARETO} --out {compared} | --out: .* holds a comparison of pruning rules
pareto, out of targets | {PARETO} --out {store} | --out: .* holds targets
pareto, out among the images | {PARETO} --out {photos}/x | --out: .* lies in .* searched for images
tune without out | tune {pruned} --images {photos} | Missing option '--out'
tune, nothing pruned | {TUNE:{tiny}} | pruned: .*tiny holds no pruned model that can be read
tune, nowhere | {TUNE:nowhere} | pruned: nowhere holds no pruned model that can be read
tune, images nowhere | {TUNE} --images nowhere | --images='nowhere': no such file or folder
tune, images without one | {TUNE} --images {empty} | --images=.*no image found
tune, images that cannot be read | {TUNE} --images {broken_image} | --images: expected at least one readable image
tune, too few images | {TUNE} --batch 64 | --images: expected at least the 64 images of a batch to train on, got 3
tune, held out nowhere | {TUNE} --held-out nowhere | --held-out='nowhere': no such file or folder
tune, held out all of it | {TUNE} --held-out 1.5 | --held-out: expected a share between 0 and 1
tune, held out the same | {TUNE} --held-out {photos} | --held-out: expected images that the network is not trained on
tune, no steps | {TUNE} --steps 0 | Invalid value for '--steps'
tune, size between patches | {TUNE} --size 57 | --size: 57x57 pixels are not divisible by the patch size 14
tune, oblong crops | {TUNE} --size 56x84 | --size: expected a square, since images are varied by square crops
tune, a rate that overflows | {TUNE} --learning-rate 1e300 | --learning-rate: the .* NaN or infinite
tune, hooks of no decoder | {TUNE} --match-hooks 1 | --match-hooks: Dinov2Model has no dense decoder
tune, out of a pruned model | {TUNE} --out {pruned} | --out: .*holds a pruned model
tune, out of a training | {TUNE} --out {trained} | --out: .*holds a training run with other settings
tune, out among the images | {TUNE} --out {photos}/x | --out: .* lies in .* searched for images
tune, unknown device | {TUNE} --device abacus | --device: 'abacus' cannot be used here
plan, a budget that nothing meets | {PLAN} --flops 0.01 | budget: no plan was found
"""


def table() -> Iterator[tuple[str, str, int, str]]:
    for line in ROWS.strip().splitlines():
        name, typed, message = (part.strip() for part in line.split(" | ", 2))
        for command in COMMANDS:
            text = globals()[command]
            typed = re.sub(  # {TARGETS:x} has x in the place of the model
                rf"^\{{{command}(?::(.*))?\}}(?=$| )",
                lambda m, text=text: text if m[1] is None else re.sub(r"tiny-scenes|\{pruned\}", m[1], text, count=1),
                typed,
            )
        yield name, typed, FAILED if name.endswith("[1]") else BAD_INPUT, message


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> dict[str, Path]:
    """Folders of everything that a command may be given, right and wrong."""
    from helpers.families import model_of, save

    root = tmp_path_factory.mktemp("place")
    paths = {"new": root / "new", "text": root / "text.csv", "empty": root / "empty", "no_lines": root / "none.txt"}
    paths["text"].write_text("neither,nor\n1,2\n")
    paths["no_lines"].write_text("# nothing\n")
    paths["empty"].mkdir()
    paths["photos"] = write_pictures(root / "photos", 6)
    paths["other"] = write_pictures(root / "other", 2, broken=False)
    for number in range(2):
        (paths["other"] / f"{number:02d}.png").unlink()
        (paths["other"] / f"other-{number}.png").write_bytes(encoded(100 + number))
    paths["broken_image"] = root / "broken" / "x.png"
    paths["broken_image"].parent.mkdir()
    paths["broken_image"].write_bytes(b"not a picture")
    save(model_of("dinov2"), root / "tiny")
    paths["tiny"] = root / "tiny"
    paths["pruned"] = pb.prune(model_of("dinov2"), "norm", ratio=0.5, stages=[1]).save_pretrained(root / "pruned")
    paths["undiagnosed"] = root / "undiagnosed"
    paths["undiagnosed"].mkdir()
    (paths["undiagnosed"] / "diagnosis.json").write_text('{"format": ')
    _models(root, paths)
    torch.manual_seed(0)
    config = HeadConfig(24, 16, 2, origin=Origin(family="dinov2", layer=4))
    paths["head"] = ImportanceHead.from_config(config).save_pretrained(root / "head")
    probe = pb.load_probe("tiny-scenes", device="cpu")
    compute_targets(probe, paths["photos"], out=root / "store", rank=2, size=56)
    paths["store"] = root / "store"
    for name in ("emptied", "halved", "unset", "rowless"):
        paths[name] = shutil.copytree(paths["store"], root / name)
    shard = next(paths["store"].glob("*.parquet"))
    (paths["emptied"] / shard.name).write_bytes(b"")
    (paths["halved"] / shard.name).write_bytes(shard.read_bytes()[:3000])
    (paths["unset"] / "targets.json").write_text('{"format": 1, ')
    (paths["rowless"] / shard.name).unlink()
    _runs(root, paths)
    return paths


def _models(root: Path, paths: dict[str, Path]) -> None:
    """Models with something wrong in each."""
    for name in ("cut", "hollow", "torn", "foreign"):
        paths[name] = shutil.copytree(EMBEDDED["tiny-scenes"], root / name)
    weights = (paths["cut"] / "model.safetensors").read_bytes()
    (paths["cut"] / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    (paths["hollow"] / "model.safetensors").write_bytes(b"")
    (paths["torn"] / "config.json").write_text('{"model_type": "tiny_')
    (paths["foreign"] / "config.json").write_text('{"name": "something else"}')
    paths["pickled"] = root / "pickled"
    paths["pickled"].mkdir()
    (paths["pickled"] / "config.json").write_text('{"model_type": "dinov2"}')
    (paths["pickled"] / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def _runs(root: Path, paths: dict[str, Path]) -> None:
    """A training and a comparison, whole and damaged."""
    for name in ("trained", "compared", "squeezed", "gaussian"):
        paths[name] = root / name
    for typed in (
        f"{BOTTLENECK} --out {{squeezed}}",
        f"{BOTTLENECK} --out {{gaussian}} --posterior gaussian",
        f"{HEAD} --held-out 0.5 --out {{trained}} --width 16 --heads 2 --batch 2",
        f"{PRUNE} --out {{compared}} --limit 1 --ratios 0.5",
    ):
        result = invoke(typed, paths)
        assert result.exit_code == 0, result.output
    for name, whole in {
        "uncheckpointed": "trained", "unfinished": "trained", "misread": "compared", "unsettled": "compared",
    }.items():  # fmt: skip
        paths[name] = shutil.copytree(paths[whole], root / name)
    paths["vae"] = paths["squeezed"] / "model"
    for name in ("torn_vae", "cut_vae"):
        paths[name] = shutil.copytree(paths["vae"], root / name)
    (paths["torn_vae"] / "config.json").write_text('{"kind": ')
    weights = (paths["cut_vae"] / "model.safetensors").read_bytes()
    (paths["cut_vae"] / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    (paths["uncheckpointed"] / "checkpoint.pt").write_bytes(b"PK half of it")
    shutil.rmtree(paths["unfinished"] / "model")
    (paths["misread"] / "rows.jsonl").write_text("nonsense\n{}\n")
    (paths["unsettled"] / "settings.json").write_text("{")


def invoke(typed: str, paths: dict[str, Path]):
    runner = CliRunner(env={"FORCE_COLOR": None, "TTY_COMPATIBLE": None, "COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    return runner.invoke(app, shlex.split(typed.format(**paths)))


def files(root: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(root)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in root.rglob("*")
        if path.is_file() and path.name != ".run"  # the mark of the last run that asked
    }


@pytest.mark.parametrize(("typed", "code", "message"), [row[1:] for row in table()], ids=[row[0] for row in table()])
def test_wrong_input_is_explained_and_nothing_is_lost(place, typed, code, message, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("pullback.report.drawing.importlib.util.find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    root, paths = place["text"].parent, place | {"new": tmp_path / "new"}
    before = files(root)
    result = invoke(typed, paths)
    said = " ".join(result.output.replace("│", " ").split())
    assert result.exit_code == code, said
    assert re.search(message, said), said
    assert "Traceback" not in said and isinstance(result.exception, SystemExit | None)
    assert files(root) == before, "files were lost or changed"
    assert not list(tmp_path.rglob(".*.tmp")) and not list(root.rglob(".*.tmp"))


def test_there_are_enough_rows():
    names = [row[0] for row in table()]
    assert len(set(names)) == len(names) >= 80


def test_documented_exit_codes_are_the_ones_in_use():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "command-line.md").read_text()
    for code in (FAILED, BAD_INPUT, 130):
        assert f"`{code}`" in page
    assert json.dumps(FAILED) == "1"
