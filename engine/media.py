"""Media of a request, from `submit` to the plan: blobs, limits, rows to merge, positions.

P prompt tokens, T tokens of a plan, R running rows.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from immutables import Map
from torch import Tensor

from purestep.engine.config import Config
from purestep.state.errors import RequestError
from purestep.state.media import Feature, embed_runs, gather_plan, group_embeds, overlap_groups
from purestep.state.mrope import check_grids, first_embed, mrope_positions
from purestep.state.plan import MergedSpan
from purestep.state.request import Request, RequestState
from purestep.state.rows import Rows
from purestep.state.scores import locked

EMBEDS = "embeds"  # the one tensor [E, encoder_width] of an item that needs no encoder


def take_media(
    config: Config, blobs: Map[str, Any], request: Request
) -> tuple[Request, Map[str, Any]]:
    """(the request without its items' tensors, the blobs with them). They are kept as they are
    until every request that names them has ended: who gave them must not write to them.

    An item without tensors must be one that a live request brought. Raises RequestError.
    """
    who, features = f"request {request.id!r}", request.features
    if not isinstance(features, tuple | list):
        raise RequestError(f"{who}: features must be a tuple of Feature, got {type(features)}")
    found = {}
    for i, feature in enumerate(features):
        if not isinstance(feature, Feature):
            raise RequestError(f"{who}: item {i} must be a Feature, got {type(feature)}")
        data = feature.data
        if data is None:
            if feature.digest not in blobs and feature.digest not in found:
                raise RequestError(
                    f"{who}: item {i} has no data, and no live request brought any of digest "
                    f"{feature.digest!r}"
                )
            continue
        named = isinstance(data, Mapping) and data and all(isinstance(name, str) for name in data)
        if not named or not all(isinstance(value, Tensor) for value in data.values()):
            raise RequestError(f"{who}: item {i}: data must be a mapping from names to tensors")
        if EMBEDS in data:
            _check_embeds(data[EMBEDS], feature, config.encoder_width, f"{who}: item {i}")
        if feature.digest not in blobs:
            found[feature.digest] = Map(data)
    bare = tuple(replace(feature, data=None) for feature in features)
    return replace(request, features=bare), blobs.update(found)


def _check_embeds(rows: Tensor, feature: Feature, D: int, what: str) -> None:
    dense = rows.layout == torch.strided and not rows.is_meta and rows.is_floating_point()
    if not dense or rows.ndim != 2 or rows.shape[1] != D or len(rows) != feature.num_embeds:
        raise RequestError(
            f"{what}: its embeddings must be floats of shape [{feature.num_embeds}, {D}], "
            f"got {tuple(rows.shape)} of {rows.dtype}"
        )
    if not rows.isfinite().all():
        raise RequestError(f"{what}: its embeddings hold NaN or infinity")


def check_media(config: Config, request: Request) -> None:
    """Raises RequestError, naming the item, its size and the limit, for a request with checked
    features that could never run: a group larger than a step may encode, or, where items are not
    split, longer than a step may be; grids that do not fit."""
    who, features = f"request {request.id!r}", request.features
    for group in overlap_groups(features):
        what = _named(features, group)
        size, limit = group_embeds(features, group), config.max_encoder_tokens
        if size > limit:
            raise RequestError(f"{who}: {what}: {size} embeddings, max_encoder_tokens={limit}")
        if not config.disable_chunked_mm_input:
            continue
        length = max(features[i].end for i in group) - features[group[0]].offset
        limits = {
            "max_batched_tokens": config.max_batched_tokens,
            "long_prefill_threshold": config.long_prefill_threshold or config.max_batched_tokens,
        }
        name = min(limits, key=limits.__getitem__)
        if length > limits[name]:
            raise RequestError(
                f"{who}: {what}: {length} positions, and items are not split, but "
                f"{name}={limits[name]}"
            )
    if config.mrope_merge:
        check_grids(features, config.mrope_merge, who)


def _named(features: tuple[Feature, ...], group: list[int]) -> str:
    kinds = ", ".join(f"item {i} ({features[i].modality})" for i in group)
    return f"{kinds}, which overlap" if len(group) > 1 else kinds


def positions_of(config: Config, request: Request) -> tuple[np.ndarray | None, int]:
    """(`position_3P`, `position_delta`) of a request, which `mrope_merge` asks for; (None, 0) where
    its positions are places in the sequence."""
    if not (config.mrope_merge and request.features):
        return None, 0
    placed = [(first_embed(f), f.grid) for f in request.features if f.num_embeds]
    position_3P, delta = mrope_positions(len(request.tokens), placed, config.mrope_merge)
    return locked(position_3P), delta


def merged_spans(
    rows: Rows, count_R: np.ndarray, requests: Map[str, RequestState]
) -> tuple[MergedSpan, ...]:
    """The tokens of this step that encoder outputs fill, row by row, item by item."""
    if "media" not in rows.traits:
        return ()
    inside_R = rows.num_computed_R < rows.media_end_R
    spans, first_R = [], np.cumsum(count_R) - count_R
    for row in np.flatnonzero(inside_R).tolist():
        record = requests[rows.ids[row]]
        features = record.features
        window = int(rows.num_computed_R[row]), int(count_R[row]), int(first_R[row])
        for i, first_row, index_E in gather_plan(features, *window):
            spans.append(
                MergedSpan(
                    identifier=features[i].identifier,
                    blob=features[i].digest,
                    modality=features[i].modality,
                    num_embeds=features[i].num_embeds,
                    first_row=first_row,
                    index_E=index_E,
                    version=record.encoder_version,
                )
            )
    return tuple(spans)


def plan_positions(
    config: Config, rows: Rows, count_R: np.ndarray, requests: Map[str, RequestState]
) -> np.ndarray | None:
    """int32 [3, T] of this step's tokens; None where they are all places in the sequence."""
    if not (config.mrope_merge and "media" in rows.traits):
        return None
    moved_R = rows.media_end_R > 0
    first_R = np.cumsum(count_R) - count_R
    offset_R = rows.num_computed_R + rows.delta_R - first_R
    position_3T = np.tile(np.arange(count_R.sum()) + np.repeat(offset_R, count_R), (3, 1))
    for row in np.flatnonzero(moved_R & (rows.num_computed_R < rows.num_prompt_R)).tolist():
        start, first = int(rows.num_computed_R[row]), int(first_R[row])
        known = requests[rows.ids[row]].position_3P[:, start : start + int(count_R[row])]
        position_3T[:, first : first + known.shape[1]] = known
    return locked(position_3T.astype(np.int32))


def plan_ends(
    config: Config, rows: Rows, count_R: np.ndarray, requests: Map[str, RequestState]
) -> np.ndarray | None:
    """int32 [T]: where what each token sees ends, 0 for its own position; None where all do. Rows
    of one item that stand side by side see each other. A step has all of them or none."""
    if not (config.bidirectional and "media" in rows.traits):
        return None
    inside_R = rows.num_computed_R < rows.media_end_R
    end_T, first_R = np.zeros(count_R.sum(), np.int32), np.cumsum(count_R) - count_R
    for row in np.flatnonzero(inside_R).tolist():
        start, first, count = int(rows.num_computed_R[row]), int(first_R[row]), int(count_R[row])
        for feature in requests[rows.ids[row]].request.features:
            for low, last in embed_runs(feature):
                inside = slice(max(low - start, 0), min(last + 1 - start, count))
                if inside.start < inside.stop:
                    end_T[first + inside.start : first + inside.stop] = last + 1
    return locked(end_T) if end_T.any() else None
