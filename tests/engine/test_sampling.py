"""Sampling parameters end to end, against transformers' generate and against each request alone.

Cases SL-05, SL-06, SL-08, SL-09, SL-11, SL-12, PC-04, DT-01.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from purestep.engine import (
    Completion,
    FinishReason,
    Request,
    SamplingParams,
    branch,
    init,
    logprob_dicts,
    prompt_logprob_dicts,
    step,
    submit,
)
from tests.engine.tiny import (
    checkpoint,
    peft_model,
    prompt,
    request,
    run,
    run_steps,
    submit_all,
    tiny_program,
    with_adapters,
)
from tests.models.tiny import make_model

NEUTRAL = request("neutral", prompt(0, 9))


def hf_tokens(tokens: list[int], count: int, **options: Any) -> list[int]:
    """Greedy continuation by transformers with its own processors."""
    with torch.no_grad():
        out = checkpoint()[1].generate(
            input_ids=torch.tensor([tokens]),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            **{"eos_token_id": None} | options,
        )
    return out[0, len(tokens) :].tolist()


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ({"repetition_penalty": 1.8}, {"repetition_penalty": 1.8}),
        ({"banned_ids": tuple(range(3, 90))}, {"suppress_tokens": list(range(3, 90))}),
        ({"logit_bias": {5: 4.0, 9: -3.0}}, {"sequence_bias": [[[5], 4.0], [[9], -3.0]]}),
        (
            {"ignore_eos": False, "min_tokens": 6, "logit_bias": {2: 30.0}},
            {"eos_token_id": 2, "min_new_tokens": 6, "sequence_bias": [[[2], 30.0]]},
        ),
        (
            {"repetition_penalty": 1.3, "banned_ids": (7, 8), "logit_bias": {5: 2.0}},
            {
                "repetition_penalty": 1.3,
                "suppress_tokens": [7, 8],
                "sequence_bias": [[[5], 2.0]],
            },
        ),
    ],
)
def test_greedy_with_edits_equals_transformers_generate(
    mine: dict[str, Any], theirs: dict[str, Any]
) -> None:
    """SL-09: the effect shows on its own row only; the neutral row beside it stays as it was."""
    program = tiny_program(stop_ids=(2,))
    items = [request(str(n), prompt(n, n + 3), max_tokens=12, **mine) for n in range(4)]
    _, done = run(program, init(program), [*items, NEUTRAL])
    for item in items:
        assert done[item.id].tokens.tolist() == hf_tokens(list(item.tokens), 12, **theirs)
    _, plain = run(
        program, init(program), [NEUTRAL, *(request(str(n), prompt(n, n + 3)) for n in range(4))]
    )
    assert done["neutral"].tokens.tolist() == plain["neutral"].tokens.tolist()
    changed = [done[i.id].tokens.tolist()[:8] != plain[i.id].tokens.tolist() for i in items]
    assert any(changed), "the edit has no effect here, so nothing was tested"


EFFECTS: dict[str, Any] = {
    "presence_penalty": 9.0,
    "frequency_penalty": 9.0,
    "allowed_ids": (3, 4, 5),
    "top_k": 1,
    "top_p": 1e-6,
    "min_p": 1.0,
    "temperature": 50.0,
}


@pytest.mark.parametrize(("name", "value"), EFFECTS.items())
def test_every_knob_turns_its_own_row_alone(name: str, value: Any) -> None:
    """SL-09: nothing is taken and ignored."""
    program = tiny_program()
    base = SamplingParams(temperature=1.0, seed=3, max_tokens=16, ignore_eos=True)
    twins = [
        Request(id="plain", tokens=prompt(1, 9), sampling=base),
        Request(id="turned", tokens=prompt(1, 9), sampling=replace(base, **{name: value})),
        NEUTRAL,
    ]
    _, done = run(program, init(program), twins)
    assert done["plain"].tokens.tolist() != done["turned"].tokens.tolist()
    for item in (twins[0], NEUTRAL):
        _, alone = run(program, init(program), [item])
        assert done[item.id].tokens.tolist() == alone[item.id].tokens.tolist()
    if name in ("top_k", "top_p", "min_p"):
        assert done["turned"].tokens.tolist() == hf_tokens(prompt(1, 9), 16)
    if name in ("presence_penalty", "frequency_penalty"):
        assert len(set(done["turned"].tokens.tolist())) == 16
    if name == "allowed_ids":
        assert set(done["turned"].tokens.tolist()) <= {3, 4, 5}


def test_a_seeded_request_draws_the_same_wherever_it_runs() -> None:
    """SL-06: alone; beside seeded, unseeded and greedy rows; elsewhere in the batch; in chunks;
    preempted; and with n > 1 each sample for itself."""
    drawn = {"temperature": 0.8, "seed": 42, "max_tokens": 16, "min_p": 0.02}
    item = request("x", prompt(5, 13), n=2, repetition_penalty=1.1, **drawn)
    unseeded = request("u", prompt(6, 4), temperature=1.0, max_tokens=20)
    seeded = request("s", prompt(7, 30), temperature=1.3, seed=42, max_tokens=20)
    seen = []
    for options, order in (
        ({}, [item]),
        ({}, [unseeded, seeded, NEUTRAL, item]),
        ({}, [item, seeded, unseeded]),
        ({"max_batched_tokens": 8}, [seeded, item]),
        ({"num_blocks": 15, "block_size": 4}, [seeded, unseeded, item]),
        ({"prefix_caching": False}, [item, unseeded]),
    ):
        program = tiny_program(**options)
        _, outputs = run_steps(program, submit_all(init(program), order))
        done = {c.key: c for out in outputs for c in out.finished}
        seen.append([done[key].tokens.tolist() for key in ("x", "x#1")])
        preempted = sum(c.num_preemptions for c in done.values())
        assert preempted or "num_blocks" not in options
    assert all(tokens == seen[0] for tokens in seen), seen
    assert seen[0][0] != seen[0][1]


def test_samples_and_branches_differ_and_share_the_prompt() -> None:
    program = tiny_program(max_batched_tokens=64)
    item = request("x", prompt(1, 21), temperature=1.0, n=4, max_tokens=12)
    state, outputs = step(program, submit(init(program), item))
    assert outputs.num_hit_tokens == 3 * 20, "three samples find the blocks of the first"
    state = branch(state, "x", ["y"])
    state = branch(state, "x#1", ["z"])
    _, news = run_steps(program, state)
    done = [c for out in (outputs, *news) for c in out.finished]
    assert [(c.id, c.index) for c in sorted(done, key=lambda c: c.key)] == [
        ("x", 0), ("x", 1), ("x", 2), ("x", 3), ("y", 0), ("z", 1),
    ]  # fmt: skip
    assert len({tuple(c.tokens.tolist()) for c in done}) == 6


def hf_logprobs(tokens: list[int], model: Any = None) -> torch.Tensor:
    """Log-softmax at every position, by transformers in one pass."""
    with torch.no_grad():
        return (model or checkpoint()[1])(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 0.5, "seed": 1},
        {"temperature": 2.0, "seed": 1},
        {"temperature": 1.0, "seed": 1, "top_k": 1},
        {"temperature": 1.0, "seed": 1, "top_p": 0.1},
        {"temperature": 0, "logit_bias": {5: 9.0}},
        {"temperature": 0, "repetition_penalty": 1.5},
    ],
)
def test_logprobs_are_the_models_own_whatever_the_sampling(sampling: dict[str, Any]) -> None:
    """SL-08: the raw log-softmax; counts 0, 1, 5 and the vocabulary in one batch."""
    program = tiny_program()
    items = [request(str(k), prompt(1, 9), logprobs=k, **sampling) for k in (0, 1, 5, 128)]
    _, done = run(program, init(program), items)
    tokens = done["0"].tokens.tolist()
    want = hf_logprobs([*prompt(1, 9), *tokens])[8:-1]
    for k in (0, 1, 5, 128):
        got = done[str(k)]
        assert got.tokens.tolist() == tokens
        chosen = want.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        np.testing.assert_allclose(got.logprobs, chosen, atol=1e-4)
        best = want.topk(k, -1)
        np.testing.assert_allclose(got.top_logprobs, best.values, atol=1e-4)
        assert got.top_ids.shape == (len(tokens), k)
        for token, entry in zip(tokens, logprob_dicts(got), strict=True):
            assert token in entry
            assert len(entry) <= k + 1
            assert all(np.isfinite(list(entry.values())))
    assert np.allclose(np.exp(done["128"].top_logprobs).sum(-1), 1, atol=1e-5)


def check_prompt_logprobs(done: Completion, tokens: list[int], k: int, want: torch.Tensor) -> None:
    entries = prompt_logprob_dicts(done, tokens)
    assert len(entries) == len(tokens)
    assert entries[0] is None
    for p, entry in enumerate(entries[1:]):
        assert tokens[p + 1] in entry
        np.testing.assert_allclose(entry[tokens[p + 1]], want[p, tokens[p + 1]], atol=1e-4)
        best = want[p].topk(k).values
        np.testing.assert_allclose(sorted(entry.values())[-k:], best.flip(0), atol=1e-4)
    assert np.isnan(done.prompt_logprobs[0])


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 33])
def test_prompt_logprobs_are_right_whatever_is_cached(length: int) -> None:
    """PC-04: warm without, then with, then again; beside requests of overlapping prefixes."""
    program = tiny_program(block_size=16, max_batched_tokens=24)
    tokens, want = prompt(3, length), hf_logprobs(prompt(3, length))
    asks = request("1", tokens, prompt_logprobs=3, max_tokens=2)
    state, _ = run(program, init(program), [request("0", tokens)])
    for n in range(3):
        others = [request(f"o{i}", [*tokens[: length // 2], *prompt(9 + i, 9)]) for i in range(2)]
        late = request("late", tokens, max_tokens=3)
        order = [asks, *others, late] if n % 2 else [*others, late, asks]
        state, done = run(program, state, order)
        check_prompt_logprobs(done["1"], tokens, 3, want)
        assert done["1"].num_cached_tokens == 0
        assert done["late"].num_cached_tokens == (length - 1) // 16 * 16


def test_scores_survive_preemption_and_are_told_once() -> None:
    """What was scored is not computed for that again: the second pass may use the cache."""
    program = tiny_program(num_blocks=14, max_batched_tokens=12, max_rows=3)
    items = [request(str(n), prompt(n, 17), prompt_logprobs=2, max_tokens=20) for n in range(3)]
    _, done = run(program, init(program), items)
    assert sum(c.num_preemptions for c in done.values())
    for item in items:
        check_prompt_logprobs(done[item.id], item.tokens, 2, hf_logprobs(item.tokens))


def test_scoring_alone() -> None:
    """max_tokens=0: scores of adapters and base in one call, nothing is generated."""
    program = tiny_program(max_context=32)
    score = SamplingParams(max_tokens=0, prompt_logprobs=1)
    full = prompt(1, 32)
    items = [
        Request(id=str(who), tokens=full, adapter=who, sampling=score) for who in (None, "a", "b")
    ]
    state, done = run(program, with_adapters(program, "ab"), items)
    for item in items:
        model = peft_model(item.adapter) if item.adapter else None
        check_prompt_logprobs(done[item.id], full, 1, hf_logprobs(full, model))
        assert done[item.id].finish_reason == FinishReason.LENGTH
        assert done[item.id].tokens.tolist() == []
    assert state.host.blocks.num_free == program.config.num_blocks


class _Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        for item in out if isinstance(out, tuple) else (out,):
            if isinstance(item, torch.Tensor):
                self.numel = max(self.numel, item.numel())
        return out


def test_prompt_logprobs_need_memory_for_a_chunk_not_for_the_prompt() -> None:
    """SL-12: 300 tokens in one step, vocabulary of 5000: logits of 64 positions at a time."""
    sizes = {"vocab_size": 5000, "max_position_embeddings": 512, "hidden_size": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16}
    program = tiny_program(sizes=sizes, max_batched_tokens=512, num_blocks=128)
    tokens = prompt(1, 300, 5000)
    item = request("x", tokens, prompt_logprobs=1, max_tokens=1)
    state = init(program)  # the pool may be larger
    with _Largest() as largest:
        _, done = run(program, state, [item])
    assert largest.numel <= 64 * 5000
    want = hf_logprobs(tokens, make_model(**sizes))
    check_prompt_logprobs(done["x"], tokens, 1, want)
    chunked = tiny_program(sizes=sizes, max_batched_tokens=64, num_blocks=128)
    _, again = run(chunked, init(chunked), [item])
    np.testing.assert_allclose(again["x"].prompt_logprobs, done["x"].prompt_logprobs, atol=1e-5)


def test_processors_change_their_row_and_end_it_when_they_fail() -> None:
    """Design, section 5; want 17 of the most wanted: own logits processing per request."""

    def even_only(seen: tuple[int, ...], logits: torch.Tensor, offset: int = 0) -> torch.Tensor:
        assert list(seen[:9]) == prompt(1, 9)
        logits[1 - offset :: 2] = -torch.inf
        return logits

    def breaks_later(seen: tuple[int, ...], logits: torch.Tensor) -> torch.Tensor:
        if len(seen) == 12:
            raise RuntimeError("enough")
        return logits

    program = tiny_program(processors={"even": even_only, "breaks": breaks_later})
    items = [
        request("even", prompt(1, 9), processor="even"),
        request("odd", prompt(1, 9), processor="even", processor_args=(1,)),
        request("broken", prompt(1, 9), processor="breaks", logprobs=1),
        NEUTRAL,
    ]
    state, done = run(program, init(program), items)
    assert all(t % 2 == 0 for t in done["even"].tokens.tolist())
    assert all(t % 2 == 1 for t in done["odd"].tokens.tolist())
    assert done["broken"].finish_reason == FinishReason.ERROR
    assert "logits processor 'breaks': RuntimeError('enough')" in done["broken"].error
    assert done["broken"].tokens.tolist() == hf_tokens(prompt(1, 9), 3)
    assert len(done["broken"].top_ids) == 3
    assert done["neutral"].tokens.tolist() == hf_tokens(list(NEUTRAL.tokens), 8)
    assert state.host.blocks.num_free == program.config.num_blocks


def test_a_processor_is_blamed_for_what_it_did_alone() -> None:
    """SL-05: NaN weights end rows with the model's own error, whatever the processor does."""
    functions = {"same": lambda seen, logits: logits, "raises": lambda seen, logits: 1 / 0}
    program = tiny_program(processors=functions)
    spoiled = tree_map(lambda leaf: None if leaf is None else leaf * torch.nan, program.params)
    items = [request(name, prompt(1, 5), processor=name) for name in functions]
    items.append(request("scored", prompt(1, 5), max_tokens=0, prompt_logprobs=1))
    items.append(request("tops", prompt(1, 5), logprobs=2))
    _, done = run(replace(program, params=spoiled), init(program), items)
    for name in ("same", "raises", "scored", "tops"):
        assert done[name].finish_reason == FinishReason.ERROR
        assert "model's logits are not finite" in done[name].error
    assert len(done["tops"].top_ids) == 0, "what a failed row would have told is dropped"


def test_a_processor_cannot_end_a_row_before_min_tokens() -> None:
    """SL-01: end tokens are banned before it is called; it may lift that, but they do not count."""

    def only(seen: tuple[int, ...], logits: torch.Tensor, token: int) -> torch.Tensor:
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor(token), 0.0)

    program = tiny_program(processors={"only": only}, stop_ids=(7,))
    words = {"processor": "only", "min_tokens": 4, "ignore_eos": False}
    items = [
        request("eos", prompt(1, 5), processor_args=(7,), **words),
        request("own", prompt(1, 5), processor_args=(9,), stop_ids=(9,), **words),
    ]
    _, done = run(program, init(program), items)
    assert done["eos"].tokens.tolist() == [7] * 4
    assert done["own"].tokens.tolist() == [9] * 4
    assert {c.finish_reason for c in done.values()} == {FinishReason.STOP}


def test_likeliest_tokens_of_equal_and_other_counts_keep_their_rows() -> None:
    """SL-08: rows of one count are looked at together; each gets what it gets alone."""
    program = tiny_program()
    items = [request(str(n), prompt(n, 5), logprobs=k) for n, k in enumerate((2, 0, 3, 2))]
    _, done = run(program, init(program), [NEUTRAL, *items])
    for item in items:
        _, alone = run(program, init(program), [item])
        assert done[item.id].top_ids.tolist() == alone[item.id].top_ids.tolist()


def test_a_row_without_a_token_left_ends_alone() -> None:
    """SL-05: a bias of -inf on every id."""
    program = tiny_program()
    bias = {token: -float("inf") for token in range(128)}
    _, done = run(program, init(program), [request("x", prompt(1, 5), logit_bias=bias), NEUTRAL])
    assert done["x"].finish_reason == FinishReason.ERROR
    assert "no token is left" in done["x"].error
    assert done["neutral"].tokens.tolist() == hf_tokens(list(NEUTRAL.tokens), 8)
