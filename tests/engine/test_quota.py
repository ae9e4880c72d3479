"""A quota of blocks for each adapter: a burst of one costs the others no cached prefix (W19)."""

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from purestep.engine import Request, SamplingParams, branch, deliver, submit
from purestep.engine.config import check_config
from purestep.simulation.device import toy_step
from purestep.simulation.world import DEFAULTS, loaded, toy_config, toy_state
from purestep.state.checks import check_host
from purestep.state.engine import EngineState
from purestep.state.errors import ConfigError, RequestError

QUOTA, POOL, KEPT = 6, 12, 5  # blocks; the last: of the prefix to be protected


def engine(quota: int) -> EngineState:
    sizes = {"num_blocks": POOL, "max_rows": 4, "max_batched_tokens": 64}
    state = toy_state(toy_config(**sizes, adapter_block_quota=quota))
    for name in ("noisy", "quiet"):
        state = deliver(state, loaded(name, f"v-{name}", 8, None))
    return state


def ended(state: EngineState) -> tuple[EngineState, dict[str, int]]:
    """The state once all have ended, and how many tokens of each were cached."""
    cached = {}
    while not state.host.idle:
        state, outputs = toy_step(state)
        check_host(state.host, state.config.block_size)
        cached |= {done.key: done.num_cached_tokens for done in outputs.finished}
    return state, cached


def asked(number: object, adapter: str | None, length: int, first: int = 3) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    tokens = [first] * length
    return Request(id=f"{number}", tokens=tokens, adapter=adapter, sampling=sampling)


def hits_after_a_burst(quota: int, adapter: str | None, burst: list[tuple[int, int]]) -> int:
    """Blocks of a prefix that are still there once a noisy adapter has sent many prompts."""
    size = DEFAULTS["block_size"]
    state, _ = ended(submit(engine(quota), asked("first", adapter, KEPT * size + 1)))
    for number, (first, length) in enumerate(burst):
        state = submit(state, asked(number, "noisy", length, first))
    state, _ = ended(state)
    state, cached = ended(submit(state, asked("again", adapter, KEPT * size + 1)))
    return cached["again"] // size


bursts = st.lists(st.tuples(st.integers(3, 11), st.integers(1, 22)), max_size=12)


@given(adapter=st.sampled_from(("quiet", None)), burst=bursts)
@example(adapter="quiet", burst=[(n, 20) for n in range(3, 12)])
def test_a_burst_of_one_adapter_costs_no_other_its_prefix(
    adapter: str | None, burst: list[tuple[int, int]]
) -> None:
    assert hits_after_a_burst(QUOTA, adapter, burst) == KEPT


def test_without_a_quota_it_does() -> None:
    assert hits_after_a_burst(0, "quiet", [(n, 20) for n in range(3, 12)]) == 0


def test_the_adapters_own_prefixes_make_way_oldest_first() -> None:
    """And of one the end before the beginning."""
    state = engine(QUOTA)
    for n in (3, 4, 5):  # two full blocks each, and a third while they run
        state, _ = ended(submit(state, asked(n, "noisy", 9, n)))
    state, cached = ended(submit(state, asked("new", "noisy", 9, 5)))
    assert cached["new"] == 8
    state, cached = ended(submit(state, asked("old", "noisy", 9, 3)))
    assert cached["old"] == 4


def test_requests_beside_each_other_stay_within_it_and_base_ones_do_not_wait() -> None:
    state = engine(QUOTA)
    for n in (3, 4):
        state = submit(state, asked(n, "noisy", 15, n))  # at most 5 blocks each
    state = submit(state, asked("base", None, 9))
    state, _ = toy_step(state)
    assert state.host.rows.ids == ("3", "base")
    state = branch(state, "3", ["b"])  # 2 of its 5 blocks are not its parent's
    assert state.host.rows.ids == ("3", "base")
    state, cached = ended(state)
    assert set(cached) == {"3", "4", "base", "b"}


def test_what_could_never_fit_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="need 7 blocks of 4, but adapter_block_quota=6"):
        submit(engine(QUOTA), asked("x", "noisy", 23))
    submit(engine(QUOTA), asked("x", None, 23))
    with pytest.raises(ConfigError, match="adapter_block_quota=13"):
        check_config(toy_config(num_blocks=12, adapter_block_quota=13))
