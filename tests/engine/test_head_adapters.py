"""Adapters on the embedding and the head (LF-04, LF-06), tied and untied, against PEFT unmerged."""

from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor

from purestep.engine import (
    AdapterLoaded,
    EngineState,
    Program,
    Request,
    deliver,
    digest,
    fork,
    init,
    load_adapter,
    load_adapter_tensors,
    register_adapter,
    restore,
    snapshot,
    step,
)
from purestep.engine.adapters import read
from purestep.engine.memory import memory_summary, pool_bytes, vocab_rows_bytes
from purestep.engine.pack import pack, pack_lora
from purestep.engine.pool import row_index
from purestep.engine.schedule import schedule
from purestep.models.decoder import AdapterRows, EmbedRows, embed, logits
from purestep.models.ends import EAGER
from purestep.ops.linear import linear
from purestep.state.adapters import Residence
from purestep.state.batch import EmbedLora, LoraBatch
from purestep.state.errors import AdapterError
from tests.engine.tiny import (
    ADAPTERS,
    checkpoint,
    oracle_logprobs,
    oracle_tokens,
    prompt,
    request,
    run,
    run_steps,
    submit_all,
    tiny_program,
)
from tests.models.peft_fixtures import save, wrap

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")  # it saves base weights too

FAMILIES = pytest.mark.parametrize("family", ["llama", "llama-tied"])
VOCAB: dict[str, dict[str, Any]] = {
    "embed": {"r": 4, "lora_alpha": 4, "target_modules": ["embed_tokens"]},
    "head": {"r": 3, "lora_alpha": 6, "use_rslora": True, "target_modules": ["lm_head"]},
    "both": {
        "r": 12,
        "lora_alpha": 12,
        "target_modules": ["embed_tokens", "lm_head", "q_proj"],
        "rank_pattern": {"embed_tokens": 9, "lm_head": 17},
        "alpha_pattern": {"embed_tokens": 4},
    },
}
PLAIN = {name: ADAPTERS[name] for name in "ab"}
NAMES = [*VOCAB, *PLAIN]


@cache
def oracle(name: str | None, family: str) -> PeftModel:
    """PEFT's model of one of the adapters above; transformers' own for the base."""
    model = checkpoint(family)[1]
    return model if name is None else wrap(model, seed=ord(name[0]), **(VOCAB | PLAIN)[name])


@cache
def folder(name: str, family: str) -> Path:
    return save(oracle(name, family))


def with_all(program: Program, family: str, names: list[str] = NAMES) -> EngineState:
    state = init(program)
    for name in names:
        state = load_adapter(state, folder(name, family), name=name)
    return state


def mixed(length: int = 9, **sampling: Any) -> list[Request]:
    """A request for every adapter, and base ones before, between and after them."""
    names = [None, "a", "both", None, "head", "embed", "b", None]
    return [
        request(f"{n}-{name}", prompt(n, length + n % 3), name, **sampling)
        for n, name in enumerate(names)
    ]


def assert_equal_to_peft(done: dict[str, Any], requests: list[Request], family: str) -> None:
    for item in requests:
        got, model = done[item.id], oracle(item.adapter, family)
        assert got.tokens.tolist() == oracle_tokens(model, item.tokens, len(got.tokens)), item.id
        want = oracle_logprobs(model, item.tokens, got.tokens)
        np.testing.assert_allclose(got.logprobs, want, atol=1e-4)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """What each step's `logits` was given and gave: hidden states and logits."""
    calls: list[tuple[Tensor, Tensor]] = []

    def spy(params: Any, hidden_TD: Tensor, *rest: Any) -> Tensor:
        out = logits(params, hidden_TD, *rest)
        calls.append((hidden_TD.clone(), out.clone()))
        return out

    ends = replace(EAGER, logits=spy)
    monkeypatch.setattr(import_module("purestep.engine.program"), "EAGER", ends)
    return calls


@FAMILIES
@pytest.mark.parametrize("max_batched_tokens", [256, 16, 8], ids=["whole", "chunks", "small"])
def test_a_mixed_batch_equals_peft(family: str, max_batched_tokens: int) -> None:
    """LF-06: head, embedding, both with q_proj, ordinary adapters and base rows in one batch.

    In chunks most steps sample fewer rows than they run, so the head's mapping is its own.
    """
    program = tiny_program(family, max_batched_tokens=max_batched_tokens, max_active_adapters=5)
    requests = mixed(length=21)
    _, done = run(program, with_all(program, family), requests)
    assert_equal_to_peft(done, requests, family)


def test_an_adapter_that_peft_ties_equals_peft() -> None:
    """ensure_weight_tying: one pair serves the embedding and the head, and is stored as two."""
    model = wrap(
        checkpoint("llama-tied")[1], seed=3, target_modules=["lm_head"], ensure_weight_tying=True
    )
    program = tiny_program("llama-tied")
    state = load_adapter(init(program), save(model), name="tied")
    item = request("x", prompt(1, 9), "tied")
    got = run(program, state, [item])[1]["x"]
    assert got.tokens.tolist() == oracle_tokens(model, item.tokens, 8)
    np.testing.assert_allclose(
        got.logprobs, oracle_logprobs(model, item.tokens, got.tokens), atol=1e-4
    )


@FAMILIES
def test_a_head_adapter_leaves_the_hidden_states_alone(family: str, seen: list) -> None:
    """LF-06: hidden states, KV and the embedding are bit-equal to base; the logits are PEFT's."""
    program, item = tiny_program(family), request("x", prompt(1, 9), "head", max_tokens=1)
    table = program.params.embed_VD.clone()
    pages = []
    for adapter in ("head", None):
        state, _ = run(program, with_all(program, family), [replace(item, adapter=adapter)])
        pages.append(torch.stack(state.device.pool.kv))
    (hidden, got), (base_hidden, base) = seen
    assert torch.equal(hidden, base_hidden)
    assert torch.equal(*pages)
    assert torch.equal(program.params.embed_VD, table)
    assert (got - base).abs().max() > 0.1
    with torch.no_grad():
        want = oracle("head", family)(input_ids=torch.tensor([item.tokens])).logits[0, -1]
    torch.testing.assert_close(got[0], want, rtol=0, atol=1e-4)


@FAMILIES
def test_an_embedding_adapter_leaves_the_head_alone(family: str, seen: list) -> None:
    """LF-06: the logits are the base head's, of other hidden states."""
    program, item = tiny_program(family), request("x", prompt(1, 9), "embed", max_tokens=1)
    for adapter in ("embed", None):
        run(program, with_all(program, family), [replace(item, adapter=adapter)])
    (hidden, got), (base_hidden, _) = seen
    assert not torch.equal(hidden, base_hidden)
    assert torch.equal(got, linear(hidden[-1:], program.params.head_VD))


@FAMILIES
def test_rows_without_such_an_adapter_keep_their_bits(family: str) -> None:
    """LK-05: base and ordinary rows beside adapters 1000 times too strong; padding too."""
    program = tiny_program(
        family, max_active_adapters=5, max_batched_tokens=128, token_buckets=(128,)
    )
    loud, silent = mixed(), [replace(r, adapter=None) if r.adapter in VOCAB else r for r in mixed()]
    results = []
    for requests in (loud, silent):
        state, _ = step(program, submit_all(with_all(program, family), requests))
        state.device.pool.embed.b_PD.mul_(1e3)
        state.device.pool.head.b_PO.mul_(1e3)
        results.append(run(program, state)[1])
    for item in loud:
        got, want = (result[item.id].logprobs.tobytes() for result in results)
        assert (got == want) == (item.adapter not in VOCAB), item.id


@FAMILIES
@pytest.mark.parametrize("name", VOCAB)
def test_bits_do_not_depend_on_the_other_rows(family: str, name: str) -> None:
    """In one padded shape: beside every other adapter, of higher rank too, or beside base rows."""
    program = tiny_program(
        family, max_active_adapters=5, max_batched_tokens=128, token_buckets=(128,)
    )
    (mine,) = [item for item in mixed() if item.adapter == name]
    alone = [mine if item.id == mine.id else replace(item, adapter=None) for item in mixed()]
    one, other = (run(program, with_all(program, family), batch)[1] for batch in (mixed(), alone))
    assert one[mine.id].logprobs.tobytes() == other[mine.id].logprobs.tobytes()


@FAMILIES
def test_free_rows_are_never_read(family: str) -> None:
    """NaN where no adapter of the linear lives, in rows that ordinary adapters own too."""
    program = tiny_program(family, max_active_adapters=5)
    state, requests = with_all(program, family), mixed()
    pool = state.device.pool
    for tensor in (pool.embed.a_CVR, pool.embed.b_PD, pool.head.a_SPD, pool.head.b_PO):
        tensor.fill_(float("nan"))
    assert_equal_to_peft(run(program, state, requests)[1], requests, family)


def test_values_that_are_not_finite_end_only_their_own_request() -> None:
    """LF-18, on the device: NaN in one adapter's embedding, and a head that overflows."""
    program = tiny_program(max_active_adapters=5, max_batched_tokens=128)
    requests = mixed()
    state, _ = step(program, submit_all(with_all(program, "llama"), requests))
    ledger, pool = state.host.adapters, state.device.pool
    pool.embed.a_CVR[list(ledger.resident[ledger.names["embed"]].row_blocks)] = float("nan")
    pool.head.b_PO[row_index(ledger.resident[ledger.names["head"]])] = 3e38
    _, done = run(program, state)
    bad = {item.id for item in requests if item.adapter in ("embed", "head")}
    assert {name for name, item in done.items() if item.finish_reason == "error"} == bad
    assert_equal_to_peft(done, [r for r in requests if r.id not in bad], "llama")


@FAMILIES
def test_rows_are_handed_on_without_residue(family: str) -> None:
    """One slot and few rows: each adapter takes over those of the one before, in every order."""
    program = tiny_program(family, max_active_adapters=1, max_registered_adapters=5, lora_rows=24)
    state = with_all(program, family)
    for names in (NAMES, NAMES[::-1], ["both", "a", "head", "embed", "head", "both", "embed"]):
        requests = [
            request(str(n), prompt(n, 7), name, max_tokens=3) for n, name in enumerate(names)
        ]
        state, done = run(program, state, requests)
        assert_equal_to_peft(done, requests, family)


def mid_decode(program: Program, family: str) -> EngineState:
    """Some steps into a mixed batch; the adapter "both" has no file."""
    state = with_all(program, family, [name for name in NAMES if name != "both"])
    model = oracle("both", family)
    tensors, config = get_peft_model_state_dict(model), model.peft_config["default"]
    state = submit_all(load_adapter_tensors(state, tensors, config, name="both"), mixed())
    for _ in range(6):
        state, _ = step(program, state)
    assert not state.host.idle
    return state


def same(done: dict[str, Any]) -> dict[str, tuple[list[int], bytes]]:
    return {name: (item.tokens.tolist(), item.logprobs.tobytes()) for name, item in done.items()}


@FAMILIES
def test_fork_and_snapshot_carry_head_and_embedding(family: str, tmp_path: Path) -> None:
    """Both twins go on as the original does, to the bit, and the original as if never copied."""
    program = tiny_program(family, max_active_adapters=5, max_batched_tokens=16)
    state = mid_decode(program, family)
    twin, small = fork(program, state), fork(program, state, num_blocks=60)
    snapshot(state, tmp_path / "s")
    restored = restore(program, tmp_path / "s")
    assert digest(restored.host) == digest(state.host) == digest(twin.host)
    _, done = run(program, state)
    assert_equal_to_peft(done, mixed(), family)
    for copy in (twin, small, restored):
        assert same(run(program, copy)[1]) == same(done)
    added = [replace(item, id=f"new {item.id}") for item in mixed(length=5)]
    _, done = run(program, restore(program, tmp_path / "s"), added)
    assert_equal_to_peft(done, added, family)


def test_ordinary_batches_do_no_work_for_head_and_embedding() -> None:
    """A plan without such rows packs nothing for them; ordinary uploads write nothing there."""
    program = tiny_program(max_active_adapters=5, max_batched_tokens=8)
    state = with_all(program, "llama")
    plain = [request("1", prompt(1, 3), "a"), request("2", prompt(2, 3))]
    batch = pack(program.config, schedule(program.config, submit_all(state, plain).host)[1])
    assert batch.lora is not None
    assert batch.embed_lora is batch.head_lora is None
    done, _ = run(program, state, plain)
    pool = done.device.pool
    for tensor in (pool.embed.a_CVR, pool.embed.b_PD, pool.head.a_SPD, pool.head.b_PO):
        assert not tensor.any()
    long = [request("3", prompt(3, 20), "both")]
    state = submit_all(with_all(program, "llama"), long)
    batch = pack(program.config, schedule(program.config, state.host)[1])
    assert batch.embed_lora is not None
    assert batch.head_lora is None, "no row of this chunk is sampled"


def test_the_pool_has_no_rows_for_them_unless_asked() -> None:
    """A vocabulary is long: refused by the option's name, with nothing changed."""
    small, large = tiny_program(lora_vocab=False), tiny_program()
    assert large.config.lora_vocab, "the default on a CPU, where unwritten memory costs nothing"
    V, D, P = 128, 32, 64
    extra = 2 * P * (V + D) * 4
    assert vocab_rows_bytes(small.config) == extra
    assert pool_bytes(large.config, 3) - pool_bytes(small.config, 3) == extra
    pool = init(large).device.pool
    tables = (pool.embed.a_CVR, pool.embed.b_PD, pool.head.a_SPD, pool.head.b_PO)
    assert sum(t.nbytes for t in tables) == extra
    assert "embed_tokens and lm_head" in memory_summary(large.config)
    assert "embed_tokens and lm_head" not in memory_summary(small.config)

    state = load_adapter(init(small), folder("a", "llama"), name="a")
    assert state.device.pool.embed is state.device.pool.head is None
    before = digest(state.host)
    for name in VOCAB:
        with pytest.raises(AdapterError, match=rf"'{name}' adapts .*lora_vocab=False.*0 MiB"):
            load_adapter(state, folder(name, "llama"), name=name)
    assert digest(state.host) == before
    item = request("x", prompt(1, 9), "a")
    state, done = run(small, state, [item])
    assert_equal_to_peft(done, [item], "llama")

    source = str(folder("head", "llama"))
    state = register_adapter(state, source, name="late")
    state, _ = step(small, submit_all(state, [request("y", prompt(1, 9), "late")]))
    adapter = read(small.config, source, "late")
    state = deliver(state, AdapterLoaded(name="late", source=source, adapter=adapter))
    assert "lora_vocab=False" in run(small, state)[1]["y"].error


def test_a_snapshot_with_them_needs_the_option(tmp_path: Path) -> None:
    small, large = tiny_program(lora_vocab=False), tiny_program()
    snapshot(with_all(large, "llama", ["a"]), tmp_path / "plain")
    snapshot(with_all(large, "llama", ["a", "head"]), tmp_path / "head")
    item = request("x", prompt(1, 9), "a")
    restored = restore(small, tmp_path / "plain")
    assert_equal_to_peft(run(small, restored, [item])[1], [item], "llama")
    with pytest.raises(AdapterError, match=r"'head'.* adapts lm_head, but lora_vocab=False"):
        restore(small, tmp_path / "head")


def test_whole_modules_in_an_adapter_are_refused() -> None:
    """LF-04: modules_to_save is named, with the modules; plain and base rows never see them."""
    program = tiny_program()
    state = with_all(program, "llama", ["a"])
    before = digest(state.host)
    model = wrap(
        checkpoint()[1],
        seed=4,
        target_modules=["q_proj"],
        modules_to_save=["lm_head", "embed_tokens"],
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "modules_to_save" in name:
                weight.add_(1.0)
    with pytest.raises(AdapterError, match=r"modules_to_save=\['lm_head', 'embed_tokens'\]"):
        load_adapter(state, save(model), name="whole")
    tensors = get_peft_model_state_dict(model)
    config = model.peft_config["default"].to_dict() | {"modules_to_save": None}
    with pytest.raises(AdapterError, match=r"modules_to_save.*lm_head\.weight.*embed_tokens\.w"):
        load_adapter_tensors(state, tensors, config, name="whole")
    assert digest(state.host) == before
    requests = [request("x", prompt(1, 9), "a"), request("y", prompt(2, 9))]
    assert_equal_to_peft(run(program, state, requests)[1], requests, "llama")


def grouped(program: Program, tokens: list[int], T: int, row_block: int) -> LoraBatch:
    """An adapter in this row block, on these of T token rows."""
    place = Residence(version="x", slot=0, row_blocks=(row_block,))
    slot_T = np.full(T, -1)
    slot_T[tokens] = 0
    return pack_lora(program.config, [place], slot_T, T)


def test_sums_are_rounded_once_in_bfloat16() -> None:
    """The head's delta meets fp32 logits; the embedding's is added in fp32 and then rounded."""
    program = tiny_program(dtype="bfloat16")
    params, P, (V, D) = program.params, 16, program.params.embed_VD.shape
    source = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source).bfloat16()

    h_TD, rows = random(6, D), AdapterRows(a_SPD=random(1, P, D), b_PO=random(P, V))
    base = F.linear(h_TD[1:5], params.head_VD).float()
    got = logits(params, h_TD, torch.arange(1, 5), rows, grouped(program, [1, 3], 4, 1))
    delta = h_TD[1:5].float() @ rows.a_SPD[0, 8:].float().T @ rows.b_PO[8:].float()
    assert got.dtype == torch.float32
    assert torch.equal(got[[0, 2]], base[[0, 2]])
    torch.testing.assert_close(got[[1, 3]], (base + delta)[[1, 3]], rtol=1e-6, atol=1e-4)

    table = EmbedRows(a_CVR=random(2, V, 8), b_PD=random(P, D))
    state = submit_all(init(program), [request("x", prompt(1, 5))])
    batch = pack(program.config, schedule(program.config, state.host)[1])
    T = len(batch.token_T)
    lora = EmbedLora(
        lora=grouped(program, [0, 2], T, 1),
        block_TC=torch.tensor([[1], [-1], [1], *[[-1]] * (T - 3)]),
        column_P=torch.tensor([*[-1] * 8, *range(8)]),
    )
    got = embed(params, table, replace(batch, embed_lora=lora))
    base = params.embed_VD[batch.token_T]
    want = base.float() + table.a_CVR[1][batch.token_T].float() @ table.b_PD[8:].float()
    assert torch.equal(got[1], base[1])
    assert torch.equal(got[3:], base[3:])
    torch.testing.assert_close(got[[0, 2]], want[[0, 2]].bfloat16(), rtol=8e-3, atol=0)


@FAMILIES
def test_the_rows_really_fed_to_the_head_get_their_own_delta(family: str) -> None:
    """Spec 10.2 (W20): prompts of mixed adapters are scored in chunks of a step, and two samples
    are drawn from one of them; every score is PEFT's."""
    program = tiny_program(family, max_batched_tokens=20, num_blocks=128)
    state = with_all(program, family)
    items = mixed(17, prompt_logprobs=2, max_tokens=3)
    drawn = {"prompt_logprobs": 0, "n": 2, "temperature": 1.0, "seed": 5, "max_tokens": 6}
    items.append(request("drawn", prompt(20, 70), "head", **drawn))
    steps = run_steps(program, submit_all(state, items))[1]
    done = {c.key: c for out in steps for c in out.finished}
    for item in items:
        got, tokens = done[item.id], list(item.tokens)
        want = oracle_logprobs(oracle(item.adapter, family), tokens[:1], tokens[1:])
        np.testing.assert_allclose(got.prompt_logprobs[1:], want, atol=1e-4)
    for key in ("drawn", "drawn#1"):
        model = oracle("head", family)
        want = oracle_logprobs(model, prompt(20, 70), done[key].tokens)
        np.testing.assert_allclose(done[key].logprobs, want, atol=1e-4)
    assert done["drawn"].tokens.tolist() != done["drawn#1"].tokens.tolist()


@FAMILIES
def test_embeddings_given_as_a_prompt_get_no_delta(family: str) -> None:
    """AU-03: with an adapter that changes embed_tokens, given rows enter as they are; the ids that
    follow are looked up with the delta."""
    program, adapter = tiny_program(family), oracle("embed", family)
    tokens = prompt(1, 12)
    rows = adapter.get_input_embeddings()(torch.tensor(tokens)).detach()  # with the delta
    items = [
        replace(request("ids", tokens, "embed"), tokens=tokens),
        replace(request("rows", (), "embed"), prompt_embeds=rows),
    ]
    _, done = run(program, with_all(program, family, ["embed"]), items)
    want = oracle_tokens(adapter, tokens, 8)
    assert done["ids"].tokens.tolist() == done["rows"].tokens.tolist() == want
