"""Words to requests: tokenizer, chat template, and the bytes behind every token id."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from purestep.state.errors import ConfigError, RequestError
from purestep.state.request import Request
from purestep.state.sampling import SamplingParams
from purestep.state.text import TokenTable

if TYPE_CHECKING:
    from purestep.engine.program import Program

Prompt = str | Sequence[Mapping[str, str]]


def prepare(
    program: "Program",
    prompt: Prompt,
    *,
    id: str,
    adapter: str | None = None,
    salt: str | None = None,
    sampling: SamplingParams | None = None,
    hidden_layers: Sequence[int] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Request:
    """A request from text, or from chat messages (`[{"role": "user", "content": ...}, ...]`).

    Text gets the tokenizer's special tokens; messages go through the checkpoint's chat template,
    with the start of the assistant's answer added and `chat_template_kwargs` as its variables.
    Without `sampling` tokens are chosen as the checkpoint's generation_config.json asks for
    (`program.defaults`). Raises ConfigError where the program has no tokenizer, RequestError where
    it has no chat template.
    """
    tokenizer = program.tokenizer
    if tokenizer is None:
        raise ConfigError("the program has no tokenizer: give token ids in Request(tokens=...)")
    if isinstance(prompt, str):
        tokens = tokenizer.encode(prompt)
    else:
        text = _chat(tokenizer, prompt, id, chat_template_kwargs or {})
        tokens = tokenizer.encode(text, add_special_tokens=False)
    return Request(
        id=id,
        tokens=tokens,
        adapter=adapter,
        salt=salt,
        sampling=program.defaults if sampling is None else sampling,
        hidden_layers=tuple(hidden_layers),
    )


def _chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, str]],
    request_id: str,
    variables: Mapping[str, Any],
) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError(
            f"request {request_id!r}: the checkpoint has no chat template; give the prompt as text"
        )
    return tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tokenize=False,
        add_generation_prompt=True,
        **variables,
    )


def load_tokenizer(folder: Path) -> Any:
    """The checkpoint's tokenizer, or None where the folder has none."""
    if not any((folder / f).is_file() for f in ("tokenizer.json", "tokenizer_config.json")):
        return None
    from transformers import AutoTokenizer  # here, since it takes seconds and token ids need none

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


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
