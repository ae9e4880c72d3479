"""A second engine state with a pool of its own, from copies of what is live."""

from collections import Counter
from dataclasses import replace

import torch

from purestep.engine.config import Config
from purestep.engine.memory import pool_bytes
from purestep.engine.platform import available_bytes
from purestep.engine.pool import allocate_pool, claim, copy_adapter_, copy_blocks_
from purestep.engine.program import Program
from purestep.state.blocks import BlockLedger, empty_blocks, held_blocks
from purestep.state.engine import DeviceState, EngineState, HostState, quiet
from purestep.state.errors import ConfigError, ForkMemoryError
from purestep.state.tables import tables_of


def fork(program: Program, state: EngineState, num_blocks: int | None = None) -> EngineState:
    """A twin of `state` that can be stepped on its own; `state` stays valid.

    The twin's pool holds copies of live and cached KV blocks and of resident adapters; weights and
    encoder outputs are shared. With `num_blocks` its pool has another size: live blocks are
    renumbered and the cached ones left behind. Raises ForkMemoryError (bytes needed, bytes free),
    ConfigError when the live blocks alone exceed `num_blocks`, DonatedStateError or StepError,
    before any change.
    """
    source = claim(state.device)
    host = quiet(state.host, "fork")
    config = state.config
    if num_blocks is None:
        kept = sorted({*held_blocks(host.blocks), *host.blocks.digest_of})
        pairs = [(block, block) for block in kept]
    else:
        host, pairs = renumbered(host, num_blocks)
        config = replace(config, num_blocks=num_blocks)
    needed, free = pool_bytes(config, config.num_blocks), _free_bytes(config)
    if needed > free:
        raise ForkMemoryError(needed, free)
    pool = allocate_pool(config)
    for place in host.adapters.resident.values():
        copy_adapter_(source, pool, place)
    pool.encoded.update(source.encoded)  # never written to, so both may have them
    copy_blocks_(source, pool, [old for old, _ in pairs], [new for _, new in pairs])
    return replace(
        state, config=config, host=host, device=DeviceState(pool=pool, generation=pool.generation)
    )


def _free_bytes(config: Config) -> int:
    if torch.device(config.device).type == "cpu":
        return available_bytes()
    return torch.cuda.mem_get_info(config.device)[0]


def renumbered(host: HostState, num_blocks: int) -> tuple[HostState, list[tuple[int, int]]]:
    """The host state on blocks 0, 1, ... of a pool of `num_blocks`, and what to copy where."""
    live = held_blocks(host.blocks)
    if len(live) > num_blocks:
        raise ConfigError(f"fork: num_blocks={num_blocks}, but {len(live)} blocks are live")
    place = {old: new for new, old in enumerate(live)}
    tables = [[place[b] for b in table.tolist()] for table in host.rows.tables]
    page = host.rows.tables.newest_RK.shape[1]
    renumbered = replace(
        host,
        rows=replace(host.rows, tables=tables_of(tables, page)),
        blocks=_renumbered_blocks(host.blocks, place, num_blocks),
        copies=tuple((place[source], place[target]) for source, target in host.copies),
    )
    return renumbered, list(place.items())


def _renumbered_blocks(old: BlockLedger, place: dict[int, int], num_blocks: int) -> BlockLedger:
    blocks = empty_blocks(num_blocks, old.quota)
    owner_of = {new: old.owner_of[b] for b, new in place.items() if b in old.owner_of}
    first: dict[bytes, int] = {}
    digest_of = blocks.digest_of.mutate()
    for block, new in place.items():
        if (digest := old.digest_of.get(block)) is not None:
            digest_of[new] = digest
            first.setdefault(digest, new)
    return replace(
        blocks,
        shared=blocks.shared.update({place[b]: n for b, n in old.shared.items()}),
        digest_of=digest_of.finish(),
        block_of=blocks.block_of.update(first),
        fresh=len(place),
        owner_of=blocks.owner_of.update(owner_of),
        owned=blocks.owned.update(Counter(owner_of.values())),
    )
