"""Which media items a step encodes: the second budget of the schedule, counted in embeddings.

An encoder sees an item whole or not at all, so a step that computes any of an item's tokens needs
the whole output: from the cache, or encoded in this step, which costs `max_encoder_tokens` and a
place in the cache. Where neither can be had the step ends in front of the item. Items whose
placeholders overlap are one group and go together.

A group that is larger than the whole cache passes it by: it is encoded in every step that computes
some of its tokens, and kept in none.

Progress (spec/multimodal.md, 10.5). Between steps a row refers only to the group that it stands in,
and with that it can go on: nobody holds one output and waits for another. Submission refuses groups
that exceed the budget of a step, so whoever comes first in the order of service finds budget, and
place once the rows that stand within items have left these. And nobody takes from whoever stands
first: behind a request that did not get its encoding no other is given a new one in that step.
The look-ahead of a drafter shortens a step, but never to nothing. A step that encodes spends at
most `max_encoder_tokens` on it: that, and no more, is what rows that decode beside it wait for.

A waiting request that cannot compute its first token for want of an encoding is passed over: those
behind it come in that need none. Where items may not be split (`disable_chunked_mm_input`) and the
step has too few tokens left for one, nobody comes in behind it, since their decoding would take
these tokens again and again.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress

from purestep.engine.config import Config
from purestep.state.encoder import (
    EncoderLedger,
    Holder,
    cancelled,
    computed,
    hold,
    let_go,
    planned,
    shrunk,
    told,
)
from purestep.state.engine import HostState
from purestep.state.in_flight import plan_places
from purestep.state.media import Feature, group_embeds, overlap_groups, rows_in_window
from purestep.state.plan import EncodedItem, StepPlan
from purestep.state.request import RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderChoice:
    """What one request does about its items in one step. Numbers are those of its features."""

    count: int  # tokens it computes
    encode: tuple[int, ...] = ()  # and keeps
    passing: tuple[int, ...] = ()  # encodes, and does not keep
    found: tuple[int, ...] = ()  # in the cache, where they are held from now on
    shared: tuple[int, ...] = ()  # encoded and not kept by another request in this step
    budget: int = 0  # embeddings that are left to encode
    short_of: str = ""  # why `count` is less than was asked for: "encoder" or "tokens"


def plan_encoder(
    features: Sequence[Feature],
    start: int,
    count: int,
    *,
    ledger: EncoderLedger,
    budget: int,
    passing: Collection[str] = (),
    closed: bool = False,
    atomic: bool = False,
    shift: int = 0,
) -> EncoderChoice:
    """How many of `count` tokens from `start` on can be computed, and what is encoded for them.

    Pure, and tells of no eviction: `ledger` is as earlier requests of this step leave it, `passing`
    the outputs that they encode without keeping them. `closed`: nothing new is encoded. `atomic`:
    no step ends within a group. `shift` is 1 where a drafter reads one token further; a group that
    it alone would need is checked and not encoded, since the drafter can do without.
    """
    end, supply = start + count, _Supply(ledger, budget, passing, closed)
    for group in overlap_groups(features):
        if not _has_rows(features, group, start, end + shift):
            continue
        needed = _has_rows(features, group, start, end)
        splits = atomic and needed and max(features[i].end for i in group) > end
        if not splits and supply.take(features, group, start, only_look=not needed):
            continue
        before = features[group[0]].offset - start
        if needed:
            count = before - shift if before > shift else max(before, 0)
            return supply.choice(count, "tokens" if splits else "encoder")
        return supply.choice(before - shift if before > shift else count)
    return supply.choice(count)


def _has_rows(features: Sequence[Feature], group: Sequence[int], start: int, end: int) -> bool:
    spans = (rows_in_window(features[i], start, end) for i in group)
    return any(first < last for first, last in spans)


class _Supply:
    """What outputs, budget and room are left while one request chooses; a local."""

    def __init__(
        self, ledger: EncoderLedger, budget: int, passing: Collection[str], closed: bool
    ) -> None:
        self.ledger, self.budget, self.closed = ledger, budget, closed
        self.passing = set(passing)
        self.mine: set[str] = set()  # held by nobody else, and by this request from now on
        self.room = ledger.freeable
        self.chosen: dict[str, list[int]] = {}

    def take(
        self, features: Sequence[Feature], group: Sequence[int], start: int, only_look: bool
    ) -> bool:
        """Whether the group's outputs can be had, those behind `start`; if so they are taken."""
        keep = group_embeds(features, group) <= self.ledger.capacity
        room, mine, passing, cost = self.room, set(self.mine), set(self.passing), 0
        chosen: dict[str, list[int]] = {"encode": [], "passing": [], "found": [], "shared": []}
        for i in group:
            name, size = features[i].identifier, features[i].num_embeds
            if features[i].end <= start:
                continue
            if name in self.ledger.holders or name in mine:
                chosen["found"].append(i)
            elif (keep or name in self.ledger.outputs) and size <= room:
                room -= size
                mine.add(name)
                if name in self.ledger.outputs:
                    chosen["found"].append(i)
                else:
                    chosen["encode"].append(i)
                    cost += 0 if name in passing else size
            elif keep:
                return False
            elif name in passing:
                chosen["shared"].append(i)
            else:
                chosen["passing"].append(i)
                passing.add(name)
                cost += size
        if cost > self.budget or (cost and self.closed):
            return False
        if not only_look:
            self.room, self.mine, self.passing = room, mine, passing
            self.budget -= cost
            for kind, items in chosen.items():
                self.chosen.setdefault(kind, []).extend(items)
        return True

    def choice(self, count: int, short_of: str = "") -> EncoderChoice:
        chosen = {kind: tuple(items) for kind, items in self.chosen.items()}
        return EncoderChoice(count=count, budget=self.budget, short_of=short_of, **chosen)


class Encoding:
    """What one step encodes, collected row by row. A local of `schedule`; the ledger it started
    from never changes, and what a row chose is undone if the row has to leave after all."""

    def __init__(self, config: Config, ledger: EncoderLedger) -> None:
        self.ledger = ledger
        self.stalled = False  # an item waits for more tokens than this step had left for it
        self._config = config
        self._closed = False
        self._encodes: dict[str, tuple[EncodedItem, frozenset[str]]] = {}  # and whom it serves

    def choose(self, record: RequestState, start: int, count: int) -> EncoderChoice:
        """What a request would do about its items; nothing changes."""
        spent = sum(item.num_embeds for item, _ in self._encodes.values())
        return plan_encoder(
            record.features,
            start,
            count,
            ledger=self.ledger,
            budget=self._config.max_encoder_tokens - spent,
            passing=[name for name, (item, _) in self._encodes.items() if not item.keep],
            closed=self._closed,
            atomic=self._config.disable_chunked_mm_input,
        )

    def fit(self, record: RequestState, start: int, count: int) -> int:
        """The tokens from `start` on that a request computes, at most `count`; what it needs for
        them is encoded or held from now on."""
        choice = self.choose(record, start, count)
        self._note(choice)
        if not choice.count:  # nothing was chosen either
            return 0
        key, features = record.key, record.features
        for i in (*choice.encode, *choice.passing, *choice.found, *choice.shared):
            keep = i in choice.encode
            name = features[i].identifier
            if keep or i in choice.passing:
                item, serves = self._encodes.get(name, (None, frozenset()))
                if item is None:
                    item = _encoded_item(record, features[i], keep)
                elif keep:
                    item = replace(item, keep=True)
                self._encodes[name] = (item, serves)
                if keep:
                    self.ledger = planned(self.ledger, name, features[i].num_embeds)
            if name in self._encodes:
                item, serves = self._encodes[name]
                self._encodes[name] = (item, serves | {key})
            if keep or i in choice.found:
                self.ledger = hold(self.ledger, name, (key, i))
        return choice.count

    def lets_in(self, record: RequestState, start: int, count: int) -> bool:
        """Whether a waiting request could compute a token of `count` from `start` on."""
        choice = self.choose(record, start, count)
        if not choice.count:
            self._note(choice)
        return choice.count > 0

    def _note(self, choice: EncoderChoice) -> None:
        self._closed |= choice.short_of == "encoder"
        self.stalled |= choice.short_of == "tokens" and not choice.count

    def leave(self, record: RequestState) -> None:
        """Undo what a row chose, and let go of what it held; also of what it only found in this
        very step, which thereby counts as the last released: the row comes back for it."""
        self.ledger = let_go(self.ledger, holds_of(record))
        for name, (item, serves) in list(self._encodes.items()):
            serves -= {record.key}
            kept = item.keep and name in self.ledger.holders
            if item.keep and not kept:
                self.ledger = cancelled(self.ledger, name)
            if serves:
                self._encodes[name] = (replace(item, keep=kept), serves)
            else:
                del self._encodes[name]

    def finish(self) -> tuple[EncoderLedger, tuple[str, ...], tuple[EncodedItem, ...]]:
        """(the ledger, outputs that the device is to drop, then items to encode)."""
        if not (self.ledger.outputs or self.ledger.leaving or self._encodes):
            return self.ledger, (), ()
        ledger, drops = told(shrunk(self.ledger))
        return ledger, drops, tuple(item for item, _ in self._encodes.values())


def _encoded_item(record: RequestState, feature: Feature, keep: bool) -> EncodedItem:
    return EncodedItem(
        identifier=feature.identifier,
        blob=feature.digest,
        modality=feature.modality,
        version=record.encoder_version,
        num_embeds=feature.num_embeds,
        keep=keep,
    )


def holds_of(record: RequestState, before: int | None = None) -> list[tuple[str, Holder]]:
    """All references that a request may have, or those to items that end at `before` the latest."""
    return [
        (feature.identifier, (record.key, i))
        for i, feature in enumerate(record.features)
        if before is None or feature.end <= before
    ]


def settled(host: HostState, plan: StepPlan, left: Iterable[str]) -> EncoderLedger:
    """The ledger once a plan has been executed: what it encoded is computed; its rows let go of
    the items they have passed, those that `left` of all. A row that is gone has let go, and one of
    its name is another's."""
    ledger = host.encoder
    if plan.encodes:
        ledger = computed(ledger, [item.identifier for item in plan.encodes if item.keep])
    if not ledger.holders:
        return ledger
    ends = zip(plan.row_ids, (plan.start_R + plan.count_R).tolist(), strict=True)
    there = (plan_places(host, plan) >= 0).tolist()
    before: dict[str, int | None] = dict(compress(ends, there)) | dict.fromkeys(left)
    released = [
        pair
        for key, end in before.items()
        if (record := host.requests.get(key)) is not None and record.request.features
        for pair in holds_of(record, end)
    ]
    return let_go(ledger, released)
