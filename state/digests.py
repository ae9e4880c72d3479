"""A persistent map from blocks to digests, in pages of bytes.

A map of Python objects keeps a node of references for every few blocks, and each update copies the
nodes above it; blocks that fill together mostly stand together, so here they share one small copy.
"""

from collections.abc import Iterator

from immutables import Map

from purestep.state.hashing import DIGEST_BYTES
from purestep.state.pytree import tree

PAGE = 32  # blocks
_NONE = bytes(DIGEST_BYTES)
_EMPTY = bytes(PAGE * DIGEST_BYTES)


@tree
class Digests:
    """Block -> digest, for every hashed block."""

    pages: Map[int, bytes]  # block // PAGE -> the digests of its blocks, zeros where there is none

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, block: int) -> bool:
        return self.get(block) is not None

    def __getitem__(self, block: int) -> bytes:
        if (digest := self.get(block)) is None:
            raise KeyError(block)
        return digest

    def __iter__(self) -> Iterator[int]:
        return (block for block, _ in self.items())

    def get(self, block: int) -> bytes | None:
        return _found(self.pages.get(block // PAGE, _EMPTY), block)

    def items(self) -> Iterator[tuple[int, bytes]]:
        """(block, digest), by block."""
        for page in sorted(self.pages):
            for block in range(page * PAGE, (page + 1) * PAGE):
                if (digest := self.get(block)) is not None:
                    yield block, digest

    def mutate(self) -> "DigestsDraft":
        return DigestsDraft(self)


def no_digests() -> Digests:
    return Digests(pages=Map())


def _found(page: bytes | bytearray, block: int) -> bytes | None:
    start = block % PAGE * DIGEST_BYTES
    digest = bytes(page[start : start + DIGEST_BYTES])
    return None if digest == _NONE else digest


class DigestsDraft:
    """Changes to a `Digests`, which `finish` puts into a new one; the old one stays."""

    __slots__ = ("_changed", "_old")

    def __init__(self, old: Digests) -> None:
        self._old = old
        self._changed: dict[int, bytearray] = {}

    def get(self, block: int) -> bytes | None:
        page = self._changed.get(block // PAGE)
        return self._old.get(block) if page is None else _found(page, block)

    def __setitem__(self, block: int, digest: bytes) -> None:
        if len(digest) != DIGEST_BYTES:
            raise ValueError(f"block {block}: {len(digest)} bytes are no digest of {DIGEST_BYTES}")
        number, start = block // PAGE, block % PAGE * DIGEST_BYTES
        page = self._changed.get(number)
        if page is None:
            page = self._changed[number] = bytearray(self._old.pages.get(number, _EMPTY))
        page[start : start + DIGEST_BYTES] = digest

    def pop(self, block: int) -> bytes | None:
        """The block's digest, if it has one; it has none from now on."""
        digest = self.get(block)
        if digest is not None:
            self[block] = _NONE
        return digest

    def finish(self) -> Digests:
        if not self._changed:
            return self._old
        with self._old.pages.mutate() as pages:
            for number, page in self._changed.items():
                if page != _EMPTY:
                    pages[number] = bytes(page)
                elif number in pages:
                    del pages[number]
            return Digests(pages=pages.finish())
