"""Media in a prompt: where each item's placeholder stands, and whose encoder output fills it."""

from typing import Any

import numpy as np

from purestep.state.pytree import tree


@tree
class Feature:
    """One media item of a prompt. Its placeholder takes `length` positions from `offset` on; those
    that `is_embed` marks (all of them for None) take the rows of its encoder output in order.

    `digest` names what the caller gave together with the processor's options, so it keys processed
    tensors; `identifier` names the encoder output, which depends on the tower's adapter too.
    """

    modality: str  # "image"
    digest: str  # blake3 hex
    identifier: str  # blake3 hex
    offset: int
    length: int
    is_embed: np.ndarray | None = None  # bool [length]
    grid: tuple[int, int, int] | None = None  # patches (t, h, w), for models that place by them
    data: Any = None  # processed tensors by name; None once submitted: the blob of `digest` then

    @property
    def end(self) -> int:
        return self.offset + self.length

    @property
    def num_embeds(self) -> int:
        """Rows of its encoder output."""
        return self.length if self.is_embed is None else int(np.count_nonzero(self.is_embed))
