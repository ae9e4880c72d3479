"""The whole engine as one value: host state (immutable), device handle (linear), blobs (immutable).

R running rows, B block size. Columns are read-only numpy arrays, replaced once a step for all rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np
from immutables import Map

from purestep.state.adapters import AdapterLedger, check_adapters, empty_adapters
from purestep.state.blocks import BlockDraft, BlockLedger, check_blocks, empty_blocks
from purestep.state.encoder import EncoderLedger, check_encoder, empty_encoder
from purestep.state.errors import StepError, UnknownRequestError
from purestep.state.media import last_embed_end
from purestep.state.plan import StepPlan
from purestep.state.pytree import evolve, static, tree
from purestep.state.request import Completion, RequestState, frozen
from purestep.state.sampling import LARGEST_INT
from purestep.state.scores import Scores, behind_the_first, joined, locked
from purestep.state.tables import Tables, tables_of

T = TypeVar("T", "Rows", Tables)


@tree
class Rows:
    """The running requests in order of admission; one column entry each."""

    ids: tuple[str, ...]
    versions: tuple[str | None, ...]  # adapter version, None = base
    used: tuple[str, ...]  # the different versions among them, in order of their first rows
    traits: tuple[
        str, ...
    ]  # what any of them is, of `_TRAITS`: most batches ask for next to nothing
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


@tree
class HostState:
    """Everything that is true between two steps, but for the bytes on the device.

    Immutable and persistent: no function changes it, old ones stay valid for ever.
    """

    step: int  # number of the next step
    arrivals: int  # requests submitted so far
    most_samples: int  # the largest `n` of any so far
    requests: Map[str, RequestState]  # live ones: running, waiting, loading
    waiting: tuple[str, ...]  # in order of service; preempted ones in front
    rows: Rows
    blocks: BlockLedger
    adapters: AdapterLedger
    encoder: EncoderLedger
    copies: tuple[tuple[int, int], ...]  # (held block, branch's block): the next step copies
    ended: tuple[Completion, ...]  # ended between steps; the next step's outputs tell
    in_flight: tuple[StepPlan, ...]  # scheduled and not committed, oldest first
    # (step, key, blocks): the row of this key has left the plan in flight of this step, whose
    # commit discards its results and frees the blocks. "" for the source of a copy.
    departed: tuple[tuple[int, str, np.ndarray], ...]

    @property
    def idle(self) -> bool:
        """No live request and nothing left to tell."""
        return not (self.requests or self.ended or self.in_flight)


@tree
class DeviceState:
    """A linear handle on a pool of device memory: valid while the pool has this generation."""

    pool: Any = static()
    generation: int = static()
    launched: tuple[Any, ...] = static(default=())  # what was queued and not waited for, in order
    drawn: tuple[int, Any] | None = static(default=None)  # the last step that drew, and its tokens


@tree
class EngineState:
    """What `step` folds over. `config` is the program's, so that no other function needs it."""

    config: Any = static()
    host: HostState
    device: DeviceState
    blobs: Map[str, Any]  # digest -> host tensors: of adapter versions, prompts, media


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


def empty_host(
    *,
    block_size: int,
    num_blocks: int,
    num_slots: int,
    num_row_blocks: int,
    max_registered: int,
    block_quota: int = 0,
    encoder_cache_tokens: int = 0,
    encoder_row_bytes: int = 0,
) -> HostState:
    """The state before the first request."""
    rows = Rows(
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
    return HostState(
        step=0,
        arrivals=0,
        most_samples=1,
        requests=Map(),
        waiting=(),
        rows=rows,
        blocks=empty_blocks(num_blocks, block_quota),
        adapters=empty_adapters(num_slots, num_row_blocks, max_registered),
        encoder=empty_encoder(encoder_cache_tokens, encoder_row_bytes),
        copies=(),
        ended=(),
        in_flight=(),
        departed=(),
    )


def drop_copies(
    copies: tuple[tuple[int, int], ...], draft: BlockDraft
) -> tuple[tuple[int, int], ...]:
    """The copies whose target still belongs to a row; the sources of the others are let go."""
    kept = []
    for source, target in reversed(copies):  # a later copy may hold an earlier one's target
        if draft.holds(target):
            kept.append((source, target))
        else:
            draft.release([source])
    return tuple(reversed(kept))


def drop_blobs(state: EngineState) -> EngineState:
    """The state without tensors that nothing names: of adapter versions that are no longer
    registered, and of prompts and media whose requests have all ended."""
    registered = state.host.adapters.registered
    unknown = [name for name in state.blobs if name not in registered]
    if not unknown:
        return state
    prompts = set(named_blobs(state.host))
    gone = [name for name in unknown if name not in prompts]
    if not gone:
        return state
    with state.blobs.mutate() as blobs:
        for name in gone:
            del blobs[name]
        return replace(state, blobs=blobs.finish())


def named_blobs(host: HostState) -> set[str]:
    """The digests of what live requests brought beside ids: embeddings, media."""
    requests = [record.request for record in host.requests.values()]
    media = {feature.digest for request in requests for feature in request.features}
    return {r.prompt_embeds for r in requests if r.prompt_embeds is not None} | media


def all_tokens(record: RequestState) -> np.ndarray:
    """Prompt and generated tokens of a record whose `generated` is complete."""
    return np.concatenate([record.request.tokens, record.generated])


def take_rows(rows: Rows, index: Sequence[int] | np.ndarray) -> Rows:
    """The rows at these places, in this order."""
    return _summed(_picked(rows, np.asarray(index, dtype=np.intp)))


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
    return _summed(_joined([rows, *new]))


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


def _summed(rows: Rows) -> Rows:
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
    return _summed(row)


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


def progress(host: HostState, request_id: str) -> RequestState:
    """How far a live request has come, its generated tokens complete.

    Raises UnknownRequestError.
    """
    record = live(host, request_id)
    if request_id in host.rows.ids:
        return completed_record(host.rows, host.rows.ids.index(request_id), record)
    return record


def live(host: HostState, request_id: str) -> RequestState:
    """The record of a live request. Raises UnknownRequestError."""
    record = host.requests.get(request_id)
    if record is None:
        raise UnknownRequestError(
            f"no live request has id {request_id!r}; {len(host.requests)} are live"
        )
    return record


def quiet(host: HostState, verb: str) -> HostState:
    """The state itself, if no plan is in flight. Raises StepError."""
    if host.in_flight:
        raise StepError(f"{verb}: step {host.in_flight[0].step} was scheduled and not committed")
    return host


def plan_places(host: HostState, plan: StepPlan) -> np.ndarray:
    """Where each row of a plan in flight stands among the running ones; -1 for those that left."""
    if plan.row_ids == host.rows.ids and not host.departed:
        return np.arange(len(plan.row_ids))
    row_of = {key: row for row, key in enumerate(host.rows.ids)}
    for step, key, _ in host.departed:
        if step >= plan.step:  # a row of this name is another request's
            row_of.pop(key, None)
    return np.array([row_of.get(key, -1) for key in plan.row_ids], np.intp)


def drawn_in_flight(host: HostState) -> np.ndarray:
    """int32 [R]: the place of each running row among the draws of the newest plan in flight, whose
    tokens nobody knows yet; -1 for a row that it does not draw for."""
    place_R = np.full(len(host.rows.ids), -1, np.int32)
    if host.in_flight:
        plan = host.in_flight[-1]
        at_S = plan_places(host, plan)[plan.sampled_R]
        there = at_S >= 0
        place_R[at_S[there]] = np.flatnonzero(there)
    return place_R


def num_coming(host: HostState) -> np.ndarray:
    """int32 [R]: the tokens that the plans in flight draw for each running row."""
    coming_R = np.zeros(len(host.rows.ids), np.int32)
    for plan in host.in_flight:
        at_S = plan_places(host, plan)[plan.sampled_R]
        coming_R[at_S[at_S >= 0]] += 1
    return coming_R


def released(
    host: HostState, keys: Sequence[str], tables: Sequence[np.ndarray], draft: BlockDraft
) -> tuple[tuple[int, str, np.ndarray], ...]:
    """Free the blocks of rows that leave, now or with the newest plan in flight that has the row,
    since it still reads and writes them; returns who has departed by then."""
    departed = list(host.departed)
    users = [
        (plan.step, set(plan.row_ids), [target for _, target in plan.copies])
        for plan in reversed(host.in_flight)
    ]
    for key, table in zip(keys, tables, strict=True):
        for step, ids, copied in users:
            if key in ids:
                departed.append((step, key, table))
                break
            if np.isin(copied, table).any():  # a branch's, in a step with no token of its row
                departed.append((step, "", table))
                break
        else:
            draft.release(table)
    return tuple(departed)


def completion(record: RequestState, **how: Any) -> Completion:
    """The end of a request whose record is complete."""
    request = record.request
    return Completion(
        id=request.id,
        key=record.key,
        adapter=request.adapter,
        tokens=record.generated,
        logprobs=record.logprobs,
        num_prompt_tokens=len(request.tokens),
        num_cached_tokens=max(record.num_cached, 0),
        num_preemptions=record.num_preemptions,
        index=record.index,
        **_collected(record),
        **how,
    )


def _collected(record: RequestState) -> dict[str, Any]:
    """The columns of a completion that only some requests ask for."""
    sampling, layers = record.request.sampling, record.request.hidden_layers
    found: dict[str, Any] = {}
    if sampling.logprobs is not None:
        tops = joined(record.tops, sampling.logprobs)
        found |= {"top_ids": tops.top_id_NK, "top_logprobs": tops.top_logprob_NK}
    if record.scores_prompt and record.num_scored == len(record.request.tokens) - 1:
        scores = behind_the_first(joined(record.prompt_scores, sampling.prompt_logprobs))
        found |= {
            "prompt_logprobs": scores.logprob_N,
            "prompt_top_ids": scores.top_id_NK,
            "prompt_top_logprobs": scores.top_logprob_NK,
        }
    if layers and record.hidden:
        states = locked(np.concatenate(record.hidden, axis=1))
        found["hidden_states"] = Map(zip(layers, states, strict=True))
    return found


def block_holders(host: HostState) -> list[Sequence[int] | np.ndarray]:
    """All that holds KV blocks: the rows' tables, copies their sources, and plans in flight those
    of rows that have left."""
    waiting = [(source,) for source, _ in host.copies]
    return [*host.rows.tables, *waiting, *(blocks for _, _, blocks in host.departed)]


def check_host(host: HostState, block_size: int) -> None:
    """Assert the laws of each ledger and those between them."""
    check_rows(host, block_size)
    check_blocks(host.blocks, block_holders(host))
    check_adapters(host.adapters)
    check_encoder(host.encoder, encoder_items(host))


def encoder_items(host: HostState) -> set[tuple[str, int]]:
    """The items whose encoder outputs may be referred to: those of running rows, as (key, number of
    the feature)."""
    counts = {key: len(host.requests[key].request.features) for key in host.rows.ids}
    return {(key, i) for key, count in counts.items() for i in range(count)}


def check_rows(host: HostState, block_size: int) -> None:
    """Assert the laws that hold between the ledgers after every transition."""
    rows = host.rows
    assert len(set(rows.ids)) == len(rows.ids)
    assert sorted([*rows.ids, *host.waiting]) == sorted(host.requests)
    blocks_R = -(-rows.num_computed_R // block_size)
    assert rows.tables.length_R.tolist() == blocks_R.tolist(), "a table has a wrong length"
    coming_R = num_coming(host)
    assert (rows.num_computed_R <= rows.num_tokens_R + np.maximum(coming_R - 1, 0)).all()
    assert (rows.num_tokens_R + coming_R <= rows.limit_R).all()
    unfinished = (rows.num_tokens_R < rows.limit_R) | (rows.num_computed_R < rows.num_tokens_R)
    assert unfinished.all() or host.in_flight, "a row has come to its end and is still there"
    flying = {plan.step: plan for plan in host.in_flight}
    for step, key, _ in host.departed:
        assert not key or key in flying[step].row_ids, f"{key} left a plan that has no such row"
    held = {int(block) for holder in block_holders(host) for block in holder}
    assert {target for _, target in host.copies} <= held, "a copy for nobody"
    users: dict[str, int] = {}
    for record in host.requests.values():
        if record.version is not None:
            users[record.version] = users.get(record.version, 0) + 1
    assert users == dict(host.adapters.users)
    places = host.adapters.resident
    slots = [-1 if version is None else places[version].slot for version in rows.versions]
    assert rows.slot_R.tolist() == slots, "a row's adapter is elsewhere"
    summed = _summed(rows)
    assert (rows.used, rows.traits) == (summed.used, summed.traits)
    for row, request_id in enumerate(rows.ids):
        record = host.requests[request_id]
        assert rows.versions[row] == record.version
        assert rows.num_known_R[row] == len(record.request.tokens) + len(record.generated)
        assert rows.newest_R[row] == rows.tail_RB[row, (rows.num_tokens_R[row] - 1) % block_size]
        assert len(unsealed(rows, row)[0]) == min(
            rows.num_tokens_R[row] % block_size, rows.num_tokens_R[row] - rows.num_known_R[row]
        )
