"""The canonical form: equal values have equal digests, everywhere and for ever (DT-03)."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings
from immutables import Map

from purestep.engine.adapters import deliver_loaded, pin_adapter, register_adapter
from purestep.engine.branch import branch
from purestep.engine.requests import abort, submit
from purestep.engine.schedule import schedule
from purestep.simulation.device import toy_step
from purestep.simulation.world import loaded, toy_config, toy_state
from purestep.state.adapters import known_names
from purestep.state.canonical import TREES, digest, from_plain, to_plain
from purestep.state.engine import EngineState, HostState
from purestep.state.errors import SnapshotError
from purestep.state.plan import BatchDescriptor
from purestep.state.request import FinishReason, Request, frozen
from purestep.state.sampling import SamplingParams

events = st.lists(st.integers(0, 10**6), max_size=40)


def after(numbers: Iterable[int], **config: Any) -> EngineState:
    """A state that a list of numbers leads to, through the real functions."""
    state = toy_state(toy_config(**config))
    for i, number in enumerate(numbers):
        state = changed(state, i, *divmod(number, 10))
    return state


def changed(state: EngineState, i: int, number: int, kind: int) -> EngineState:
    live = sorted(state.host.requests)
    names = [None, *known_names(state.host.adapters)]
    if kind < 3:
        sampling = SamplingParams(
            temperature=number % 3 / 3, max_tokens=1 + number % 9, stop=("ab",) * (number % 2)
        )
        tokens = [1 + (number >> k) % 2 for k in range(1 + number % 17)]
        request = Request(
            id=f"r{i}",
            tokens=tokens,
            adapter=names[number % len(names)],
            salt=(None, "s")[number % 2],
            sampling=sampling,
        )
        return submit(state, request)
    if kind == 3:
        version = f"v{number % 4}"
        if len(state.host.adapters.registered) < 3:
            return deliver_loaded(state, loaded("ab"[number % 2], version, 1 + number % 16, None))
        return state
    if kind == 4:
        return register_adapter(state, "/c", name="c")
    if kind == 5 and live:
        return branch(state, live[number % len(live)], [f"b{i}"])
    if kind == 6 and live:
        return abort(state, live[number % len(live)])
    if kind == 7 and state.host.adapters.names and not state.host.adapters.pins:
        return pin_adapter(state, min(state.host.adapters.names))
    for _ in range(3):
        if not state.host.idle:
            state = toy_step(state)[0]
    return state


def through_json(value: Any) -> Any:
    return from_plain(json.loads(json.dumps(to_plain(value))))


@settings(max_examples=60)
@given(events, st.booleans())
@example([10, 101, 8, 8, 5, 8], True)
def test_states_survive_their_canonical_form(numbers: list[int], in_flight: bool) -> None:
    """Written out and read again, in flight or not: the same digest, arrays of the same types."""
    state = after(numbers)
    host = state.host
    if in_flight and not host.idle:
        host, _ = schedule(state.config, host)
    again = through_json(host)
    assert digest(again) == digest(host)
    assert same(again, host)


def same(one: Any, two: Any) -> bool:
    """Equal in type and value, all the way down, without the canonical form's help."""
    if type(one) is not type(two):
        return False
    if isinstance(one, np.ndarray):
        writable = one.flags.writeable or two.flags.writeable
        return one.dtype == two.dtype and np.array_equal(one, two) and not writable
    if isinstance(one, tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, Map):
        return set(one) == set(two) and all(same(one[k], two[k]) for k in one)
    if type(one).__name__ in TREES:
        return all(same(getattr(one, f.name), getattr(two, f.name)) for f in fields(one))
    return one == two


@settings(max_examples=25)
@given(events)
def test_a_restored_state_goes_on_as_the_original(numbers: list[int]) -> None:
    """DT-03: every later state has the same digest."""
    state = after(numbers)
    twin = replace(state, host=through_json(state.host))
    for _ in range(6):
        if state.host.idle:
            break
        (state, said), (twin, told) = toy_step(state), toy_step(twin)
        assert digest(twin.host) == digest(state.host)
        assert json.dumps(to_plain(told)) == json.dumps(to_plain(said))


@settings(max_examples=25)
@given(events)
def test_equal_histories_give_equal_states_and_old_ones_keep_theirs(numbers: list[int]) -> None:
    """A pure function of its events; later transitions leave every earlier state alone."""
    state, kept = toy_state(toy_config()), []
    for i, number in enumerate(numbers):
        kept.append((state.host, digest(state.host)))
        state = changed(state, i, *divmod(number, 10))
    assert digest(after(numbers).host) == digest(state.host)
    assert all(digest(host) == name for host, name in kept)


def test_old_states_outlive_thousands_of_transitions() -> None:
    """DT-03: kept from the beginning of a run of some 2000 transitions, checked at its end."""
    numbers = np.random.default_rng(0).integers(0, 10**6, 1500).tolist()
    state, kept = toy_state(toy_config()), []
    for i, number in enumerate(numbers):
        if i % 20 == 0:
            kept.append((state.host, digest(state.host)))
        state = changed(state, i, *divmod(number, 10))
    assert len({name for _, name in kept}) > 60
    assert all(digest(host) == name for host, name in kept)


@given(events, events)
@settings(max_examples=25)
def test_different_states_have_different_digests(one: list[int], two: list[int]) -> None:
    first, second = after(one).host, after(two).host
    assert (digest(first) == digest(second)) == same(first, second)


# Python's hash is equal for -1 and -2, and for 0 and 2**61-1: such keys come as they were put in.
keys = st.integers() | st.text(max_size=3) | st.sampled_from((-1, -2, 0, 2**61 - 1))


@given(st.dictionaries(keys, st.integers(), max_size=20), st.data())
def test_maps_are_written_in_the_order_of_their_keys(
    values: dict[Any, int], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(list(values)))
    one, two = Map(values), Map([(key, values[key]) for key in order])
    detour = Map({**values, "gone": 1}).delete("gone")
    texts = {json.dumps(to_plain(m)) for m in (one, two, detour)}
    assert len(texts) == 1
    assert through_json(one) == one


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.floats(allow_nan=False)
    | st.sampled_from(FinishReason),
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3).map(Map)
    ),
    max_leaves=8,
)


@given(plain_values)
@example((1, True, 1.0, "1", b"1", None, 0, False, -0.0, 0.0))
def test_values_survive(value: Any) -> None:
    again = through_json(value)
    assert same(again, value)
    assert json.dumps(to_plain(again)) == json.dumps(to_plain(value))


@given(plain_values, plain_values)
@example(1, True)
@example(0.0, -0.0)
@example(1, 1.0)
@example("a", b"a")
@example((), Map())
@example("stop", FinishReason.STOP)
@example("00", b"\0")
def test_different_values_look_different(one: Any, two: Any) -> None:
    bits = [math.copysign(1, v) if isinstance(v, float) else 1 for v in (one, two)]
    equal = json.dumps(to_plain(one)) == json.dumps(to_plain(two))
    if isinstance(one, float) and isinstance(two, float):
        assert equal == (one == two and bits[0] == bits[1])
    elif not isinstance(one, tuple | Map):
        assert equal == same(one, two)


@given(st.floats(width=64))
@example(5e-324)
@example(0.1)
@example(float("inf"))
def test_floats_keep_every_bit(value: float) -> None:
    again = through_json(value)
    assert (again == value and math.copysign(1, again) == math.copysign(1, value)) or (
        math.isnan(again) and math.isnan(value)
    )


@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.uint64, np.bool_, np.int64, ">i4"])
@pytest.mark.parametrize("shape", [(0,), (3,), (2, 3), (0, 4)])
def test_arrays_keep_every_bit(dtype: Any, shape: tuple[int, ...]) -> None:
    """Whatever the byte order of the array or its strides; nan payloads and -0.0 too."""
    raw = np.arange(1, 1 + 8 * math.prod(shape), dtype=np.uint8) * 31
    array = raw.view(np.dtype(dtype))[: math.prod(shape)].reshape(shape)
    if dtype is np.bool_:
        array = array.view(np.uint8) % 2 == 1
    again = through_json(array)
    assert (again.dtype, again.shape) == (array.dtype.newbyteorder("="), shape)
    assert again.tobytes() == array.astype(again.dtype).tobytes()
    assert not again.flags.writeable
    spaced = np.repeat(array, 2, axis=0)[::2]
    assert to_plain(spaced) == to_plain(array)


@pytest.mark.parametrize(
    "value",
    [[1], {1: 2}, {1}, object(), np.int64(3), np.float32(1), np.bool_(True), 1j, range(2), Path()],
)
def test_what_no_state_may_hold_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="host state cannot hold"):
        to_plain((value,))


DAMAGED: list[Any] = [
    {},
    {"tree": "Nobody"},
    {"tree": "Request"},
    {"tree": "EncoderLedger", "more": 1},
    {"tree": ["Request"]},
    {"tree": "os.system"},
    {"float": 3},
    {"float": "x"},
    {"bytes": "zz"},
    {"bytes": 3},
    {"map": [[1]]},
    {"map": 5},
    {"map": [[{"map": []}, 1, 2]]},
    {"reason": "bogus"},
    {"array": "x", "shape": [0], "hex": ""},
    {"array": "object", "shape": [1], "hex": "00" * 8},
    {"array": "int32", "shape": [3], "hex": "00"},
    {"array": "int32", "shape": [3], "hex": "00" * 8},
    {"other": 1},
    1.5,
]


@pytest.mark.parametrize("plain", DAMAGED)
def test_damaged_forms_are_refused_by_type(plain: Any) -> None:
    """`from_plain` raises SnapshotError for anything that `to_plain` does not make."""
    with pytest.raises(SnapshotError):
        from_plain([plain])


def test_no_field_of_a_tree_looks_like_a_tag() -> None:
    """`from_plain` tells kinds apart by their keys."""
    tags = {"tree", "reason", "float", "bytes", "map", "array", "shape", "hex"}
    for cls in TREES.values():
        assert not tags & {f.name for f in fields(cls)}, cls


def test_every_part_of_a_state_counts() -> None:
    """Two states that differ in one field of one tree have two digests."""
    host = after([3, 80, 8, 161]).host
    assert host.rows.ids
    assert host.waiting
    assert digest(host) == digest(replace(host))
    for changes in one_change_each(host):
        assert digest(replace(host, **changes)) != digest(host), changes.keys()


def one_change_each(host: HostState) -> list[dict[str, Any]]:
    record = next(iter(host.requests.values()))
    request_id = record.request.id
    rows = replace(host.rows, num_computed_R=frozen(host.rows.num_computed_R + 1))
    longer = replace(record, generated=frozen([*record.generated, 1]))
    hotter = replace(record.request.sampling, temperature=math.nextafter(1.0, 2.0))
    return [
        {"step": host.step + 1},
        {"arrivals": host.arrivals + 1},
        {"waiting": (*host.waiting, "x")},
        {"rows": rows},
        {"requests": host.requests.set(request_id, longer)},
        {"requests": host.requests.set(request_id, replace(record, stream=record.stream ^ 1))},
        {
            "requests": host.requests.set(
                request_id, replace(record, request=replace(record.request, sampling=hotter))
            )
        },
        {"blocks": replace(host.blocks, tail=host.blocks.tail + 1)},
        {"adapters": replace(host.adapters, pins=("x",))},
        {"copies": (*host.copies, (0, 1))},
    ]


PRINT_DIGESTS = """
from tests.state.test_canonical import after
from purestep.state.canonical import digest
print([digest(after(numbers).host) for numbers in ([], [20, 103, 3, 8, 5, 8], range(0, 9999, 71))])
"""


def test_digests_are_equal_in_a_process_with_another_hash_seed() -> None:
    """PC-09, DT-03: sets and dicts of strings come in another order there than here."""
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    command, root = [sys.executable, "-c", PRINT_DIGESTS], Path(__file__).parents[2]
    there = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=True)
    lists = ([], [20, 103, 3, 8, 5, 8], range(0, 9999, 71))
    assert there.stdout == f"{[digest(after(numbers).host) for numbers in lists]}\n"


def test_a_descriptor_is_a_tree_of_the_form() -> None:
    """The one dataclass here that compares by value, since it finds a captured graph."""
    shape = BatchDescriptor(num_tokens=8, num_rows=2, uniform_decode=False, num_active_loras=1)
    assert through_json(shape) == shape
    assert hash(through_json(shape)) == hash(shape)
