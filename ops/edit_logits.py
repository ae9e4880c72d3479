"""Change the logits of some rows before they are divided and cut: biases, penalties, masks.

S sampled rows, V vocabulary, E edits: pairs of a row and an id, the same pair at most once unless
something else is said. Nothing waits for a device, as assigning a number by index would.
"""

import inspect
from collections.abc import Mapping

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


EDITS = {  # in the order that SamplingParams documents
    "bias": add_bias_,
    "seen": penalise_repetition_,
    "drawn": penalise_counts_,
    "banned": ban_,
    "allowed": allow_only_,
}

COLUMNS = {  # what each of them takes beside the logits, as "kind/number"
    f"{kind}/{n}": torch.int64 if name.startswith(("row", "id")) else torch.float32
    for kind, change_ in EDITS.items()
    for n, name in enumerate([*inspect.signature(change_).parameters][1:])
}


def edit_(logits_SV: Tensor, columns: Mapping[str, Tensor]) -> None:
    """Make those of `EDITS` whose `COLUMNS` are there, for all rows at once."""
    for kind, change_ in EDITS.items():
        if own := [column for name, column in columns.items() if name.startswith(f"{kind}/")]:
            change_(logits_SV, *own)


def edited(raw_SV: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The logits with these edits, and the largest of each row, NaN where there is one.

    A compiler, for whom there would be a graph for each choice of edits, is given all `COLUMNS`,
    of which some are empty.
    """
    if torch.compiler.is_dynamo_compiling():
        logits_SV = torch.ops.purestep.edited(raw_SV, [columns[name] for name in COLUMNS])
    else:
        logits_SV = raw_SV.clone()
        edit_(logits_SV, columns)
    return logits_SV, logits_SV.amax(-1)


def _edited_traced(raw_SV: Tensor, columns: list[Tensor]) -> Tensor:
    logits_SV, found = raw_SV.clone(), dict(zip(COLUMNS, columns, strict=True))
    there = {name: c for name, c in found.items() if len(found[name.partition("/")[0] + "/0"])}
    edit_(logits_SV, there)
    return logits_SV


# An op, since a compiler rounds a product and the sum behind it once, and has other quotients.
torch.library.define("purestep::edited", "(Tensor raw_SV, Tensor[] columns) -> Tensor")
torch.library.impl("purestep::edited", ("cpu", "cuda"), _edited_traced)
torch.library.register_fake("purestep::edited", lambda raw_SV, _: raw_SV.new_empty(raw_SV.shape))
