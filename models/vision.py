"""What a multimodal family adds to its language model, as plain functions: one file a family.

E encoder rows of an item, D hidden size of the language model, n positions of a placeholder.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor
from transformers import PretrainedConfig

from purestep.models.tower_rows import ItemAdapters

Tensors = Mapping[str, Tensor]  # the processor's tensors of one item, without a batch dimension
Shapes = dict[str, tuple[int, ...]]  # by the tensors' names in a checkpoint
Words = Callable[[str], Sequence[int]]  # a text's ids by the tokenizer, nothing added


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """The functions of one family. `config` is the family's own frozen, hashable geometry, `params`
    its own tree of weights (tower and projector)."""

    read_config: Callable[[PretrainedConfig], Any]  # transformers' config -> geometry
    shapes: Callable[[Any], Shapes]  # config -> the tensors that `load_params` takes
    unread: str  # regular expression: tensors of a checkpoint's tower that nothing here reads
    load_params: Callable[[Any, dict[str, Tensor]], Any]  # (config, tensors) -> params
    marker: Callable[[Any], int]  # config -> the id that stands for one item in a template's ids
    # (config, what AutoImageProcessor returns for one image as tensors) -> the item's tensors, on
    # the host; RequestError where a processor option makes what the tower cannot take
    item: Callable[[Any, Tensors], Tensors]
    # (config, item, words) -> (ids int32 [n], is_embed bool [n] or None): what replaces the marker;
    # of `words` it asks for the texts that stand between an item's rows
    placeholder: Callable[[Any, Tensors, Words], tuple[np.ndarray, np.ndarray | None]]
    # (config, item) -> what stands in the text before and behind the placeholder, which a tokenizer
    # may join with the words beside it
    around: Callable[[Any, Tensors], tuple[str, str]] = lambda config, item: ("", "")
    # (params, config, items, adapters) -> one [E, D] tensor an item, which owns its memory, on the
    # device of the params; whatever shapes and adapters stand beside it
    encode: "Encode"
    # (config, the image processor's settings) -> the item with the most rows that they allow
    largest: Callable[[Any, Mapping[str, Any]], Tensors]
    # (config, the settings, E) -> items, at least one, that take as much memory as any that a step
    # may encode which makes at most E rows
    heaviest: Callable[[Any, Mapping[str, Any], int], list[Tensors]]
    # (config, item) -> an upper estimate of the numbers that encoding it holds at a time
    working: Callable[[Any, Tensors], int]
    # With M-RoPE: (config, item) -> patches (t, h, w), and the patches a side of what is one row
    grid: Callable[[Any, Tensors], tuple[int, int, int] | None] = lambda config, item: None
    merge: Callable[[Any], int] = lambda config: 0
    # config -> the decoder layers behind which rows are added too, each by D numbers more of a row:
    # rows are then [E, (1 + that) D] wherever [E, D] is said
    deepstack: Callable[[Any], int] = lambda config: 0
    # config -> shapes by name of linears that a checkpoint's tower has and `encode` never runs
    spare: Callable[[Any], Shapes] = lambda config: {}
    bidirectional: bool = False  # rows that stand side by side see each other in the decoder


class Encode(Protocol):
    """The type of `VisionFamily.encode`."""

    def __call__(
        self,
        params: Any,
        config: Any,
        items: Sequence[Tensors],
        adapters: ItemAdapters | None = None,
    ) -> list[Tensor]: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Vision:
    """A loaded tower. Immutable; threads may share it."""

    family: VisionFamily
    config: Any  # the family's geometry; Config.vision is the same value
    params: Any


def as_many(item: Tensors, rows: int, limit: int) -> list[Tensors]:
    """The item as often as `limit` holds its rows, at least once."""
    return [item] * max(limit // rows, 1)


def working_numbers(
    num_tokens: int, width: int, inner: int, num_rows: int, hidden_size: int
) -> int:
    """An upper estimate for a tower: a layer's intermediates, of rotary ones in float32, and the
    projector's, which come after them."""
    return num_tokens * (18 * width + 4 * inner) + num_rows * 4 * hidden_size


def marker_ids(marker: int, count: int) -> np.ndarray:
    """A placeholder that is the marker `count` times."""
    return np.full(count, marker, np.int32)


def woven(marker: int, parts: Sequence[int | Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """A placeholder of rows and of texts between them, as (ids int32 [n], is_embed bool [n]): a
    part is a number of rows, or the ids of a text."""
    ids = [np.full(p, marker) if isinstance(p, int) else np.array(p, int) for p in parts]
    is_embed = [np.full(len(x), isinstance(p, int)) for x, p in zip(ids, parts, strict=True)]
    return np.concatenate(ids).astype(np.int32), np.concatenate(is_embed)


def owned_rows(rows_ED: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """The rows of each of several items, copied: keeping one item's keeps no neighbour's."""
    return [rows.clone() for rows in rows_ED.split(list(counts))]
