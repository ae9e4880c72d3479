"""Frozen trees: what torch sees of them, and what they refuse (design, section 4)."""

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st

from purestep.state import (
    adapters,
    batch,
    blocks,
    digests,
    encoder,
    engine,
    media,
    plan,
    request,
    rows,
    sampling,
    scores,
    tables,
)
from purestep.state.canonical import TREES
from purestep.state.pytree import evolve, static, tree

MODULES = (
    adapters,
    batch,
    blocks,
    digests,
    encoder,
    engine,
    media,
    plan,
    request,
    rows,
    sampling,
    scores,
    tables,
)


@tree
class Pair:
    left: Any
    right: Any = None
    name: str = static(default="p")


def trees_of_state() -> list[type]:
    """Every registered tree that the modules of `state` define."""
    found = [
        value
        for module in MODULES
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
        if dataclasses.is_dataclass(value) and value is not plan.BatchDescriptor
    ]
    assert len(found) > 15
    return found


@pytest.mark.parametrize("cls", trees_of_state())
def test_trees_flatten_to_their_fields_and_back(cls: type) -> None:
    """Unflattening builds trees of non-values, so a constructor must not look at them."""
    fields = dataclasses.fields(cls)
    values = {f.name: object() for f in fields}
    leaves, spec = pytree.tree_flatten(cls(**values))
    fixed = [f.name for f in fields if f.metadata.get("static")]
    assert leaves == [values[f.name] for f in fields if f.name not in fixed]
    again = pytree.tree_unflatten([None] * len(leaves), spec)
    assert type(again) is cls
    assert all(
        getattr(again, f.name) is (values[f.name] if f.name in fixed else None) for f in fields
    )


@pytest.mark.parametrize("cls", trees_of_state())
def test_trees_are_frozen_slotted_and_compared_by_identity(cls: type) -> None:
    value = cls(**{f.name: 1 for f in dataclasses.fields(cls)})
    other = dataclasses.replace(value)
    assert value != other
    assert hash(value) != hash(other) or value is not other
    assert not hasattr(value, "__dict__")
    with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
        value.something_new = 1
    for f in dataclasses.fields(cls):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, f.name, 2)
    with pytest.raises(TypeError):
        cls(*[1] * max(1, len(dataclasses.fields(cls))))
    alive = weakref.ref(value)
    del value
    gc.collect()
    assert alive() is None
    assert not hasattr(cls, "__post_init__")


def test_every_tree_of_the_host_state_has_a_canonical_form() -> None:
    """A new part of the state that `canonical` does not know would break digests and snapshots."""
    on_device = {c.__name__ for c in trees_of_state() if c.__module__ == batch.__name__}
    on_device |= {"DeviceState", "EngineState"}
    names = {cls.__name__ for cls in trees_of_state()} | {"BatchDescriptor"}
    assert names - on_device == set(TREES)


nested = st.recursive(
    st.integers() | st.text(max_size=2),
    lambda inner: st.builds(Pair, left=inner, right=inner, name=st.text(max_size=2)),
    max_leaves=6,
)


@given(nested)
def test_tree_map_keeps_the_structure(value: Any) -> None:
    tokens: list[Any] = []

    def number(leaf: Any) -> int:
        tokens.append(leaf)
        return len(tokens) - 1

    mapped = pytree.tree_map(number, value)
    assert pytree.tree_structure(mapped) == pytree.tree_structure(value)
    assert pytree.tree_leaves(pytree.tree_map(lambda i: tokens[i], mapped)) == tokens


def test_static_fields_belong_to_the_structure() -> None:
    one, two = Pair(left=1, name="a"), Pair(left=1, name="b")
    assert pytree.tree_structure(one) != pytree.tree_structure(two)
    assert pytree.tree_leaves(one) == pytree.tree_leaves(two) == [1, None]


def test_functional_transforms_see_through() -> None:
    """`torch.func` differentiates with regard to the tensors in a tree."""

    def loss(pair: Pair) -> torch.Tensor:
        return (pair.left * pair.right).sum()

    value = Pair(left=torch.tensor([1.0, 2.0]), right=torch.tensor([3.0, 5.0]))
    slope = torch.func.grad(loss)(value)
    assert isinstance(slope, Pair)
    assert slope.left.tolist() == [3.0, 5.0]
    assert slope.right.tolist() == [1.0, 2.0]


def test_evolve_is_replace() -> None:
    pair = Pair(left=1, right=(2, 3), name="x")
    new = evolve(pair, left=5)
    assert (new.left, new.right, new.name) == (5, (2, 3), "x")
    assert (pair.left, new.right is pair.right) == (1, True)
    with pytest.raises(KeyError):
        evolve(pair, middle=0)
