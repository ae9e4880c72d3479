"""The whole engine as one value: host state and blobs (immutable), device handle (linear)."""

from dataclasses import replace
from typing import Any

import numpy as np
from immutables import Map

from purestep.state.adapters import AdapterLedger, empty_adapters
from purestep.state.blocks import BlockDraft, BlockLedger, empty_blocks
from purestep.state.encoder import EncoderLedger, empty_encoder
from purestep.state.errors import StepError, UnknownRequestError
from purestep.state.plan import StepPlan
from purestep.state.pytree import static, tree
from purestep.state.request import Completion, RequestState
from purestep.state.rows import Rows, completed_record, empty_rows


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
    return HostState(
        step=0,
        arrivals=0,
        most_samples=1,
        requests=Map(),
        waiting=(),
        rows=empty_rows(block_size),
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
    gone = {name for name in state.blobs if name not in registered}
    if gone:
        gone -= named_blobs(state.host)
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
