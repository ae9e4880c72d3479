"""Frozen dataclasses that torch.compile, torch.func and tree_map see through."""

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar, dataclass_transform

import torch.utils._pytree as pytree

T = TypeVar("T")


def static(**kwargs: Any) -> Any:
    """A field that belongs to the tree's structure: hashable, never a tensor."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, kw_only_default=True, eq_default=False)
def tree(cls: type[T]) -> type[T]:
    """Make `cls` a frozen, slotted, keyword-only dataclass and register it as a pytree.

    Fields are leaves or subtrees, in order of definition, but for those marked `static()`.
    Equality is identity: host states are compared by `digest`, tensors by their own functions.
    Validation never lives in `__post_init__`, since unflattening builds trees of non-values.
    """
    cls = dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)(
        cls
    )
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    setters = {f.name: cls.__dict__[f.name].__set__ for f in fields}
    # Two names at least, or attrgetter gives no tuple.
    values = attrgetter("__class__", "__class__", *setters)
    cls.__tree_slots__ = values, setters  # type: ignore[attr-defined]
    dynamic = tuple(f.name for f in fields if not f.metadata.get("static"))
    fixed = tuple(f.name for f in fields if f.metadata.get("static"))
    pytree.register_pytree_node(cls, _flatten(dynamic, fixed), _unflatten(cls, dynamic, fixed))
    return cls


def evolve(value: T, **changes: Any) -> T:
    """`dataclasses.replace` of a tree, for what a step does for many rows: a third of its
    time, which was 22 us for 30 fields. Raises KeyError for a field the tree does not have."""
    cls = type(value)
    values, setters = cls.__tree_slots__  # type: ignore[attr-defined]
    new = object.__new__(cls)
    for put, old in zip(setters.values(), values(value)[2:], strict=True):
        put(new, old)
    for name, changed in changes.items():
        setters[name](new, changed)
    return new


def _flatten(dynamic: tuple[str, ...], fixed: tuple[str, ...]) -> Callable[[Any], Any]:
    return lambda x: ([getattr(x, n) for n in dynamic], tuple(getattr(x, n) for n in fixed))


def _unflatten(
    cls: type, dynamic: tuple[str, ...], fixed: tuple[str, ...]
) -> Callable[[Any, Any], Any]:
    return lambda leaves, context: cls(
        **dict(zip(dynamic, leaves, strict=True)), **dict(zip(fixed, context, strict=True))
    )
