"""Tiny multimodal programs with a tokenizer of ASCII and a chat template."""

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from purestep.engine import Program, Request, load_program
from purestep.engine.image_processor import ImageProcessor
from purestep.engine.prepare import byte_alphabet
from tests.models.tiny_vision import load, saved

# A template that knows parts and drops contents that are strings, as LLaVA's own does.
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% elif p.type == 'text' %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endfor %}[assistant]"
)
# One that knows contents that are strings, and writes a list as Python does.
WORDS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
# One that knows both, and puts a message's images before its text.
IMAGES_FIRST = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content if p.type == 'image' %}<image>{% endfor %}"
    "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}"
    "{% endif %}{% endfor %}[assistant]"
)


NAMES = (  # that Idefics3 puts between the rows of a picture
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{col}>" for row in (1, 2) for col in (1, 2)),
)


def ascii_tokenizer(marker: int) -> PreTrainedTokenizerFast:
    """One id for each printable byte, from 3 on, `<image>` and NAMES."""
    letters = [c for c, b in byte_alphabet().items() if 0x20 <= b < 0x7F or b == 0x0A]
    vocabulary = {c: n for n, c in enumerate(letters, 3)} | {"<image>": marker}
    vocabulary |= {name: n for n, name in enumerate(NAMES, len(vocabulary) + 3)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        extra_special_tokens={"image_token": "<image>"},
    )
    tokenizer.add_tokens(list(NAMES), special_tokens=True)
    tokenizer.chat_template = PARTS
    return tokenizer


@cache
def folder(kind: str) -> Path:
    """The checkpoint of tiny_vision with a tokenizer."""
    path = Path(mkdtemp(prefix="purestep-test-"))
    shutil.copytree(saved(kind)[0], path, dirs_exist_ok=True)
    ascii_tokenizer(load(kind).marker).save_pretrained(path)
    return path


@cache
def image_program(kind: str = "llava", template: str = PARTS, **options: Any) -> Program:
    program = load_program(folder(kind), device="cpu", num_blocks=32, **options)
    program.tokenizer.chat_template = template
    return program


class Counting:
    """An image processor that notes the sizes (width, height) of the pictures it is called with."""

    def __init__(self, processor: ImageProcessor) -> None:
        self.call, self.sizes = processor.call, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.call, name)

    def __call__(self, *, images: Any, **options: Any) -> Any:
        self.sizes.append(images.size)
        return self.call(images=images, **options)


def counted(program: Program) -> tuple[Program, Counting]:
    counting = Counting(program.image_processor)
    return replace(
        program, image_processor=replace(program.image_processor, call=counting)
    ), counting


def assert_same_request(one: Request, other: Request) -> None:
    """Field by field; features with their tensors."""
    assert one.tokens == other.tokens
    assert (one.id, one.adapter, one.salt) == (other.id, other.adapter, other.salt)
    assert len(one.features) == len(other.features)
    for a, b in zip(one.features, other.features, strict=True):
        for name in ("modality", "digest", "identifier", "offset", "length", "grid"):
            assert getattr(a, name) == getattr(b, name), name
        assert (a.is_embed is None) == (b.is_embed is None)
        assert a.is_embed is None or np.array_equal(a.is_embed, b.is_embed)
        assert a.data.keys() == b.data.keys()
        assert all(a.data[name].equal(b.data[name]) for name in a.data)


def spans(request: Request) -> list[tuple[int, int]]:
    """Where the placeholders are: (offset, length)."""
    return [(feature.offset, feature.length) for feature in request.features]
