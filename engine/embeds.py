"""Prompts given as embeddings: checked, copied, and named by their digest."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from purestep.engine.config import Config
from purestep.state.errors import RequestError
from purestep.state.hashing import embeds_extra, framed
from purestep.state.request import Request
from purestep.state.request_rules import num_given


def take_embeds(config: Config, request: Request) -> tuple[Request, Tensor]:
    """(the request with a digest in place of its embeddings, the rows to keep).

    The rows are copied to the host in the engine's number format; a prompt without ids gets a -1
    for each. Raises RequestError for another shape than [n, hidden size], for what is no dense
    array of floats with memory behind it, and for values that are not finite.
    """
    what = f"request {request.id!r}: prompt_embeds"
    rows = checked_rows(config, request.prompt_embeds, config.model.hidden_size, what)
    if num_given(request.tokens) == 0:
        request = replace(request, tokens=np.full(len(rows), -1))
    return replace(request, prompt_embeds=embeds_name(config, rows)), rows


def embeds_name(config: Config, rows: Tensor) -> str:
    """The digest that names rows in the engine's number format, on the host."""
    return blake3(framed("purestep/embeds/1", config.dtype.encode(), _bytes(rows))).hexdigest()


def check_places(request: Request, rows: Tensor) -> None:
    """Raises RequestError unless there is a place (an id of -1) for each row."""
    places = int(np.count_nonzero(request.tokens == -1))
    if places != len(rows):
        raise RequestError(
            f"request {request.id!r}: prompt_embeds has {len(rows)} rows, but tokens have "
            f"{places} places for them (ids of -1)"
        )


def checked_rows(config: Config, given: Any, D: int, what: str) -> Tensor:
    """A copy of embeddings [n, D] on the host, in the engine's number format.

    Raises RequestError that begins with `what`.
    """
    if not isinstance(given, Tensor | np.ndarray):
        raise RequestError(f"{what} must be a tensor or array, got {type(given)}")
    if isinstance(given, Tensor):
        if given.layout != torch.strided or given.is_nested or given.is_meta:
            kind = "meta" if given.is_meta else "nested" if given.is_nested else given.layout
            raise RequestError(f"{what} must be a dense tensor, this one is {kind}")
        floats = given.is_floating_point()
    else:
        floats = given.dtype.kind == "f" and given.dtype.itemsize <= 8  # torch has no longdouble
    if not floats or given.ndim != 2 or given.shape[1] != D or not given.shape[0]:
        raise RequestError(
            f"{what} must be floats of shape [n, {D}], got {tuple(given.shape)} of {given.dtype}"
        )
    if isinstance(given, np.ndarray):  # torch takes neither negative strides nor foreign bytes
        native = given.dtype.newbyteorder("=")
        given = torch.from_numpy(np.array(given, order="C", dtype=native))
    rows = given.detach().to("cpu", getattr(torch, config.dtype), copy=True).contiguous()
    if not rows.isfinite().all():
        raise RequestError(f"{what} hold NaN or infinity (in {config.dtype})")
    return rows


def block_extras(tokens: np.ndarray, rows: Tensor, block_size: int) -> tuple[bytes, ...]:
    """What names the embeddings in each block of the prompt, a partial last one included."""
    before = np.concatenate([[0], np.cumsum(tokens == -1)])  # embeddings before each position
    starts = range(0, len(tokens), block_size)
    ends = [min(start + block_size, len(tokens)) for start in starts]
    spans = [(before[a], before[b]) for a, b in zip(starts, ends, strict=True)]
    return tuple(embeds_extra(_bytes(rows[a:b])) for a, b in spans)


def _bytes(rows: Tensor) -> bytes:
    return rows.contiguous().view(torch.uint8).numpy().tobytes()
