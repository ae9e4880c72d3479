"""A waiting request as a new row: its prefix hits, its first tokens, its first blocks.

B block size.
"""

from collections.abc import Sequence

import numpy as np

from purestep.engine.config import Config, row_limit
from purestep.engine.encoding import Encoding
from purestep.state.blocks import BlockDraft
from purestep.state.media import outside_groups
from purestep.state.request import RequestState
from purestep.state.rows import Rows, make_row


def outgrows_pool(config: Config, record: RequestState) -> bool:
    """Whether all its known tokens need more blocks than there are."""
    return -(-_num_tokens(record) // config.block_size) > config.num_blocks


def blocks_suffice(config: Config, record: RequestState, draft: BlockDraft) -> bool:
    """Whether all its known tokens fit, so that admission does not cause the next preemption."""
    hits = prefix_hits(config, record, draft)
    total = -(-_num_tokens(record) // config.block_size)
    return total - len(hits) + draft.count_queued(hits) <= draft.num_free


def items_fit(
    config: Config, record: RequestState, draft: BlockDraft, encoding: Encoding, room: int
) -> bool:
    """Whether the items that its first tokens need can be encoded now."""
    start = len(prefix_hits(config, record, draft)) * config.block_size
    return encoding.lets_in(record, start, _first_count(config, record, start, room))


def _first_count(config: Config, record: RequestState, start: int, room: int) -> int:
    """The tokens a new row computes first, media aside."""
    return min(_num_tokens(record) - start, room, config.long_prefill_threshold or room)


def _num_tokens(record: RequestState) -> int:
    return len(record.request.tokens) + len(record.generated)


def prefix_hits(config: Config, record: RequestState, draft: BlockDraft) -> list[int]:
    """Cached blocks of the longest prefix, never with the last token: its logits are needed. Nor
    with positions whose scores or hidden states the caller is still to get."""
    if not config.prefix_caching:
        return []
    most, told = _num_tokens(record) - 1, record.num_told
    usable = most if told is None else min(most, told)
    hits = draft.lookup(record.digests[: usable // config.block_size])
    if config.disable_chunked_mm_input and record.request.features:
        del hits[outside_groups(record.request.features, len(hits), config.block_size) :]
    return hits


def start_row(
    config: Config,
    record: RequestState,
    slot: int,
    draft: BlockDraft,
    encoding: Encoding,
    room: int,
) -> tuple[Rows, int]:
    """Give a record its blocks and make it a row, and tell how many tokens it computes first."""
    B = config.block_size
    hits = prefix_hits(config, record, draft)
    draft.retain(hits)
    computed = len(hits) * B
    count = _first_count(config, record, computed, room)
    if record.request.features:
        count = encoding.fit(record, computed, count)
    num_more = -(-(computed + count) // B) - len(hits)
    table = [*hits, *draft.allocate(num_more, record.version)]
    if config.prefix_caching:
        register_blocks(record.digests, table, computed // B, (computed + count) // B, draft)
    limit = row_limit(config, record)
    row = make_row(record, table, slot=slot, num_computed=computed, limit=limit, block_size=B)
    return row, count


def register_blocks(
    digests: Sequence[bytes],
    table: Sequence[int] | np.ndarray,
    first: int,
    last: int,
    draft: BlockDraft,
) -> None:
    """Make the blocks from the `first` up to the `last` of a table findable, which this step fills
    and whose chain is `digests`; with prefix caching.

    At once, so that a request admitted in this very step can share them: each layer writes all
    rows' KV before any row attends.
    """
    for k in range(first, last):
        draft.register(int(table[k]), digests[k])
