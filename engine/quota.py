"""How many KV blocks an adapter may still get, where the config sets a quota for each.

An adapter version owns what its requests hold and what they have left cached. A request is
admitted where all it may come to hold fits the quota beside the rows of its adapter, so no row ever
has to leave for the quota; what is cached makes way, of the adapter itself first
(`state/blocks.py`). So an adapter that has its quota takes nothing from anybody: where the others
need no more than the pool less the quota, no burst of its requests costs them a cached prefix.
Requests of the base model have no quota.
"""

from collections.abc import Iterable

from purestep.engine.config import Config
from purestep.state.blocks import BlockDraft
from purestep.state.rows import Rows


def quota_room(config: Config, draft: BlockDraft, version: str, parts: Iterable[Rows]) -> int:
    """Blocks that a further row of `version` may come to hold beside the rows in `parts`, which
    will have grown to their limits."""
    growth = 0
    for rows in parts:
        for row, owner in enumerate(rows.versions):
            if owner == version:
                last = -(-int(rows.limit_R[row]) // config.block_size)
                growth += last - int(rows.tables.length_R[row])
    return config.adapter_block_quota - draft.num_held(version) - growth
