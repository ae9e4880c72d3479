"""How often a run went through the transitions where engines go wrong."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from purestep.simulation.machine import Event
from purestep.state.engine import EngineState, HostState
from purestep.state.media import Feature
from purestep.state.plan import StepPlan

TRANSITIONS = (
    "preemption",
    "preemption while requests wait for a load",
    "eviction of a cached block and later re-hit",
    "adapter eviction with waiters",
    "failed load",
    "drain on unload",
    "abort in mid-prefill",
    "branch on a partial block",
    "hit ending inside embeddings",
    "media hit ending inside an item",
    "preemption inside an item",
    "abort inside an item",
    "encoder output dropped",
    "item encoded for one step alone",
    "step that ends in front of an item",
    "restore",
    "fork into another pool size",
    "recovery of a failed step",
    "promise to a request that waited too long",
    "plan behind one in flight",
    "plan in flight that the next had to wait for",
    "row that stopped and was planned on",
    "abort of a row in flight",
    "failed step behind one in flight",
    "lost step in flight",
)


@dataclass
class Coverage:
    """Counts of transitions, of events and of configs that came to their end; `see` is told each
    event (`Machine.sees`)."""

    configs: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    evicted: set[bytes] = field(default_factory=set)

    def see(
        self, event: Event, before: EngineState, after: EngineState, plan: StepPlan | None
    ) -> None:
        kind, arguments = event
        old, new = before.host, after.host
        if kind in ("step", "ahead"):
            self._see_landing(old, new, plan)
        if plan is not None:
            self.events["step"] += 1
            self._see_step(before, after, plan)
            return
        if old is new:
            return
        self.events[kind] += 1
        match kind:
            case "load_fails":
                self.counts["failed load"] += len(new.ended) > len(old.ended)
            case "unload" if arguments["running"] == "drain":
                version = old.adapters.names.get(arguments["name"])
                drains = version in new.adapters.users
                self.counts["drain on unload"] += drains
            case "abort":
                rows = old.rows
                begun = (rows.num_computed_R > 0) & (rows.num_computed_R < rows.num_tokens_R - 1)
                self.counts["abort inside an item"] += any(
                    _inside(old.requests[key].request.features, at) and key not in new.requests
                    for key, at in zip(rows.ids, rows.num_computed_R.tolist(), strict=True)
                )
                self.counts["abort in mid-prefill"] += any(
                    halfway and key not in new.requests
                    for key, halfway in zip(rows.ids, begun.tolist(), strict=True)
                )
                gone = len(new.departed) - len(old.departed)
                self.counts["abort of a row in flight"] += gone
            case "branch":
                copies = len(new.copies) - len(old.copies)
                self.counts["branch on a partial block"] += copies
            case "restore":
                self.counts["restore"] += 1
            case "fork":
                self.counts["fork into another pool size"] += 1
            case "fail":
                self.counts["recovery of a failed step"] += 1
                self.counts["failed step behind one in flight"] += bool(old.in_flight)
            case "lose":
                self.counts["lost step in flight"] += 1

    def _see_landing(self, old: HostState, new: HostState, plan: StepPlan | None) -> None:
        if not old.in_flight:
            return
        behind = plan is not None
        self.counts["plan behind one in flight"] += behind
        self.counts["plan in flight that the next had to wait for"] += not behind
        self.counts["row that stopped and was planned on"] += len(new.departed)

    def _see_step(self, before: EngineState, after: EngineState, plan: StepPlan) -> None:
        old, new = before.host, after.host
        if plan.num_preempted:
            self.counts["preemption"] += 1
            loads = any(old.requests[key].loading for key in old.waiting)
            self.counts["preemption while requests wait for a load"] += loads
            places = zip(old.rows.ids, old.rows.num_computed_R.tolist(), strict=True)
            self.counts["preemption inside an item"] += any(
                _inside(old.requests[key].request.features, at)
                for key, at in places
                if key in new.waiting[: plan.num_preempted]
            )
        for block in plan.overwrites.blocks:
            digest = old.blocks.digest_of.get(block)
            if digest is not None and old.blocks.block_of.get(digest) == block:
                self.evicted.add(digest)
        if plan.num_hit_tokens:
            self._see_hits(before, plan)
        if before.config.max_encoder_tokens:
            self._see_media(before, plan)
        evicted = [v for v in old.adapters.resident if v not in new.adapters.resident]
        self.counts["adapter eviction with waiters"] += any(
            v in new.adapters.users for v in evicted
        )
        promises = {r.version for r in new.adapters.reservations}
        promises -= {r.version for r in old.adapters.reservations}
        self.counts["promise to a request that waited too long"] += len(promises)

    def _see_hits(self, before: EngineState, plan: StepPlan) -> None:
        running, size = set(before.host.rows.ids), before.config.block_size
        for key, start in zip(plan.row_ids, plan.start_R.tolist(), strict=True):
            if key in running or not start:
                continue
            record = before.host.requests[key]
            again = self.evicted.intersection(record.digests[: start // size])
            self.counts["eviction of a cached block and later re-hit"] += bool(again)
            self.evicted -= again
            inside = (record.request.tokens[start - 1 : start + 1] == -1).sum() == 2
            self.counts["hit ending inside embeddings"] += bool(inside)
            within = _inside(record.request.features, start)
            self.counts["media hit ending inside an item"] += within

    def _see_media(self, before: EngineState, plan: StepPlan) -> None:
        self.counts["encoder output dropped"] += len(plan.drops)
        passing = [item for item in plan.encodes if not item.keep]
        self.counts["item encoded for one step alone"] += len(passing)
        ends = (plan.start_R + plan.count_R).tolist()
        for key, end, drew in zip(plan.row_ids, ends, plan.sampled_R.tolist(), strict=True):
            features = before.host.requests[key].request.features
            waits = any(f.offset == end for f in features) and not drew
            self.counts["step that ends in front of an item"] += waits

    def table(self) -> str:
        """One line a transition."""
        return "\n".join(f"{self.counts[name]:>9,}  {name}" for name in TRANSITIONS)


def _inside(features: Sequence[Feature], place: int) -> bool:
    """Whether a position stands within an item."""
    return any(f.offset < place < f.end for f in features)
