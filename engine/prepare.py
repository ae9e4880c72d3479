"""Words and pictures to requests, and the bytes behind every token id."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from purestep.engine.chat import chat_text, chat_tokens, image_parts, marker_text, surrounded
from purestep.engine.images import (
    check_image_count,
    check_places,
    image_part,
    place,
    take_images,
    with_texts,
)
from purestep.state.errors import CheckpointError, ConfigError, MediaError, RequestError
from purestep.state.processor_cache import ProcessorCache, empty_processor_cache
from purestep.state.request import Request
from purestep.state.request_rules import num_given
from purestep.state.sampling import SamplingParams
from purestep.state.text import TokenTable

if TYPE_CHECKING:
    from purestep.engine.program import Program

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
PLACES = ("markers", "start", "end")


def prepare(program: "Program", prompt: Prompt, **options: Any) -> Request:
    """A request from text, token ids or chat messages: `prepare_cached` without a cache. Raises as
    it does."""
    return prepare_cached(program, empty_processor_cache(0), prompt, **options)[1]


def prepare_cached(
    program: "Program",
    cache: ProcessorCache,
    prompt: Prompt,
    *,
    id: str,
    images: Sequence[Any] = (),
    images_at: str = "markers",
    image_options: Mapping[str, Any] | None = None,
    adapter: str | None = None,
    salt: str | None = None,
    sampling: SamplingParams | None = None,
    hidden_layers: Sequence[int] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[ProcessorCache, Request]:
    """A request, and the cache that also knows its pictures.

    `prompt` is text, which gets the tokenizer's special tokens; token ids; or chat messages
    (`[{"role": "user", "content": ...}, ...]`), which go through the checkpoint's chat template,
    with the start of the assistant's answer added and `chat_template_kwargs` as its variables.
    Without `sampling` tokens are chosen as the checkpoint's generation_config.json asks for
    (`program.defaults`).

    In messages an image is a part of a content list, among parts of text: `{"type": "image",
    "image": picture}` with whatever `engine/pictures.py: read_picture` takes; `{"type":
    "image_url", "image_url": {"url": "data:..."}}`; `{"type": "image_embeds", "image_embeds":
    rows}` for rows [E, `Config.encoder_width`] that need no encoder. An `image` part may have
    `options` of its own for the image processor, the `layout` of an array, and an `id`: once the
    cache knows its picture, the id alone stands for it, under the same salt and options.
    Text and ids bring their pictures (or such parts) as `images`, one for each marker in the
    prompt, in order; with `images_at` "start" or "end" the prompt has none, and all stand there.
    `image_options` are the image processor's (`min_pixels`, `max_pixels`, `size`, ...) for all
    pictures. The letters of the marker in a message's text are text.

    Raises MediaError for pictures that cannot be used, more than `image_limit`, or as many as the
    prompt has no places for; RequestError for what is no prompt, and where there is no chat
    template; ConfigError where the program has no tokenizer.
    """
    who = f"request {id!r}"
    if images_at not in PLACES:
        raise MediaError(f"{who}: images_at={images_at!r} must be one of {', '.join(PLACES)}")
    if not isinstance(prompt, str | np.ndarray | Sequence) or isinstance(prompt, bytes):
        raise RequestError(
            f"{who}: a prompt is text, token ids or a list of messages, not {type(prompt)}"
        )
    is_chat = not isinstance(prompt, str) and any(isinstance(m, Mapping) for m in prompt)
    if is_chat and (num_given(images) != 0 or images_at != "markers"):
        raise MediaError(f"{who}: images of a chat are parts of its messages, not images=")
    if not isinstance(images, list | tuple):
        raise MediaError(f"{who}: images must be a list of pictures, got {type(images)}")
    if is_chat:
        parts = image_parts(prompt, who)
    else:
        names = [f"{who}: image {n} of {len(images)}" for n in range(1, len(images) + 1)]
        parts = [image_part(given, name) for given, name in zip(images, names, strict=True)]
    if parts:
        check_image_count(program, len(parts), who)

    def tokens_with(around: Sequence[tuple[str, str]] = ()) -> list[int]:
        return _tokens(program, prompt, is_chat, chat_template_kwargs or {}, who, around)

    tokens, features = tokens_with(), ()
    if program.vision is not None:
        marker = program.vision.family.marker(program.vision.config)
        if images_at != "markers":
            tokens = _with_markers(tokens, [marker] * len(parts), images_at, who)
        check_places(tokens, marker, len(parts), who)
    if parts:
        options = {} if image_options is None else image_options
        cache, items = take_images(program, cache, parts, salt=salt, options=options, who=who)
        around = [item.around for item in items]
        if any(map(any, around)):
            if images_at == "markers" and (is_chat or isinstance(prompt, str)):
                tokens = tokens_with(around)
                check_places(tokens, marker, len(parts), who)
            else:
                items = with_texts(program, items)
        tokens, features = place(tokens, marker, items)
    request = Request(
        id=id,
        tokens=tokens,
        adapter=adapter,
        salt=salt,
        sampling=program.defaults if sampling is None else sampling,
        hidden_layers=tuple(hidden_layers),
        features=features,
    )
    return cache, request


def _tokens(
    program: "Program",
    prompt: Prompt,
    is_chat: bool,
    variables: Mapping[str, Any],
    who: str,
    around: Sequence[tuple[str, str]] = (),
) -> list[int]:
    """The prompt's ids, a marker in each image's place; with `around` between two texts each."""
    if not isinstance(prompt, str) and not is_chat:
        return prompt.tolist() if isinstance(prompt, np.ndarray) else list(prompt)
    tokenizer = program.tokenizer
    if tokenizer is None:
        raise ConfigError("the program has no tokenizer: give token ids in Request(tokens=...)")
    if not is_chat:
        if around:
            marker = program.vision.family.marker(program.vision.config)
            prompt = surrounded(prompt, marker_text(tokenizer, marker), around, who)
        return tokenizer.encode(prompt)
    if program.vision is None:
        text = chat_text(tokenizer, prompt, variables, who)
        return tokenizer.encode(text, add_special_tokens=False)
    marker = program.vision.family.marker(program.vision.config)
    return chat_tokens(tokenizer, prompt, variables, marker, who, around)


def _with_markers(tokens: list[int], markers: list[int], at: str, who: str) -> list[int]:
    if markers and (found := tokens.count(markers[0])):
        raise MediaError(
            f"{who}: images_at={at!r}, but the prompt itself has {found} places for an image"
        )
    return markers + tokens if at == "start" else tokens + markers


def load_tokenizer(folder: Path) -> Any:
    """The checkpoint's tokenizer, or None where the folder has none. Raises CheckpointError."""
    if not any((folder / f).is_file() for f in ("tokenizer.json", "tokenizer_config.json")):
        return None
    from transformers import AutoTokenizer  # here, since it takes seconds and token ids need none

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    older = folder / "chat_template.json"  # where multimodal checkpoints once kept it
    if not tokenizer.chat_template and older.is_file():
        try:
            tokenizer.chat_template = json.loads(older.read_text())["chat_template"]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{older} holds no chat_template: {error!r}") from None
    return tokenizer


def token_table(tokenizer: Any) -> TokenTable:
    """What each id of a tokenizer adds to a text; special tokens add nothing.

    Byte-level vocabularies (GPT-2's printable alphabet for bytes) and SentencePiece ones (a marker
    for spaces, `<0x0A>` for bytes). Raises ConfigError for other decoders.
    """
    vocabulary = tokenizer.get_vocab()
    special = set(tokenizer.all_special_ids)
    added = {i: str(t) for i, t in tokenizer.added_tokens_decoder.items()}
    to_bytes = _piece_decoder(tokenizer)
    pieces = [b""] * (max(vocabulary.values()) + 1)
    for piece, i in vocabulary.items():
        if i in added:
            pieces[i] = b"" if i in special else added[i].encode()
        else:
            pieces[i] = to_bytes(piece)
    return TokenTable(pieces)


def _piece_decoder(tokenizer: Any) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.loads(backend.to_str())["decoder"] if backend is not None else None
    kinds = set(_kinds(decoder or {}))
    if "ByteLevel" in kinds:
        alphabet = byte_alphabet()
        return lambda piece: bytes(alphabet[c] for c in piece)
    if kinds & {"Metaspace", "ByteFallback", "Replace"}:
        return _sentencepiece_bytes
    raise ConfigError(f"cannot turn tokens into bytes: the tokenizer's decoder is {decoder}")


def _kinds(decoder: Mapping[str, Any]) -> Iterable[str]:
    yield decoder.get("type", "")
    for part in decoder.get("decoders", ()):
        yield from _kinds(part)


def _sentencepiece_bytes(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable characters stand for themselves, other bytes for 256 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}
