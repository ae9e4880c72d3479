"""Chat messages to token ids, with a marker where each image stands.

A template sees `{"type": "image"}` in the place of an image and writes the family's marker there.
One that knows text alone gets the parts of a message as one string, a line each, with the marker's
own text for an image.

What a user types is never a marker. Where a text holds the marker's letters, a character that no
text here has is put behind the first of them; once the template is rendered the prompt is cut at
those characters, and each piece is encoded for itself, so that the tokenizer never sees the marker
whole.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from operator import add
from typing import Any

from purestep.engine.images import IMAGE_PARTS, OTHER_MEDIA, ImagePart, image_part
from purestep.state.errors import MediaError, RequestError

Messages = Sequence[Mapping[str, Any]]

PRIVATE = range(0xE000, 0xF900)  # characters without a meaning, of which one stands for a cut
PROBE = "purestep?"


def image_parts(messages: Messages, who: str) -> list[ImagePart]:
    """The images of a chat, in order. Raises MediaError for other media and for broken parts."""
    found = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise MediaError(f"{who}: {str(message)[:60]!r} is no message with a role")
        content = message.get("content")
        if isinstance(content, Mapping):  # a template would write nothing for it
            raise MediaError(f"{who}: a message's content is one part, must be a list of parts")
        for part in content if isinstance(content, list | tuple) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in OTHER_MEDIA:
                raise MediaError(
                    f"{who}: a part of type {kind!r} is given, but only text and images are "
                    f"understood: {', '.join(IMAGE_PARTS)}"
                )
            if kind in IMAGE_PARTS:
                found.append(part)
    return [
        image_part(part, f"{who}: image {number} of {len(found)}")
        for number, part in enumerate(found, 1)
    ]


def chat_text(tokenizer: Any, messages: Any, variables: Mapping[str, Any], who: str) -> str:
    """The checkpoint's chat template with the start of the assistant's answer. RequestError."""
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError(f"{who}: the checkpoint has no chat template; give the prompt as text")
    return tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tokenize=False,
        add_generation_prompt=True,
        **variables,
    )


def chat_tokens(
    tokenizer: Any,
    messages: Messages,
    variables: Mapping[str, Any],
    marker: int,
    who: str,
    around: Sequence[tuple[str, str]] = (),
) -> list[int]:
    """The ids of a chat, `marker` for each image in the order of `image_parts`, between the texts
    that `around` has for it.

    Raises RequestError where the template takes neither text nor parts, or rejects the messages.
    """
    word = marker_text(tokenizer, marker)
    takes_text, takes_parts = _takes(tokenizer, variables, word, who)
    cut = _unused([messages, variables]) if _has(word, [messages, variables]) else ""

    def escaped(value: Any) -> Any:
        if isinstance(value, str):
            return _escaped(value, word, cut) if cut else value
        if isinstance(value, Mapping):
            return {key: escaped(item) for key, item in value.items()}
        return [escaped(item) for item in value] if isinstance(value, list | tuple) else value

    def content_of(content: Any) -> Any:
        if isinstance(content, str) and not takes_text:
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list | tuple):
            return escaped(content)
        parts = [{"type": "image"} if _is_image(part) else escaped(part) for part in content]
        if takes_parts:
            return parts
        return "\n".join(word if _is_image(part) else _text_of(part, who) for part in parts)

    plain = [
        {key: content_of(value) if key == "content" else escaped(value) for key, value in m.items()}
        for m in messages
    ]
    text = chat_text(tokenizer, plain, escaped(variables), who)
    if around:
        text = surrounded(text, word, around, who)
    first, *others = text.split(cut) if cut else [text]
    tokens = list(tokenizer.encode(first, add_special_tokens=False))
    for piece in others:
        tokens += _encoded_after(tokenizer, piece, word, marker)
    return tokens


def surrounded(text: str, word: str, around: Sequence[tuple[str, str]], who: str) -> str:
    """`text` with each `word` in it between two texts, in order. MediaError for another number."""
    first, *others = text.split(word)
    if len(others) != len(around):
        raise MediaError(
            f"{who}: the prompt's text has {len(others)} places for an image ({word}), but "
            f"{len(around)} images are given"
        )
    pieces = [before + word + behind for before, behind in around]
    return first + "".join(map(add, pieces, others))


def marker_text(tokenizer: Any, marker: int) -> str:
    """The token that stands for an image. Raises MediaError where the tokenizer has none."""
    word = tokenizer.convert_ids_to_tokens(marker)
    if not isinstance(word, str) or len(word) < 2:
        raise MediaError(f"the tokenizer has no token of letters for an image (id {marker})")
    return word


def _takes(tokenizer: Any, variables: Mapping[str, Any], word: str, who: str) -> tuple[bool, bool]:
    """Whether the template writes contents that are strings, and ones that are lists of parts."""
    parts = [{"type": "image"}, {"type": "text", "text": PROBE}]
    rendered = []
    for content in (PROBE, parts):
        try:
            message = {"role": "user", "content": content}
            rendered.append(chat_text(tokenizer, [message], variables, who))
        except RequestError:
            raise
        except Exception:  # of the template, which may raise anything for what it does not know
            rendered.append("")
    takes_text, takes_parts = PROBE in rendered[0], PROBE in rendered[1]
    takes_parts = takes_parts and rendered[1].count(word) == 1
    if not (takes_text or takes_parts):
        raise RequestError(
            f"{who}: the chat template writes neither a user's text nor a list of parts"
        )
    return takes_text, takes_parts


def _text_of(part: Any, who: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise RequestError(
            f"{who}: the chat template writes text alone, and {str(part)[:60]!r} is no text part"
        )
    return text


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not (key in IMAGE_PARTS and _is_image(value)):  # a picture, or its data: URL
                yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _has(word: str, value: Any) -> bool:
    return any(word in text for text in _texts(value))


def _unused(value: Any) -> str:
    used = set().union(*_texts(value))
    return next(chr(code) for code in PRIVATE if chr(code) not in used)


def _escaped(text: str, word: str, cut: str) -> str:
    """`text` with a cut behind the first character of each occurrence of `word`, overlapping ones
    included."""
    starts = [i for i in range(len(text)) if text.startswith(word, i)]
    ends = [0, *(i + 1 for i in starts), len(text)]
    return cut.join(text[a:b] for a, b in pairwise(ends))


def _encoded_after(tokenizer: Any, piece: str, word: str, marker: int) -> list[int]:
    """The ids of a piece that has something before it: behind the marker, which is then dropped,
    or a tokenizer might put a space at its start."""
    first, *ids = tokenizer.encode(word + piece, add_special_tokens=False)
    return ids if first == marker else tokenizer.encode(piece, add_special_tokens=False)
