"""The running rows as columns: taken, joined, made, and read back into their records.

R running rows, B block size. Columns are read-only numpy arrays, replaced once a step for all rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TypeVar

import numpy as np

from purestep.state.media import last_embed_end
from purestep.state.pytree import evolve, tree
from purestep.state.request import RequestState, all_tokens, frozen
from purestep.state.sampling import LARGEST_INT
from purestep.state.scores import Scores, joined, locked
from purestep.state.tables import Tables, tables_of

T = TypeVar("T", "Rows", Tables)


@tree
class Rows:
    """The running requests in order of admission; one column entry each."""

    ids: tuple[str, ...]
    versions: tuple[str | None, ...]  # adapter version, None = base
    used: tuple[str, ...]  # the different versions among them, in order of their first rows
    # What any of them is, of `_TRAITS`: most batches ask for next to nothing.
    traits: tuple[str, ...]
    slot_R: np.ndarray  # int32, where the adapter is, -1 = base; it stays there while rows run
    tables: Tables  # the rows' KV blocks, ceil(num_computed / B) of them
    num_computed_R: np.ndarray  # int32, tokens whose KV is written or planned
    num_tokens_R: np.ndarray  # int32, prompt and generated
    num_prompt_R: np.ndarray  # int32
    num_known_R: np.ndarray  # int32, tokens it had when it became a row
    newest_R: np.ndarray  # int32, the last of them or of those drawn since
    limit_R: np.ndarray  # int32, num_tokens at which the row ends with reason length
    temperature_R: np.ndarray  # float32
    top_k_R: np.ndarray  # int32
    top_p_R: np.ndarray  # float64: 1 - top_p is rounded once
    min_p_R: np.ndarray  # float32
    stream_R: np.ndarray  # uint64
    heeds_eos_R: np.ndarray  # bool
    least_R: np.ndarray  # int32, num_tokens before which no stop counts
    watched_R: np.ndarray  # bool, has stop ids or stop strings of its own
    streams_R: np.ndarray  # bool, tells its text
    num_text_R: np.ndarray  # int32, bytes of the text; counted where somebody asks for it
    num_streamed_R: np.ndarray  # int32, bytes of it that were told
    num_tops_R: np.ndarray  # int32, likeliest tokens to tell for each; -1 = none asked for
    edited_R: np.ndarray  # bool, its logits are changed before they are divided and cut
    num_scored_R: np.ndarray  # int32, prompt scores it had as it became a row; -1 = none asked for
    num_hidden_R: np.ndarray  # int32, likewise, hidden states
    embedded_R: np.ndarray  # bool, embeddings stand in its prompt
    media_end_R: np.ndarray  # int32, behind the last token that an encoder output fills; 0 = none
    delta_R: np.ndarray  # int32, what is added to a place behind the prompt to give its position
    tail_RB: np.ndarray  # int32, token of position p at p % B, for the newest B positions
    tail_logprob_RB: np.ndarray  # float32, likewise, of tokens drawn since the row was admitted
    # What was drawn since then up to the newest block's end: (tokens, logprobs, digest) for each
    # block's part, the digest empty without prefix caching. What comes behind is in the tails.
    sealed: tuple[tuple[tuple[np.ndarray, np.ndarray, bytes], ...], ...]
    texts: tuple[bytes | None, ...]  # as in the record
    tail_tops: tuple[tuple[Scores, ...], ...]  # behind the record's, one for each such token
    tail_hidden: tuple[tuple[np.ndarray, ...], ...]  # behind the record's, one for each step


_COLUMNS = {
    "slot_R": np.int32,
    "num_computed_R": np.int32,
    "num_tokens_R": np.int32,
    "num_prompt_R": np.int32,
    "num_known_R": np.int32,
    "newest_R": np.int32,
    "limit_R": np.int32,
    "temperature_R": np.float32,
    "top_k_R": np.int32,
    "top_p_R": np.float64,
    "min_p_R": np.float32,
    "stream_R": np.uint64,
    "heeds_eos_R": np.bool_,
    "least_R": np.int32,
    "watched_R": np.bool_,
    "streams_R": np.bool_,
    "num_text_R": np.int32,
    "num_streamed_R": np.int32,
    "num_tops_R": np.int32,
    "edited_R": np.bool_,
    "num_scored_R": np.int32,
    "num_hidden_R": np.int32,
    "embedded_R": np.bool_,
    "media_end_R": np.int32,
    "delta_R": np.int32,
}


def empty_rows(block_size: int) -> Rows:
    """Nobody runs."""
    return Rows(
        ids=(),
        versions=(),
        used=(),
        traits=(),
        tables=tables_of((), block_size),
        tail_RB=locked(np.zeros((0, block_size), np.int32)),
        tail_logprob_RB=locked(np.zeros((0, block_size), np.float32)),
        sealed=(),
        texts=(),
        tail_tops=(),
        tail_hidden=(),
        **{name: frozen((), dtype) for name, dtype in _COLUMNS.items()},
    )


def take_rows(rows: Rows, index: Sequence[int] | np.ndarray) -> Rows:
    """The rows at these places, in this order."""
    return summed(_picked(rows, np.asarray(index, dtype=np.intp)))


def _picked(columns: T, places: np.ndarray) -> T:
    picked = {}
    for field in fields(columns):
        column = getattr(columns, field.name)
        if field.name in _SUMMARIES:
            picked[field.name] = ()
        elif isinstance(column, tuple):
            picked[field.name] = tuple(column[i] for i in places.tolist())
        elif isinstance(column, np.ndarray):
            picked[field.name] = locked(column[places])
        else:
            picked[field.name] = _picked(column, places)
    return type(columns)(**picked)


def add_rows(rows: Rows, new: Sequence[Rows]) -> Rows:
    """`rows` with others behind them."""
    if not new:
        return rows
    return summed(_joined([rows, *new]))


def _joined(parts: Sequence[T]) -> T:
    joined = {}
    for field in fields(parts[0]):
        columns = [getattr(part, field.name) for part in parts]
        if field.name in _SUMMARIES:
            joined[field.name] = ()
        elif isinstance(columns[0], tuple):
            joined[field.name] = tuple(item for column in columns for item in column)
        elif isinstance(columns[0], np.ndarray):
            joined[field.name] = locked(np.concatenate(columns))
        else:
            joined[field.name] = _joined(columns)
    return type(parts[0])(**joined)


def summed(rows: Rows) -> Rows:
    """With what follows from the columns of other rows than before."""
    used = tuple(version for version in dict.fromkeys(rows.versions) if version is not None)
    traits = tuple(name for name, flags in _TRAITS.items() if np.count_nonzero(flags(rows)))
    return evolve(rows, used=used, traits=traits)


_SUMMARIES = ("used", "traits")


_TRAITS: dict[str, Callable[[Rows], np.ndarray]] = {
    "edited": lambda rows: rows.edited_R,
    "early": lambda rows: rows.least_R > rows.num_prompt_R,  # no stop counts for some tokens
    "heeds_eos": lambda rows: rows.heeds_eos_R,
    "watched": lambda rows: rows.watched_R,
    "has_text": lambda rows: np.array([text is not None for text in rows.texts], bool),
    "told_more": lambda rows: (rows.num_tops_R >= 0) | (rows.num_hidden_R >= 0),
    "probed": lambda rows: (rows.num_scored_R >= 0) | (rows.num_hidden_R >= 0),
    "only_scored": lambda rows: rows.limit_R == rows.num_prompt_R,  # generates nothing
    "embedded": lambda rows: rows.embedded_R,
    "media": lambda rows: rows.media_end_R > 0,
}


def make_row(
    record: RequestState,
    table: Sequence[int],
    *,
    slot: int,
    num_computed: int,
    limit: int,
    block_size: int,
) -> Rows:
    """One running row for a record whose `generated` is complete; `slot` is its adapter's."""
    sampling = record.request.sampling
    tokens = all_tokens(record)
    num_prompt = len(record.request.tokens)
    values = {
        "slot_R": slot,
        "num_computed_R": num_computed,
        "num_tokens_R": len(tokens),
        "num_prompt_R": num_prompt,
        "num_known_R": len(tokens),
        "newest_R": tokens[-1],
        "limit_R": limit,
        "temperature_R": sampling.temperature,
        "top_k_R": sampling.top_k,
        "top_p_R": sampling.top_p,
        "min_p_R": sampling.min_p,
        "stream_R": record.stream,
        "heeds_eos_R": not sampling.ignore_eos,
        "least_R": min(num_prompt + sampling.min_tokens, LARGEST_INT),
        "watched_R": bool(sampling.stop or sampling.stop_ids),
        "streams_R": sampling.stream,
        "num_text_R": record.num_text,
        "num_streamed_R": record.num_streamed,
        "num_tops_R": -1 if sampling.logprobs is None else sampling.logprobs,
        "edited_R": record.edits is not None,
        "num_scored_R": record.num_scored if record.scores_prompt else -1,
        "num_hidden_R": record.num_hidden if record.request.hidden_layers else -1,
        "embedded_R": record.request.prompt_embeds is not None,
        "media_end_R": last_embed_end(record.request.features),
        "delta_R": record.position_delta,
    }
    tail = np.zeros((1, block_size), np.int32)
    places = np.arange(max(0, len(tokens) - block_size), len(tokens))
    tail[0, places % block_size] = tokens[places]
    row = Rows(
        ids=(record.key,),
        versions=(record.version,),
        used=(),
        traits=(),
        tables=tables_of((table,), block_size),
        tail_RB=locked(tail),
        tail_logprob_RB=locked(np.zeros((1, block_size), np.float32)),
        sealed=((),),
        texts=(record.text,),
        tail_tops=((),),
        tail_hidden=((),),
        **{name: frozen((values[name],), dtype) for name, dtype in _COLUMNS.items()},
    )
    return summed(row)


def unsealed(rows: Rows, row: int) -> tuple[np.ndarray, np.ndarray]:
    """The row's newest tokens and logprobs, behind those in `sealed`."""
    B, start, sealed = rows.tail_RB.shape[1], int(rows.num_known_R[row]), len(rows.sealed[row])
    if sealed:
        start = (start // B + sealed) * B
    first = start % B  # all of them stand in one block
    places = row, slice(first, first + int(rows.num_tokens_R[row]) - start)
    return rows.tail_RB[places], rows.tail_logprob_RB[places]


def drawn_parts(rows: Rows, row: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The tokens and logprobs that the row has drawn, behind those of its record, in parts."""
    tokens, logprobs = unsealed(rows, row)
    sealed = rows.sealed[row]
    return [*(part[0] for part in sealed), tokens], [*(part[1] for part in sealed), logprobs]


def chain(rows: Rows, row: int, record: RequestState) -> tuple[bytes, ...]:
    """The digests of the row's full blocks, and of those of its prompt, in order."""
    return record.digests + tuple(part[2] for part in rows.sealed[row] if part[2])


def with_tails(rows: Rows, row: int, record: RequestState) -> RequestState:
    """The record with the row's likeliest tokens and hidden states behind its own."""
    tops, hidden, changes = rows.tail_tops[row], rows.tail_hidden[row], {}
    if tops:  # one chunk for all of them: a chunk for each token would be copied with every token
        changes["tops"] = (*record.tops, joined(tops, tops[0].top_id_NK.shape[1]))
    if hidden:
        changes["hidden"] = (*record.hidden, locked(np.concatenate(hidden, axis=1)))
    return evolve(record, **changes) if changes else record


def completed_record(rows: Rows, row: int, record: RequestState) -> RequestState:
    """The record with everything the row has generated."""
    tokens, logprobs = drawn_parts(rows, row)
    return evolve(
        with_tails(rows, row, record),
        generated=locked(np.concatenate((record.generated, *tokens))),
        logprobs=locked(np.concatenate((record.logprobs, *logprobs))),
        generated_digests=chain(rows, row, record)[len(record.prompt_digests) :],
        text=rows.texts[row],
        num_text=int(rows.num_text_R[row]),
        num_streamed=int(rows.num_streamed_R[row]),
    )
