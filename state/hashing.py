"""Identity of a KV block: a blake3 chain whose keys are tagged by kind and framed by length.

A block's digest covers everything its keys and values depend on: the model weights, the adapter
version, the salt and every token up to the block's end. Tags keep the kinds apart, so an adapter
can never be mistaken for a salt; lengths keep neighbours apart, so ("ab", "c") is not ("a", "bc").
The encoding is fixed bytes, so digests agree between processes, machines and hash seeds.
"""

from collections.abc import Sequence

import numpy as np
from blake3 import blake3

DIGEST_BYTES = 32


def framed(tag: str, *parts: bytes) -> bytes:
    """`tag` and `parts`, each behind its length as 8 little-endian bytes."""
    fields = (tag.encode(), *parts)
    return b"".join(len(f).to_bytes(8, "little") + f for f in fields)


_TOKENS = framed("tokens")


def chain_root(model: str, adapter_version: str | None, salt: str | None) -> bytes:
    """What stands before a request's first block.

    `model` names weights and dtype; `adapter_version` is None for the base model, which differs
    from every version, the empty string included. The same holds for `salt`.
    """
    adapter = (
        framed("base") if adapter_version is None else framed("lora", adapter_version.encode())
    )
    salted = framed("unsalted") if salt is None else framed("salt", salt.encode())
    return blake3(framed("purestep/kv/1", model.encode(), adapter, salted)).digest()


def block_digest(parent: bytes, tokens_B: np.ndarray, extra: bytes = b"") -> bytes:
    """The digest of one full block of token ids behind `parent`; `extra` names what stands in the
    block beside ids (see `embeds_extra`)."""
    return ids_digest(parent, tokens_B.astype("<i4").tobytes(), extra)


def ids_digest(parent: bytes, ids: bytes, extra: bytes = b"") -> bytes:
    """`block_digest` of ids as little-endian bytes, 4 each."""  # framed as `framed` does it
    return blake3(parent + _TOKENS + len(ids).to_bytes(8, "little") + ids + extra).digest()


def block_digests(
    parent: bytes, tokens: np.ndarray, block_size: int, extras: Sequence[bytes] = ()
) -> tuple[bytes, ...]:
    """Digests of all full blocks of `tokens`, in order; a partial last block has none. Blocks
    beyond `extras` hold ids alone."""
    ids, size, digests = tokens.astype("<i4").tobytes(), 4 * block_size, []
    for block in range(len(tokens) // block_size):
        extra = extras[block] if block < len(extras) else b""
        parent = ids_digest(parent, ids[block * size : (block + 1) * size], extra)
        digests.append(parent)
    return tuple(digests)


def embeds_extra(rows: bytes) -> bytes:
    """What names the embeddings in a block, whose places show as ids of -1."""
    return framed("embeds", blake3(rows).digest()) if rows else b""


def random_stream(seed: int, sample_index: int, branch_path: Sequence[int]) -> int:
    """The 64-bit key of a request's noise; siblings of `n > 1` and of `branch` all differ."""
    path = b"".join(step.to_bytes(8, "little") for step in branch_path)
    fields = seed.to_bytes(8, "little"), sample_index.to_bytes(8, "little"), path
    return int.from_bytes(blake3(framed("purestep/stream/1", *fields)).digest(8), "little")


def request_seed(engine_seed: int, request_id: str) -> int:
    """The seed of a request that brought none."""
    fields = engine_seed.to_bytes(8, "little"), request_id.encode()
    return int.from_bytes(blake3(framed("purestep/seed/1", *fields)).digest(8), "little")
