"""The plan of a step, written out from the rows that take part in it."""

from operator import attrgetter
from typing import Any

import numpy as np
from immutables import Map

from purestep.engine.config import Config, describe
from purestep.engine.extras import embedded_spans, probes, row_edits
from purestep.engine.media import merged_spans, plan_ends, plan_positions
from purestep.state.adapters import AdapterLedger, Residence
from purestep.state.engine import HostState
from purestep.state.plan import EncodedItem, Overwrites, SamplingRows, StepPlan
from purestep.state.request import RequestState, all_tokens
from purestep.state.rows import Rows, take_rows
from purestep.state.scores import locked


def make_plan(
    config: Config,
    host: HostState,
    rows: Rows,
    count_R: np.ndarray,
    requests: Map[str, RequestState],
    adapters: AdapterLedger,
    allocated: list[int],
    drawn_R: np.ndarray | None,
    drops: tuple[str, ...],
    encodes: tuple[EncodedItem, ...],
    **told: Any,
) -> StepPlan:
    """What `execute` needs to know. `rows` and `count_R` are as this step leaves them, but for
    `num_computed_R`; `allocated` are the blocks this step handed out; `drawn_R` are the places of
    the first rows among the draws of the plan in flight (`drawn_in_flight`), if there is one;
    `drops` and `encodes` say what becomes of encoder outputs; `told` is what the plan says of
    requests that are no rows.
    """
    active, gathered_T = rows, _gathered(drawn_R, count_R)
    if np.count_nonzero(count_R) < len(count_R):
        active = take_rows(rows, np.flatnonzero(count_R))
        count_R = count_R[count_R > 0]
    count_R, num_tokens = locked(count_R), len(gathered_T)
    residents = _residents(active.used, adapters)
    uploads = tuple(p for p in residents if host.adapters.resident.get(p.version) is not p)
    done_R = active.num_computed_R + count_R == active.num_tokens_R
    sampled_R = done_R & (active.num_tokens_R < active.limit_R)  # else it is only scored
    scored, hidden = probes(active, count_R, requests)
    return StepPlan(
        step=host.step,
        descriptor=describe(config, num_tokens, len(active.ids), len(residents)),
        uploads=uploads,
        overwrites=_overwrites(host, allocated, uploads, drops),
        row_ids=active.ids,
        start_R=active.num_computed_R,
        count_R=count_R,
        tokens_T=_step_tokens(active, count_R, gathered_T, requests),
        gathered_T=gathered_T,
        tables=active.tables,
        slot_R=active.slot_R,
        residents=residents,
        sampled_R=locked(sampled_R),
        sampling=_sampling(active, sampled_R, requests),
        scored=scored,
        hidden=hidden,
        embedded=embedded_spans(active, count_R, requests),
        drops=drops,
        encodes=encodes,
        merges=merged_spans(active, count_R, requests),
        position_3T=plan_positions(config, active, count_R, requests),
        end_T=plan_ends(config, active, count_R, requests),
        **told,
    )


def _sampling(rows: Rows, sampled_R: np.ndarray, requests: Map[str, RequestState]) -> SamplingRows:
    drawing = rows
    if np.count_nonzero(sampled_R) < len(sampled_R):
        drawing = take_rows(rows, np.flatnonzero(sampled_R))
    return SamplingRows(
        temperature_S=drawing.temperature_R,
        top_k_S=drawing.top_k_R,
        top_p_S=drawing.top_p_R,
        min_p_S=drawing.min_p_R,
        stream_S=drawing.stream_R,
        position_S=drawing.num_tokens_R,
        num_tops_S=drawing.num_tops_R,
        edits=row_edits(rows, sampled_R, requests),
    )


def _residents(versions: tuple[str, ...], adapters: AdapterLedger) -> tuple[Residence, ...]:
    places = [adapters.resident[v] for v in versions]
    return tuple(sorted(places, key=attrgetter("slot")))


def _gathered(drawn_R: np.ndarray | None, count_R: np.ndarray) -> np.ndarray:
    """Where in the draws of the plan in flight each token of this step is found; -1 for one whose
    id is known. Rows behind those of `drawn_R` are new."""
    gathered_T = np.empty(count_R.sum(), np.int32)
    gathered_T.fill(-1)
    if drawn_R is not None:  # so no row has left
        rows = np.flatnonzero((drawn_R >= 0) & (count_R[: len(drawn_R)] > 0))
        gathered_T[np.cumsum(count_R)[rows] - 1] = drawn_R[rows]
    return locked(gathered_T)


def _step_tokens(
    rows: Rows, count_R: np.ndarray, gathered_T: np.ndarray, requests: Map[str, RequestState]
) -> np.ndarray:
    """The ids of all rows' windows, row after row; -1 for one that is still to be gathered."""
    earlier_R = rows.num_computed_R != rows.num_tokens_R - 1
    earlier = earlier_R.nonzero()[0].tolist()
    if not earlier:
        return _gaps(rows.newest_R, gathered_T)
    tokens_T, last_R = np.empty(len(gathered_T), np.int32), np.cumsum(count_R)
    tokens_T[last_R - 1] = rows.newest_R
    for row in earlier:
        start, count, last = int(rows.num_computed_R[row]), int(count_R[row]), int(last_R[row])
        tokens = all_tokens(requests[rows.ids[row]])
        tokens_T[last - count : last] = tokens[start : start + count]
    return _gaps(tokens_T, gathered_T)


def _gaps(tokens_T: np.ndarray, gathered_T: np.ndarray) -> np.ndarray:
    """These ids, but -1 where one is still to be gathered."""
    gathers_T = gathered_T >= 0
    return locked(np.where(gathers_T, -1, tokens_T) if np.count_nonzero(gathers_T) else tokens_T)


def _overwrites(
    host: HostState,
    allocated: list[int],
    uploads: tuple[Residence, ...],
    drops: tuple[str, ...],
) -> Overwrites:
    """What the input state counts on among the blocks and adapter rows this plan hands out, and the
    encoder outputs that it drops."""
    ledger = host.blocks
    used = (b for b in allocated if b < ledger.fresh)
    blocks = sorted(b for b in used if ledger.holders(b) or b in ledger.digest_of)
    outputs = tuple(sorted(name for name in drops if name in host.encoder.outputs))
    if not uploads:
        return Overwrites(blocks=tuple(blocks), outputs=outputs)
    taken = {b for place in uploads for b in place.row_blocks}
    adapters = [
        v for v, place in host.adapters.resident.items() if not taken.isdisjoint(place.row_blocks)
    ]
    return Overwrites(blocks=tuple(blocks), adapters=tuple(sorted(adapters)), outputs=outputs)
