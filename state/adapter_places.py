"""Places of adapters on the device: who is evicted for whom, and to whom a place is promised."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from purestep.state.adapters import AdapterLedger, Reservation, Residence, evict, pinned_versions


def free_row_blocks(ledger: AdapterLedger) -> list[int]:
    """The row blocks that no resident adapter holds, the lowest first."""
    taken = {b for r in ledger.resident.values() for b in r.row_blocks}
    return [b for b in range(ledger.num_row_blocks) if b not in taken]


def victims_for(
    ledger: AdapterLedger, version: str, protected: Collection[str]
) -> tuple[str, ...] | None:
    """Whom to evict, least recently used first, so that `version` fits; None if it cannot.

    Neither pinned versions nor those in `protected`, the step's own adapters, are ever chosen.
    """
    needed = ledger.registered[version].num_row_blocks
    free_slots = ledger.num_slots - len(ledger.resident)
    free_rows = len(free_row_blocks(ledger))
    spared = {*protected, *pinned_versions(ledger)}
    victims = []
    for candidate in ledger.device_order:
        if free_slots >= 1 and free_rows >= needed:
            break
        if candidate in spared:
            continue
        victims.append(candidate)
        free_slots += 1
        free_rows += len(ledger.resident[candidate].row_blocks)
    return tuple(victims) if free_slots >= 1 and free_rows >= needed else None


def activate(ledger: AdapterLedger, version: str, victims: Iterable[str]) -> AdapterLedger:
    """Evict `victims` and give `version` the lowest free slot and row blocks."""
    for victim in victims:
        ledger = evict(ledger, victim)
    taken = {r.slot for r in ledger.resident.values()}
    slot = next(s for s in range(ledger.num_slots) if s not in taken)
    info = ledger.registered[version]
    rows = tuple(free_row_blocks(ledger)[: info.num_row_blocks])
    place = Residence(version=version, slot=slot, row_blocks=rows, linears=info.linears)
    return replace(
        ledger,
        resident=ledger.resident.set(version, place),
        device_order=(*ledger.device_order, version),
    )


def slot_of(ledger: AdapterLedger, version: str | None) -> int:
    """Where a resident version is; -1 for the base model."""
    return -1 if version is None else ledger.resident[version].slot


def renew_reservations(ledger: AdapterLedger) -> AdapterLedger:
    """Drop the reservations of versions that are in by now or that nobody waits for any more, and
    those that cannot be kept behind the ones before them, as a pin or a load came in the way.

    Whoever has left by another way, as all do where a failed step overwrote their rows, is nobody's
    victim any more: coming back under a promise of its own it would not leave again.
    """
    kept: tuple[Reservation, ...] = ()
    for promise in ledger.reservations:
        victims = tuple(v for v in promise.victims if v in ledger.resident)
        if len(victims) < len(promise.victims):
            promise = Reservation(version=promise.version, victims=victims)
        wanted = promise.version in ledger.users and not has_place(ledger, kept, promise.version)
        if wanted and keeping(ledger, (*kept, promise)) is not None:
            kept = (*kept, promise)
    return ledger if kept == ledger.reservations else replace(ledger, reservations=kept)


def has_place(ledger: AdapterLedger, promises: Iterable[Reservation], version: str) -> bool:
    """Whether a version is resident, and not to leave for one of the promises."""
    return version in ledger.resident and all(version not in r.victims for r in promises)


def keeping(ledger: AdapterLedger, promises: Iterable[Reservation]) -> AdapterLedger | None:
    """The ledger once these promises are kept, one after the other; None where they cannot be."""
    for promise in promises:
        victims = promised_victims(ledger, promise)
        if victims is None:
            return None
        ledger = activate(ledger, promise.version, victims)
    return ledger


def promised_victims(ledger: AdapterLedger, promise: Reservation) -> tuple[str, ...] | None:
    """Whom to evict to keep a promise: all who were named. None where that is not enough (any
    more), or a pin forbids it."""
    victims = tuple(v for v in promise.victims if v in ledger.resident)
    if not pinned_versions(ledger).isdisjoint(victims):
        return None
    bare = ledger
    for victim in victims:
        bare = evict(bare, victim)
    return None if victims_for(bare, promise.version, bare.resident) is None else victims


def reserve(ledger: AdapterLedger, version: str, rows: Mapping[str, int]) -> AdapterLedger:
    """Promise `version` the place of resident adapters, behind the promises there are: of those
    without running rows, then of those with the fewest, and among equals of the least recently
    used.

    `rows` are the running rows of each version. Without any change where no choice of adapters that
    are neither pinned nor promised already would make room.
    """
    later = keeping(ledger, ledger.reservations)
    if later is None:
        return ledger
    promised = {promise.version for promise in ledger.reservations}
    busy = [v for v in later.device_order if v in rows and v not in promised]
    spared = {*rows, *promised}
    for candidate in sorted(busy, key=lambda v: rows[v]):  # stable: LRU among equals
        if victims_for(later, version, spared) is not None:
            break
        spared.discard(candidate)
    victims = victims_for(later, version, spared)
    if victims is None:
        return ledger
    promise = Reservation(version=version, victims=victims)
    return replace(ledger, reservations=(*ledger.reservations, promise))
