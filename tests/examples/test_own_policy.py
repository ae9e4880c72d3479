"""The properties that a test of one's own policy would check."""

import hypothesis.strategies as st
from hypothesis import given, settings

from purestep.engine import fcfs
from tests.examples.own_policy import request, run, shortest_first

sizes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 14)), min_size=1, max_size=9)


@settings(max_examples=30)
@given(sizes, st.integers(1, 3), st.integers(8, 14))
def test_a_policy_changes_when_but_never_what(
    sizes: list[tuple[int, int]], max_rows: int, num_blocks: int
) -> None:
    requests = [request(f"{at}", tokens=p, new=n) for at, (p, n) in enumerate(sizes)]
    told = {
        policy: {name: done.tokens.tolist() for name, _, done in run(policy, requests, **limits)}
        for policy in (fcfs, shortest_first)
        for limits in [{"max_rows": max_rows, "num_blocks": num_blocks}]
    }
    assert told[shortest_first] == told[fcfs]
    assert len(told[fcfs]) == len(sizes), "every request comes to an end"


@settings(max_examples=30)
@given(sizes)
def test_with_one_row_the_shortest_waiting_one_is_next(sizes: list[tuple[int, int]]) -> None:
    requests = [request(f"{at}", tokens=p, new=n) for at, (p, n) in enumerate(sizes)]
    ends = run(shortest_first, requests, max_rows=1, num_blocks=14)
    lengths = [len(done.tokens) for _, _, done in ends]
    assert lengths == sorted(lengths)
