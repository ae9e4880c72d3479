"""One line of a batch file to one row: the OpenAI batch format and a plain form. Pure.

OpenAI: `custom_id`, `method` POST, `url` of chat completions or completions, `body`; its `model`
names the base model or an adapter. Plain: `prompt` (text, ids or messages), `adapter`, `images`,
`custom_id`. Either takes the sampling fields below; a field that nothing knows is an error.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from purestep.state.errors import BatchLineError
from purestep.state.media import PART_MODALITIES
from purestep.state.sampling import GREEDY_BELOW, is_int, is_unicode

URLS = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "allowed_ids", "banned_ids", "seed", "n", "max_tokens",
    "min_tokens", "stop", "stop_ids", "include_stop", "ignore_eos", "logprobs", "prompt_logprobs",
)  # fmt: skip
IGNORED = {"user", "metadata", "store", "service_tier"}  # of OpenAI's, without any effect here
ABSENT = {  # OpenAI's, where only the value that changes nothing is taken
    "stream": (False,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}
COMMON = {"model", "salt", "chat_template_kwargs", *SAMPLING, *IGNORED, *ABSENT}
FIELDS = {
    "chat": COMMON | {"messages", "max_completion_tokens", "top_logprobs"},
    "completion": COMMON | {"prompt"},
    "plain": {
        "custom_id",
        "prompt",
        "adapter",
        "images",
        "salt",
        "chat_template_kwargs",
        *SAMPLING,
    },
}
UNSUPPORTED_PARTS = {kind: what for kind, what in PART_MODALITIES.items() if what != "image"}
LONGEST_ID = 512


def _refuse(literal: str) -> None:
    raise ValueError(f"{literal} is no JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse)  # made once: it takes as long as a line


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one line asks for. `prompt` is text, ids, or messages whose content is text or a list of
    parts `{"type": "text", "text": ...}` and `{"type": "image", "url": ...}`."""

    form: str  # "chat", "completion" or "plain"
    custom_id: str | None
    model: str | None  # as the line has it
    adapter: str | None
    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]]
    sampling: Mapping[str, Any]  # fields of SamplingParams that the line gives
    salt: str | None
    chat_template_kwargs: Mapping[str, Any]

    @property
    def images(self) -> list[str]:
        """The sources of its images, in order."""
        if isinstance(self.prompt, str) or not any(isinstance(m, Mapping) for m in self.prompt):
            return []
        lists = [m["content"] for m in self.prompt if not isinstance(m["content"], str)]
        return [part["url"] for parts in lists for part in parts if part["type"] == "image"]

    @property
    def locality(self) -> tuple[str, str]:
        """Rows that sort together share an adapter and the beginning of a prompt."""
        prompt = self.prompt
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
        return self.adapter or "", text


def read_object(raw: bytes) -> dict[str, Any]:
    """The JSON object of a line. Raises BatchLineError."""

    try:
        found = DECODER.decode(raw.decode())
    except (ValueError, RecursionError) as error:
        raise BatchLineError("invalid_json", f"the line is no JSON: {error}") from None
    if not isinstance(found, dict):
        what = type(found).__name__
        raise BatchLineError("invalid_json", f"the line holds a {what}, must be an object")
    return found


def custom_id_of(given: Mapping[str, Any]) -> str | None:
    """The line's own name, None where it has none. Raises BatchLineError."""
    found = given.get("custom_id")
    if found is None and "body" not in given:
        return None
    if not isinstance(found, str) or not 0 < len(found) <= LONGEST_ID or not is_unicode(found):
        shown = repr(found)[:80]
        raise _invalid(f"custom_id={shown} must be a string of 1 to {LONGEST_ID} characters")
    return found


def row_of(given: Mapping[str, Any], base_names: Collection[str]) -> Row:
    """What a line's object asks for; `base_names` are what `model` may call the base model.

    Raises BatchLineError naming the field, its value and what is allowed. Values of sampling fields
    are checked when the request is submitted.
    """
    body, form = _body_of(given)
    if foreign := sorted(str(name) for name in body.keys() - FIELDS[form]):
        raise _invalid(f"unknown field {foreign[0]!r} in {_place(form)}")
    for name, values in ABSENT.items():
        if (value := body.get(name)) is not None and value not in values:
            raise _invalid(f"{name}={_shown(value)} is not supported", "not_supported")
    model = body.get("adapter" if form == "plain" else "model")
    if model is not None and not (isinstance(model, str) and model and is_unicode(model)):
        raise _invalid(f"model={_shown(model)} must be the name of the base model or an adapter")
    if model is None and form != "plain":
        raise _invalid(f"model is missing; the base model is called {sorted(base_names)}")
    variables = body.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise _invalid(f"chat_template_kwargs={_shown(variables)} must be an object")
    return Row(
        form=form,
        custom_id=custom_id_of(given),
        model=model,
        adapter=None if model in base_names else model,
        prompt=_prompt_of(body, form),
        sampling=_sampling_of(body, form),
        salt=body.get("salt"),
        chat_template_kwargs=variables,
    )


def _body_of(given: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    if not given.keys() & {"body", "url", "method"}:
        return given, "plain"
    if foreign := sorted(given.keys() - {"custom_id", "method", "url", "body"}):
        raise _invalid(f"unknown field {foreign[0]!r} beside custom_id, method, url and body")
    if given.get("method") != "POST":
        raise _invalid(f"method={_shown(given.get('method'))} must be 'POST'")
    url = given.get("url")
    if not isinstance(url, str) or url not in URLS:
        raise _invalid(f"url={_shown(url)} must be one of {sorted(URLS)}", "not_supported")
    if not isinstance(given.get("body"), dict):
        raise _invalid(f"body={_shown(given.get('body'))} must be an object")
    return given["body"], URLS[url]


def _prompt_of(body: Mapping[str, Any], form: str) -> Any:
    if form == "chat":
        return _messages(body.get("messages"), "messages")
    prompt = body.get("prompt")
    if form == "plain" and isinstance(prompt, list) and any(isinstance(m, dict) for m in prompt):
        prompt = _messages(prompt, "prompt")
    if images := body.get("images"):
        return _with_images(prompt, images)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    whole_ids = isinstance(prompt, list) and all(map(is_int, prompt))
    if isinstance(prompt, str):
        _check_unicode(prompt, "prompt")
    elif not whole_ids and not isinstance(prompt, tuple):
        raise _invalid(f"prompt={_shown(prompt)} must be one text, or a list of token ids")
    return prompt


def _with_images(prompt: Any, images: Any) -> tuple[dict[str, Any], ...]:
    """A user's message of the images, then the text."""
    if not isinstance(prompt, str) or not isinstance(images, list):
        raise _invalid("images must be a list, and prompt a text: in messages give image parts")
    parts = [{"type": "image_url", "image_url": {"url": source}} for source in images]
    text = {"type": "text", "text": prompt}
    return _messages([{"role": "user", "content": [*parts, text]}], "images")


def _messages(given: Any, field: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(given, list) or not given:
        raise _invalid(f"{field}={_shown(given)} must be a list of at least 1 message")
    messages = []
    for at, message in enumerate(given):
        where = f"{field}[{at}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _invalid(f"{where}={_shown(message)} must be an object with a role")
        if foreign := sorted(message.keys() - {"role", "content", "name"}):
            raise _invalid(f"unknown field {foreign[0]!r} in {where}", "not_supported")
        _check_unicode(message["role"], where)
        content = _content(message.get("content"), where)
        messages.append({**message, "content": content})
    return tuple(messages)


def _content(content: Any, where: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        _check_unicode(content, where)
        return content
    if not isinstance(content, list) or not content:
        raise _invalid(f"{where}: content={_shown(content)} must be a text or a list of parts")
    parts = [_part(part, f"{where}, part {at}") for at, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(part: Any, where: str) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in UNSUPPORTED_PARTS:
        modality = UNSUPPORTED_PARTS[kind]
        raise _invalid(f"{where}: {modality} is not supported", "modality_not_supported")
    if kind == "text" and isinstance(part.get("text"), str):
        _check_unicode(part["text"], where)
        return {"type": "text", "text": part["text"]}
    if kind == "image_url" and isinstance(part.get("image_url"), dict):
        url = part["image_url"].get("url")
        if isinstance(url, str) and url and is_unicode(url):
            return {"type": "image", "url": url}
    raise _invalid(f'{where}: {_shown(part)} must be a "text" or "image_url" part')


def _sampling_of(body: Mapping[str, Any], form: str) -> dict[str, Any]:
    """The fields of SamplingParams that a body gives, in its names and types."""
    given = {name: body[name] for name in SAMPLING if body.get(name) is not None}
    if form == "chat":
        _take_chat_names_(given, body)
    for name, convert in CONVERTERS.items():
        if name in given:
            given[name] = convert(given[name])
    warmth = given.get("temperature", 1)
    if isinstance(warmth, int | float) and warmth < GREEDY_BELOW:  # then they are without effect
        given = {k: v for k, v in given.items() if k not in ("top_k", "top_p", "min_p")}
    return given


def _take_chat_names_(given: dict[str, Any], body: Mapping[str, Any]) -> None:
    """`max_completion_tokens`, and `logprobs` as a switch beside `top_logprobs`."""
    most = body.get("max_completion_tokens")
    if most is not None and given.setdefault("max_tokens", most) != most:
        raise _invalid(f"max_tokens={given['max_tokens']!r}, but max_completion_tokens={most!r}")
    wanted, tops = given.pop("logprobs", False), body.get("top_logprobs")
    if not isinstance(wanted, bool):
        raise _invalid(f"logprobs={_shown(wanted)} must be true or false")
    if tops is not None and not wanted:
        raise _invalid(f"top_logprobs={_shown(tops)} needs logprobs=true")
    if wanted:
        given["logprobs"] = 0 if tops is None else tops


def _words(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _biases(value: Any) -> Any:
    """JSON's names are strings; ids are not."""
    if not isinstance(value, dict):
        return value
    try:
        return {int(token): bias for token, bias in value.items()}
    except ValueError as error:
        raise _invalid(f"logit_bias={_shown(value)} must name token ids: {error}") from None


CONVERTERS: dict[str, Callable[[Any], Any]] = {"stop": _words, "logit_bias": _biases}


def _check_unicode(text: str, where: str) -> None:
    if not is_unicode(text):
        raise _invalid(f"{where} holds half of a surrogate pair, which is no Unicode")


def _place(form: str) -> str:
    return "the line" if form == "plain" else "body"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _invalid(message: str, code: str = "invalid_request") -> BatchLineError:
    return BatchLineError(code, message)
