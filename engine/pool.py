"""Device memory of one engine: KV pages and adapter rows, allocated once, written in place; and
encoder outputs, which come and go as plans say and are never written to.

The pool's generation is the one mutable integer of purestep: it tells which `DeviceState` is valid.
L layers, P adapter rows in C blocks of R = ROW_BLOCK, S slices of a fused linear, B block size,
K KV heads, H head size, D hidden, V vocabulary.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from purestep.engine.config import Config
from purestep.engine.memory import tower_rows_bytes, vocab_rows_bytes
from purestep.engine.pending import Ring, check_sound
from purestep.engine.upload import copy_stream, sent, sent_adapter
from purestep.models.adapter_files import Adapter
from purestep.models.adapter_names import EMBED, HEAD
from purestep.models.config import TOWER, fused_linears
from purestep.models.decoder import AdapterRows, EmbedRows, LayerAdapters
from purestep.models.room import Room
from purestep.models.tower_rows import TowerRows
from purestep.state.adapters import ROW_BLOCK, Residence
from purestep.state.engine import DeviceState
from purestep.state.errors import AdapterError, DonatedStateError, TornStateError
from purestep.state.plan import Overwrites, StepPlan

ALIGNMENT = 64  # bytes, as torch's own CPU memory


@dataclass(slots=True, eq=False, weakref_slot=True)
class Pool:
    """Everything a step writes. Mutable, and reached only through a `DeviceState`."""

    config: Config
    kv: tuple[Tensor, ...]  # L tensors [2, num_blocks, B, K, H], keys then values
    a_LSPD: dict[str, Tensor]  # by fused linear
    b_LPO: dict[str, Tensor]
    layers: tuple[LayerAdapters, ...]  # views of the two, one a layer
    embed: EmbedRows | None  # None where config.lora_vocab is off, as the head's
    head: AdapterRows | None
    tower: dict[str, TowerRows]  # by linear; empty where config.lora_tower is off
    encoded: dict[str, Tensor] = field(default_factory=dict)  # outputs by identifier, [E, D]
    generation: int = 0
    consumer: str = ""  # what made the present generation
    torn: Overwrites | None = None  # what a failed step may have destroyed
    ring: Ring = field(default_factory=Ring)
    beside: torch.cuda.Stream | None = None  # on a GPU: where adapters are copied
    graphs: Any = None  # on a GPU: engine/graphs.py, with its addresses; dies with the pool


def check_linears(config: Config, adapter: Adapter, label: str) -> None:
    """Raises AdapterError where the pool has no rows for a linear that the adapter touches."""
    if not config.lora_tower and "tower" in adapter.linears:
        raise AdapterError(
            f"{label} adapts the vision tower or its projector, but lora_tower=False: with "
            f"lora_tower=True the pool takes {tower_rows_bytes(config) / 2**20:.0f} MiB more for "
            "such adapters"
        )
    if not config.lora_vocab and {"embed", "head"} & adapter.arenas.keys():
        modules = [module for module in adapter.modules if module in (EMBED, HEAD)]
        raise AdapterError(
            f"{label} adapts {' and '.join(modules)}, but lora_vocab=False: with lora_vocab=True "
            f"the pool takes {vocab_rows_bytes(config) / 2**20:.0f} MiB more for such adapters"
        )


def allocate_pool(config: Config, room: Room | None = None) -> Pool:
    """A pool of zeros, which has its rows of A in the `room` if no other pool has them there; on a
    CPU pages cost memory only once they are written."""
    model, L, P = config.model, config.model.num_layers, config.lora_rows
    room = room if room is not None and room.is_free else None
    pages = (2, config.num_blocks, config.block_size, model.num_kv_heads, model.head_dim)
    a, b, wide = {}, {}, {}
    for linear in fused_linears(model):
        S = len(linear.out_sizes)
        if room is not None and linear.name in room.a_LSPD:
            a[linear.name] = room.a_LSPD[linear.name].zero_()
            wide[linear.name] = room.wide_LWD[linear.name]
        else:
            a[linear.name] = _zeros(config, L, S, P, linear.in_features)
            wide[linear.name] = [None] * L
        b[linear.name] = _zeros(config, L, P, linear.out_features)
    layers = tuple(
        LayerAdapters(
            **{
                name: AdapterRows(a_SPD=a[name][i], b_PO=b[name][i], wide_WD=wide[name][i])
                for name in a
            }
        )
        for i in range(L)
    )
    kv = tuple(_zeros(config, *pages) for _ in range(L))
    embed, head = _vocab_rows(config) if config.lora_vocab else (None, None)
    pool = Pool(
        config=config,
        kv=kv,
        a_LSPD=a,
        b_LPO=b,
        layers=layers,
        embed=embed,
        head=head,
        tower=tower_rows(config) if config.lora_tower else {},
        beside=copy_stream(config.device),
    )
    if room is not None:
        room.owner = ref(pool)
    return pool


def tower_rows(config: Config) -> dict[str, TowerRows]:
    """Rows of zeros for adapters on a tower, by linear."""
    P = config.lora_rows
    return {
        linear.name: TowerRows(
            a_SPD=_zeros(config, len(linear.out_sizes), P, linear.in_features),
            b_PO=_zeros(config, P, linear.out_features),
            out_sizes=linear.out_sizes,
        )
        for linear in config.tower
        if linear.parent == TOWER
    }


def _vocab_rows(config: Config) -> tuple[EmbedRows, AdapterRows]:
    P, D, V = config.lora_rows, config.model.hidden_size, config.model.vocab_size
    embed = EmbedRows(a_CVR=_zeros(config, P // ROW_BLOCK, V, ROW_BLOCK), b_PD=_zeros(config, P, D))
    return embed, AdapterRows(a_SPD=_zeros(config, 1, P, D), b_PO=_zeros(config, P, V))


def _zeros(config: Config, *shape: int) -> Tensor:
    """torch.zeros, but for a CPU: there it writes every page at once (256 MiB took 0.4 s), and
    numpy leaves that to the first use."""
    dtype = getattr(torch, config.dtype)
    if torch.device(config.device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=config.device)
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return torch.from_numpy(raw[start : start + nbytes]).view(dtype).view(shape)


def owned(device: DeviceState) -> Pool:
    """The pool behind a handle. Raises DonatedStateError for a spent one."""
    pool = device.pool
    if device.generation != pool.generation:
        raise DonatedStateError(
            f"this state's device memory was consumed by {pool.consumer}; use the state that "
            "call returned, or fork a state before stepping it twice"
        )
    return pool


def claim(device: DeviceState) -> Pool:
    """A pool that may be read and written. Raises DonatedStateError or TornStateError."""
    pool = owned(device)
    if pool.torn is not None:
        raise TornStateError(
            f"a failed step may have overwritten {len(pool.torn.blocks)} KV blocks and "
            f"{len(pool.torn.adapters)} adapters that this state counts on; call recover(state)"
        )
    check_sound(device.launched)
    return pool


def advance_(device: DeviceState, consumer: str) -> DeviceState:
    """Make this and older handles of its pool invalid and return the new one."""
    pool = device.pool
    pool.generation += 1
    pool.consumer = consumer
    return replace(device, generation=pool.generation)


def retract_(device: DeviceState, plan: StepPlan) -> None:
    """Make a handle valid again: what `plan`, queued on it, has made is lost, and what that
    overwrote."""
    pool = device.pool
    pool.generation = device.generation
    for item in plan.encodes:
        if item.keep:
            pool.encoded.pop(item.identifier, None)
    if not plan.overwrites.empty:
        pool.torn = plan.overwrites


def row_index(place: Residence) -> np.ndarray:
    """The adapter rows of a residence, int64."""
    blocks = np.array(place.row_blocks, np.int64)[:, None] * ROW_BLOCK
    return (blocks + np.arange(ROW_BLOCK)).ravel()


def upload_adapter_(pool: Pool, place: Residence, adapter: Adapter) -> None:
    """Write an adapter's rows. Linears of layers that it does not touch get zeros, so that no
    residue is left; an embedding, a head or a tower that it does not touch is never read for it.

    On a GPU nothing waits but the work that is queued behind this.
    """
    index = {"rows": row_index(place), "blocks": np.array(place.row_blocks, np.int64)}
    index, arenas = sent_adapter(index, adapter.arenas, pool.config.device, pool.beside)
    rows = index["rows"]
    if (arena := arenas.get("embed")) is not None:
        a_CVR = arena.a_LSRD[0, 0].unflatten(0, (-1, ROW_BLOCK)).transpose(1, 2)
        pool.embed.a_CVR.index_copy_(0, index["blocks"], a_CVR)
        pool.embed.b_PD.index_copy_(0, rows, arena.b_LRO[0])
    if (arena := arenas.get("head")) is not None:
        pool.head.a_SPD.index_copy_(1, rows, arena.a_LSRD[0])
        pool.head.b_PO.index_copy_(0, rows, arena.b_LRO[0])
    for name, own in pool.tower.items() if "tower" in place.linears else ():
        if (arena := arenas.get(name)) is None:
            own.a_SPD.index_fill_(1, rows, 0)
            own.b_PO.index_fill_(0, rows, 0)
        else:
            own.a_SPD.index_copy_(1, rows, arena.a_LSRD[0])
            own.b_PO.index_copy_(0, rows, arena.b_LRO[0])
    for name in pool.a_LSPD:
        arena = arenas.get(name)
        if arena is None:
            pool.a_LSPD[name].index_fill_(2, rows, 0)
            pool.b_LPO[name].index_fill_(1, rows, 0)
        else:
            pool.a_LSPD[name].index_copy_(2, rows, arena.a_LSRD)
            pool.b_LPO[name].index_copy_(1, rows, arena.b_LRO)


def copy_adapter_(source: Pool, target: Pool, place: Residence) -> None:
    """Copy one adapter's rows from pool to pool, to the same place."""
    index = {"rows": row_index(place), "blocks": np.array(place.row_blocks, np.int64)}
    rows, blocks = sent(index, source.config.device).values()
    for name in source.a_LSPD:
        target.a_LSPD[name][:, :, rows] = source.a_LSPD[name][:, :, rows]
        target.b_LPO[name][:, rows] = source.b_LPO[name][:, rows]
    if "embed" in place.linears:
        target.embed.a_CVR[blocks] = source.embed.a_CVR[blocks]
        target.embed.b_PD[rows] = source.embed.b_PD[rows]
    if "head" in place.linears:
        target.head.a_SPD[:, rows] = source.head.a_SPD[:, rows]
        target.head.b_PO[rows] = source.head.b_PO[rows]
    for name in source.tower if "tower" in place.linears else ():
        target.tower[name].a_SPD[:, rows] = source.tower[name].a_SPD[:, rows]
        target.tower[name].b_PO[rows] = source.tower[name].b_PO[rows]


def copy_blocks_(source: Pool, target: Pool, from_blocks: list[int], to_blocks: list[int]) -> None:
    """Copy KV blocks between pools, or within one; the two lists pair up."""
    if not from_blocks:
        return
    pairs = {"take": np.array(from_blocks, np.int64), "put": np.array(to_blocks, np.int64)}
    take, put = sent(pairs, target.config.device).values()
    for old, new in zip(source.kv, target.kv, strict=True):
        new[:, put] = old[:, take]
