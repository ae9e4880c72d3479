"""The encoder ledger: outputs of vision and audio towers, who still needs them, who goes next.

An output is named by its identifier and counted in embeddings, of `row_bytes` each. A running
request refers to it, item by item, from the step in which its tokens first need it until they are
computed. Without references it stays findable until its place is needed, the least recently
released goes first. No function here evicts but `shrunk`, which a step calls once it is certain.
"""

from collections.abc import Iterable
from dataclasses import replace

from immutables import Map

from purestep.state.pytree import tree

Holder = tuple[str, int]
"""(key of a running request, number of the item among its features)."""


@tree
class EncoderOutput:
    """One output. It is planned as long as the plan that encodes it has not been committed."""

    num_embeds: int
    computed: bool
    released: int  # stamp of its last release; no meaning while it is referred to


@tree
class EncoderLedger:
    """Which encoder outputs are resident, and who still needs them."""

    capacity: int  # embeddings
    row_bytes: int
    outputs: Map[str, EncoderOutput]  # by identifier
    holders: Map[str, tuple[Holder, ...]]  # of each output that has any, sorted
    clock: int  # the next stamp
    leaving: tuple[str, ...]  # dropped here, but not yet on the device: the next plan tells it

    @property
    def used(self) -> int:
        """Embeddings of all outputs."""
        return sum(output.num_embeds for output in self.outputs.values())

    @property
    def held(self) -> int:
        """Embeddings of outputs that somebody refers to."""
        return sum(self.outputs[identifier].num_embeds for identifier in self.holders)

    @property
    def free(self) -> int:
        return self.capacity - self.used

    @property
    def freeable(self) -> int:
        """What is free once all that nobody refers to has gone."""
        return self.capacity - self.held

    @property
    def evictable(self) -> tuple[str, ...]:
        """Outputs that nobody refers to, in the order in which they go."""
        idle = [(o.released, i) for i, o in self.outputs.items() if i not in self.holders]
        return tuple(identifier for _, identifier in sorted(idle))


def empty_encoder(capacity: int = 0, row_bytes: int = 0) -> EncoderLedger:
    """A ledger without outputs."""
    return EncoderLedger(
        capacity=capacity,
        row_bytes=row_bytes,
        outputs=Map(),
        holders=Map(),
        clock=0,
        leaving=(),
    )


def planned(ledger: EncoderLedger, identifier: str, num_embeds: int) -> EncoderLedger:
    """With an output that this step encodes. The ledger may hold too much until it is `shrunk`."""
    output = EncoderOutput(num_embeds=num_embeds, computed=False, released=ledger.clock)
    return replace(ledger, outputs=ledger.outputs.set(identifier, output), clock=ledger.clock + 1)


def cancelled(ledger: EncoderLedger, identifier: str) -> EncoderLedger:
    """Without an output that this step was to encode and does not; nobody refers to it."""
    return replace(ledger, outputs=ledger.outputs.delete(identifier))


def hold(ledger: EncoderLedger, identifier: str, holder: Holder) -> EncoderLedger:
    """With a reference more; none where the holder has it already."""
    holders = ledger.holders.get(identifier, ())
    if holder in holders:
        return ledger
    return replace(
        ledger, holders=ledger.holders.set(identifier, tuple(sorted((*holders, holder))))
    )


def let_go(ledger: EncoderLedger, released: Iterable[tuple[str, Holder]]) -> EncoderLedger:
    """Without these references (identifier, holder); those that are not there are passed over."""
    holders, outputs, clock = ledger.holders, ledger.outputs, ledger.clock
    for identifier, holder in released:
        mine = holders.get(identifier, ())
        if holder not in mine:
            continue
        rest = tuple(h for h in mine if h != holder)
        if rest:
            holders = holders.set(identifier, rest)
            continue
        holders = holders.delete(identifier)
        outputs = outputs.set(identifier, replace(outputs[identifier], released=clock))
        clock += 1
    if holders is ledger.holders:
        return ledger
    return replace(ledger, holders=holders, outputs=outputs, clock=clock)


def computed(ledger: EncoderLedger, identifiers: Iterable[str]) -> EncoderLedger:
    """With these outputs no longer only planned; those that have left are passed over."""
    outputs = ledger.outputs
    for identifier in identifiers:
        if (output := outputs.get(identifier)) is not None:
            outputs = outputs.set(identifier, replace(output, computed=True))
    return replace(ledger, outputs=outputs)


def shrunk(ledger: EncoderLedger) -> EncoderLedger:
    """Within its capacity: the least recently released outputs have left."""
    excess, gone = -ledger.free, []
    for identifier in ledger.evictable if excess > 0 else ():
        if excess <= 0:
            break
        excess -= ledger.outputs[identifier].num_embeds
        gone.append(identifier)
    return dropped(ledger, gone) if gone else ledger


def dropped(ledger: EncoderLedger, identifiers: Iterable[str]) -> EncoderLedger:
    """Without these outputs and all references to them; the next plan tells the device."""
    gone = [i for i in identifiers if i in ledger.outputs]
    outputs, holders = ledger.outputs, ledger.holders
    for identifier in gone:
        outputs = outputs.delete(identifier)
        if identifier in holders:
            holders = holders.delete(identifier)
    return replace(ledger, outputs=outputs, holders=holders, leaving=(*ledger.leaving, *gone))


def told(ledger: EncoderLedger) -> tuple[EncoderLedger, tuple[str, ...]]:
    """The ledger once a plan has told the device what left, and what that is."""
    return (replace(ledger, leaving=()) if ledger.leaving else ledger), ledger.leaving


def check_encoder(ledger: EncoderLedger, live: Iterable[Holder]) -> None:
    """Assert the ledger's own laws; `live` are the items that may be referred to."""
    i1_free_and_used_are_all(ledger)
    i2_freeable_is_free_and_evictable(ledger)
    i3_evictable_has_no_holder(ledger)
    i4_bounds(ledger)
    i5_holders_are_live_items(ledger, live)
    i6_what_left_is_not_held(ledger)


def i1_free_and_used_are_all(ledger: EncoderLedger) -> None:
    """I1: what is free and what outputs take is the capacity."""
    sizes = sum(output.num_embeds for output in ledger.outputs.values())
    assert ledger.free + sizes == ledger.capacity


def i2_freeable_is_free_and_evictable(ledger: EncoderLedger) -> None:
    """I2: freeable is what is free and what can go."""
    idle = sum(ledger.outputs[i].num_embeds for i in ledger.evictable)
    assert ledger.freeable == ledger.free + idle


def i3_evictable_has_no_holder(ledger: EncoderLedger) -> None:
    """I3: an output can go exactly if it is there and nobody refers to it."""
    assert set(ledger.evictable) == set(ledger.outputs) - set(ledger.holders)
    assert len({o.released for o in ledger.outputs.values()}) == len(ledger.outputs)


def i4_bounds(ledger: EncoderLedger) -> None:
    """I4: 0 <= free <= freeable <= capacity."""
    assert 0 <= ledger.free <= ledger.freeable <= ledger.capacity, f"{ledger.used} are used"


def i5_holders_are_live_items(ledger: EncoderLedger, live: Iterable[Holder]) -> None:
    """I5: references are those of live (request, item) pairs, each once."""
    items = set(live)
    for identifier, holders in ledger.holders.items():
        assert holders, f"{identifier} has an entry and no holder"
        assert len(set(holders)) == len(holders), f"a holder twice: {holders}"
        assert items.issuperset(holders), f"{identifier} is held for the dead: {holders}"


def i6_what_left_is_not_held(ledger: EncoderLedger) -> None:
    """I6: nobody refers to what is not there."""
    assert set(ledger.holders) <= set(ledger.outputs)


def i7_device_has_what_is_computed(ledger: EncoderLedger, on_device: Iterable[str]) -> None:
    """I7: the device has every output that counts as computed, and nothing but these and what it
    is still to be told of; with no plan in flight."""
    there = set(on_device)
    counted = {identifier for identifier, output in ledger.outputs.items() if output.computed}
    assert counted == set(ledger.outputs), "an output is planned, but no plan is in flight"
    assert counted <= there, f"outputs are missing: {sorted(counted - there)}"
    assert there <= counted | set(ledger.leaving), f"left behind: {sorted(there - counted)}"
