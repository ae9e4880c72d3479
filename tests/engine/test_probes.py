"""Research hooks: hidden states, prompts as embeddings, one prompt for many adapters.

Cases AU-01, AU-03, AU-06.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from purestep.engine import (
    FinishReason,
    Request,
    SamplingParams,
    for_adapters,
    fork,
    generate,
    init,
    restore,
    snapshot,
    step,
    submit,
)
from tests.engine.tiny import (
    adapter_folder,
    checkpoint,
    oracle_tokens,
    peft_model,
    prompt,
    request,
    run,
    run_steps,
    tiny_program,
    with_adapters,
)


def model_of(adapter: str | None) -> Any:
    return peft_model(adapter) if adapter else checkpoint()[1]


def hf_hidden(tokens: list[int], adapter: str | None) -> list[np.ndarray]:
    with torch.no_grad():
        out = model_of(adapter)(input_ids=torch.tensor([tokens]), output_hidden_states=True)
    return [h[0].numpy() for h in out.hidden_states]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batched_tokens": 8},
        {"num_blocks": 19, "max_batched_tokens": 16},
        {"prefix_caching": False},
        {"token_buckets": (16, 32)},
    ],
)
def test_hidden_states_equal_transformers(options: dict[str, Any]) -> None:
    """AU-01: prompt and generated positions, two adapters and base, whole, in chunks, preempted and
    behind a cached prefix, beside rows that do not ask."""
    program = tiny_program(**options)
    state, _ = run(program, with_adapters(program, "ab"), [request("warm", prompt(1, 17), "a")])
    items = [
        Request(
            id=str(who),
            tokens=prompt(1, 17),
            adapter=who,
            sampling=request("", [1], max_tokens=9).sampling,
            hidden_layers=layers,
        )
        for who, layers in (("a", (0, -1)), ("b", (1,)), (None, (-1, 0, 1)))
    ]
    _, done = run(program, state, [request("plain", prompt(2, 5)), *items])
    assert sum(c.num_preemptions for c in done.values()) or "num_blocks" not in options
    for item in items:
        got = done[item.id]
        read = [*item.tokens, *got.tokens.tolist()[:-1]]
        want = hf_hidden(read, item.adapter)
        assert set(got.hidden_states) == set(item.hidden_layers)
        for layer in item.hidden_layers:
            assert got.hidden_states[layer].shape == (17 + 9 - 1, 32)
            np.testing.assert_allclose(got.hidden_states[layer], want[layer], atol=1e-4)
    assert done["plain"].hidden_states is None


def test_hidden_states_of_a_prompt_alone() -> None:
    program = tiny_program(max_batched_tokens=8)
    probe = Request(
        id="x", tokens=prompt(1, 19), hidden_layers=(-1,), sampling=SamplingParams(max_tokens=0)
    )
    state, done = run(program, init(program), [probe])
    np.testing.assert_allclose(
        done["x"].hidden_states[-1], hf_hidden(prompt(1, 19), None)[-1], atol=1e-4
    )
    assert done["x"].finish_reason == FinishReason.LENGTH
    assert state.host.blocks.num_free == program.config.num_blocks


def embeddings(tokens: list[int]) -> torch.Tensor:
    return checkpoint()[1].get_input_embeddings()(torch.tensor(tokens)).detach()


def test_embeddings_of_ids_give_what_the_ids_give() -> None:
    """AU-03: length and usage 20; in chunks; beside ids; mixed with ids; with an adapter."""
    tokens = prompt(1, 20)
    program = tiny_program(max_batched_tokens=12)
    mixed = [*tokens[:3], -1, -1, *tokens[5:11], -1, *tokens[12:]]
    holes = [tokens[i] for i in (3, 4, 11)]
    greedy = request("", [1]).sampling
    items = [
        Request(id="ids", tokens=tokens, sampling=greedy),
        Request(id="rows", prompt_embeds=embeddings(tokens), sampling=greedy),
        Request(id="numpy", prompt_embeds=embeddings(tokens).numpy(), sampling=greedy),
        Request(id="mixed", tokens=mixed, prompt_embeds=embeddings(holes), sampling=greedy),
        Request(id="lora", prompt_embeds=embeddings(tokens), adapter="b", sampling=greedy),
    ]
    state, done = run(program, with_adapters(program, "b"), items)
    want = oracle_tokens(checkpoint()[1], tokens, 8)
    for name in ("ids", "rows", "numpy", "mixed"):
        assert done[name].tokens.tolist() == want
        assert done[name].num_prompt_tokens == 20
        np.testing.assert_allclose(done[name].logprobs, done["ids"].logprobs, atol=1e-5)
    assert done["lora"].tokens.tolist() == oracle_tokens(peft_model("b"), tokens, 8)
    assert not [name for name in state.blobs if name not in state.host.adapters.registered]


def test_embeddings_share_a_prefix_with_equal_ones_alone() -> None:
    """AU-03: two different prompts of equal length never share; equal ones do; generated tokens
    extend the chain from within a block that holds embeddings."""
    program = tiny_program()
    state, hits = init(program), []
    one, other = embeddings(prompt(1, 14)), embeddings(prompt(2, 14))
    turn = [-1] * 14
    for n, (tokens, rows) in enumerate(
        [((), one), ((), other), ((), one), (turn, one), (prompt(1, 14), None)]
    ):
        item = Request(
            id=str(n), tokens=tokens, prompt_embeds=rows, sampling=request("", [1]).sampling
        )
        state, done = run(program, state, [item])
        hits.append(done[str(n)].num_cached_tokens)
    assert hits == [0, 0, 12, 12, 0]
    said = done["4"].tokens.tolist()
    follow = {"tokens": [*turn, *said[:5]], "sampling": request("", [1]).sampling}
    state, done = run(program, state, [Request(id="5", prompt_embeds=one, **follow)])
    assert done["5"].num_cached_tokens == 16, "positions 12 to 15 hold two embeddings and two ids"
    state, done = run(program, state, [Request(id="6", prompt_embeds=other, **follow)])
    assert done["6"].num_cached_tokens == 12


def test_embeddings_survive_preemption_snapshot_and_fork(tmp_path: Path) -> None:
    program = tiny_program(num_blocks=12, max_rows=3)
    items = [
        Request(
            id=str(n),
            prompt_embeds=embeddings(prompt(n, 11)),
            sampling=request("", [1], max_tokens=12).sampling,
        )
        for n in range(3)
    ]
    state = init(program)
    for item in items:
        state = submit(state, item)
    for _ in range(3):
        state, _ = step(program, state)
    snapshot(state, tmp_path / "shot")
    for twin in (restore(program, tmp_path / "shot"), fork(program, state), state):
        _, outputs = run_steps(program, twin)
        done = {c.id: c for out in outputs for c in out.finished}
        assert sum(c.num_preemptions for c in done.values())
        for n in range(3):
            assert done[str(n)].tokens.tolist() == oracle_tokens(checkpoint()[1], prompt(n, 11), 12)


def test_text_behind_a_soft_prompt_is_scored() -> None:
    """Where an embedding stands there is no id to score; the ids behind it have theirs."""
    program = tiny_program()
    ids = prompt(3, 8)
    soft = embeddings(prompt(4, 3))
    tokens = [-1, -1, -1, *ids]
    item = Request(
        id="x",
        tokens=tokens,
        prompt_embeds=soft,
        sampling=SamplingParams(max_tokens=0, prompt_logprobs=1),
    )
    _, done = run(program, init(program), [item])
    with torch.no_grad():
        rows = torch.cat([soft, embeddings(ids)])[None]
        want = checkpoint()[1](inputs_embeds=rows).logits[0].log_softmax(-1)
    got = done["x"].prompt_logprobs
    assert np.isnan(got[:3]).all()
    np.testing.assert_allclose(
        got[3:], [want[p + 2, t].item() for p, t in enumerate(ids)], atol=1e-4
    )


def test_one_prompt_for_five_adapters_in_one_call() -> None:
    """AU-06: five results."""
    program = tiny_program()
    folders = {name: adapter_folder(name) for name in "abcd"}
    asked = request("q", prompt(1, 9))
    requests = for_adapters(asked, [None, *"abcd"])
    done = {c.id: c for c in generate(program, requests, adapters=folders)}
    assert len(done) == 5
    for item in requests:
        assert done[item.id].tokens.tolist() == oracle_tokens(
            model_of(item.adapter), prompt(1, 9), 8
        )
