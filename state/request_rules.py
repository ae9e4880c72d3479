"""Whether the engine can serve a user's request, and its plain form."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from purestep.state.errors import RequestError, SamplingError
from purestep.state.media import Feature, checked_features, embed_runs
from purestep.state.request import Request
from purestep.state.sampling import (
    LARGEST_INT,
    SamplingParams,
    is_int,
    is_list,
    is_unicode,
)
from purestep.state.sampling_rules import check_sampling


def num_given(values: Any) -> int | None:
    """How many items the caller gave; None for what is no sequence."""
    try:
        return len(values)
    except TypeError:  # also of an array without dimensions
        return None


def checked_request(
    request: Request,
    *,
    vocab_size: int,
    max_context: int,
    num_layers: int,
    has_text: bool,
    processors: tuple[str, ...],
) -> Request:
    """The request in plain Python values and a read-only int32 prompt.

    Raises RequestError or SamplingError naming the request, the field, its value and the limit.
    """
    if not isinstance(request.id, str) or not request.id or not is_unicode(request.id):
        raise RequestError(f"request id {request.id!r} must be a non-empty string of Unicode")
    who = f"request {request.id!r}"
    if not isinstance(request.adapter, str | None):
        raise RequestError(
            f"{who}: adapter={request.adapter!r} must be one adapter's name or None; several "
            "adapters on one request, or a strength, are not supported (see for_adapters)"
        )
    salt = request.salt
    if salt is not None and not (isinstance(salt, str) and is_unicode(salt)):
        raise RequestError(f"{who}: salt={salt!r} must be None or a string")
    if not isinstance(request.sampling, SamplingParams):
        raise RequestError(f"{who}: sampling={request.sampling!r} must be SamplingParams")
    if not is_int(request.priority) or abs(request.priority) > LARGEST_INT:
        raise RequestError(
            f"{who}: priority={request.priority!r} must be an integer in +-{LARGEST_INT}"
        )
    sampling = check_sampling(
        request.sampling, who, vocab_size=vocab_size, has_text=has_text, processors=processors
    )
    layers = checked_layers(request.hidden_layers, num_layers, who)
    if sampling.max_tokens == 0 and sampling.prompt_logprobs is None and not layers:
        raise SamplingError(
            f"{who}: max_tokens=0 generates nothing, so it needs prompt_logprobs or hidden_layers"
        )
    generates = sampling.max_tokens > 0
    features = checked_features(request.features, num_given(request.tokens) or 0, who)
    tokens = checked_tokens(request, vocab_size, max_context, generates, features)
    return replace(
        request,
        tokens=tokens,
        sampling=sampling,
        priority=int(request.priority),
        hidden_layers=layers,
        features=features,
    )


def checked_layers(layers: Any, num_layers: int, who: str) -> tuple[int, ...]:
    """`hidden_layers` as a tuple. Raises RequestError."""
    low, high = -num_layers - 1, num_layers
    whole = is_list(layers) and all(map(is_int, layers))
    if not whole or not all(low <= i <= high for i in layers) or len(set(layers)) < len(layers):
        raise RequestError(
            f"{who}: hidden_layers={layers!r} must be different integers in {low}..{high}"
        )
    return tuple(int(i) for i in layers)


def checked_tokens(
    request: Request,
    vocab_size: int,
    max_context: int,
    generates: bool = True,
    features: Sequence[Feature] = (),
) -> np.ndarray:
    """The prompt as a read-only int32 array; -1 where an embedding stands, and where `features`
    fill a place whose id is not in the vocabulary.

    Raises RequestError for an empty prompt, ids outside the vocabulary, or a prompt that leaves no
    room in the context for one generated token, if it `generates` any.
    """
    who, unknown = f"request {request.id!r}", []
    try:
        wide = np.asarray(request.tokens)
    except ValueError:  # a ragged list
        wide = np.array(None)
    if wide.ndim != 1 or (wide.size and wide.dtype.kind not in "iu"):
        raise RequestError(
            f"{who}: tokens must be a flat sequence of integers, "
            f"got shape {wide.shape} of {wide.dtype}"
        )
    if wide.size == 0:
        raise RequestError(f"{who}: the prompt is empty; at least 1 token is needed")
    for first, last in (run for feature in features for run in embed_runs(feature)):
        ids = wide[first : last + 1]
        known = (ids >= 0) & (ids < vocab_size)
        if not known.all() and request.prompt_embeds is not None:
            place = first + int(np.flatnonzero(~known)[0])
            raise RequestError(
                f"{who}: a media item fills position {place}, whose id is {wide[place]}: beside "
                "prompt_embeds ids there must be in the vocabulary"
            )
        if not known.all():
            wide = wide.copy()
            wide[first : last + 1] = np.where(known, ids, 0)
            unknown.extend((first + np.flatnonzero(~known)).tolist())
    least = 0 if request.prompt_embeds is None else -1
    bad = np.flatnonzero((wide < least) | (wide >= vocab_size))
    if bad.size:
        raise RequestError(
            f"{who}: token id {wide[bad[0]]} at position {bad[0]} is outside 0..{vocab_size - 1}"
        )
    if wide.size + generates > max_context:
        more = " and one generated token exceed" if generates else " exceeds"
        raise RequestError(f"{who}: a prompt of {wide.size} tokens{more} max_context={max_context}")
    tokens = np.array(wide, dtype=np.int32)
    tokens[unknown] = -1
    tokens.setflags(write=False)
    return tokens
