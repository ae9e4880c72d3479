"""What a caller does with requests between steps: submit and abort. All pure.

Each takes an EngineState and returns another; a call that is refused raises before any change.
"""

from dataclasses import replace

import numpy as np
from torch import Tensor

from purestep.engine.config import Config, request_limit
from purestep.engine.embeds import block_extras, check_places, take_embeds
from purestep.engine.encoding import holds_of
from purestep.engine.extras import edits_of
from purestep.engine.media import check_media, positions_of, take_media
from purestep.state.adapters import AdapterLedger, count_users, encoder_version, resolve
from purestep.state.blocks import BlockDraft
from purestep.state.encoder import let_go
from purestep.state.engine import (
    EngineState,
    HostState,
    drop_blobs,
    drop_copies,
    live,
)
from purestep.state.errors import RequestError
from purestep.state.hashing import block_digests, chain_root, random_stream, request_seed
from purestep.state.in_flight import released
from purestep.state.media import media_extras
from purestep.state.request import Request, RequestState, frozen
from purestep.state.request_rules import checked_request
from purestep.state.rows import take_rows


def submit(state: EngineState, request: Request) -> EngineState:
    """Queue a request; it runs when `step` finds room for it.

    With `sampling.n` > 1 each sample is a request of its own from here on: the first lives under
    the request's id, the others under `id#1`, `id#2`, ... They share the prompt's KV blocks.

    Media bring an adapter along where `default_adapters` has one and the request names none.

    Raises RequestError (empty or too long prompt, id outside the vocabulary, an id that is live, a
    media item that does not fit), SamplingError or UnknownAdapterError, naming item, value and
    limit, before any change.
    """
    blobs, rows = state.blobs, None
    if request.features:
        request, blobs = take_media(state.config, blobs, request)
    if request.prompt_embeds is not None:
        request, rows = take_embeds(state.config, request)
        blobs = blobs.set(request.prompt_embeds, rows)
    host = submit_host(state.config, state.host, request, rows)
    return replace(state, host=host, blobs=blobs)


def submit_host(
    config: Config, host: HostState, request: Request, embeds: Tensor | None = None
) -> HostState:
    """`submit` on the host state alone; `embeds` are the rows that `take_embeds` gave."""
    request = _checked(config, host, request)
    extras = ()
    if embeds is not None:
        check_places(request, embeds)
        extras = block_extras(request.tokens, embeds, config.block_size)
    if request.features:
        media = media_extras(request.features, len(request.tokens), config.block_size)
        extras = tuple(map(bytes.__add__, extras, media)) if extras else tuple(media)
    positions = positions_of(config, request)
    version, loading = resolve(host.adapters, request.adapter, f"request {request.id!r}")
    records = []
    for index in range(request.sampling.n):
        record = _new_record(config, host, request, index, extras, positions)
        records.append(record if loading else bind(config, host.adapters, record, version))
    adapters = host.adapters
    if not loading:
        adapters = count_users(adapters, [(version, 1)] * len(records))
    return replace(
        host,
        arrivals=host.arrivals + len(records),
        most_samples=max(host.most_samples, len(records)),
        requests=host.requests.update({record.key: record for record in records}),
        waiting=(*host.waiting, *(record.key for record in records)),
        adapters=adapters,
    )


def _new_record(
    config: Config,
    host: HostState,
    request: Request,
    index: int,
    extras: tuple[bytes, ...],
    positions: tuple[np.ndarray | None, int],
) -> RequestState:
    given = request.sampling.seed
    seed = request_seed(config.seed, request.id) if given is None else given
    watches_text = bool(request.sampling.stop or request.sampling.stream)
    waits = request.sampling.min_tokens > 0
    return RequestState(
        request=request,
        key=_sample_key(request.id, index),
        index=index,
        arrival=host.arrivals + index,
        queued_at=host.step,
        version=None,
        encoder_version=None,
        loading=True,
        seed=seed,
        stream=random_stream(seed, index, ()),
        branch_path=(),
        num_branches=0,
        root=b"",
        block_extras=extras,
        position_3P=positions[0],
        position_delta=positions[1],
        prompt_digests=(),
        generated_digests=(),
        generated=frozen(()),
        logprobs=frozen((), np.float32),
        num_cached=-1,
        num_preemptions=0,
        text=b"" if watches_text else None,
        num_text=0,
        num_streamed=0,
        early_edits=edits_of(config, request.sampling, early=True) if waits else None,
        edits=edits_of(config, request.sampling, early=False),
        tops=(),
        prompt_scores=(),
        hidden=(),
    )


def _sample_key(request_id: str, index: int) -> str:
    return f"{request_id}#{index}" if index else request_id


def _checked(config: Config, host: HostState, request: Request) -> Request:
    request = checked_request(
        request,
        vocab_size=config.model.vocab_size,
        max_context=config.max_context,
        num_layers=config.model.num_layers,
        has_text=config.tokens is not None,
        processors=config.processors,
    )
    request = with_default_adapter(config, request)
    check_media(config, request)
    check_free(host, request.id, request.sampling.n, f"request {request.id!r}")
    generates = request.sampling.max_tokens > 0
    needed = -(-(len(request.tokens) + generates) // config.block_size)
    if needed > config.num_blocks:
        more = " and one generated token need" if generates else " need"
        raise RequestError(
            f"request {request.id!r}: {len(request.tokens)} prompt tokens{more} "
            f"{needed} blocks of {config.block_size}, but num_blocks={config.num_blocks}"
        )
    check_quota(config, request)
    return request


def with_default_adapter(config: Config, request: Request) -> Request:
    """The request with the adapter that its media's modality has by default, if it names none.

    Raises RequestError where two modalities ask for different ones: a request has one adapter.
    """
    if request.adapter is not None or not (config.default_adapters and request.features):
        return request
    present = {feature.modality for feature in request.features}
    wanted = [(name, modality) for modality, name in config.default_adapters if modality in present]
    if len({name for name, _ in wanted}) > 1:
        asked = " and ".join(f"{name!r} for its {modality}" for name, modality in wanted)
        raise RequestError(
            f"request {request.id!r}: default_adapters asks for {asked}, but a request has one "
            "adapter: name it"
        )
    return replace(request, adapter=wanted[0][0]) if wanted else request


def check_quota(config: Config, request: Request) -> None:
    """Raises RequestError where a request of an adapter could come to hold more than its quota."""
    quota, limit = config.adapter_block_quota, request_limit(config, request)
    needed = -(-limit // config.block_size)
    if quota and request.adapter is not None and needed > quota:
        raise RequestError(
            f"request {request.id!r}: {len(request.tokens)} prompt tokens and all it may generate "
            f"need {needed} blocks of {config.block_size}, but adapter_block_quota={quota}"
        )


def check_free(host: HostState, request_id: str, n: int, who: str) -> None:
    """Raises RequestError while a request of this id, or any sample of it, is live or has an end
    to be told, or while another request has the name of one of its `n` samples."""
    for index in range(max(n, host.most_samples)):
        key = _sample_key(request_id, index)
        record = host.requests.get(key)
        if record is not None and (index < n or record.request.id == request_id):
            raise RequestError(f"{who}: a live request has the id {key!r}")
    untold = [*host.ended, *(end for plan in host.in_flight for end in plan.ended)]
    names = {_sample_key(request_id, index) for index in range(n)} if untold else ()
    for completion in untold:
        if completion.id == request_id or completion.key in names:
            raise RequestError(f"{who}: the end of {completion.key!r} is still to be told")


def bind(
    config: Config, ledger: AdapterLedger, record: RequestState, version: str | None
) -> RequestState:
    """The record with its adapter version, which fixes the identity of its KV blocks, and that of
    its media's encoder outputs where the adapter changes encoders. As the root of the chain names
    the version, `block_extras` need not."""
    root = chain_root(config.kv_identity, version, record.request.salt)
    digests = ()
    if config.prefix_caching:
        tokens, extras = record.request.tokens, record.block_extras
        digests = block_digests(root, tokens, config.block_size, extras)
    return replace(
        record,
        version=version,
        encoder_version=encoder_version(ledger, version),
        loading=False,
        root=root,
        prompt_digests=digests,
    )


def abort(state: EngineState, request_id: str) -> EngineState:
    """End a request at once, with all its samples that still live, and free all it holds;
    `progress` tells what it had generated. The request's id ends every sample, also when the first,
    which lives under that id, has ended before; `id#1` and so on end one sample alone. Branches are
    requests of their own and go on.

    Raises UnknownRequestError.
    """
    host = state.host
    keys = [r.key for r in host.requests.values() if request_id in (r.key, r.request.id)]
    for key in sorted(keys) or [request_id]:
        host = abort_host(host, key)
    return drop_blobs(replace(state, host=host))


def abort_host(host: HostState, key: str) -> HostState:
    """End one sample, on the host state alone. A plan in flight keeps the row's blocks until its
    commit, which discards what it found for the row."""
    record = live(host, key)
    rows, blocks, copies, departed = host.rows, host.blocks, host.copies, host.departed
    if key in rows.ids:
        row = rows.ids.index(key)
        draft = BlockDraft(blocks)
        departed = released(host, [key], [rows.tables[row]], draft)
        copies = drop_copies(host.copies, draft)
        blocks = draft.finish()
        rows = take_rows(rows, [r for r in range(len(rows.ids)) if r != row])
    return replace(
        host,
        requests=host.requests.delete(key),
        waiting=tuple(i for i in host.waiting if i != key),
        rows=rows,
        blocks=blocks,
        copies=copies,
        departed=departed,
        adapters=count_users(host.adapters, ((record.version, -1),)),
        encoder=let_go(host.encoder, holds_of(record)),
    )
