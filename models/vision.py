"""What a multimodal family adds to its language model, as plain functions: one file a family.

E encoder rows of an item, D hidden size of the language model, n positions of a placeholder.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

Tensors = Mapping[str, Tensor]  # the processor's tensors of one item, without a batch dimension


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """The functions of one family. `config` is the family's own frozen, hashable geometry, `params`
    its own tree of weights (tower and projector)."""

    read_config: Callable[[Mapping[str, Any]], Any]  # config.json -> geometry; ConfigError
    load_params: Callable[..., Any]  # (config, tensors by checkpoint name) -> params
    marker: Callable[[Any], int]  # config -> the id that stands for one item in a template's ids
    # (config, tensors) -> (ids int32 [n], is_embed bool [n] or None): what replaces the marker
    placeholder: Callable[[Any, Tensors], tuple[np.ndarray, np.ndarray | None]]
    # (params, config, items) -> one [E, D] tensor an item, whatever shapes stand beside it
    encode: Callable[[Any, Any, Sequence[Tensors]], list[Tensor]]
    grid: Callable[[Any, Tensors], tuple[int, int, int] | None]  # for M-RoPE; None without it
    largest: Callable[[Any, Mapping[str, Any]], Tensors]  # dummy item, (config, processor options)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Vision:
    """A program's encoder: its family, geometry and weights."""

    family: VisionFamily
    config: Any
    params: Any
