"""The laws of a host state, asserted: tests and debug runs call `check_host` after every step."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from purestep.state.adapters import check_adapters
from purestep.state.blocks import check_blocks
from purestep.state.encoder import check_encoder
from purestep.state.engine import HostState
from purestep.state.in_flight import num_coming
from purestep.state.rows import summed, unsealed


def check_host(host: HostState, block_size: int) -> None:
    """Assert the laws of each ledger and those between them."""
    check_rows(host, block_size)
    check_blocks(host.blocks, block_holders(host))
    check_adapters(host.adapters)
    check_encoder(host.encoder, encoder_items(host))


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
    users = Counter(record.version for record in host.requests.values())
    del users[None]  # the base model has none
    assert users == dict(host.adapters.users)
    places = host.adapters.resident
    slots = [-1 if version is None else places[version].slot for version in rows.versions]
    assert rows.slot_R.tolist() == slots, "a row's adapter is elsewhere"
    again = summed(rows)
    assert (rows.used, rows.traits) == (again.used, again.traits)
    for row, request_id in enumerate(rows.ids):
        record = host.requests[request_id]
        assert rows.versions[row] == record.version
        assert rows.num_known_R[row] == len(record.request.tokens) + len(record.generated)
        assert rows.newest_R[row] == rows.tail_RB[row, (rows.num_tokens_R[row] - 1) % block_size]
        assert len(unsealed(rows, row)[0]) == min(
            rows.num_tokens_R[row] % block_size, rows.num_tokens_R[row] - rows.num_known_R[row]
        )


def block_holders(host: HostState) -> list[Sequence[int] | np.ndarray]:
    """All that holds KV blocks: the rows' tables, copies their sources, and plans in flight those
    of rows that have left."""
    waiting = [(source,) for source, _ in host.copies]
    return [*host.rows.tables, *waiting, *(blocks for _, _, blocks in host.departed)]


def encoder_items(host: HostState) -> set[tuple[str, int]]:
    """The items whose encoder outputs may be referred to: those of running rows, as (key, number of
    the feature)."""
    counts = {key: len(host.requests[key].request.features) for key in host.rows.ids}
    return {(key, i) for key, count in counts.items() for i in range(count)}
