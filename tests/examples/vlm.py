"""A LLaVA of SmolLM2-135M-Instruct and the small tower in `shapes_vlm/`, as a checkpoint folder.

`python -m tests.examples.vlm` prints the folder. The language model's weights are a link to those
of `smollm2.py`, under the names that they have there. purestep reads them as they are; transformers
needs to be told where they belong:

    LlavaForConditionalGeneration.from_pretrained(shapes_vlm_dir(), key_mapping=KEY_MAPPING)
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open

from purestep.engine.demo_model import locked, smollm2_dir

HERE = Path(__file__).parent / "shapes_vlm"
VISION = "vision.safetensors"
LANGUAGE = "language.safetensors"
KEY_MAPPING = {r"^model\.(embed_tokens|layers|norm)\.": r"model.language_model.\1."}

SIDE, PATCH = 128, 16
IMAGE = "<image>"
MARKER, RESERVED = (
    16,
    "<empty_output>",
)  # a token of SmolLM2's that no chat has; it gets IMAGE's name
TOWER: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": PATCH,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "vision_use_head": False,
}
IMAGE_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "SiglipImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"height": SIDE, "width": SIDE},
    "resample": 3,  # bicubic
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
PROCESSOR = {
    "processor_class": "LlavaProcessor",
    "image_token": IMAGE,
    "num_additional_image_tokens": 0,
    "patch_size": PATCH,
    "vision_feature_select_strategy": "full",
}


def shapes_vlm_dir() -> Path:
    """The checkpoint with the committed tower, made on first use."""
    return composed(HERE / VISION)


def composed(vision: Path) -> Path:
    """The checkpoint with the tower and projector of a file, in the user's cache.

    The folder's name has the digest of what it is made of, so that another tower is another folder,
    and it appears in one rename."""
    language = smollm2_dir()
    template = (HERE / "chat_template.jinja").read_bytes()
    settings = [llava_config(language), IMAGE_PROCESSOR, PROCESSOR]
    made_of = vision.read_bytes() + template + json.dumps(settings).encode()
    digest = hashlib.sha256(made_of).hexdigest()[:12]
    folder = language.parent / f"shapes-vlm-{digest}"
    if folder.is_dir():
        return folder
    with locked(folder.with_suffix(".lock")):
        if not folder.is_dir():
            work = folder.with_suffix(".partial")
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            compose(vision, language, work)
            work.rename(folder)
    return folder


def compose(vision: Path, language: Path, into: Path) -> None:
    """Writes all files of the checkpoint into an empty folder."""
    shutil.copyfile(vision, into / VISION)
    (into / LANGUAGE).symlink_to(os.path.relpath(language / "model.safetensors", into))
    weight_map = {
        name: file.name for file in (into / VISION, into / LANGUAGE) for name in _names(file)
    }
    _write(into / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    _write(into / "config.json", llava_config(language))
    _write(into / "preprocessor_config.json", IMAGE_PROCESSOR)
    _write(into / "processor_config.json", PROCESSOR)
    shutil.copyfile(HERE / "chat_template.jinja", into / "chat_template.jinja")
    for name in ("generation_config.json", "tokenizer_config.json"):
        shutil.copyfile(language / name, into / name)
    words = (language / "tokenizer.json").read_text(encoding="utf-8")
    (into / "tokenizer.json").write_text(words.replace(f'"{RESERVED}"', f'"{IMAGE}"'), "utf-8")


def llava_config(language: Path) -> dict[str, Any]:
    """config.json of LLaVA's layout around that of the language model."""
    text = json.loads((language / "config.json").read_text())
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "dtype": text["dtype"],
        "image_token_index": MARKER,
        "multimodal_projector_bias": True,
        "projector_hidden_act": "gelu",
        "text_config": {name: text[name] for name in text if name != "_model_name_or_path"},
        "tie_word_embeddings": text["tie_word_embeddings"],
        "vision_config": TOWER,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as handle:
        return list(handle.keys())


def _write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    print(shapes_vlm_dir())
