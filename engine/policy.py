"""Who is served first: pure functions from a host state to an order, replaceable by the caller."""

from collections.abc import Callable
from dataclasses import dataclass

from purestep.state.engine import HostState
from purestep.state.errors import PolicyError


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order of service. Victims of preemption are taken from the end of `running`."""

    running: tuple[str, ...]
    waiting: tuple[str, ...]


Policy = Callable[[HostState], Order]
"""Pure, from a host state to the order in which its rows and its waiting requests are served: each
one just once, else the step raises PolicyError and changes nothing."""


def fcfs(host: HostState) -> Order:
    """First come, first served. Raises nothing."""
    return Order(running=host.rows.ids, waiting=host.waiting)


def by_priority(host: HostState) -> Order:
    """The smallest (priority, arrival) first; the largest is preempted first. Raises nothing."""

    def rank(key: str) -> tuple[int, int]:
        record = host.requests[key]
        return record.request.priority, record.arrival

    return Order(
        running=tuple(sorted(host.rows.ids, key=rank)),
        waiting=tuple(sorted(host.waiting, key=rank)),
    )


def checked_order(host: HostState, policy: Policy) -> Order:
    """What the policy chose. Raises PolicyError unless it reorders just the requests there are."""
    order = policy(host)
    for kind, chosen, present in (
        ("running", order.running, host.rows.ids),
        ("waiting", order.waiting, host.waiting),
    ):
        if chosen is not present and sorted(chosen) != sorted(present):
            wrong = sorted(set(chosen) ^ set(present)) or "an id twice"
            raise PolicyError(f"policy: {kind} must be a permutation of {kind} requests: {wrong}")
    return order
