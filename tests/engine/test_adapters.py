"""Adapters in the engine: numbers against PEFT, names, versions, residency, background loads."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from purestep.engine import (
    AdapterFailed,
    AdapterLoaded,
    deliver,
    digest,
    init,
    load_adapter,
    load_adapter_tensors,
    pin_adapter,
    register_adapter,
    step,
    submit,
    unpin_adapter,
)
from purestep.engine.adapters import read
from purestep.state.errors import AdapterError, RequestError, UnknownAdapterError
from tests.engine.tiny import (
    adapter_folder,
    alone,
    checkpoint,
    oracle_logprobs,
    oracle_tokens,
    peft_model,
    prompt,
    request,
    run,
    run_steps,
    submit_all,
    tiny_program,
    with_adapters,
)
from tests.models.peft_fixtures import make_adapter, save, wrap

RANKS = [1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 31, 32, 33, 64]


def test_every_rank_equals_peft_in_one_batch() -> None:
    """LK-03: ranks 1 to 64, powers of two or not, together; hidden size 64, all projections."""
    sizes = {"hidden_size": 64}
    rows = sum(-(-r // 8) * 8 for r in RANKS)
    program = tiny_program(
        sizes=sizes,
        max_rows=16,
        num_blocks=256,
        max_active_adapters=16,
        lora_rows=rows,
        max_registered_adapters=16,
    )
    model = checkpoint(**sizes)[1]
    oracles = {
        r: wrap(model, seed=r, r=r, lora_alpha=r, target_modules="all-linear") for r in RANKS
    }
    state = init(program)
    for r, oracle in oracles.items():
        state = load_adapter(state, save(oracle), name=f"rank{r}")
    requests = [request(str(r), prompt(r, 9), f"rank{r}", max_tokens=5) for r in RANKS]
    _, done = run(program, state, requests)
    for r, item in zip(RANKS, requests, strict=True):
        got = done[item.id]
        assert got.tokens.tolist() == oracle_tokens(oracles[r], item.tokens, 5), r
        want = oracle_logprobs(oracles[r], item.tokens, got.tokens)
        np.testing.assert_allclose(got.logprobs, want, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen2", "llama-bias"])
def test_adapters_on_biased_families_equal_peft(family: str) -> None:
    """LF-16, bias=none: the base model has biases, the adapter none."""
    program = tiny_program(family)
    state = load_adapter(init(program), adapter_folder("b", family), name="b")
    item = request("x", prompt(1, 11), "b")
    _, done = run(program, state, [item, request("base", prompt(2, 5))])
    assert done["x"].tokens.tolist() == oracle_tokens(peft_model("b", family), item.tokens, 8)


@pytest.mark.parametrize(
    "targets",
    [["q_proj"], ["k_proj"], ["v_proj"], ["q_proj", "k_proj"], ["gate_proj"], ["down_proj"]],
)
def test_partial_coverage_equals_peft(targets: list[str]) -> None:
    """LF-11: absent projections of a fused linear have no delta, whatever their width."""
    oracle = wrap(checkpoint()[1], seed=3, target_modules=targets)
    program = tiny_program()
    state = load_adapter(init(program), save(oracle), name="p")
    item = request("x", prompt(1, 11), "p")
    _, done = run(program, state, [item, request("y", prompt(2, 5))])
    want = oracle_logprobs(oracle, item.tokens, done["x"].tokens)
    np.testing.assert_allclose(done["x"].logprobs, want, atol=1e-4)


def test_one_layer_only_equals_peft() -> None:
    """LF-11: layers_to_transform=[1]."""
    oracle = wrap(checkpoint()[1], seed=3, target_modules=["q_proj"], layers_to_transform=[1])
    program = tiny_program()
    state = load_adapter(init(program), save(oracle), name="p")
    item = request("x", prompt(1, 11), "p")
    _, done = run(program, state, [item])
    assert done["x"].tokens.tolist() == oracle_tokens(oracle, item.tokens, 8)


def test_rank_stabilised_and_classic_scaling_in_one_batch() -> None:
    """LF-01: the same weights with and without use_rslora, alpha 16, rank 16: scales 4 and 1."""
    program, state, oracles = tiny_program(), init(tiny_program()), {}
    for flag in (False, True):
        oracles[flag] = wrap(
            checkpoint()[1],
            seed=1,
            r=16,
            lora_alpha=16,
            use_rslora=flag,
            target_modules=["q_proj", "v_proj"],
        )
        state = load_adapter(state, save(oracles[flag]), name=str(flag))
    requests = [request(str(flag), prompt(1, 11), str(flag)) for flag in oracles]
    _, done = run(program, state, requests)
    for flag, oracle in oracles.items():
        assert done[str(flag)].tokens.tolist() == oracle_tokens(oracle, prompt(1, 11), 8)
    assert done["True"].logprobs.tolist() != done["False"].logprobs.tolist()


def test_live_tensors_equal_the_folder_and_share_its_version() -> None:
    program = tiny_program()
    model = peft_model("b")
    state = with_adapters(program, "b")
    state = load_adapter_tensors(
        state, get_peft_model_state_dict(model), model.peft_config["default"], name="live"
    )
    names = state.host.adapters.names
    assert names["live"] == names["b"]
    requests = [request("x", prompt(1, 9), "live"), request("y", prompt(1, 9), "b")]
    state, done = run(program, state, requests)
    assert done["x"].tokens.tolist() == oracle_tokens(model, prompt(1, 9), 8)
    np.testing.assert_allclose(done["x"].logprobs, done["y"].logprobs, atol=1e-5)
    assert len(state.host.adapters.resident) == 1


def test_unknown_names_are_refused_and_never_served_as_the_base_model() -> None:
    """LS-04: typos, case, spaces, the empty string; None is the base model."""
    program = tiny_program()
    state = submit(with_adapters(program, "ab"), request("ok", prompt(1, 5), "a"))
    before = digest(state.host)
    for name in ("c", "A", "a ", "", "base"):
        with pytest.raises(UnknownAdapterError, match=r"\['a', 'b'\]"):
            submit(state, request("bad", prompt(1, 5), name))
    assert digest(state.host) == before
    _, done = run(program, state)
    assert done["ok"].tokens.tolist() == alone(request("ok", prompt(1, 5), "a")).tokens.tolist()


def test_a_reload_never_meets_old_weights_or_old_kv() -> None:
    """LS-03, PC: 'a' -> A1, then 'a' -> A2, then 'b' -> A2."""
    program = tiny_program()
    item = request("1", prompt(1, 40), "x")
    state = load_adapter(init(program), adapter_folder("a"), name="x")
    state, first = run(program, state, [item])
    state = load_adapter(state, adapter_folder("b"), name="x")
    assert len(state.blobs) == 1, "the old weights are still held"
    state, second = run(program, state, [replace(item, id="2")])
    state = load_adapter(state, adapter_folder("b"), name="y")
    state, third = run(program, state, [replace(item, id="3", adapter="y")])
    want = oracle_tokens(peft_model("b"), item.tokens, 8)
    assert first["1"].tokens.tolist() == oracle_tokens(peft_model("a"), item.tokens, 8)
    assert second["2"].tokens.tolist() == third["3"].tokens.tolist() == want
    assert (second["2"].num_cached_tokens, third["3"].num_cached_tokens) == (0, 36)


def test_running_requests_finish_on_the_weights_they_started_with() -> None:
    """LS-05: the name is bound anew while a request runs."""
    program = tiny_program(max_active_adapters=2)
    state = submit(with_adapters(program, "a"), request("old", prompt(1, 9), "a", max_tokens=20))
    for _ in range(5):
        state, _ = step(program, state)
    state = load_adapter(state, adapter_folder("b"), name="a")
    state, done = run(program, state, [request("new", prompt(1, 9), "a", max_tokens=20)])
    assert done["old"].tokens.tolist() == oracle_tokens(peft_model("a"), prompt(1, 9), 20)
    assert done["new"].tokens.tolist() == oracle_tokens(peft_model("b"), prompt(1, 9), 20)
    assert len(state.host.adapters.registered) == len(state.blobs) == 1


def test_a_smaller_adapter_leaves_no_residue_of_a_larger_one() -> None:
    """LS-07: rank 16 on everything, then rank 2, then one that targets less, in the same rows."""
    program = tiny_program(max_active_adapters=1, lora_rows=16)
    model = checkpoint()[1]
    oracles = [
        wrap(model, seed=1, r=16, target_modules="all-linear"),
        wrap(model, seed=2, r=2, target_modules="all-linear"),
        wrap(model, seed=3, r=9, target_modules=["v_proj"]),
    ]
    state = init(program)
    for n, oracle in enumerate(oracles):
        state = load_adapter(state, save(oracle), name=str(n))
        state, done = run(program, state, [request("x", prompt(n, 9), str(n))])
        assert done["x"].tokens.tolist() == oracle_tokens(oracle, prompt(n, 9), 8)


@pytest.mark.parametrize("limits", [{"max_active_adapters": 2}, {"lora_rows": 24}])
def test_more_adapters_than_places(limits: dict[str, int]) -> None:
    """LS-01: a chunked prompt counts while it prefills, base rows never do; all finish."""
    program = tiny_program(**limits, max_batched_tokens=8)
    wishes = ["a", "b", None, "c", "a", None, "b", "c"]
    requests = [request(str(n), prompt(n, 20 - 2 * n), who) for n, who in enumerate(wishes)]
    state = submit_all(with_adapters(program, "abc"), requests)
    _, outputs = run_steps(program, state)
    limit = limits.get("max_active_adapters", 3)
    assert max(out.num_active_adapters for out in outputs) <= limit
    for done in (c for out in outputs for c in out.finished):
        assert done.tokens.tolist() == alone(requests[int(done.id)]).tokens.tolist()


def test_pinned_adapters_are_never_evicted() -> None:
    """LS-10: others take turns in the place that is left; all on one state, none on another."""
    program = tiny_program(max_active_adapters=2)
    loaded = with_adapters(program, "abc")
    state, _ = run(program, pin_adapter(loaded, "a"), [request("0", prompt(0, 5), "a")])
    version = state.host.adapters.names["a"]
    for n, who in enumerate("bcbcb"):
        state, _ = run(program, state, [request(str(n), prompt(n, 5), who)])
        assert version in state.host.adapters.resident
    assert not loaded.host.adapters.pins
    state = pin_adapter(state, "b")
    with pytest.raises(AdapterError, match="max_active_adapters=2"):
        pin_adapter(state, "c")
    state, done = run(program, state, [request("c", prompt(1, 5), "c"), request("d", prompt(1, 5))])
    assert done["c"].finish_reason == "error"
    assert "pinned" in done["c"].error
    assert done["d"].finish_reason == "length"
    _, done = run(program, unpin_adapter(state, "b"), [request("c", prompt(1, 5), "c")])
    assert done["c"].finish_reason == "length"
    with pytest.raises(UnknownAdapterError):
        pin_adapter(state, "zzz")


def test_a_rank_above_the_limit_is_refused_at_load() -> None:
    """LF-12: running requests do not notice; the message has name, rank, limit and option."""
    program = tiny_program(max_lora_rank=8, lora_rows=16)
    requests = [request(str(n), prompt(n, 5), max_tokens=12) for n in range(2)]
    state = submit_all(init(program), requests)
    for _ in range(3):
        state, _ = step(program, state)
    before = digest(state.host)
    with pytest.raises(AdapterError, match=r"'big'.*16.*max_lora_rank.*8"):
        load_adapter(state, adapter_folder("c"), name="big")
    assert digest(state.host) == before
    _, done = run(program, state)
    for item in requests:
        assert done[item.id].tokens.tolist() == alone(item).tokens.tolist()


def test_a_corrupt_adapter_changes_nothing(tmp_path: Path) -> None:
    """LF-14, LF-18: refused before any change; a good one loaded next is right."""
    program = tiny_program()
    state, before = init(program), digest(init(program).host)
    for damage in ("cut", "nan", "wide"):
        folder = tmp_path / damage
        shutil.copytree(adapter_folder("a"), folder)
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        name = sorted(tensors)[0]
        if damage == "cut":
            file.write_bytes(file.read_bytes()[:200])
        elif damage == "nan":
            tensors[name][0, 0] = float("nan")
            save_file(tensors, file)
        else:
            tensors[name] = torch.zeros(4, 31)
            save_file(tensors, file)
        with pytest.raises(AdapterError, match="'bad'"):
            load_adapter(state, folder, name="bad")
        assert digest(state.host) == before
    state = load_adapter(state, adapter_folder("a"), name="bad")
    _, done = run(program, state, [request("x", prompt(1, 9), "bad")])
    assert done["x"].tokens.tolist() == oracle_tokens(peft_model("a"), prompt(1, 9), 8)


@pytest.mark.parametrize("where", ["A", "B"])
def test_weights_that_are_not_finite_end_only_their_own_request(where: str) -> None:
    """LF-18: what is not finite on the device ends rows of that adapter alone: NaN (written there;
    no file brings it in), and sums that overflow, as of the largest values a file may hold."""
    program = tiny_program()
    requests = [request("bad", prompt(1, 5), "a"), request("good", prompt(2, 5), "b")]
    state = submit_all(with_adapters(program, "ab"), [*requests, request("base", prompt(3, 4))])
    state, _ = step(program, state)
    (place,) = [
        p for v, p in state.host.adapters.resident.items() if v == state.host.adapters.names["a"]
    ]
    rows = [b * 8 + i for b in place.row_blocks for i in range(8)]
    if where == "A":
        state.device.pool.a_LSPD["qkv"][:, :, rows] = float("nan")
    else:
        state.device.pool.b_LPO["qkv"][:, rows] = 3e38
    _, done = run(program, state)
    assert done["bad"].finish_reason == "error"
    assert "not finite" in done["bad"].error
    assert len(done["bad"].tokens) == 1
    assert done["good"].tokens.tolist() == alone(requests[1]).tokens.tolist()


def test_a_registered_adapter_loads_on_first_use() -> None:
    """A bare loop: the request waits without a row, `deliver` binds it, others step meanwhile."""
    program = tiny_program()
    state = register_adapter(init(program), adapter_folder("a"), name="lazy")
    state = submit_all(
        state, [request("l", prompt(1, 9), "lazy"), request("b", prompt(2, 5), max_tokens=3)]
    )
    state, outputs = step(program, state)
    assert outputs.loads == (("lazy", str(adapter_folder("a"))),)
    state, outputs = step(program, state)
    assert outputs.loads == (), "a load is asked for once"
    state, outputs = step(program, state)
    assert [c.id for c in outputs.finished] == ["b"]
    assert outputs.waiting_for == ("lazy",)
    adapter = read(program.config, str(adapter_folder("a")), "lazy")
    event = AdapterLoaded(name="lazy", source=str(adapter_folder("a")), adapter=adapter)
    _, done = run(program, deliver(state, event))
    assert done["l"].tokens.tolist() == oracle_tokens(peft_model("a"), prompt(1, 9), 8)


def test_a_failed_load_ends_only_the_requests_that_wait_for_it() -> None:
    """W12: another load of the name may succeed later."""
    program = tiny_program()
    state = register_adapter(init(program), "/nonexistent", name="gone")
    state = submit_all(state, [request("g", prompt(1, 9), "gone"), request("b", prompt(2, 5))])
    state, _ = step(program, state)
    state = deliver(state, AdapterFailed(name="gone", error="no such folder"))
    state, done = run(program, state)
    assert (done["g"].finish_reason, done["g"].error) == ("error", "no such folder")
    assert done["b"].tokens.tolist() == alone(request("b", prompt(2, 5))).tokens.tolist()
    state = load_adapter(state, adapter_folder("a"), name="gone")
    _, done = run(program, state, [request("g", prompt(1, 9), "gone")])
    assert done["g"].finish_reason == "length"


def test_a_delivered_adapter_that_cannot_fit_counts_as_failed() -> None:
    program = tiny_program(lora_rows=8)
    state = register_adapter(init(program), adapter_folder("c"), name="big")
    state, _ = step(program, submit(state, request("x", prompt(1, 5), "big")))
    wide = read(replace(program.config, max_lora_rank=64), str(adapter_folder("c")), "big")
    stale = AdapterLoaded(name="big", source="elsewhere", adapter=wide)
    assert digest(deliver(state, stale).host) != digest(state.host), "asked for once more"
    source = str(adapter_folder("c"))
    state = deliver(state, AdapterLoaded(name="big", source=source, adapter=wide))
    _, done = run(program, state)
    assert "lora_rows=8" in done["x"].error


def test_the_host_tier_evicts_what_can_be_read_again() -> None:
    program = tiny_program(max_active_adapters=1, max_registered_adapters=2)
    state = with_adapters(program, "abc")
    assert sorted(state.host.adapters.names) == ["b", "c"]
    assert len(state.blobs) == 2
    state = submit(state, request("x", prompt(1, 9), "a"))  # known, so it is read again
    state, outputs = step(program, state)
    assert [name for name, _ in outputs.loads] == ["a"]


def test_tensors_without_a_file_are_never_evicted() -> None:
    program = tiny_program(max_active_adapters=1, max_registered_adapters=1)
    model = peft_model("a")
    tensors, config = get_peft_model_state_dict(model), model.peft_config["default"]
    state = load_adapter_tensors(init(program), tensors, config, name="live")
    before = digest(state.host)
    with pytest.raises(AdapterError, match="max_registered_adapters=1"):
        load_adapter(state, adapter_folder("b"), name="b")
    assert digest(state.host) == before


def test_adapters_refused_by_name_leave_the_others_alone() -> None:
    """LF-03, LF-04, LF-16: use_dora, modules_to_save and bias are named."""
    program = tiny_program()
    model = checkpoint()[1]
    state = with_adapters(program, "a")
    before = digest(state.host)
    for settings, word in (
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
    ):
        with pytest.raises(AdapterError, match=word):
            load_adapter(state, make_adapter(model, seed=1, **settings), name="x")
    assert digest(state.host) == before
    with pytest.raises(RequestError):
        submit(state, request("y", prompt(1, 3), "x"))
