"""What `train_vlm.py` learns from: pictures, what is in each of their patches, and chats as ids.

B pictures, S their side, P patches, C colours, T tokens of a chat, A tokens of all answers.
"""

import multiprocessing
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tests.examples.shapes import (
    COLORS,
    PLACES,
    SHAPES,
    Question,
    Scene,
    draw,
    make_scene,
    questions,
)
from tests.examples.vlm import HERE, IMAGE, MARKER, PATCH, RESERVED, SIDE

SEED = 1
CHUNK = 512  # pictures that a worker hands over at once
MIXED = 0.25  # of the pictures have two groups
TURNS = 3  # questions about one picture, as one chat
ROWS = SIDE // PATCH
PATCHES = ROWS * ROWS
NOWHERE = len(PLACES)
PATCH_CLASSES = 1 + len(COLORS) * len(SHAPES)

Chat = list[Question]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pictures, what is in them, and a chat about each."""

    pixels_BSSC: np.ndarray  # uint8, as all here
    patch_BP: np.ndarray  # 0, or 1 + colour * shapes + shape
    counts_BC: np.ndarray  # shapes of every colour
    place_B: np.ndarray  # NOWHERE for none
    chats: list[Chat]


def make_chunk(number: int, size: int = CHUNK, held_out: bool = False) -> Chunk:
    """The same pictures for the same arguments, whoever makes them."""
    source = random.Random(f"{SEED} {number} {held_out}")
    scenes = [
        make_scene(source, held_out=held_out, groups=1 + (source.random() < MIXED))
        for _ in range(size)
    ]
    counts = np.zeros((size, len(COLORS)), np.uint8)
    for row, scene in zip(counts, scenes, strict=True):
        for group in scene.groups:
            row[list(COLORS).index(group.color)] = group.count
    places = [NOWHERE if s.place is None else PLACES.index(s.place) for s in scenes]
    return Chunk(
        pixels_BSSC=np.stack([np.asarray(as_processed(draw(scene))) for scene in scenes]),
        patch_BP=np.stack([patch_classes(scene) for scene in scenes]),
        counts_BC=counts,
        place_B=np.array(places, np.uint8),
        chats=[make_chat(scene, source, held_out) for scene in scenes],
    )


def as_processed(picture: Image.Image) -> Image.Image:
    """What the checkpoint's image processor does before it rescales the numbers."""
    if picture.size == (SIDE, SIDE):
        return picture
    return picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def patch_classes(scene: Scene) -> np.ndarray:
    """The shape that covers a patch's centre, or has its own there: uint8 [P]."""
    centre = (np.arange(ROWS) + 0.5) / ROWS
    found = np.zeros((ROWS, ROWS), np.uint8)
    for thing in scene.things:
        group = scene.groups[thing.group]
        near = np.hypot(centre[None, :] - thing.x, centre[:, None] - thing.y) < thing.radius
        near[int(thing.y * ROWS), int(thing.x * ROWS)] = True
        pair = list(COLORS).index(group.color) * len(SHAPES) + SHAPES.index(group.shape)
        found[near] = 1 + pair
    return found.ravel()


def make_chat(scene: Scene, source: random.Random, held_out: bool) -> Chat:
    """For training some questions about any group, else all about the one that is held out."""
    groups = range(1 if held_out else len(scene.groups))
    asked = [question for group in groups for question in questions(scene, source, group)]
    return asked if held_out else source.sample(asked, min(TURNS, len(asked)))


class Pictures:
    """Training pictures on the device, which workers go on making while others are in use."""

    def __init__(self, count: int, workers: int, device: torch.device) -> None:
        chunks = -(-count // CHUNK)
        self.chats: list[Chat] = []
        # Before this process calls CUDA, which its forked children could not use then.
        pool = multiprocessing.get_context("fork").Pool(workers)
        empty = partial(torch.empty, dtype=torch.uint8, device=device)
        self.pixels_BSSC = empty(chunks * CHUNK, SIDE, SIDE, 3)
        self.patch_BP = empty(chunks * CHUNK, PATCHES)
        self.counts_BC = empty(chunks * CHUNK, len(COLORS))
        self.place_B = empty(chunks * CHUNK)
        self._thread = threading.Thread(target=self._take, args=(pool, chunks), daemon=True)
        self._thread.start()

    def _take(self, pool: Any, chunks: int) -> None:
        with pool:
            for chunk in pool.imap_unordered(make_chunk, range(chunks)):
                at = slice(len(self.chats), len(self.chats) + CHUNK)
                self.pixels_BSSC[at].copy_(torch.from_numpy(chunk.pixels_BSSC))
                self.patch_BP[at].copy_(torch.from_numpy(chunk.patch_BP))
                self.counts_BC[at].copy_(torch.from_numpy(chunk.counts_BC))
                self.place_B[at].copy_(torch.from_numpy(chunk.place_B))
                self.chats += chunk.chats  # last: its length says how many are there

    def sample(self, size: int, source: random.Random) -> list[int]:
        """Indices of pictures that are there; waits for the first."""
        while not self.chats:
            if not self._thread.is_alive():
                raise RuntimeError("no pictures: the workers that draw them have failed")
            time.sleep(0.05)
        return [source.randrange(len(self.chats)) for _ in range(size)]


@dataclass(frozen=True, slots=True)
class Words:
    """Chats as ids, padded on the right, and where their answers are."""

    ids_BT: Tensor
    at_A: Tensor  # which of the B * T positions comes before the answer's token
    token_A: Tensor
    row_A: Tensor  # the chat it belongs to
    rows_at: int  # where the picture's rows begin, in all chats


Encode = Callable[[Chat, Callable[[str], str]], tuple[list[int], list[int]]]


def chat_encoder(tokenizer: Any) -> Encode:
    """A function from a chat, and how answers are written, to (ids, indices of the answers').

    `tokenizer` is SmolLM2's own, in which the marker has another name."""
    template = (HERE / "chat_template.jinja").read_text().replace(IMAGE, RESERVED)
    end = tokenizer.eos_token

    def rendered(messages: list[dict[str, Any]]) -> str:
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )

    def asked(question: str) -> dict[str, Any]:
        parts = [{"type": "image"}, {"type": "text", "text": question}]
        return {"role": "user", "content": parts}

    @cache
    def first(question: str) -> list[int]:
        ids = tokenizer.encode(rendered([asked(question)]), add_special_tokens=False)
        at = ids.index(MARKER)
        return ids[:at] + PATCHES * [MARKER] + ids[at + 1 :]

    @cache
    def later(question: str) -> list[int]:
        opening = [asked(""), {"role": "assistant", "content": ""}]
        before = rendered(opening[:1]) + end
        text = rendered([*opening, {"role": "user", "content": question}])
        return tokenizer.encode(text.removeprefix(before), add_special_tokens=False)

    @cache
    def reply(answer: str) -> list[int]:
        return tokenizer.encode(answer + end, add_special_tokens=False)

    def encode(chat: Chat, write: Callable[[str], str]) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        answers: list[int] = []
        for question in chat:
            ids += later(question.text) if ids else first(question.text)
            answer = reply(write(question.answer))
            answers += range(len(ids), len(ids) + len(answer))
            ids += answer
        return ids, answers

    return encode


def collate(encoded: Sequence[tuple[list[int], list[int]]], device: torch.device) -> Words:
    width = -(-max(len(ids) for ids, _ in encoded) // 16) * 16
    ids_BT = np.zeros((len(encoded), width), np.int64)
    at, token, rows = [], [], []
    for row, (ids, answers) in enumerate(encoded):
        ids_BT[row, : len(ids)] = ids
        at += [row * width + i - 1 for i in answers]
        token += [ids[i] for i in answers]
        rows += [row] * len(answers)
    tensors = (torch.as_tensor(x).to(device) for x in (ids_BT, at, token, rows))
    return Words(*tensors, encoded[0][0].index(MARKER))
