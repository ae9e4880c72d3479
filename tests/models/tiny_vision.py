"""Tiny random vision-language checkpoints, and what transformers says about them.

E rows of an item, L tokens of a prompt, V vocabulary, D hidden size.
"""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SiglipVisionConfig,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from purestep.models.checkpoint import load_checkpoint, load_vision
from purestep.models.config import ModelConfig
from purestep.models.decoder import Params, forward, logits
from purestep.models.vision import Tensors, Vision
from purestep.state.batch import Batch
from purestep.state.mrope import mrope_positions
from tests.models.tiny import SIZES, randomised

MARKER = 127
SIDE, PATCH = 56, 14
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": PATCH,
}
CROPPED = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
CLIP = {"image_processor_type": "CLIPImageProcessor", **CROPPED}
SIGLIP = {"image_processor_type": "SiglipImageProcessor", "size": {"height": SIDE, "width": SIDE}}


GRIDS = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
TILED = {
    "image_processor_type": "LlavaNextImageProcessor",
    **CROPPED,
    "image_grid_pinpoints": GRIDS,
}
MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 2, 1]}
QWEN = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 56 * 56,
    "max_pixels": 28 * 28 * 40,
}


QWEN2_TOWER = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2}
# A window is 3 x 3 rows, and layer 1 sees the whole picture.
QWEN25_TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 4,
    "out_hidden_size": 32,
    "window_size": 84,
    "fullatt_block_indexes": [1],
}
# Two layers of the tower have rows for decoder layers; a learned grid of 5 x 5.
QWEN3_TOWER = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}
QWEN3 = {**QWEN, "patch_size": 16, "min_pixels": 64 * 64, "max_pixels": 32 * 32 * 40}
# Tiles of 4 rows each, up to 2 x 2 of them.
SPLIT = {
    "image_processor_type": "Idefics3ImageProcessor",
    "size": {"longest_edge": 2 * SIDE},
    "max_image_size": {"longest_edge": SIDE},
    "return_row_col_info": True,
}
PIXTRAL = {
    "image_processor_type": "PixtralImageProcessor",
    "size": {"longest_edge": 5 * PATCH},
    "patch_size": {"height": PATCH, "width": PATCH},
}


GEMMA = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": SIDE, "width": SIDE},
    "do_pan_and_scan": False,
    "pan_and_scan_min_crop_size": 30,
    "pan_and_scan_max_num_crops": 3,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


def gemma(**text: Any) -> PretrainedConfig:
    """16 rows for a picture, of 2 x 2 patches each."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    fields = {"head_dim": 8, "query_pre_attn_scalar": 12, "num_hidden_layers": 3}
    return Gemma3Config(
        vision_config=SiglipVisionConfig(**{**TOWER, "patch_size": 7}, vision_use_head=False),
        text_config=Gemma3TextConfig(**{**SIZES, **fields, "layer_types": kinds, **text}),
        mm_tokens_per_image=16,
        boi_token_index=MARKER,
        eoi_token_index=125,
        image_token_index=122,
    )


def words(text: str) -> list[int]:
    """Ids of a text, without a tokenizer: of its last letters."""
    return [3 + ord(letter) % 90 for letter in text[-3:]]


def tiled(config_class: type) -> PretrainedConfig:
    return config_class(
        vision_config=TOWER, text_config=LlamaConfig(**SIZES), image_token_id=MARKER, scale_factor=2
    )


def pixtral(**fields: Any) -> LlavaConfig:
    return LlavaConfig(
        vision_config=PixtralVisionConfig(**TOWER),
        text_config=MistralConfig(**SIZES, sliding_window=None, head_dim=8),
        image_token_index=MARKER,
        **{"vision_feature_layer": -1, "vision_feature_select_strategy": "full", **fields},
    )


def qwen(config_class: type, tower: dict[str, Any], **text: Any) -> PretrainedConfig:
    return config_class(
        text_config={**SIZES, "rope_parameters": MROPE, **text},
        vision_config=tower,
        image_token_id=MARKER,
        video_token_id=126,
        vision_start_token_id=125,
        vision_end_token_id=124,
        tie_word_embeddings=text.get("tie_word_embeddings", False),
    )


def qwen3(**text: Any) -> PretrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
    fields = {"head_dim": 16, "num_hidden_layers": 4, "rope_parameters": rope}
    return qwen(Qwen3VLConfig, QWEN3_TOWER, **{**fields, **text})


def llava(
    vision: PretrainedConfig, config_class: type = LlavaConfig, **fields: Any
) -> PretrainedConfig:
    return config_class(
        vision_config=vision, text_config=LlamaConfig(**SIZES), image_token_index=MARKER, **fields
    )


def next_config(vision: PretrainedConfig, **fields: Any) -> LlavaNextConfig:
    return llava(vision, LlavaNextConfig, image_grid_pinpoints=GRIDS, **fields)


@cache
def kinds() -> dict[str, tuple[type[PreTrainedModel], PretrainedConfig, dict[str, Any]]]:
    """Model class, its config, and the image processor's settings."""
    clip, siglip = CLIPVisionConfig(**TOWER), SiglipVisionConfig(**TOWER, vision_use_head=False)
    several = {"vision_feature_layer": [-2, 1], "vision_feature_select_strategy": "full"}
    bare = {"multimodal_projector_bias": False, "vision_feature_layer": -1}
    whole = {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}
    return {
        "llava": (LlavaForConditionalGeneration, llava(clip), CLIP),
        "llava-layers": (LlavaForConditionalGeneration, llava(clip, **several), CLIP),
        "llava-bare": (LlavaForConditionalGeneration, llava(clip, **bare), CLIP),
        "llava-siglip": (LlavaForConditionalGeneration, llava(siglip, **whole), SIGLIP),
        "llava_next": (LlavaNextForConditionalGeneration, next_config(clip), TILED),
        "llava_next-siglip": (
            LlavaNextForConditionalGeneration,
            next_config(siglip, vision_feature_select_strategy="full"),
            TILED,
        ),
        "gemma3": (Gemma3ForConditionalGeneration, gemma(sliding_window=7), GEMMA),
        "gemma3-wide": (Gemma3ForConditionalGeneration, gemma(sliding_window=19), GEMMA),
        "idefics3": (Idefics3ForConditionalGeneration, tiled(Idefics3Config), SPLIT),
        "smolvlm": (
            SmolVLMForConditionalGeneration,
            tiled(SmolVLMConfig),
            {**SPLIT, "image_processor_type": "SmolVLMImageProcessor"},
        ),
        "pixtral": (LlavaForConditionalGeneration, pixtral(), PIXTRAL),
        "qwen2_vl": (Qwen2VLForConditionalGeneration, qwen(Qwen2VLConfig, QWEN2_TOWER), QWEN),
        "qwen2_vl-tied": (
            Qwen2VLForConditionalGeneration,
            qwen(
                Qwen2VLConfig,
                QWEN2_TOWER,
                tie_word_embeddings=True,
                use_sliding_window=True,
                sliding_window=6,
                max_window_layers=1,
            ),
            QWEN,
        ),
        "qwen2_5_vl": (
            Qwen2_5_VLForConditionalGeneration,
            qwen(Qwen2_5_VLConfig, QWEN25_TOWER),
            QWEN,
        ),
        "qwen3_vl": (Qwen3VLForConditionalGeneration, qwen3(), QWEN3),
        "qwen3_vl-tied": (
            Qwen3VLForConditionalGeneration,
            qwen3(tie_word_embeddings=True, attention_bias=True),
            QWEN3,
        ),
    }


@dataclass(frozen=True, kw_only=True)
class Loaded:
    folder: Path
    oracle: Any
    processor: Any
    config: ModelConfig
    params: Params
    vision: Vision

    @property
    def marker(self) -> int:
        return self.vision.family.marker(self.vision.config)

    @property
    def row_id(self) -> int:
        """The id that stands for one row."""
        return getattr(self.vision.config, "row_id", self.marker)

    def item(self, image: Image.Image) -> Tensors:
        return self.vision.family.item(
            self.vision.config, self.processor(images=image, return_tensors="pt")
        )

    def placeholder(self, item: Tensors) -> tuple[np.ndarray, np.ndarray | None]:
        ids, is_embed = self.vision.family.placeholder(self.vision.config, item, words)
        assert ids.dtype == np.int32
        if is_embed is None:
            assert (ids == self.marker).all()
        else:
            assert is_embed.dtype == bool
            assert np.array_equal(is_embed, ids == self.row_id)
        return ids, is_embed

    def count(self, item: Tensors) -> int:
        """Its rows."""
        return int((self.placeholder(item)[0] == self.row_id).sum())

    @torch.inference_mode()
    def encode(self, items: Sequence[Tensors]) -> list[Tensor]:
        return self.vision.family.encode(self.vision.params, self.vision.config, items)


@cache
def saved(kind: str) -> tuple[Path, PreTrainedModel]:
    """A checkpoint's folder as transformers saves it, and the model."""
    model_class, config, processor = kinds()[kind]
    folder = Path(mkdtemp(prefix="purestep-test-"))
    model = randomised(lambda: model_class(copy.deepcopy(config)), seed=0)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder, model


@cache
def load(kind: str) -> Loaded:
    folder, oracle = saved(kind)
    config, params, _ = load_checkpoint(folder, dtype=torch.float32)
    found = load_vision(folder, dtype=torch.float32)
    assert found is not None
    return Loaded(
        folder=folder,
        oracle=oracle,
        processor=AutoImageProcessor.from_pretrained(folder),
        config=config,
        params=params,
        vision=found[0],
    )


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A smooth colourful image with some noise, so that every pixel counts."""
    source = np.random.default_rng(seed + 1000 * width + height)
    y, x = np.mgrid[:height, :width] / max(width, height)
    waves = [np.sin(7 * (x * a + y * b) + c) for a, b, c in source.uniform(-2, 2, (3, 3))]
    noisy = np.stack(waves, -1) * 100 + 128 + source.uniform(-20, 20, (height, width, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


Part = Image.Image | Sequence[int]  # of a prompt: a picture, or text


def processed(model: Loaded, images: Sequence[Image.Image]) -> dict[str, Any]:
    """What the model takes of several images."""
    given = dict(model.processor(images=images, return_tensors="pt"))
    return {
        name: value for name, value in given.items() if name not in ("rows", "cols", "num_crops")
    }


def features_of(oracle: Any, given: dict[str, Any]) -> list[Tensor]:
    """The rows of images by a transformers model, what is for later layers beside them."""
    found = oracle.model.get_image_features(**given)
    rows = found.pooler_output
    deeper = [  # before 5.24 of all images together
        x.split([len(own) for own in rows]) if isinstance(x, Tensor) else x
        for x in getattr(found, "deepstack_features", [])
    ]
    return [torch.cat(own, -1) for own in zip(rows, *deeper, strict=True)]


@torch.inference_mode()
def expected(
    model: Loaded, parts: Sequence[Part], **more: Any
) -> tuple[list[int], Tensor, list[Tensor]]:
    """transformers' word on a prompt: ids, logits [L, V], and the rows of its images, with what is
    added behind decoder layers. Its models refuse ids in which the number of markers is not the
    number of rows."""
    images = [part for part in parts if isinstance(part, Image.Image)]
    given = processed(model, images) if images else {}
    rows = features_of(model.oracle, given) if images else []
    own = [model.placeholder(model.item(image)) for image in images]
    if any(is_embed is not None for _, is_embed in own):  # their word on these is another test
        placeholders = [ids.tolist() for ids, _ in own]
        rows = list(torch.cat(rows).split([ids.count(model.row_id) for ids in placeholders]))
    else:
        placeholders = [[model.marker] * len(found) for found in rows]
    ids: list[int] = []
    left = iter(placeholders)
    for part in parts:
        if isinstance(part, Image.Image):
            ids += next(left)
        else:
            ids += part
    tokens = torch.tensor([ids])
    if images and model.config.rope.sections:
        given["mm_token_type_ids"] = (tokens == model.marker).int()
    if images and model.vision.family.bidirectional:
        given["token_type_ids"] = (tokens == model.row_id).int()
    return ids, model.oracle(input_ids=tokens, **given, **more).logits[0], rows


@torch.inference_mode()
def computed(
    model: Loaded, parts: Sequence[Part], decode: Callable[..., Tensor] = forward
) -> tuple[list[int], Tensor, list[Tensor]]:
    """The same, by this library: each picture processed alone, all encoded together, the rows put
    over the markers' embeddings. `decode` is `forward` or `fused_forward`."""
    images = [part for part in parts if isinstance(part, Image.Image)]
    items = [model.item(image) for image in images]
    rows = model.encode(items)
    ids: list[int] = []
    places: list[int] = []
    media = []
    left = iter(items)
    for part in parts:
        if isinstance(part, Image.Image):
            item = next(left)
            own, _ = model.placeholder(item)
            grid = model.vision.family.grid(model.vision.config, item)
            media.append((len(ids), grid))
            places += (len(ids) + np.flatnonzero(own == model.row_id)).tolist()
            ids += own.tolist()
        else:
            ids += part
    positions = None
    if model.config.rope.sections:
        found, _ = mrope_positions(len(ids), media, model.vision.config.merge_size)
        positions = torch.from_numpy(found).long()
    batch = one_row(ids, positions)
    if model.vision.family.bidirectional:
        batch = replace(batch, end_T=ends_of(torch.tensor(ids) == model.row_id))
    config = model.config
    pages = torch.full((2, len(ids), 1, config.num_kv_heads, config.head_dim), float("nan"))
    embeds = (torch.tensor(places), torch.cat(rows)) if rows else None
    hidden = decode(
        model.params,
        None,
        [pages.clone() for _ in range(config.num_layers)],
        batch,
        config,
        embeds=embeds,
    )
    return ids, logits(model.params, hidden, batch.logits_index_S), rows


def ends_of(is_row_T: Tensor) -> Tensor:
    """The position behind each run of rows, told at each of them; 0 elsewhere."""
    end_T = torch.zeros(len(is_row_T), dtype=torch.int64)
    for at in reversed(range(len(is_row_T))):
        if is_row_T[at]:
            end_T[at] = max(at + 1, int(end_T[at + 1]) if at + 1 < len(end_T) else 0)
    return end_T


def one_row(ids: Sequence[int], positions: Tensor | None = None) -> Batch:
    """A whole prompt in one step, on blocks of one token."""
    L = len(ids)
    return Batch(
        token_T=torch.tensor(ids),
        position_T=torch.arange(L),
        kv_index_T=torch.arange(L),
        query_start_R1=torch.tensor([0, L], dtype=torch.int32),
        context_len_R=torch.tensor([L], dtype=torch.int32),
        block_table_RM=torch.arange(L, dtype=torch.int32)[None],
        logits_index_S=torch.arange(L),
        lora=None,
        position_3T=positions,
    )


def assert_same_answers(
    model: Loaded, parts: Sequence[Part], decode: Callable[..., Tensor] = forward
) -> None:
    """Ids, rows and logits of a prompt are those of transformers."""
    want_ids, want_LV, want_rows = expected(model, parts)
    ids, got_LV, rows = computed(model, parts, decode)
    assert ids == want_ids
    assert [len(r) for r in rows] == [len(r) for r in want_rows]
    for got, want in zip(rows, want_rows, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        assert got.untyped_storage().nbytes() == got.nbytes, "the rows own their memory"
    torch.testing.assert_close(got_LV, want_LV, atol=1e-4, rtol=1e-4)


def assert_depends_on_pixels(model: Loaded, image: Image.Image) -> None:
    """The answer is about the picture: another one moves the logits by far more than 1e-4."""
    other = Image.fromarray(255 - np.asarray(image))
    one, two = (computed(model, [[3, 4], picture, [5]])[1][-1] for picture in (image, other))
    assert (one - two).abs().max() > 0.01
