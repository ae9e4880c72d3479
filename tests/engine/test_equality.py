"""The law of equality: what a request gets never depends on whom it runs with."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from purestep.engine import Request, SamplingParams, abort, init, step, submit
from purestep.state.checks import check_host
from tests.engine.tiny import (
    alone,
    checkpoint,
    oracle_logprobs,
    oracle_tokens,
    peft_model,
    prompt,
    request,
    run,
    submit_all,
    tiny_program,
    with_adapters,
)

FAMILIES = ["llama", "llama-tied", "llama-rope3", "llama-bias", "qwen2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_logprobs_equal_transformers(family: str) -> None:
    model = checkpoint(family)[1]
    program = tiny_program(family)
    requests = [request(str(n), prompt(n, n)) for n in (1, 2, 3, 4, 5, 15, 16, 17, 40)]
    _, done = run(program, init(program), requests)
    for item in requests:
        got = done[item.id]
        assert got.tokens.tolist() == oracle_tokens(model, item.tokens, 8)
        want = oracle_logprobs(model, item.tokens, got.tokens)
        np.testing.assert_allclose(got.logprobs, want, atol=1e-4)


def test_a_mixed_batch_equals_peft_one_at_a_time() -> None:
    """LK-01: adapters interleave in one batch, prompt lengths 1 to 12."""
    pattern = ["a", "b", "a", None, "c", "a", "b", None, "c", "c", "d", "b"]
    program = tiny_program(max_rows=12, num_blocks=128)
    requests = [request(str(n), prompt(n, n + 1), who) for n, who in enumerate(pattern)]
    _, done = run(program, with_adapters(program), requests)
    for item in requests:
        oracle = checkpoint()[1] if item.adapter is None else peft_model(item.adapter)
        got = done[item.id]
        assert got.tokens.tolist() == oracle_tokens(oracle, item.tokens, 8), item
        want = oracle_logprobs(oracle, item.tokens, got.tokens)
        np.testing.assert_allclose(got.logprobs, want, atol=1e-4)
    texts = {who: oracle_tokens(peft_model(who), prompt(3, 9), 8) for who in "abcd"}
    assert len({tuple(t) for t in texts.values()}) == 4, "the adapters are too alike to test with"


LIVE = st.lists(
    st.tuples(
        st.integers(1, 24),  # prompt length
        st.sampled_from([None, "a", "b", "c"]),
        st.integers(0, 6),  # shared prefix, in tokens
        st.sampled_from([0.0, 0.8]),
        st.integers(1, 10),  # max_tokens
        st.integers(0, 8),  # steps before the next arrives
        st.booleans(),  # aborted later
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=25)
@given(
    arrivals=LIVE,
    block_size=st.sampled_from([1, 3, 4, 16]),
    budget=st.integers(4, 40),
    num_blocks=st.integers(20, 60),
    caching=st.booleans(),
    max_active=st.integers(1, 3),
)
def test_any_schedule_gives_each_request_what_it_gets_alone(
    arrivals: list[tuple],
    block_size: int,
    budget: int,
    num_blocks: int,
    caching: bool,
    max_active: int,
) -> None:
    """Chunks, budgets, block sizes, caching, preemption, arrivals and aborts change no token."""
    program = tiny_program(
        block_size=block_size,
        num_blocks=max(num_blocks, -(-40 // block_size)),
        max_rows=4,
        max_batched_tokens=budget,
        max_active_adapters=max_active,
        prefix_caching=caching,
    )
    state, done = with_adapters(program, "abc"), {}
    requests, doomed = [], []
    for n, (length, who, shared, temperature, count, gap, dies) in enumerate(arrivals):
        tokens = (prompt(99, shared) + prompt(n, 24))[:length]
        sampling = SamplingParams(
            temperature=temperature, seed=n, max_tokens=count, ignore_eos=True
        )
        item = Request(id=str(n), tokens=tokens, adapter=who, sampling=sampling)
        requests.append(item)
        state = submit(state, item)
        for _ in range(gap):
            state, outputs = step(program, state)
            check_host(state.host, block_size)
            done |= {c.id: c for c in outputs.finished}
        doomed += [item.id] if dies else []
        if doomed and doomed[0] in state.host.requests and gap % 2:
            state = abort(state, doomed[0])
            check_host(state.host, block_size)
    state, rest = run(program, state)
    done |= rest
    for item in requests:
        if item.id in done:
            solo = alone(item, max_rows=4)
            assert done[item.id].tokens.tolist() == solo.tokens.tolist()
            np.testing.assert_allclose(done[item.id].logprobs, solo.logprobs, atol=1e-5)
        else:
            assert item.id in doomed
    blocks = state.host.blocks
    assert blocks.num_free == blocks.num_blocks, "blocks were lost"


def test_preempted_requests_continue_as_if_nothing_had_happened() -> None:
    """SC-04: at least 3 preemptions, greedy and seeded; tokens, logprobs and reasons as alone."""
    program = tiny_program(num_blocks=26, max_rows=4, block_size=4)
    requests = [
        request(str(n), prompt(n, 30), "a" if n % 2 else None, max_tokens=30) for n in range(2)
    ] + [request(str(n), prompt(n, 30), max_tokens=30, temperature=0.9, seed=n) for n in (2, 3)]
    _, done = run(program, with_adapters(program), requests)
    assert sum(c.num_preemptions for c in done.values()) >= 3
    for item in requests:
        solo = alone(item)
        assert done[item.id].tokens.tolist() == solo.tokens.tolist()
        np.testing.assert_allclose(done[item.id].logprobs, solo.logprobs, atol=1e-5)
        assert done[item.id].finish_reason == solo.finish_reason == "length"


def test_greedy_output_does_not_depend_on_the_batch() -> None:
    """DT-01: 50 prompts alone, together, shuffled, and beside a long neighbour."""
    sizes = {"max_position_embeddings": 2048}
    options = {"sizes": sizes, "max_rows": 64, "num_blocks": 1200, "max_batched_tokens": 256}
    requests = [request(str(n), prompt(n, 1 + n), max_tokens=4) for n in range(50)]
    shuffled = [requests[i] for i in np.random.default_rng(0).permutation(50)]
    long = request("long", prompt(7, 1000), max_tokens=4)
    program = tiny_program(**options)
    _, together = run(program, init(program), requests)
    _, mixed = run(program, init(program), [long, *shuffled])
    for item in requests:
        _, by_itself = run(program, init(program), [item])
        for done in (together, mixed):
            want = by_itself[item.id]
            assert done[item.id].tokens.tolist() == want.tokens.tolist()
            np.testing.assert_allclose(done[item.id].logprobs, want.logprobs, atol=1e-5)


@settings(max_examples=20)
@given(
    others=st.lists(st.sampled_from([None, "a", "b", "c", "d"]), min_size=5, max_size=5),
    seed=st.integers(0, 2**16),
    mine=st.sampled_from([None, "a", "b"]),
    bucket=st.sampled_from([0, 48]),
)
def test_other_rows_never_change_a_bit_at_one_shape(
    others: list[str | None], seed: int, mine: str | None, bucket: int
) -> None:
    """Same lengths, other tokens and other adapters around: the same logprobs to the last bit."""
    program = tiny_program(token_buckets=(bucket,) if bucket else (), prefix_caching=False)
    reference = [request(str(n), prompt(n, 3 + n), max_tokens=3) for n in range(5)]
    changed = [
        replace(item, tokens=prompt(seed + n, 3 + n), adapter=who)
        for n, (item, who) in enumerate(zip(reference, others, strict=True))
    ]
    me = request("me", prompt(1234, 7), mine, max_tokens=3)
    results = []
    for neighbours in (reference, changed):
        _, done = run(program, with_adapters(program), [*neighbours[:3], me, *neighbours[3:]])
        results.append(done["me"])
    assert results[0].tokens.tolist() == results[1].tokens.tolist()
    assert results[0].logprobs.tobytes() == results[1].logprobs.tobytes()


def test_unused_memory_never_changes_a_bit() -> None:
    """NaN in free blocks, in free places of used blocks and in free adapter rows is not seen."""
    program = tiny_program(token_buckets=(64,))
    requests = [request("x", prompt(1, 9), "a"), request("y", prompt(2, 6))]
    results = []
    for filler in (0.0, float("nan")):
        state = with_adapters(program)
        for tensor in (*state.device.pool.kv, *state.device.pool.a_LSPD.values()):
            tensor.fill_(filler)
        for tensor in state.device.pool.b_LPO.values():
            tensor.fill_(filler)
        results.append(run(program, state, requests)[1])
    for name in "xy":
        assert results[0][name].logprobs.tobytes() == results[1][name].logprobs.tobytes()
        assert np.isfinite(results[1][name].logprobs).all()


def test_base_rows_beside_a_huge_adapter_equal_a_run_without_adapters() -> None:
    """LK-05: any leak of an adapter 1000 times too strong would show; base rows are bit-equal."""
    program = tiny_program()
    requests = [request(str(n), prompt(n, 5), max_tokens=6) for n in range(7)]
    loud = request("loud", prompt(50, 5), "a", max_tokens=2)
    silent = replace(loud, adapter=None)
    results = []
    for last in (loud, silent):
        state = with_adapters(program, "a")
        state = submit_all(state, [*requests, last])
        state, _ = step(program, state)
        for tensor in state.device.pool.b_LPO.values():
            tensor.mul_(1e3)
        results.append(run(program, state)[1])
    for item in requests:
        assert results[0][item.id].logprobs.tobytes() == results[1][item.id].logprobs.tobytes()


def test_seeded_requests_are_the_same_in_any_batch() -> None:
    """SL-06: alone, beside others, at another place, with small chunks, unseeded neighbours."""
    item = request("s", prompt(5, 11), temperature=0.8, seed=42, max_tokens=16)
    want = alone(item).tokens.tolist()
    others = [request(str(n), prompt(n, 6), temperature=1.0, max_tokens=20) for n in range(3)]
    for options in ({}, {"max_batched_tokens": 8}, {"num_blocks": 14}):
        program = tiny_program(**options)
        for batch in ([item, *others], [*others, item]):
            assert run(program, init(program), batch)[1]["s"].tokens.tolist() == want
    assert alone(replace(item, id="other name")).tokens.tolist() == want
    fresh = replace(item, sampling=replace(item.sampling, seed=43))
    assert alone(fresh).tokens.tolist() != want


def test_no_global_generator_is_read() -> None:
    """DT-03: torch's and numpy's global generators change nothing and are not moved."""
    item = request("s", prompt(5, 11), temperature=0.8, max_tokens=16)
    want = alone(item).tokens.tolist()
    np.random.seed(999)
    torch.manual_seed(999)
    before = torch.random.get_rng_state()
    assert alone(item).tokens.tolist() == want
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_context_limit_and_the_token_budget_may_be_in_any_relation() -> None:
    """SC-08: limit minus budget from -2 to 2."""
    item = request("x", prompt(1, 20), max_tokens=100)
    for difference in range(-2, 3):
        program = tiny_program(max_context=32, max_batched_tokens=32 + difference)
        twin = replace(item, id="y")
        _, done = run(program, init(program), [item, twin])
        assert len(done["x"].tokens) == 12
        assert done["x"].finish_reason == "length"
        assert done["x"].tokens.tolist() == done["y"].tokens.tolist()
        assert done["x"].tokens.tolist() == alone(item, max_context=32).tokens.tolist()
