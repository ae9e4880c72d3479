"""Frozen dataclasses that torch.compile, torch.func and tree_map see through."""

import dataclasses
from collections.abc import Callable
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
    cls.__tree_slots__ = _copier(setters), setters  # type: ignore[attr-defined]
    dynamic = tuple(f.name for f in fields if not f.metadata.get("static"))
    fixed = tuple(f.name for f in fields if f.metadata.get("static"))
    pytree.register_pytree_node(cls, _flatten(dynamic, fixed), _unflatten(cls, dynamic, fixed))
    return cls


def evolve(value: T, **changes: Any) -> T:
    """`dataclasses.replace` of a tree, for what a step does for many rows: a tenth of its
    time, which was 22 us for 30 fields. Raises KeyError for a field the tree does not have."""
    cls = type(value)
    copy_, setters = cls.__tree_slots__  # type: ignore[attr-defined]
    new = object.__new__(cls)
    copy_(new, value)
    for name, changed in changes.items():
        setters[name](new, changed)
    return new


def _copier(setters: dict[str, Callable[[Any, Any], None]]) -> Callable[[Any, Any], None]:
    """`copy_(new, old)`, written out field by field, as dataclasses write their `__init__`."""
    lines = (f"    put_{name}(new, old.{name})\n" for name in setters)
    names: dict[str, Any] = {f"put_{name}": put for name, put in setters.items()}
    exec("def copy_(new, old):\n" + ("".join(lines) or "    pass\n"), names)
    return names["copy_"]


def _flatten(dynamic: tuple[str, ...], fixed: tuple[str, ...]) -> Callable[[Any], Any]:
    return lambda x: ([getattr(x, n) for n in dynamic], tuple(getattr(x, n) for n in fixed))


def _unflatten(
    cls: type, dynamic: tuple[str, ...], fixed: tuple[str, ...]
) -> Callable[[Any, Any], Any]:
    return lambda leaves, context: cls(
        **dict(zip(dynamic, leaves, strict=True)), **dict(zip(fixed, context, strict=True))
    )
