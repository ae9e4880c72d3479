"""Media into embeddings, and these into the token stream. Part of `execute`.

E embeddings, D hidden size of the language model, T token rows of a step.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from purestep.engine.media import EMBEDS
from purestep.engine.pool import Pool
from purestep.engine.program import Program
from purestep.engine.upload import sent
from purestep.models.tower_rows import ItemAdapters
from purestep.state.errors import StepError
from purestep.state.plan import EncodedItem, MergedSpan, StepPlan

Outputs = dict[str, Tensor]
"""identifier -> [E, D] on the device, each with memory of its own."""

Faults = tuple[tuple[str, int, str], ...]
"""As `StepResult` has them."""


def encoded_outputs(
    program: Program, pool: Pool, plan: StepPlan, blobs: Mapping[str, Any]
) -> Outputs:
    """What the plan's items are encoded to, each by its own adapter. Raises StepError."""
    return _encoded(program, pool, plan, plan.encodes, blobs) if plan.encodes else {}


def merged_rows(
    program: Program, pool: Pool, plan: StepPlan, blobs: Mapping[str, Any], outputs: Outputs
) -> tuple[list[tuple[np.ndarray, Tensor]], Faults]:
    """(places among the plan's tokens, rows) for each of its merges; but for those whose request
    says another number of rows than the output has, which are told.

    An output that is not there, as after damage, is encoded once more, for this step alone.
    """
    lost = {span.identifier: span for span in plan.merges if span.identifier not in outputs}
    if lost:
        again = [_item_of(span) for span in lost.values()]
        outputs = outputs | _encoded(program, pool, plan, again, blobs)
    sizes = {(s.identifier, s.num_embeds): len(outputs[s.identifier]) for s in plan.merges}
    faults = tuple(
        (name, said, f"{said} embeddings are said, but its encoder gave {found}")
        for (name, said), found in sorted(sizes.items())
        if said != found
    )
    spans = [
        (span.index_E, outputs[span.identifier][span.first_row :][: len(span.index_E)])
        for span in plan.merges
        if sizes[span.identifier, span.num_embeds] == span.num_embeds
    ]
    return spans, faults


def _item_of(span: MergedSpan) -> EncodedItem:
    """The item behind a span."""
    return EncodedItem(
        identifier=span.identifier,
        blob=span.blob,
        modality=span.modality,
        version=span.version,
        num_embeds=span.num_embeds,
        keep=False,
    )


def _encoded(
    program: Program,
    pool: Pool,
    plan: StepPlan,
    items: Sequence[EncodedItem],
    blobs: Mapping[str, Any],
) -> Outputs:
    """One output an item; those that need a tower go through it together."""
    outputs = {item.identifier: blobs[item.blob].get(EMBEDS) for item in items}
    towers = [item for item in items if outputs[item.identifier] is None]
    if towers:
        vision = program.vision
        if vision is None:
            raise StepError(f"item {towers[0].identifier!r}: the program has no encoder for it")
        data = [blobs[item.blob] for item in towers]
        adapters = _adapters(pool, plan, towers)
        rows = vision.family.encode(vision.params, vision.config, data, adapters)
        outputs |= {item.identifier: own for item, own in zip(towers, rows, strict=True)}
    return {item.identifier: _checked(program, item, outputs[item.identifier]) for item in items}


def _adapters(pool: Pool, plan: StepPlan, items: Sequence[EncodedItem]) -> ItemAdapters | None:
    """Whose rows each item of a call has on the tower; None where none has any."""
    places = {place.version: place for place in plan.residents}
    versions = list(dict.fromkeys(item.version for item in items if item.version is not None))
    if not versions:
        return None
    if missing := [version for version in versions if version not in places]:
        raise StepError(f"adapter {missing[0]!r} of an item is none of step {plan.step}'s")
    return ItemAdapters(
        rows=pool.tower,
        places=tuple((places[v].slot, places[v].row_blocks) for v in versions),
        slots=tuple(-1 if i.version is None else places[i.version].slot for i in items),
        send=partial(sent, device=pool.config.device),
    )


def _checked(program: Program, item: EncodedItem, rows_ED: Tensor) -> Tensor:
    """The rows on the device, in memory of their own: a view of a batch would keep all of it for
    one of its items."""
    D = program.config.encoder_width
    if rows_ED.dim() != 2 or rows_ED.shape[1] != D:
        raise StepError(
            f"item {item.identifier!r}: embeddings of {D} are wanted, its encoder gave "
            f"{tuple(rows_ED.shape)}"
        )
    rows_ED = rows_ED.to(program.config.device, getattr(torch, program.config.dtype))
    return rows_ED if rows_ED.untyped_storage().nbytes() == rows_ED.nbytes else rows_ED.clone()
