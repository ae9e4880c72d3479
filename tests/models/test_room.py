"""Weights with rows of adapters beneath them: the same weights, and one pool at a time."""

import gc

import pytest
import torch

from purestep.engine import init, load_adapter, make_program
from purestep.engine.fork import fork
from purestep.engine.options import LORA_ROWS, room_for
from purestep.models import checkpoint as checkpoint_files
from purestep.models.checkpoint import load_checkpoint
from purestep.models.config import fused_linears
from purestep.models.room import WEIGHTS, Room, make_room, moved_in
from purestep.models.tensor_files import read_tensors
from purestep.ops.lora_linear import WIDE_ROWS
from purestep.state.errors import ConfigError
from tests.engine.tiny import adapter_folder, checkpoint, request, run

P = 64


def loaded_in_room(family: str) -> tuple[Room, tuple]:
    folder, _ = checkpoint(family)
    model, *_ = load_checkpoint(folder, dtype=torch.float32)
    room = make_room(model, P, dtype=torch.float32, device="cpu")
    return room, load_checkpoint(folder, dtype=torch.float32, room=room)


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_weights_lie_in_it_and_are_the_same(family: str) -> None:
    room, (model, params, digest) = loaded_in_room(family)
    model, plain, known = load_checkpoint(checkpoint(family)[0], dtype=torch.float32)
    assert digest == known
    by_hand = make_room(model, P, dtype=torch.float32, device="cpu")
    moved = moved_in(plain, by_hand)
    for i in range(model.num_layers):
        for linear in fused_linears(model):
            field = WEIGHTS[linear.name]
            want = getattr(plain.layers[i], field)
            for own, home in ((params, room), (moved, by_hand)):
                got = getattr(own.layers[i], field)
                assert torch.equal(got, want)
                wide = home.wide_LWD.get(linear.name)
                assert (wide is None) == (family == "qwen2" and linear.name == "qkv"), "a bias"
                if wide is not None:
                    assert got.data_ptr() == wide[i].data_ptr()
                    assert len(wide[i]) == linear.out_features + P * len(linear.out_sizes)


def test_weights_are_read_to_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that memory need not hold a model twice."""
    read: dict[str, torch.Tensor] = {}

    def reading(*args, **kwargs):
        tensors, digest = read_tensors(*args, **kwargs)
        read.update(tensors)
        return tensors, digest

    monkeypatch.setattr(checkpoint_files, "read_tensors", reading)
    room, _ = loaded_in_room("llama")
    homes = {wide.untyped_storage().data_ptr() for wide in room.wide_LWD.values()}
    matrices = [name for name in read if name.startswith("layers.") and "_proj" in name]
    assert len(matrices) == 14
    assert all(read[name].untyped_storage().data_ptr() in homes for name in matrices)


def test_one_pool_has_the_rows_and_the_next_one_after_it() -> None:
    room, (model, params, digest) = loaded_in_room("llama")
    options = {"num_blocks": 32, "max_rows": 4, "max_active_adapters": 2, "lora_rows": P}
    common = {"weights": digest, "dtype": "float32", "device": "cpu", **options}
    program = make_program(model, params, room=room, **common)
    plain = make_program(model, params, **common)
    state = load_adapter(init(program), adapter_folder("b"), name="b")
    assert not room.is_free
    twin = load_adapter(init(plain), adapter_folder("b"), name="b")
    item = request("x", [3, 4, 5], "b", max_tokens=4)
    (state, got), (twin, want) = run(program, state, [item]), run(plain, twin, [item])
    assert got["x"].tokens.tolist() == want["x"].tokens.tolist()
    for name, rows in room.a_LSPD.items():
        assert state.device.pool.a_LSPD[name] is rows
        assert torch.equal(rows, twin.device.pool.a_LSPD[name])
        assert rows.any()
    for other in (init(program), fork(program, state)):
        for name, rows in room.a_LSPD.items():
            own = other.device.pool.a_LSPD[name]
            assert own.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr()
        assert other.device.pool.layers[0].qkv.wide_WD is None
    del state, other
    gc.collect()
    assert room.is_free
    again = init(program)
    assert not any(rows.any() for rows in room.a_LSPD.values())
    assert not room.is_free
    assert (
        again.device.pool.layers[0].down.wide_WD.data_ptr() == params.layers[0].down_DF.data_ptr()
    )


def test_its_rows_are_those_of_the_config() -> None:
    room, (model, params, digest) = loaded_in_room("llama")
    with pytest.raises(ConfigError, match="room: it has 64 adapter rows, lora_rows=32"):
        make_program(
            model, params, weights=digest, dtype="float32", device="cpu", lora_rows=32, room=room
        )
    form = {"dtype": torch.float32, "device": "cpu"}
    for options, rows in (({}, LORA_ROWS), ({"lora_rows": 16, "adapter_bytes": None}, 16)):
        assert room_for(model, options, **form).num_rows == rows
    assert room_for(model, {"adapter_bytes": 10**6}, **form) is None
    assert make_room(model, WIDE_ROWS + 8, dtype=torch.float32, device="cpu") is None
