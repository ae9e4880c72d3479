"""A scheduling policy of one's own, and the properties that a test of it would check.

`shortest_first` serves the request with the least left to generate. A policy is a pure function
from a host state to an order, so it is tested without a model: on the simulated device, whose next
token is a hash of everything a row sees. `tests/examples/test_own_policy.py` holds the properties:
no policy may change what a request is told, and this one lets short requests overtake long ones.
"""

from collections.abc import Iterable

from purestep.engine import (
    Completion,
    HostState,
    Order,
    Policy,
    Request,
    SamplingParams,
    fcfs,
    submit,
)
from purestep.simulation.device import toy_step
from purestep.simulation.world import toy_config, toy_state


def main() -> None:
    requests = [request(f"{at}", tokens=3, new=new) for at, new in enumerate((14, 9, 12, 1, 2))]
    for policy in (fcfs, shortest_first):
        ends = run(policy, requests, max_rows=1)
        print(f"{policy.__name__}: {', '.join(f'{name} at step {at}' for name, at, _ in ends)}")


def shortest_first(host: HostState) -> Order:
    """The least left to generate first; equals as they came."""

    def left(key: str) -> tuple[int, int]:
        record = host.requests[key]
        return record.request.sampling.max_tokens - len(record.generated), record.arrival

    return Order(running=host.rows.ids, waiting=tuple(sorted(host.waiting, key=left)))


def request(name: str, *, tokens: int, new: int) -> Request:
    """A request of that many prompt tokens and new ones."""
    prompt = [3 + (7 * int(name) + at) % 8 for at in range(tokens)]
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    return Request(id=name, tokens=prompt, sampling=sampling)


def run(
    policy: Policy, requests: Iterable[Request], **changes: int
) -> list[tuple[str, int, Completion]]:
    """Every request to its end under `policy`: (name, step, completion) as they finish."""
    state, ends = toy_state(toy_config(**changes)), []
    for item in requests:
        state = submit(state, item)
    while not state.host.idle:
        state, outputs = toy_step(state, policy=policy)
        ends += [(done.id, outputs.step, done) for done in outputs.finished]
    return ends


if __name__ == "__main__":
    main()
