"""Small random models of every registered family, and what their own forward says that each decoder must give.

The tests of backbones, decoders and probes run over this table; a family without an entry here fails them. Every
parameter is random, layer scales and norms too, so that no two mistakes cancel. Models are shared between tests: do
not change them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

from helpers.timm_names import TimmViT
from pullback.models.tiny_scenes import TinyScenes, TinyScenesConfig
from pullback.runs.files import write_network

Reference = Callable[[nn.Module, Tensor], Tensor]

WIDTH, HEADS = 24, 3
TRAINED_GRID = (3, 3)  # the position embeddings fit this one; others are interpolated
GRIDS = (TRAINED_GRID, (2, 2), (2, 3), (4, 1))
DOWNSAMPLED, ONE_LOGIT = "depth-3x4", "logit-3"  # stand for the registry's depth-GxG and logit-K
FOR_KNOWN_WEIGHTS = {"dinov2": {"depth", "depth-GxG"}}  # decoders that ship, tested in tests/decoders/test_depth.py
FROM_FOLDER = {"saliency"}  # decoders that come with a folder, tested in tests/decoders/test_saliency.py


@dataclass(frozen=True)
class SmallModel:
    """``references``: for each decoder, its output by transformers' own forward."""

    family: str
    make: Callable[[], nn.Module]
    references: dict[str, Reference]
    patch_size: int
    depth: int = 3
    folder: bool = True  # whether it can be saved as a folder and loaded from it


def save(model: nn.Module, folder: Path) -> None:
    """The model as a folder that `load_backbone` takes."""
    if isinstance(model, TinyScenes):
        write_network(folder, model, asdict(model.config))
    else:
        model.save_pretrained(folder)


@lru_cache
def model_of(name: str) -> nn.Module:
    """The small model ``name``: float64, evaluation mode, seeded."""
    return randomized(SMALL_MODELS[name].make())


def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    """``model`` with every parameter and every batch-norm statistic drawn anew, in float64 and evaluation mode."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    model = model.double().eval().requires_grad_(False)
    for name, value in sorted(model.named_parameters()):
        if value.ndim > 1 and not any(part in name for part in ("token", "position", "probe")):
            value.copy_(draw(value.shape) * value[0].numel() ** -0.5)
        elif name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "lambda1")):
            value.copy_(1 + 0.4 * draw(value.shape))
        else:
            value.copy_(0.5 * draw(value.shape))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.copy_(0.3 * draw(module.running_mean.shape))
            module.running_var.copy_(0.5 + draw(module.running_var.shape).abs())
    return model


@lru_cache
def seeded_vit() -> nn.Module:
    """A quick dense model: 6 blocks of width 64 and a DPT head that reads four of them, random but the same everywhere.

    Its norms and scales are those of a fresh model, so its Jacobians behave; `SMALL_MODELS` are wilder on purpose.
    """
    backbone = tf.Dinov2Config(
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        patch_size=14,
        image_size=224,
        out_indices=[2, 3, 5, 6],
        apply_layernorm=True,
        reshape_hidden_states=False,
    )
    config = tf.DepthAnythingConfig(
        backbone_config=backbone,
        reassemble_hidden_size=64,
        neck_hidden_sizes=[16, 16, 32, 32],
        fusion_hidden_size=16,
        head_hidden_size=8,
        patch_size=14,
    )
    model = tf.DepthAnythingForDepthEstimation(config).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.ndim > 1:
            fan_in = parameter[0].numel() if "token" not in name and "position" not in name else 1
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * fan_in**-0.5)
    model.head.conv3.bias.fill_(1.0)  # keep the final ReLU open
    return model.double().eval()


def images_for(name: str, grid: tuple[int, int], batch: int = 2, seed: int = 0) -> Tensor:
    """Random images [B, 3, H, W] of ``grid`` patches."""
    height, width = (side * SMALL_MODELS[name].patch_size for side in grid)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, height, width, generator=generator, dtype=torch.float64)


def patches_for(images: Tensor, patch: int) -> dict[str, Tensor]:
    """What SigLIP 2 takes for images of one shape, cut patch by patch; transformers' processor numbers them so."""
    rows, columns = (side // patch for side in images.shape[-2:])
    patches = [
        images[:, :, patch * row : patch * (row + 1), patch * column : patch * (column + 1)].movedim(1, -1).flatten(1)
        for row in range(rows)
        for column in range(columns)
    ]
    return {
        "pixel_values": torch.stack(patches, 1),
        "pixel_attention_mask": torch.ones(len(images), rows * columns, dtype=torch.int32),
        "spatial_shapes": torch.tensor([[rows, columns]] * len(images)),
    }


def random_normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _common(patch: int) -> dict:
    return {
        "hidden_size": WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": HEADS,
        "patch_size": patch,
        "image_size": TRAINED_GRID[0] * patch,
    }


def _dinov2(**options: object) -> nn.Module:
    return tf.Dinov2Model(tf.Dinov2Config(**_common(14), mlp_ratio=2, **options))


def _registers() -> nn.Module:
    config = tf.Dinov2WithRegistersConfig(**_common(14), mlp_ratio=2, num_register_tokens=2)
    return tf.Dinov2WithRegistersModel(config)


def _dinov3(gated: bool) -> nn.Module:
    config = tf.DINOv3ViTConfig(**_common(16), intermediate_size=40, num_register_tokens=2, use_gated_mlp=gated)
    return tf.DINOv3ViTModel(config)


def _clip(hidden_act: str) -> nn.Module:
    config = tf.CLIPVisionConfig(**_common(8), intermediate_size=40, projection_dim=10, hidden_act=hidden_act)
    return tf.CLIPVisionModelWithProjection(config)


def _siglip() -> nn.Module:
    return tf.SiglipVisionModel(tf.SiglipVisionConfig(**_common(8), intermediate_size=40))


def _siglip2() -> nn.Module:
    sizes = {name: value for name, value in _common(8).items() if name != "image_size"}
    return tf.Siglip2VisionModel(tf.Siglip2VisionConfig(**sizes, intermediate_size=40, num_patches=9))


def _vit() -> nn.Module:
    return tf.ViTModel(tf.ViTConfig(**_common(8), intermediate_size=40, pooler_output_size=10))


def _deit() -> nn.Module:
    return tf.DeiTModel(tf.DeiTConfig(**_common(8), intermediate_size=40))


CLASSES = 5


def _classifier(kind: type, base: nn.Module) -> nn.Module:
    """An image classifier on top of the same kind of ViT."""
    config = type(base.config)(**base.config.to_dict() | {"num_labels": CLASSES})
    return kind(config)


def _two_towers(kind: type, config: type, base: nn.Module) -> nn.Module:
    """An image classifier whose configuration is that of a model with a text tower."""
    return kind(config(vision_config=base.config.to_dict(), num_labels=CLASSES))


def _depth_anything(out_indices: list[int], kind: str = "relative", apply_layernorm: bool = True) -> nn.Module:
    backbone = tf.Dinov2Config(
        **(_common(14) | {"num_hidden_layers": 5}),
        mlp_ratio=2,
        out_indices=out_indices,
        apply_layernorm=apply_layernorm,
        reshape_hidden_states=False,
    )
    config = tf.DepthAnythingConfig(
        backbone_config=backbone,
        reassemble_hidden_size=WIDTH,
        neck_hidden_sizes=[8, 8, 12, 12],
        fusion_hidden_size=8,
        head_hidden_size=6,
        patch_size=14,
        depth_estimation_type=kind,
        max_depth=80 if kind == "metric" else 1,
    )
    return tf.DepthAnythingForDepthEstimation(config)


def _tiny_scenes() -> nn.Module:
    config = TinyScenesConfig(
        width=WIDTH, layers=5, heads=HEADS, patch_size=14, image_size=42, hooks=(0, 1, 3, 4), channels=8, classes=5
    )
    return TinyScenes(config)


def _tokens(model: nn.Module, images: Tensor) -> Tensor:
    return model(images).last_hidden_state


def _pooled(model: nn.Module, images: Tensor) -> Tensor:
    return model(images).pooler_output


def _tokens_any_size(model: nn.Module, images: Tensor) -> Tensor:
    return model(images, interpolate_pos_encoding=True).last_hidden_state


def _pooled_any_size(model: nn.Module, images: Tensor) -> Tensor:
    return model(images, interpolate_pos_encoding=True).pooler_output


def _normed_clip(model: nn.Module, images: Tensor) -> Tensor:
    """CLIP leaves the final norm to the class token; the decoders here read every token after it."""
    return model.vision_model.post_layernorm(_tokens_any_size(model, images))


def _hook(model: nn.Module, images: Tensor) -> Tensor:
    """The last layer's tokens as Depth Anything's own backbone hands them out, after the norm."""
    last = model.backbone(images).feature_maps[-1]
    return last if model.backbone.config.apply_layernorm else model.backbone.layernorm(last)


def _depth(model: nn.Module, images: Tensor) -> Tensor:
    return model(images).predicted_depth


def _class_token(tokens: Reference) -> Reference:
    return lambda model, images: tokens(model, images)[:, 0]


def _patch_mean(tokens: Reference, prefix: int) -> Reference:
    return lambda model, images: tokens(model, images)[:, prefix:].mean(1)


def _logits(model: nn.Module, images: Tensor) -> Tensor:
    return model(images).logits


def _logits_any_size(model: nn.Module, images: Tensor) -> Tensor:
    return model(images, interpolate_pos_encoding=True).logits


def _classified(inner: str, references: dict[str, Reference], logits: Reference) -> dict[str, Reference]:
    """What an image classifier gives: that of the ViT inside it, and logits."""

    def inside(reference: Reference) -> Reference:
        return lambda model, images: reference(getattr(model, inner), images)

    own = {"logits": logits, ONE_LOGIT: lambda model, images: logits(model, images)[:, 3:4]}
    return {name: inside(reference) for name, reference in references.items()} | own


DINO = {"cls": _pooled, "mean": _patch_mean(_tokens, 1)}
DINO_WITH_REGISTERS = {"cls": _pooled, "mean": _patch_mean(_tokens, 3)}
CLIP = {
    "cls": lambda model, images: _pooled_any_size(model.vision_model, images),
    "projection": lambda model, images: model(images, interpolate_pos_encoding=True).image_embeds,
    "mean": _patch_mean(_normed_clip, 1),
}
SIGLIP = {"pool": _pooled_any_size, "mean": _patch_mean(_tokens_any_size, 0)}
SIGLIP2 = {
    "pool": lambda model, images: model(**patches_for(images, 8)).pooler_output,
    "mean": lambda model, images: model(**patches_for(images, 8)).last_hidden_state.mean(1),
}
VIT = {
    "cls": _class_token(_tokens_any_size),
    "pool": _pooled_any_size,
    "mean": _patch_mean(_tokens_any_size, 1),
}
DEIT = VIT | {"mean": _patch_mean(_tokens_any_size, 2)}
CLASS_TOKEN_CLASSIFIER = {name: VIT[name] for name in ("cls", "mean")}
CLIP_CLASSIFIER = {
    "cls": _pooled_any_size,
    "mean": _patch_mean(lambda model, images: model.post_layernorm(_tokens_any_size(model, images)), 1),
}
TIMM_TOKEN = {
    "cls": lambda model, images: model.forward_features(images)[:, 0],
    "mean": _patch_mean(lambda model, images: model.forward_features(images), 1),
    "logits": lambda model, images: model(images),
    ONE_LOGIT: lambda model, images: model(images)[:, 3:4],
}
TIMM_AVG = TIMM_TOKEN | {  # its only norm, in front of the head, stands for the final one
    "cls": lambda model, images: model.fc_norm(model.forward_features(images)[:, 0]),
    "mean": _patch_mean(lambda model, images: model.fc_norm(model.forward_features(images)), 3),
}
DEPTH = {
    "depth": _depth,
    DOWNSAMPLED: lambda model, images: F.adaptive_avg_pool2d(_depth(model, images), (3, 4)),
    "cls": _class_token(_hook),
    "mean": _patch_mean(_hook, 1),
}

TINY_SCENES = {
    "depth": _depth,
    DOWNSAMPLED: DEPTH[DOWNSAMPLED],
    "cls": lambda model, images: model(images).embedding,
    "mean": lambda model, images: _patch_mean(_tokens, 1)(model.backbone, images),
}

V1_STYLE, V2_STYLE = [2, 3, 4, 5], [1, 2, 4, 5]  # the last four layers; spread over the depth

SMALL_MODELS: dict[str, SmallModel] = {
    "dinov2": SmallModel("dinov2", _dinov2, DINO, 14),
    "dinov2-swiglu": SmallModel("dinov2", partial(_dinov2, use_swiglu_ffn=True), DINO, 14),
    "dinov2-registers": SmallModel("dinov2-registers", _registers, DINO_WITH_REGISTERS, 14),
    "dinov3": SmallModel("dinov3", partial(_dinov3, gated=False), DINO_WITH_REGISTERS, 16),
    "dinov3-gated": SmallModel("dinov3", partial(_dinov3, gated=True), DINO_WITH_REGISTERS, 16),
    "clip": SmallModel("clip", partial(_clip, "quick_gelu"), CLIP, 8),
    "clip-gelu": SmallModel("clip", partial(_clip, "gelu"), CLIP, 8),
    "siglip": SmallModel("siglip", _siglip, SIGLIP, 8),
    "vit": SmallModel("vit", _vit, VIT, 8),
    "deit": SmallModel("deit", _deit, DEIT, 8),
    "dinov2-classifier": SmallModel(
        "dinov2",
        lambda: _classifier(tf.Dinov2ForImageClassification, _dinov2()),
        _classified("dinov2", DINO, _logits),
        14,
    ),
    "dinov2-registers-classifier": SmallModel(
        "dinov2-registers",
        lambda: _classifier(tf.Dinov2WithRegistersForImageClassification, _registers()),
        _classified("dinov2_with_registers", DINO_WITH_REGISTERS, _logits),
        14,
    ),
    "vit-classifier": SmallModel(
        "vit",
        lambda: _classifier(tf.ViTForImageClassification, _vit()),
        _classified("vit", CLASS_TOKEN_CLASSIFIER, _logits_any_size),
        8,
    ),
    "deit-classifier": SmallModel(
        "deit",
        lambda: _classifier(tf.DeiTForImageClassification, _deit()),
        _classified("deit", CLASS_TOKEN_CLASSIFIER | {"mean": DEIT["mean"]}, _logits_any_size),
        8,
    ),
    "deit-two-classifiers": SmallModel(
        "deit",
        lambda: _classifier(tf.DeiTForImageClassificationWithTeacher, _deit()),
        _classified("deit", CLASS_TOKEN_CLASSIFIER | {"mean": DEIT["mean"]}, _logits_any_size),
        8,
    ),
    "clip-classifier": SmallModel(
        "clip",
        lambda: _two_towers(tf.CLIPForImageClassification, tf.CLIPConfig, _clip("gelu")),
        _classified("vision_model", CLIP_CLASSIFIER, _logits_any_size),
        8,
    ),
    "siglip-classifier": SmallModel(
        "siglip",
        lambda: _two_towers(tf.SiglipForImageClassification, tf.SiglipConfig, _siglip()),
        _classified("vision_model", SIGLIP, _logits_any_size),
        8,
    ),
    "siglip2": SmallModel("siglip2", _siglip2, SIGLIP2, 8),
    "siglip2-classifier": SmallModel(
        "siglip2",
        lambda: _two_towers(tf.Siglip2ForImageClassification, tf.Siglip2Config, _siglip2()),
        _classified("vision_model", SIGLIP2, lambda model, images: model(**patches_for(images, 8)).logits),
        8,
    ),
    "timm-token": SmallModel("timm-vit", partial(TimmViT, "token"), TIMM_TOKEN, 8, folder=False),
    "timm-avg": SmallModel("timm-vit", partial(TimmViT, "avg", registers=2), TIMM_AVG, 8, folder=False),
    "depth-v1": SmallModel("depth-anything", partial(_depth_anything, V1_STYLE), DEPTH, 14, 5),
    "depth-v2": SmallModel("depth-anything", partial(_depth_anything, V2_STYLE), DEPTH, 14, 5),
    "depth-v2-metric": SmallModel("depth-anything", partial(_depth_anything, V2_STYLE, "metric"), DEPTH, 14, 5),
    "depth-raw-hooks": SmallModel(
        "depth-anything", partial(_depth_anything, V2_STYLE, apply_layernorm=False), DEPTH, 14, 5
    ),
    "tiny-scenes": SmallModel("tiny-scenes", _tiny_scenes, TINY_SCENES, 14, 5),
}
