"""Scheduling and the prefix cache, on a real tiny model."""

import numpy as np
import pytest
import torch

from purestep.engine import Request, SamplingParams, abort, init, schedule, step, submit
from purestep.engine.pack import pack_lora
from purestep.state.adapters import Residence
from tests.engine.tiny import (
    alone,
    prompt,
    request,
    run,
    run_steps,
    submit_all,
    tiny_program,
    with_adapters,
)


def test_decoding_rows_are_never_starved_by_a_long_prompt() -> None:
    program = tiny_program(max_batched_tokens=8, sizes={"max_position_embeddings": 512})
    state = submit_all(
        init(program), [request(str(n), prompt(n, 3), max_tokens=40) for n in (1, 2)]
    )
    for _ in range(3):
        state, _ = step(program, state)
    state = submit(state, request("long", prompt(9, 120), max_tokens=2))
    while "long" in state.host.requests:
        state, outputs = step(program, state)
        assert outputs.num_tokens <= 8
        if "1" in state.host.requests:
            assert {"1", "2"} <= set(outputs.ids), "a decoding row got no token"


def test_hits_stop_short_of_the_last_token() -> None:
    """PC-03: block 4; prompts of 7, 8, 9, 16 tokens, each twice; at least one is computed."""
    for length, hits in ((7, 4), (8, 4), (9, 8), (16, 12)):
        program = tiny_program()
        state, first = run(program, init(program), [request("1", prompt(1, length))])
        state, second = run(program, state, [request("2", prompt(1, length))])
        assert second["2"].num_cached_tokens == hits
        assert second["2"].tokens.tolist() == first["1"].tokens.tolist()
        np.testing.assert_allclose(second["2"].logprobs, first["1"].logprobs, atol=1e-5)


def test_the_same_prompt_twice_in_one_cold_batch() -> None:
    """PC-03: the second shares blocks that the first computes in the same step."""
    program = tiny_program()
    items = [request(n, prompt(1, 16)) for n in "12"]
    state = submit_all(init(program), items)
    state, outputs = step(program, state)
    assert outputs.num_hit_tokens == 12
    _, done = run(program, state)
    assert done["1"].tokens.tolist() == done["2"].tokens.tolist()
    assert done["2"].tokens.tolist() == alone(items[0]).tokens.tolist()


def test_kv_is_shared_within_one_identity_only() -> None:
    """PC-01: 33 tokens as base, A, B, base, A: hits 0, 0, 0, 32, 32."""
    program = tiny_program()
    state, hits = with_adapters(program, "ab"), []
    for n, who in enumerate([None, "a", "b", None, "a"]):
        item = request(str(n), prompt(1, 33), who)
        state, done = run(program, state, [item])
        hits.append(done[item.id].num_cached_tokens)
        assert done[item.id].tokens.tolist() == alone(item).tokens.tolist()
    assert hits == [0, 0, 0, 32, 32]


def test_a_salt_is_never_taken_for_an_adapter() -> None:
    """Spec 12.2: base with salt "a" and adapter "a" share nothing; equal salts share."""
    program = tiny_program()
    state = with_adapters(program, "a")
    hits = []
    for n, (who, salt) in enumerate([("a", None), (None, "a"), (None, "a"), (None, None)]):
        item = Request(
            id=str(n),
            tokens=prompt(1, 17),
            adapter=who,
            salt=salt,
            sampling=SamplingParams(temperature=0, max_tokens=2),
        )
        state, done = run(program, state, [item])
        hits.append(done[str(n)].num_cached_tokens)
    assert hits == [0, 0, 16, 0]


def test_generated_tokens_are_a_prefix_for_the_next_turn() -> None:
    program = tiny_program()
    first = request("1", prompt(1, 10), max_tokens=12)
    state, done = run(program, init(program), [first])
    turn = [*prompt(1, 10), *done["1"].tokens.tolist(), *prompt(2, 5)]
    state, after = run(program, state, [request("2", turn)])
    assert after["2"].num_cached_tokens == 20  # 21 of the 22 tokens were computed
    assert after["2"].tokens.tolist() == alone(request("2", turn)).tokens.tolist()


@pytest.mark.parametrize(
    ("running", "waiting", "admitted"),
    [
        (["a", "a", "b"], ["c", "a", None, "b"], ["a", None, "b"]),
        (["a"], ["b", "c", "a"], ["b", "a"]),
        ([None, None], ["a", "b", "c"], ["a", "b"]),
    ],
)
def test_admission_by_distinct_adapters(
    running: list[str | None], waiting: list[str | None], admitted: list[str | None]
) -> None:
    """Spec 11.2 with two places."""
    program = tiny_program(max_active_adapters=2)
    state = submit_all(
        with_adapters(program, "abc"),
        [request(f"r{n}", prompt(n, 3), who, max_tokens=30) for n, who in enumerate(running)],
    )
    state, _ = step(program, state)
    state = submit_all(
        state, [request(f"w{n}", prompt(n, 3), who) for n, who in enumerate(waiting)]
    )
    host, _ = schedule(program.config, state.host)
    names = {v: n for n, v in host.adapters.names.items()}
    assert [names.get(v) for v in host.rows.versions[len(running) :]] == admitted


def test_the_kernel_metadata_of_the_specification() -> None:
    """Spec 7.2 as design section 7 corrects it: base rows are no group.

    vLLM lists the -1 group first: active (-1, 0, 2), counts (3, 1, 4), sorted rows 3 4 7 5 0 1 2 6.
    Here: slots (0, 2), counts (1, 4), starts (0, 1, 5), sorted rows 5 0 1 2 6, two groups.
    """
    program = tiny_program(max_active_adapters=4)
    residents = (
        Residence(version="id 3", slot=0, row_blocks=(3,)),
        Residence(version="id 7", slot=2, row_blocks=(0, 1)),
    )
    slot_T = np.repeat([2, -1, 0, 2, -1], [3, 2, 1, 1, 1])  # rows A, B, C, D, E
    batch = pack_lora(program.config, residents, slot_T, 9)  # and one of padding
    assert batch.row_R.tolist() == [*range(16), *range(24, 32)]
    own_RT = (~batch.foreign_TR).T
    assert [row.nonzero().flatten().tolist() for row in own_RT[[16, 0]]] == [[5], [0, 1, 2, 6]]
    assert torch.equal(own_RT, own_RT[[0] * 16 + [16] * 8])
    assert batch.span_C2.tolist() == [[0, 24]]


def test_a_plan_tells_the_bucket_of_the_step() -> None:
    """Base rows are never counted; adapter counts round up to powers of two within the limit."""
    program = tiny_program(max_active_adapters=3)
    for names, want in (("", 0), ("a", 1), ("ab", 2), ("abc", 3)):
        requests = [request(f"{n}{k}", prompt(k, 3), n) for k in range(2) for n in names]
        state = submit_all(with_adapters(program), [*requests, request("base", prompt(3, 3))])
        _, plan = schedule(program.config, state.host)
        assert plan.descriptor.num_active_loras == want
        assert plan.descriptor.has_lora == bool(names)


def test_plans_list_every_effect() -> None:
    program = tiny_program(num_blocks=10, max_active_adapters=1)
    state, _ = run(program, with_adapters(program, "ab"), [request("1", prompt(1, 24), "a")])
    state = submit(state, request("2", prompt(2, 33), "b"))
    _, plan = schedule(program.config, state.host)
    assert [u.slot for u in plan.uploads] == [0]
    assert plan.overwrites.adapters == (state.host.adapters.names["a"],)
    cached = set(state.host.blocks.digest_of)
    assert plan.overwrites.blocks
    assert set(plan.overwrites.blocks) <= cached
    assert set(plan.overwrites.blocks) <= {b for t in plan.tables for b in t.tolist()}


def test_a_pool_is_whole_after_hundreds_of_random_events() -> None:
    """MO-03: 300 random submits, steps and aborts on 32 blocks; then a full-size request fits."""
    program = tiny_program(num_blocks=32, max_rows=4)
    state, rng = with_adapters(program, "ab"), np.random.default_rng(0)
    for n in range(300):
        event = rng.integers(3)
        live = sorted(state.host.requests)
        if event == 0 and len(live) < 6:
            who = [None, "a", "b"][rng.integers(3)]
            state = submit(state, request(str(n), prompt(n, int(rng.integers(1, 30))), who))
        elif event == 1 and live and rng.random() < 0.3:
            state = abort(state, live[rng.integers(len(live))])
        else:
            state, _ = step(program, state)
    state, _ = run_steps(program, state)
    assert state.host.blocks.num_free == 32
    _, done = run(program, state, [request("full", prompt(5, 120), max_tokens=3)])
    assert done["full"].finish_reason == "length"
