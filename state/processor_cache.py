"""What an image processor made of the pictures it saw, kept under a byte limit: a value.

Nothing is locked and nothing is shared: a call takes a cache and gives back the next one, and both
stay as they are.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from immutables import Map
from torch import Tensor

from purestep.state.errors import ConfigError
from purestep.state.pytree import tree
from purestep.state.sampling import is_int


@tree
class Processed:
    """The tensors of one item, which own their memory, and the names that lead to them."""

    digest: str
    tensors: Map[str, Tensor]
    aliases: tuple[str, ...] = ()  # see state/identity.py
    used: int = 0  # when it was last asked for, by the cache's clock

    @property
    def num_bytes(self) -> int:
        """Of the tensors, and of the aliases, which are not free either."""
        return tensor_bytes(self.tensors) + sum(map(len, self.aliases))


@tree
class ProcessorCache:
    """Processed items by digest; the least recently used leave first. `max_bytes` 0 keeps none."""

    max_bytes: int
    num_bytes: int
    clock: int
    items: Map[str, Processed]
    digests: Map[str, str]  # by alias
    num_hits: int  # items of requests that were found here, or earlier in their request
    num_misses: int  # items that had to be processed


def empty_processor_cache(max_bytes: int) -> ProcessorCache:
    """A cache that holds nothing yet. Raises ConfigError for what is no number of bytes."""
    if not is_int(max_bytes) or max_bytes < 0:
        raise ConfigError(f"max_bytes={max_bytes!r} of a processor cache must be an integer >= 0")
    return ProcessorCache(
        max_bytes=max_bytes,
        num_bytes=0,
        clock=0,
        items=Map(),
        digests=Map(),
        num_hits=0,
        num_misses=0,
    )


def find(cache: ProcessorCache, name: str) -> Processed | None:
    """The item of this digest or alias. Looking changes nothing: see `remember`."""
    return cache.items.get(cache.digests.get(name, name))


def remember(
    cache: ProcessorCache, items: Iterable[Processed], num_hits: int, num_misses: int
) -> ProcessorCache:
    """The cache after a request that used these items, in this order: found ones are the newest
    again and learn new aliases, others are added, and the oldest leave until all fit.

    An item larger than the whole cache is not kept, and drives nothing out. Raises ValueError for
    an alias that leads to another item.
    """
    for item in items:
        cache = _with(cache, item)
    hits, misses = cache.num_hits + num_hits, cache.num_misses + num_misses
    return _trimmed(replace(cache, num_hits=hits, num_misses=misses))


def _with(cache: ProcessorCache, item: Processed) -> ProcessorCache:
    """The cache with an item as its newest; perhaps larger than it may be."""
    clock, old = cache.clock + 1, cache.items.get(item.digest)
    if old is not None:
        item = replace(old, aliases=tuple(dict.fromkeys((*old.aliases, *item.aliases))))
        cache = _without(cache, old)
    for name in item.aliases:
        if name in cache.digests:
            raise ValueError(f"alias {name} of {item.digest} leads to another item")
    if item.num_bytes > cache.max_bytes:
        return replace(cache, clock=clock)
    return replace(
        cache,
        clock=clock,
        num_bytes=cache.num_bytes + item.num_bytes,
        items=cache.items.set(item.digest, replace(item, used=clock)),
        digests=cache.digests.update(dict.fromkeys(item.aliases, item.digest)),
    )


def _without(cache: ProcessorCache, item: Processed) -> ProcessorCache:
    digests = cache.digests
    for name in item.aliases:
        digests = digests.delete(name)
    num_bytes = cache.num_bytes - item.num_bytes
    return replace(
        cache, num_bytes=num_bytes, items=cache.items.delete(item.digest), digests=digests
    )


def _trimmed(cache: ProcessorCache) -> ProcessorCache:
    if cache.num_bytes > cache.max_bytes:
        for item in sorted(cache.items.values(), key=lambda item: item.used):
            cache = _without(cache, item)
            if cache.num_bytes <= cache.max_bytes:
                break
    return cache


def tensor_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def check_processor_cache(cache: ProcessorCache) -> None:
    """The laws of a cache; AssertionError names the one that is broken."""
    held = sum(item.num_bytes for item in cache.items.values())
    assert cache.num_bytes == held <= cache.max_bytes, f"{cache.num_bytes} noted, {held} held"
    assert all(digest == item.digest for digest, item in cache.items.items()), "keyed by digest"
    names = {name: item.digest for item in cache.items.values() for name in item.aliases}
    assert names == dict(cache.digests), "every alias leads to the item that knows it"
    uses = [item.used for item in cache.items.values()]
    assert len({*uses}) == len(uses), "one use a tick"
    assert max(uses, default=0) <= cache.clock, "no use in the future"
