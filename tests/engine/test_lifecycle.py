"""States as values: donation, branch, fork, snapshot and restore, recovery, abort, idleness."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from purestep.engine import (
    EngineState,
    Request,
    SamplingParams,
    abort,
    branch,
    commit,
    digest,
    execute,
    fork,
    init,
    load_adapter,
    load_adapter_tensors,
    progress,
    recover,
    restore,
    schedule,
    snapshot,
    step,
    submit,
)
from purestep.engine import fork as fork_function
from purestep.state.checks import check_host
from purestep.state.errors import (
    AdapterError,
    ConfigError,
    DonatedStateError,
    ForkMemoryError,
    RequestError,
    SnapshotError,
    StepError,
    TornStateError,
    UnknownRequestError,
)
from purestep.state.text import TokenTable
from tests.engine.tiny import (
    adapter_folder,
    alone,
    peft_model,
    prompt,
    request,
    run,
    submit_all,
    tiny_program,
    with_adapters,
)


def mid_decode(program: object, steps: int = 4, count: int = 12) -> EngineState:
    """Three rows in mid-decode, with a half-filled block each."""
    requests = [
        request("a", prompt(1, 9), "a", max_tokens=count),
        request("base", prompt(2, 7), max_tokens=count),
        request("drawn", prompt(3, 6), "b", max_tokens=count, temperature=0.7, seed=5),
    ]
    state = submit_all(with_adapters(program, "ab"), requests)
    for _ in range(steps):
        state, _ = step(program, state)
    assert any(c % program.config.block_size for c in state.host.rows.num_computed_R)
    return state


def tokens_of(done: dict) -> dict[str, list[int]]:
    return {name: c.tokens.tolist() for name, c in done.items()}


def test_a_spent_state_names_the_step_that_consumed_it() -> None:
    program = tiny_program()
    first = submit(init(program), request("x", prompt(1, 5)))
    second, _ = step(program, first)
    before = digest(first.host)
    with pytest.raises(DonatedStateError, match="step 0"):
        step(program, first)
    assert digest(first.host) == before
    step(program, second)


def test_the_four_verbs_are_the_step() -> None:
    program = tiny_program()
    state = submit(init(program), request("x", prompt(1, 5)))
    twin = fork(program, state)
    host, plan = schedule(program.config, state.host)
    device, result = execute(program, state.device, plan, state.blobs)
    host, outputs = commit(program.config, host, plan, result)
    stepped, news = step(program, twin)
    assert digest(host) == digest(stepped.host)
    assert outputs.tokens_S.tolist() == news.tokens_S.tolist()
    assert device.generation == stepped.device.generation == 1


def test_at_most_two_plans_are_in_flight_and_land_in_order() -> None:
    program = tiny_program()
    state = submit(init(program), request("x", prompt(1, 5)))
    host, plan = schedule(program.config, state.host)
    later, behind = schedule(program.config, host)
    with pytest.raises(StepError, match=r"steps \[0, 1\]"):
        schedule(program.config, later)
    for wrong, made in ((state.host, plan), (host, behind), (later, behind)):
        with pytest.raises(StepError, match="is not the oldest in flight"):
            commit(program.config, wrong, made, None)


def test_an_idle_step_returns_the_same_state() -> None:
    """SC-09: three empty steps, a request to its end, another empty step."""
    program = tiny_program()
    state = init(program)
    for _ in range(3):
        after, outputs = step(program, state)
        assert after is state
        assert not outputs.ids
        assert not outputs.finished
    state, done = run(program, state, [request("x", prompt(1, 5))])
    assert done["x"].finish_reason == "length"
    assert step(program, state)[0] is state


def test_a_failed_step_leaves_its_input_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """SC-09: an error inside the model; with nothing overwritten the same state goes on."""
    program = tiny_program()
    state = mid_decode(program)
    want = tokens_of(run(program, fork(program, state))[1])

    def failing(*_: object) -> torch.Tensor:
        raise RuntimeError("injected")

    with pytest.raises(RuntimeError, match="injected"):
        step(replace(program, layer=failing, fused=False), state)
    assert tokens_of(run(program, state)[1]) == want


def test_recover_drops_what_a_failed_step_overwrote() -> None:
    """Evicted cached blocks and taken adapter rows are forgotten, everything else goes on."""
    program = tiny_program(num_blocks=12, max_active_adapters=1, lora_rows=8)
    state, _ = run(program, with_adapters(program, "ab"), [request("old", prompt(9, 24), "a")])
    cached = state.host.blocks.num_cached
    assert cached >= 5
    state = submit(state, request("new", prompt(8, 40), "b", max_tokens=4))
    calls = []

    def failing(*args: object) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("injected")
        return program.layer(*args)

    with pytest.raises(RuntimeError, match="injected"):
        step(replace(program, layer=failing, fused=False), state)
    with pytest.raises(TornStateError, match="recover"):
        step(program, state)
    healed = recover(state)
    check_host(healed.host, 4)
    assert healed.host.blocks.num_cached < cached
    assert not healed.host.adapters.resident
    with pytest.raises(DonatedStateError, match="recover"):
        step(program, state)
    _, done = run(program, healed, [request("again", prompt(9, 24), "a")])
    assert (
        done["new"].tokens.tolist()
        == alone(request("n", prompt(8, 40), "b", max_tokens=4)).tokens.tolist()
    )
    assert done["again"].tokens.tolist() == alone(request("o", prompt(9, 24), "a")).tokens.tolist()


def test_recover_recomputes_rows_whose_blocks_were_taken() -> None:
    """A step that preempts a row reuses its blocks; when it fails the row is recomputed."""
    program = tiny_program(num_blocks=12, max_rows=2)
    requests = [request(n, prompt(ord(n), 18), max_tokens=12) for n in "xy"]
    state = submit_all(init(program), requests)

    def failing(*_: object) -> torch.Tensor:
        raise RuntimeError("injected")

    torn = 0
    while not state.host.idle:
        _, plan = schedule(program.config, state.host)
        if plan.num_preempted and not plan.overwrites.empty and not torn:
            with pytest.raises(RuntimeError, match="injected"):
                step(replace(program, layer=failing, fused=False), state)
            state = recover(state)
            check_host(state.host, 4)
            torn += 1
        state, outputs = step(program, state)
        for done in outputs.finished:
            want = alone(next(r for r in requests if r.id == done.id))
            assert done.tokens.tolist() == want.tokens.tolist()
    assert torn == 1


def test_recover_without_a_failed_step_changes_nothing() -> None:
    state = init(tiny_program())
    assert recover(state) is state


def test_greedy_branches_equal_the_original_and_share_blocks() -> None:
    program = tiny_program()
    state = mid_decode(program, steps=5)
    before = state.host.blocks.num_free
    state = branch(state, "a", ["a1", "a2"])
    check_host(state.host, 4)
    assert before - state.host.blocks.num_free == 2, "only the partial block is copied"
    assert len(state.host.copies) == 2
    _, done = run(program, state)
    assert tokens_of(done)["a1"] == tokens_of(done)["a2"] == tokens_of(done)["a"]
    assert done["a1"].logprobs.tolist() == pytest.approx(done["a"].logprobs.tolist(), abs=1e-5)


@pytest.mark.parametrize("steps", range(1, 9))
def test_branches_at_every_place_of_a_block(steps: int) -> None:
    program = tiny_program()
    state = branch(mid_decode(program, steps=steps), "a", ["twin"])
    check_host(state.host, 4)
    _, done = run(program, state)
    assert done["twin"].tokens.tolist() == done["a"].tokens.tolist()


def test_drawn_branches_differ_and_do_not_depend_on_names() -> None:
    program = tiny_program()
    results = []
    for names in (["p", "q", "r"], ["u", "v", "w"]):
        state = branch(mid_decode(program, count=24), "drawn", names)
        state = branch(state, names[0], [names[0] + "x"])
        _, done = run(program, state)
        results.append([tokens_of(done)[n] for n in ["drawn", *names, names[0] + "x"]])
    assert results[0] == results[1]
    assert len({tuple(t) for t in results[0]}) == 5, "siblings drew the same tokens"


def test_a_branch_without_room_waits_and_still_equals_the_original() -> None:
    program = tiny_program(max_rows=3)
    state = branch(mid_decode(program), "a", ["twin"])
    assert state.host.waiting == ("twin",)
    _, done = run(program, state)
    assert done["twin"].tokens.tolist() == done["a"].tokens.tolist()


def test_a_branch_outlives_its_aborted_original() -> None:
    """The copy of the partial block is made even if the original is gone by then."""
    program = tiny_program()
    state = mid_decode(program)
    want = tokens_of(run(program, fork(program, state))[1])["a"]
    state = abort(branch(state, "a", ["twin"]), "a")
    state = submit(state, request("other", prompt(4, 30)))  # takes the freed blocks at once
    _, done = run(program, state)
    assert done["twin"].tokens.tolist() == want


def test_branch_of_a_waiting_request() -> None:
    program = tiny_program()
    state = branch(submit(init(program), request("x", prompt(1, 9))), "x", ["y"])
    _, done = run(program, state)
    assert done["y"].tokens.tolist() == done["x"].tokens.tolist()


@pytest.mark.parametrize("new_ids", [["a"], ["n", "n"], [""], "nn", ["base"]])
def test_bad_branch_ids_are_refused(new_ids: list[str]) -> None:
    state = mid_decode(tiny_program())
    before = digest(state.host)
    with pytest.raises(RequestError):
        branch(state, "a", new_ids)
    with pytest.raises(UnknownRequestError, match="nobody"):
        branch(state, "nobody", ["n"])
    assert digest(state.host) == before


def test_a_fork_is_a_twin_and_leaves_the_state_valid() -> None:
    program = tiny_program()
    state = mid_decode(program)
    twin = fork(program, state)
    assert digest(twin.host) == digest(state.host)
    (end, done), (twin_end, twin_done) = run(program, state), run(program, twin)
    assert tokens_of(done) == tokens_of(twin_done)
    for name in done:
        assert done[name].logprobs.tobytes() == twin_done[name].logprobs.tobytes()
    assert digest(end.host) == digest(twin_end.host)


@pytest.mark.parametrize("copied", [False, True])
def test_a_fork_may_have_another_size(copied: bool) -> None:
    program = tiny_program()
    state = mid_decode(program)
    if copied:
        state = branch(state, "a", ["twin"])
    live = state.host.blocks.num_held
    small = fork(program, state, num_blocks=live + 9)
    check_host(small.host, 4)
    assert tokens_of(run(program, small)[1]) == tokens_of(run(program, state)[1])
    with pytest.raises(DonatedStateError):
        fork(program, state)


def test_a_fork_that_cannot_fit_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    program = tiny_program()
    state = mid_decode(program)
    with pytest.raises(ConfigError, match="num_blocks=1, but"):
        fork(program, state, num_blocks=1)
    module = sys.modules[fork_function.__module__]
    monkeypatch.setattr(module, "available_bytes", lambda: 1000)
    with pytest.raises(ForkMemoryError) as caught:
        fork(program, state)
    assert caught.value.free == 1000
    assert caught.value.needed > 1000
    step(program, state)


RESTORE = """
import sys, json
from tests.engine.tiny import run, tiny_program
from purestep.engine import digest, restore
program = tiny_program()
state = restore(program, sys.argv[1])
name = digest(state.host)
end, done = run(program, state)
print(json.dumps({"digest": name, "end": digest(end.host),
                  "tokens": {k: c.tokens.tolist() for k, c in done.items()},
                  "logprobs": {k: c.logprobs.tobytes().hex() for k, c in done.items()}}))
"""


@pytest.mark.parametrize("pending", [False, True])
def test_restore_in_another_process_goes_on_where_it_was(tmp_path: Path, pending: bool) -> None:
    """DT-03: another process, another hash seed; the same bits. Also with a copy still to do."""
    program = tiny_program()
    state = mid_decode(program)
    if pending:
        state = abort(branch(state, "a", ["twin"]), "a")
    snapshot(state, tmp_path / "s")
    (end, done), name = run(program, state), digest(state.host)
    path = os.pathsep.join([".", os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONHASHSEED": "77", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    out = subprocess.run(
        [sys.executable, "-c", RESTORE, str(tmp_path / "s")],
        capture_output=True,
        text=True,
        env=env,
        check=True,
    ).stdout
    got = json.loads(out.strip().splitlines()[-1])
    assert got["digest"] == name
    assert got["end"] == digest(end.host)
    assert got["tokens"] == tokens_of(done)
    assert got["logprobs"] == {k: c.logprobs.tobytes().hex() for k, c in done.items()}


def test_snapshots_carry_adapters_that_have_no_file(tmp_path: Path) -> None:
    program = tiny_program()
    model = peft_model("c")
    state = load_adapter_tensors(
        init(program), get_peft_model_state_dict(model), model.peft_config["default"], name="live"
    )
    state = submit(state, request("x", prompt(1, 9), "live"))
    state, _ = step(program, state)
    snapshot(state, tmp_path / "s")
    snapshot(state, tmp_path / "s")  # replaces the first
    restored = restore(program, tmp_path / "s")
    assert digest(restored.host) == digest(state.host)
    assert tokens_of(run(program, restored)[1]) == tokens_of(run(program, state)[1])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s"], "something was left behind"


def test_a_snapshot_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    program = tiny_program()
    state = mid_decode(program)
    snapshot(state, tmp_path / "s")
    for options, word in (
        ({"block_size": 8}, "block_size"),
        ({"lora_rows": 32}, "lora_rows"),
        ({"family": "llama-tied"}, "weights"),
    ):
        with pytest.raises(SnapshotError, match=word):
            restore(tiny_program(**options), tmp_path / "s")
    with pytest.raises(SnapshotError, match="no snapshot"):
        restore(program, tmp_path / "missing")
    (tmp_path / "other").mkdir()
    with pytest.raises(SnapshotError, match="not a snapshot"):
        snapshot(state, tmp_path / "other")


@pytest.mark.parametrize("file", ["state.json", "kv.safetensors", "adapters.safetensors"])
@pytest.mark.parametrize("how", ["cut", "empty", "gone"])
def test_a_damaged_snapshot_is_refused(tmp_path: Path, file: str, how: str) -> None:
    program = tiny_program()
    snapshot(mid_decode(program), tmp_path / "s")
    victim = tmp_path / "s" / file
    data = victim.read_bytes()
    if how == "gone":
        victim.unlink()
    else:
        victim.write_bytes(data[: len(data) // 2] if how == "cut" else b"")
    with pytest.raises(SnapshotError):
        restore(program, tmp_path / "s")


def test_a_program_that_cannot_run_the_requests_is_refused(tmp_path: Path) -> None:
    """Stop strings and streams need a token table, processors their function."""
    table = TokenTable([b"x"] * 128)
    full = tiny_program(tokens=table, processors={"mine": lambda seen, logits: logits})
    for words, lacking, message in (
        ({"stop": ("ab",)}, {"processors": full.processors}, "'x' has stop .* no token table"),
        ({"stream": True}, {"processors": full.processors}, "'x' has stop .* no token table"),
        ({"processor": "mine"}, {"tokens": table}, "'x' needs the logits processor 'mine'"),
    ):
        state, _ = step(full, submit(init(full), request("x", prompt(1, 5), **words)))
        snapshot(state, tmp_path / "s")
        with pytest.raises(SnapshotError, match=message):
            restore(tiny_program(**lacking), tmp_path / "s")
        run(full, restore(full, tmp_path / "s"))


@pytest.mark.parametrize("how", ["altered", "missing", "reshaped", "gone"])
def test_prompts_of_a_snapshot_are_checked(tmp_path: Path, how: str) -> None:
    """Embeddings are named by their digest, so that what was changed is not taken for them."""
    program = tiny_program()
    item = Request(id="x", prompt_embeds=torch.randn(6, 32))
    state, _ = step(program, submit(init(program), item))
    snapshot(state, tmp_path / "s")
    file = tmp_path / "s" / "prompts.safetensors"
    ((name, rows),) = load_file(file).items()
    file.unlink()
    if how != "gone":
        changed = {"altered": rows + 1, "missing": rows, "reshaped": rows.view(3, 64)}[how]
        save_file({"other" if how == "missing" else name: changed}, file)
    with pytest.raises(SnapshotError, match=r"prompts\.safetensors is damaged"):
        restore(program, tmp_path / "s")


def test_an_adapter_that_changed_since_the_snapshot_is_named(tmp_path: Path) -> None:
    program = tiny_program()
    folder = tmp_path / "adapter"
    shutil.copytree(adapter_folder("a"), folder)
    state = load_adapter(init(program), folder, name="mine")
    snapshot(state, tmp_path / "s")
    shutil.rmtree(folder)
    shutil.copytree(adapter_folder("b"), folder)
    with pytest.raises(AdapterError, match="changed since the snapshot"):
        restore(program, tmp_path / "s")


def test_abort_frees_everything_at_any_moment() -> None:
    """MO-03: waiting, in mid-prefill, in mid-decode; the others are not disturbed."""
    program = tiny_program(max_batched_tokens=8, max_rows=2)
    for steps in range(8):
        requests = [request(str(n), prompt(n, 14), "a" if n else None) for n in range(3)]
        state = submit_all(with_adapters(program, "a"), requests)
        for _ in range(steps):
            state, _ = step(program, state)
        for name in ("0", "2"):
            if name in state.host.requests:
                had = progress(state.host, name).generated
                state = abort(state, name)
                check_host(state.host, 4)
                assert len(had) <= steps
        with pytest.raises(UnknownRequestError):
            abort(state, "0")
        state, done = run(program, state)
        if "1" in done:
            assert done["1"].tokens.tolist() == alone(requests[1]).tokens.tolist()
        assert state.host.blocks.num_free == 64
        assert not state.host.adapters.users


def test_a_finished_id_may_be_used_again() -> None:
    """SC-01: a live id is refused and its request unharmed; a finished one is free."""
    program = tiny_program()
    first, second = request("x", prompt(1, 5)), request("x", prompt(2, 6))
    state = submit(init(program), first)
    for _ in range(2):
        with pytest.raises(RequestError, match="'x'"):
            submit(state, second)
        state, _ = step(program, state)
    state, done = run(program, state)
    assert done["x"].tokens.tolist() == alone(first).tokens.tolist()
    _, done = run(program, state, [second])
    assert done["x"].tokens.tolist() == alone(second).tokens.tolist()


def test_old_states_keep_their_value() -> None:
    program = tiny_program(max_batched_tokens=8)
    requests = [
        Request(id=str(n), tokens=prompt(n, 11), sampling=SamplingParams(seed=n, max_tokens=9))
        for n in range(6)
    ]
    state, kept = submit_all(init(program), requests), []
    while not state.host.idle:
        kept.append((state.host, digest(state.host)))
        state, _ = step(program, state)
    assert all(digest(host) == name for host, name in kept)
    with pytest.raises(ValueError, match="read-only"):
        kept[3][0].rows.tail_RB[:] = 0


def test_a_state_of_another_program_is_refused() -> None:
    state = init(tiny_program())
    with pytest.raises(ConfigError, match="another program"):
        step(tiny_program(block_size=8), state)
