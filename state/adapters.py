"""The adapter ledger: which adapters are known, which are on the device, and where.

Four numberings, never mixed: a *name* is what requests say; a *version* is the digest of the
weights a name was bound to; a *slot* is one resident adapter; a *group* is one adapter's place
among those active in a step. Blocks, slots and requests key on versions, so a reload under the same
name never meets old KV or old weights, and two names of one adapter share both.

Two tiers, each in LRU order: registered (weights on the host) and resident (rows on the device).
Device memory is rows in blocks of `ROW_BLOCK`; an adapter holds as many as its true rank needs.
"""

from collections.abc import Iterable
from dataclasses import replace

from immutables import Map

from purestep.state.errors import AdapterError, UnknownAdapterError
from purestep.state.pytree import tree

ROW_BLOCK = 8  # adapter rows in one row block


@tree
class AdapterInfo:
    """What the ledger knows of one registered version; the tensors lie in the state's blobs."""

    version: str
    rank: int  # the largest over its modules
    nbytes: int  # of the tensors as stored
    modules: tuple[str, ...]
    # Names of the linears its modules belong to, sorted; all those of a tower are `tower`.
    linears: tuple[str, ...] = ()

    @property
    def num_row_blocks(self) -> int:
        return -(-self.rank // ROW_BLOCK)


@tree
class Residence:
    """One adapter's place on the device."""

    version: str
    slot: int
    row_blocks: tuple[int, ...]
    linears: tuple[str, ...] = ()  # as in AdapterInfo: where its rows hold something


@tree
class Reservation:
    """The place that `victims` leave is for `version`, whose requests waited too long; with as many
    free rows as it needs beside theirs."""

    version: str
    victims: tuple[str, ...]  # resident, with running rows or without; they get no new ones


@tree
class AdapterLedger:
    """Names, versions and places. Slots are a view of `resident`: at most one version each."""

    num_slots: int
    num_row_blocks: int
    max_registered: int
    names: Map[str, str]  # name -> version it is bound to now
    sources: Map[str, str]  # name -> where its weights can be read (again)
    loading: tuple[str, ...]  # names whose load was asked for and has not come back
    registered: Map[str, AdapterInfo]  # by version
    host_order: tuple[str, ...]  # registered versions, least recently used first
    resident: Map[str, Residence]  # by version
    device_order: tuple[str, ...]  # resident versions, least recently used first
    pins: tuple[str, ...]  # names; the versions they are bound to are never evicted
    users: Map[str, int]  # version -> live requests bound to it
    reservations: tuple[Reservation, ...]  # oldest first


def empty_adapters(num_slots: int, num_row_blocks: int, max_registered: int) -> AdapterLedger:
    """A ledger that knows no adapter."""
    none: Map = Map()
    return AdapterLedger(
        num_slots=num_slots,
        num_row_blocks=num_row_blocks,
        max_registered=max_registered,
        names=none,
        sources=none,
        loading=(),
        registered=none,
        host_order=(),
        resident=none,
        device_order=(),
        pins=(),
        users=none,
        reservations=(),
    )


def known_names(ledger: AdapterLedger) -> list[str]:
    """Every name a request may use, sorted."""
    return sorted({*ledger.names, *ledger.sources})


def resolve(ledger: AdapterLedger, name: str | None, who: str) -> tuple[str | None, bool]:
    """(version, loading) for the adapter a request names; None is the base model.

    Raises UnknownAdapterError, naming `who` asked and what is known. Names match exactly: nothing
    unknown ever falls back to the base model.
    """
    if name is None:
        return None, False
    if name in ledger.names:
        return ledger.names[name], False
    if name in ledger.sources:
        return None, True
    raise UnknownAdapterError(
        f"{who}: no adapter is called {name!r}; known are {known_names(ledger)}"
    )


def encoder_version(ledger: AdapterLedger, version: str | None) -> str | None:
    """The version itself if its adapter changes what encoders make of media, else None: then they
    make the same as for the base model."""
    return version if version and "tower" in ledger.registered[version].linears else None


def add_source(ledger: AdapterLedger, name: str, source: str) -> AdapterLedger:
    """Make `name` known without reading it; the first request that uses it causes the load.

    A name that is bound to something else is unbound, so that no request gets the old weights.
    Raises AdapterError for a pinned name.
    """
    if ledger.sources.get(name) == source:
        return ledger
    if name in ledger.pins:
        raise AdapterError(f"adapter {name!r} is pinned: unpin it, or load the new source at once")
    names = ledger.names.delete(name) if name in ledger.names else ledger.names
    return drop_unnamed(replace(ledger, names=names, sources=ledger.sources.set(name, source)))


def add_adapter(
    ledger: AdapterLedger, name: str, info: AdapterInfo, source: str | None
) -> AdapterLedger:
    """Register `info` and bind `name` to it. Requests already running keep the version they have.

    A version that lost its last name is dropped once no request uses it. Raises AdapterError,
    before any change, when its rank cannot fit the device rows, when the pinned adapters would no
    longer fit together, or when every registered one is pinned, in use or impossible to read again.
    """
    if info.num_row_blocks > ledger.num_row_blocks:
        raise AdapterError(
            f"adapter {name!r}: rank {info.rank} needs {info.num_row_blocks * ROW_BLOCK} adapter "
            f"rows, but lora_rows={ledger.num_row_blocks * ROW_BLOCK}"
        )
    names = ledger.names.set(name, info.version)
    sources = ledger.sources.mutate()
    sources.pop(name, None)
    if source is not None:
        sources[name] = source
    new = replace(
        ledger,
        names=names,
        sources=sources.finish(),
        loading=tuple(n for n in ledger.loading if n != name),
        registered=ledger.registered.set(info.version, info),
        host_order=_moved_last(ledger.host_order, [info.version]),
    )
    _check_pins(new, name)
    new = drop_unnamed(new)
    while len(new.registered) > new.max_registered:
        victim = next((v for v in new.host_order if v != info.version and _evictable(new, v)), None)
        if victim is None:
            raise AdapterError(
                f"adapter {name!r}: max_registered_adapters={new.max_registered} are registered, "
                "and each is pinned, in use or was given as tensors, which cannot be read again"
            )
        new = _unregister(new, victim)
    return new


def _evictable(ledger: AdapterLedger, version: str) -> bool:
    bound = [n for n, v in ledger.names.items() if v == version]
    spared = any(n in ledger.pins or n not in ledger.sources for n in bound)
    return not spared and version not in ledger.users


def num_unevictable(ledger: AdapterLedger) -> int:
    """Registered versions that are in use, pinned, or could not be read again."""
    return sum(not _evictable(ledger, version) for version in ledger.registered)


def forget_name(ledger: AdapterLedger, name: str) -> AdapterLedger:
    """Unbind a name and forget its source and pin. Its version stays while requests use it or
    another name is bound to it. Raises UnknownAdapterError."""
    if name not in known_names(ledger):
        known = known_names(ledger)
        raise UnknownAdapterError(f"unload: no adapter is called {name!r}; known are {known}")
    names, sources = ledger.names.mutate(), ledger.sources.mutate()
    names.pop(name, None)
    sources.pop(name, None)
    return drop_unnamed(
        replace(
            ledger,
            names=names.finish(),
            sources=sources.finish(),
            loading=tuple(n for n in ledger.loading if n != name),
            pins=tuple(n for n in ledger.pins if n != name),
        )
    )


def load_failed(ledger: AdapterLedger, name: str) -> AdapterLedger:
    """Forget a load that failed; the next request for the name tries again."""
    return replace(ledger, loading=tuple(n for n in ledger.loading if n != name))


def load_asked(ledger: AdapterLedger, names: Iterable[str]) -> AdapterLedger:
    """Note that these loads are under way."""
    asked = (*ledger.loading, *names)
    return replace(ledger, loading=asked) if len(asked) > len(ledger.loading) else ledger


def count_users(ledger: AdapterLedger, changes: Iterable[tuple[str | None, int]]) -> AdapterLedger:
    """Add to the number of live requests of each version, then drop what nothing refers to."""
    users = ledger.users.mutate()
    for version, change in changes:
        if version is None:
            continue
        count = users.get(version, 0) + change
        if count:
            users[version] = count
        else:
            del users[version]
    return drop_unnamed(replace(ledger, users=users.finish()))


def drop_unnamed(ledger: AdapterLedger) -> AdapterLedger:
    """Free every version that no name and no request refers to."""
    kept = {*ledger.names.values(), *ledger.users}
    for version in ledger.host_order:
        if version not in kept:
            ledger = _unregister(ledger, version)
    return ledger


def _unregister(ledger: AdapterLedger, version: str) -> AdapterLedger:
    names = ledger.names.mutate()
    for name in [n for n, v in ledger.names.items() if v == version]:
        del names[name]
    ledger = evict(ledger, version)
    return replace(
        ledger,
        names=names.finish(),
        registered=ledger.registered.delete(version),
        host_order=tuple(v for v in ledger.host_order if v != version),
    )


def evict(ledger: AdapterLedger, version: str) -> AdapterLedger:
    """Take a version off the device, if it is there. It stays registered."""
    if version not in ledger.resident:
        return ledger
    return replace(
        ledger,
        resident=ledger.resident.delete(version),
        device_order=tuple(v for v in ledger.device_order if v != version),
    )


def pin(ledger: AdapterLedger, name: str) -> AdapterLedger:
    """Never evict the version `name` is bound to, also after a reload under this name.

    Raises UnknownAdapterError, and AdapterError where all pinned adapters together would not fit.
    """
    if name not in ledger.names:
        known = known_names(ledger)
        raise UnknownAdapterError(f"pin: no loaded adapter is called {name!r}; known are {known}")
    new = replace(ledger, pins=tuple(sorted({*ledger.pins, name})))
    _check_pins(new, name)
    return new


def _check_pins(ledger: AdapterLedger, name: str) -> None:
    pinned = pinned_versions(ledger)
    rows = sum(ledger.registered[v].num_row_blocks for v in pinned) * ROW_BLOCK
    if len(pinned) > ledger.num_slots or rows > ledger.num_row_blocks * ROW_BLOCK:
        raise AdapterError(
            f"adapter {name!r}: {len(pinned)} pinned adapters with {rows} rows exceed "
            f"max_active_adapters={ledger.num_slots} or "
            f"lora_rows={ledger.num_row_blocks * ROW_BLOCK}"
        )


def unpin(ledger: AdapterLedger, name: str) -> AdapterLedger:
    """Undo `pin`. Raises UnknownAdapterError for a name that is not pinned."""
    if name not in ledger.pins:
        raise UnknownAdapterError(f"unpin: {name!r} is not pinned; pinned are {ledger.pins}")
    return replace(ledger, pins=tuple(n for n in ledger.pins if n != name))


def pinned_versions(ledger: AdapterLedger) -> set[str]:
    """What the pinned names are bound to."""
    return {ledger.names[name] for name in ledger.pins}


def touch(ledger: AdapterLedger, versions: Iterable[str]) -> AdapterLedger:
    """Mark the step's adapters as the most recently used, in the given order, in both tiers."""
    used = list(versions)
    last = tuple(used)
    if ledger.host_order[-len(used) :] == last == ledger.device_order[-len(used) :]:
        return ledger  # as in most steps
    return replace(
        ledger,
        host_order=_moved_last(ledger.host_order, used),
        device_order=_moved_last(ledger.device_order, used),
    )


def _moved_last(order: tuple[str, ...], versions: list[str]) -> tuple[str, ...]:
    return (*(v for v in order if v not in versions), *versions)


def check_adapters(ledger: AdapterLedger) -> None:
    """Assert the ledger's laws (multi_lora.md, 21: 1 and 3)."""
    assert set(ledger.host_order) == set(ledger.registered)
    assert len(ledger.host_order) == len(ledger.registered) <= ledger.max_registered
    assert set(ledger.device_order) == set(ledger.resident) <= set(ledger.registered)
    assert len(ledger.device_order) == len(ledger.resident) <= ledger.num_slots
    slots = [r.slot for r in ledger.resident.values()]
    assert len(set(slots)) == len(slots), f"a slot is held twice: {slots}"
    assert all(0 <= s < ledger.num_slots for s in slots)
    rows = [b for r in ledger.resident.values() for b in r.row_blocks]
    assert len(set(rows)) == len(rows), f"a row block is held twice: {rows}"
    assert all(0 <= b < ledger.num_row_blocks for b in rows)
    promised = [v for r in ledger.reservations for v in r.victims]
    assert len(set(promised)) == len(promised), f"a place is promised twice: {promised}"
    for version, place in ledger.resident.items():
        assert len(place.row_blocks) == ledger.registered[version].num_row_blocks
    assert {*ledger.names.values(), *ledger.users} == set(ledger.registered)
    assert set(ledger.pins) <= set(ledger.names)
    assert all(count > 0 for count in ledger.users.values())
