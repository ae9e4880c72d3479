"""Unloading, listing and finding adapters; flushing; other base weights in a running state."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from purestep.engine import (
    Loader,
    adopt,
    by_priority,
    digest,
    flush,
    folder_resolver,
    generate,
    init,
    list_adapters,
    load_adapter,
    pin_adapter,
    register_adapter,
    schedule,
    step,
    submit,
    unload_adapter,
    with_weights,
)
from purestep.engine.renewal import adopt_weights
from purestep.models.checkpoint import load_checkpoint
from purestep.simulation.world import toy_config, toy_state
from purestep.state.encoder import hold, planned
from purestep.state.errors import AdapterError, ConfigError, StepError, UnknownAdapterError
from tests.engine.tiny import (
    adapter_folder,
    alone,
    checkpoint,
    oracle_tokens,
    prompt,
    request,
    run,
    submit_all,
    tiny_program,
    with_adapters,
)


def test_unloading_drains_and_then_frees() -> None:
    """LS-05: running and waiting requests finish on their weights; new ones are refused at once."""
    program = tiny_program(max_rows=2)
    items = [request(str(n), prompt(n, 9), "a") for n in range(4)]
    state, _ = step(program, submit_all(with_adapters(program, "ab"), items))
    state = unload_adapter(pin_adapter(state, "a"), "a")
    version = state.host.requests["0"].version
    assert list(list_adapters(state)) == ["b"]
    assert version in state.blobs
    with pytest.raises(UnknownAdapterError, match="no adapter is called 'a'; known are \\['b'\\]"):
        submit(state, request("late", prompt(1, 5), "a"))
    state, done = run(program, state)
    for item in items:
        assert done[item.id].tokens.tolist() == alone(item).tokens.tolist()
    assert version not in state.blobs
    assert version not in state.host.adapters.resident
    assert load_adapter(state, adapter_folder("c"), name="a").host.adapters.names["a"] != version


def test_unloading_may_abort_or_refuse() -> None:
    program = tiny_program()
    state = with_adapters(program, "ab")
    state = register_adapter(state, adapter_folder("a"), name="again")  # a second name, not loaded
    items = [request("a", prompt(1, 9), "a"), request("b", prompt(2, 9), "b")]
    items.append(request("waits", prompt(1, 5), "again"))
    state, _ = step(program, submit_all(state, items))
    before = digest(state.host)
    with pytest.raises(AdapterError, match="unload: 1 live requests use adapter 'a'"):
        unload_adapter(state, "a", running="refuse")
    with pytest.raises(AdapterError, match="running='kill' must be"):
        unload_adapter(state, "a", running="kill")
    with pytest.raises(UnknownAdapterError, match="unload: no adapter is called 'c'"):
        unload_adapter(state, "c")
    assert digest(state.host) == before
    state = unload_adapter(unload_adapter(state, "a", running="abort"), "again")
    _, done = run(program, state)
    assert {n: done[n].error for n in ("a", "waits")} == {
        "a": "adapter 'a' was unloaded",
        "waits": "adapter 'again' was unloaded",
    }
    assert len(done["a"].tokens) == 1
    assert done["b"].tokens.tolist() == alone(items[1]).tokens.tolist()


def test_the_list_of_adapters_tells_their_state() -> None:
    program = tiny_program()
    state = pin_adapter(with_adapters(program, "a"), "a")
    state = register_adapter(state, adapter_folder("b"), name="lazy")
    items = [request("1", prompt(1, 5), "a"), request("2", prompt(1, 5), "lazy")]
    state, _ = step(program, submit_all(state, items))
    found = list_adapters(state)
    assert (found["a"].rank, found["a"].resident, found["a"].pinned) == (4, True, True)
    assert (found["a"].num_requests, found["a"].loading) == (1, False)
    assert found["a"].nbytes == state.blobs[found["a"].version].nbytes
    lazy = found["lazy"]
    assert (lazy.version, lazy.rank, lazy.loading, lazy.resident) == (None, None, True, False)
    assert lazy.source == str(adapter_folder("b"))


def test_adapters_are_found_below_a_folder_and_not_outside(tmp_path: Path) -> None:
    """Spec 13.4: names that leave the folder are unknown."""
    (tmp_path / "all" / "team").mkdir(parents=True)
    (tmp_path / "all" / "a").symlink_to(tmp_path / "all" / "team" / "a")
    (tmp_path / "all" / "team" / "a").symlink_to(tmp_path / "all" / "team" / "real")
    real = tmp_path / "all" / "team" / "real"
    real.mkdir()
    for file in adapter_folder("a").iterdir():
        (real / file.name).write_bytes(file.read_bytes())
    (tmp_path / "all" / "out").symlink_to(adapter_folder("b"))
    resolve = folder_resolver(tmp_path / "all")
    assert resolve("a") == resolve("team/real") == str(real)
    for name in ("", ".", "..", "../all/a/..", str(real), "out", "nobody", "a\0", "x" * 5000):
        if name == str(real):
            assert resolve(name) == str(real), "it lies inside"
            continue
        assert resolve(name) is None, name


def test_generate_resolves_names_on_demand() -> None:
    program, asked = tiny_program(), []

    def resolver(name: str) -> str | None:
        asked.append(name)
        return str(adapter_folder(name)) if name in "ab" else None

    items = [request(f"{n}", prompt(n, 9), who) for n, who in enumerate(["a", "z", "b", "a", None])]
    done = {c.id: c for c in generate(program, items, resolver=resolver)}
    assert asked == ["a", "z", "b"]
    assert "no adapter is called 'z'" in done["1"].error
    for n in (0, 2, 3, 4):
        assert done[str(n)].tokens.tolist() == alone(items[n]).tokens.tolist()


def test_loaders_leave_the_number_of_threads_as_it_was() -> None:
    before = torch.get_num_threads()
    with Loader(tiny_program().config):
        assert torch.get_num_threads() == before


def test_priorities_decide_who_is_served_first() -> None:
    program = tiny_program(max_rows=1)
    items = [replace(request(str(p), prompt(p + 5, 5)), priority=p) for p in (3, 1, -2, 2)]
    order = [c.id for c in generate(program, items, policy=by_priority, window=8)]
    assert order == ["-2", "1", "2", "3"]
    assert [c.id for c in generate(program, items)] == ["3", "1", "-2", "2"]


def test_a_flushed_cache_is_not_hit() -> None:
    program = tiny_program()
    state, _ = run(program, init(program), [request("1", prompt(1, 20))])
    for change, hits in ((lambda s: s, 16), (flush, 0)):
        _, done = run(program, change(state), [request("2", prompt(1, 20))])
        assert done["2"].num_cached_tokens == hits
        state, _ = run(program, init(program), [request("1", prompt(1, 20))])
    state, _ = step(program, submit(state, request("3", prompt(2, 20))))
    state, done = run(program, flush(state), [request("4", prompt(2, 20))])
    assert done["4"].num_cached_tokens == 0, "blocks of running requests are forgotten too"
    assert done["3"].tokens.tolist() == done["4"].tokens.tolist()


def test_new_weights_go_on_with_live_requests() -> None:
    """A training loop: after some tokens the base weights are others, and no old KV is met."""
    program = tiny_program(num_blocks=24)
    folder, model = checkpoint("llama", seed=5)
    _, params, weights = load_checkpoint(folder, dtype=torch.float32)
    newer = with_weights(program, params, version=weights)
    items = [request(str(n), prompt(n, 9), max_tokens=12) for n in range(3)]
    state = submit_all(init(program), items)
    for _ in range(5):
        state, _ = step(program, state)
    sofar = {item.id: oracle_tokens(checkpoint()[1], item.tokens, 5) for item in items}
    state = adopt(newer, state)
    with pytest.raises(ConfigError, match="another program"):
        step(program, state)
    _, done = run(newer, state, [request("late", prompt(0, 9), max_tokens=12)])
    for item in items:
        rest = oracle_tokens(model, [*item.tokens, *sofar[item.id]], 7)
        assert done[item.id].tokens.tolist() == sofar[item.id] + rest
    assert done["late"].tokens.tolist() == oracle_tokens(model, prompt(0, 9), 12)
    assert done["late"].num_cached_tokens == 8, "blocks of the new weights are shared"


def test_what_the_device_is_to_drop_does_not_depend_on_the_hash_seed() -> None:
    """Several outputs are held as other weights come in: they leave in the order of their names."""
    names = [f"item {n}" for n in range(12)]
    state = toy_state(toy_config(encoder_cache_tokens=24))
    ledger = state.host.encoder
    for n, name in enumerate(names):
        ledger = hold(planned(ledger, name, 2), name, ("x", n))
    after = adopt_weights(replace(state, host=replace(state.host, encoder=ledger)), "other")
    assert after.host.encoder.leaving == tuple(sorted(names))


def test_adopting_is_refused_where_more_differs() -> None:
    program = tiny_program()
    other = tiny_program(block_size=8)
    with pytest.raises(ConfigError, match="more than its weights"):
        adopt(other, init(program))
    with pytest.raises(ConfigError, match="is the one the program has"):
        with_weights(program, program.params, version=program.config.weights)

    state = submit(init(program), request("1", prompt(1, 5)))
    flying = replace(state, host=schedule(program.config, state.host)[0])
    with pytest.raises(StepError, match="flush: step 0 was scheduled"):
        flush(flying)
