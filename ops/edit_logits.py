"""Change the logits of some rows before they are divided and cut: biases, penalties, masks.

S sampled rows, V vocabulary, E edits: pairs of a row and an id, the same pair at most once unless
something else is said. Nothing waits for a device, as assigning a number by index would.
"""

import torch
from torch import Tensor


def add_bias_(logits_SV: Tensor, row_E: Tensor, id_E: Tensor, bias_E: Tensor) -> None:
    """logits[row, id] += bias."""
    logits_SV[row_E, id_E] += bias_E


def penalise_repetition_(logits_SV: Tensor, row_E: Tensor, id_E: Tensor, penalty_E: Tensor) -> None:
    """Divide positive logits by the penalty and multiply negative ones (Keskar et al., 2019), once
    for each id, however often its pair stands there."""
    seen_E = logits_SV[row_E, id_E]
    logits_SV[row_E, id_E] = torch.where(seen_E < 0, seen_E * penalty_E, seen_E / penalty_E)


def penalise_counts_(
    logits_SV: Tensor,
    row_E: Tensor,
    id_E: Tensor,
    count_E: Tensor,
    frequency_E: Tensor,
    presence_E: Tensor,
) -> None:
    """logits[row, id] -= count * frequency + presence, for ids that were generated before."""
    logits_SV[row_E, id_E] -= count_E * frequency_E + presence_E


def ban_(logits_SV: Tensor, row_E: Tensor, id_E: Tensor) -> None:
    """Minus infinity for these ids."""
    logits_SV.view(-1).index_fill_(0, row_E * logits_SV.shape[1] + id_E, -torch.inf)


def allow_only_(logits_SV: Tensor, rows_A: Tensor, row_E: Tensor, id_E: Tensor) -> None:
    """Minus infinity in each row of `rows_A` but for the ids that its pairs name."""
    kept_E = logits_SV[row_E, id_E]
    logits_SV.index_fill_(0, rows_A, -torch.inf)
    logits_SV[row_E, id_E] = kept_E
