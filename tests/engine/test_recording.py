"""A recorded run, folded without a device: the same host states anywhere (design, section 3)."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import get_peft_model_state_dict

from purestep.engine import (
    AdapterFailed,
    Request,
    SamplingParams,
    abort,
    begin_recording,
    branch,
    by_priority,
    deliver,
    digest,
    flush,
    init,
    load_adapter,
    load_adapter_tensors,
    pin_adapter,
    record,
    recover,
    register_adapter,
    replay,
    step,
    submit,
    unload_adapter,
    unpin_adapter,
)
from purestep.simulation.events import first_events, random_event
from purestep.simulation.longrun import random_world
from purestep.simulation.world import toy_config
from purestep.state.errors import SnapshotError, UnknownRequestError
from tests.engine.tiny import adapter_folder, peft_model, prompt, request, tiny_program


@pytest.mark.parametrize("seed", range(3))
def test_a_random_run_is_folded_to_the_same_states(seed: int) -> None:
    """From its beginning, and from any prefix of its lines."""
    world, rng, tape = random_world(seed, 0), np.random.default_rng(seed), io.StringIO()
    machine, seen = world.machine(laws=False, keep=0, tape=tape), []
    for event in first_events(rng):
        machine.do(event)
    while machine.number < 240:
        event = random_event(rng, machine)
        machine.do(("step", {}) if event[0] == "fork" else event)  # another pool: another recording
        if machine.number % 60 == 0:
            seen.append((tape.getvalue().count("\n"), digest(machine.state.host)))
    lines = tape.getvalue().splitlines()
    for count, name in seen:
        assert digest(replay(toy_config(**world.config), lines[:count])) == name


FOLD = """
import json, sys
from purestep.engine import digest, replay
from purestep.simulation.world import toy_config
with open(sys.argv[1]) as file:
    print(digest(replay(toy_config(**json.loads(sys.argv[2])), file)))
"""


def test_another_process_with_another_hash_seed_finds_the_same_digest(tmp_path: Path) -> None:
    world, rng = random_world(3, 1), np.random.default_rng(3)
    with (tmp_path / "run.jsonl").open("w") as file:
        machine = world.machine(keep=0, tape=file)
        for event in first_events(rng):
            machine.do(event)
        while machine.number < 200:
            event = random_event(rng, machine)
            machine.do(("step", {}) if event[0] == "fork" else event)
    for hash_seed in ("1", "77"):
        done = subprocess.run(
            [sys.executable, "-c", FOLD, tmp_path / "run.jsonl", json.dumps(world.config)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == digest(machine.state.host)


def test_a_real_run_is_folded_without_weights_or_adapter_files() -> None:
    """Every call, a policy of the caller's, embeddings, a step that fails and recovers."""
    program, tape = tiny_program(num_blocks=10, max_rows=3), io.StringIO()
    state = init(program)
    begin_recording(tape, state)
    state = record(tape, load_adapter, state, adapter_folder("a"), name="a")
    model = peft_model("b")
    tensors, peft_config = get_peft_model_state_dict(model), model.peft_config["default"]
    state = record(tape, load_adapter_tensors, state, tensors, peft_config, name="b")
    state = record(tape, register_adapter, state, "/nowhere", name="c")
    state = record(tape, pin_adapter, state, "a")
    rows = torch.randn(5, program.config.model.hidden_size)
    soft = Request(id="s", prompt_embeds=rows, sampling=SamplingParams(max_tokens=4, n=2))
    state = record(tape, submit, state, soft)
    for i, name in enumerate((None, "a", "b", "c")):
        item = replace(request(f"r{i}", prompt(i, 9), name, max_tokens=8), priority=-i)
        state = record(tape, submit, state, item)
    state, _ = record(tape, step, program, state, by_priority)
    state = record(tape, deliver, state, AdapterFailed(name="c", error="gone"))
    state = record(tape, branch, state, state.host.rows.ids[0], ["twin"])
    state = record(tape, abort, state, "r0")
    with pytest.raises(UnknownRequestError):
        record(tape, abort, state, "r0")
    state = record(tape, unpin_adapter, state, "a")
    state = record(tape, unload_adapter, state, "b")
    state = record(tape, flush, state)

    def failing(*_: object) -> torch.Tensor:
        raise RuntimeError("injected")

    failures = 0
    while not state.host.idle:
        if state.host.step % 3 == 0:
            with pytest.raises(RuntimeError, match="injected"):
                record(tape, step, replace(program, layer=failing, fused=False), state)
            state, failures = record(tape, recover, state), failures + 1
        state, _ = record(tape, step, program, state)
    assert failures
    lines = tape.getvalue().splitlines()
    assert digest(replay(program.config, lines)) == digest(state.host)
    assert state.host.step > 8


def test_what_is_planned_ahead_of_time_is_not_recorded(eager_graphs: list) -> None:
    """A policy is asked once more for the step that is queued behind the present one."""
    program, tape = tiny_program(row_buckets=(1, 2, 4, 8)), io.StringIO()
    program = replace(program, fused=True, graphs=True)
    state = init(program)
    begin_recording(tape, state)
    for turn in range(4):
        state = record(tape, submit, state, request(str(turn), prompt(turn, 5), max_tokens=6))
        state, _ = record(tape, step, program, state, by_priority)
    lines = tape.getvalue().splitlines()
    assert digest(replay(program.config, lines)) == digest(state.host)


def test_a_recording_may_begin_at_any_state() -> None:
    program, tape = tiny_program(), io.StringIO()
    state = submit(init(program), request("r", prompt(0, 9), max_tokens=5))
    state, _ = step(program, state)
    begin_recording(tape, state)
    state, _ = record(tape, step, program, state)
    lines = tape.getvalue().splitlines()
    assert len(lines) == 3
    elsewhere = replace(program.config, device="cuda")
    assert digest(replay(elsewhere, lines)) == digest(state.host)


def test_what_is_no_recording_of_this_config_is_refused() -> None:
    tape = io.StringIO()
    begin_recording(tape, random_world(0, 0).machine().state)
    lines = tape.getvalue().splitlines()
    config = toy_config(**random_world(0, 0).config)
    replay(config, lines)
    with pytest.raises(SnapshotError, match="num_blocks: recorded"):
        replay(replace(config, num_blocks=99), lines)
    with pytest.raises(SnapshotError, match="tokens: recorded"):
        replay(replace(config, tokens=None), lines)
    with pytest.raises(SnapshotError, match="format None"):
        replay(config, [])
    for line, what in (("[", "damaged"), ('["dance"]', "no event"), ('{"x": 1}', "canonical")):
        with pytest.raises(SnapshotError, match=what):
            replay(config, [*lines, line])
    with pytest.raises(TypeError, match="digest is not"):
        record(tape, digest, None)
