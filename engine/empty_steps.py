"""Steps with no row in them, by which a program is compiled before it is used: nothing is written.

They lie in memory as real ones do, at its beginning or not, since a compiler tells that apart.
"""

from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor

from purestep.engine.pending import Ring
from purestep.engine.pool import Pool
from purestep.engine.program import Program
from purestep.engine.sampling import sampled, score_rows
from purestep.engine.upload import Arrays, sent
from purestep.models.decoder import forward
from purestep.models.ends import Ends
from purestep.models.fused import fused_forward
from purestep.ops.lora_add import chunk_spans
from purestep.state.adapters import ROW_BLOCK
from purestep.state.batch import Batch, LoraBatch
from purestep.state.plan import SamplingRows
from purestep.state.sampling import LogitEdits


def run_empty(program: Program, pool: Pool, batch: Batch) -> None:
    """The forward pass of a batch of padding (engine/graphs.py: `padding`) that is not replayed,
    and all that samples from it and scores it."""
    config, ends = pool.config, program.ends
    end_T = torch.zeros(2 + len(batch.kv_index_T), dtype=torch.int64, device=config.device)[2:]
    for seen in (None, *([end_T] if config.bidirectional else [])):
        if program.fused:
            # Another tensor, or the compiler would be told of the first pass's sizes alone.
            own = replace(batch, end_T=seen, kv_index_T=batch.kv_index_T[:])
            run, layer_fn = fused_forward, program.fused_layer
        else:
            own = _plain(config.device, batch, seen)
            run, layer_fn = forward, program.layer
        args = program.params, pool.layers, pool.kv, own, config.model, layer_fn
        hidden_TD = run(*args, embed_fn=ends.embed)
    _sample(ends, ends.logits(program.params, hidden_TD, batch.logits_index_S, None, None))


def _plain(device: str, batch: Batch, end_T: Tensor | None) -> Batch:
    """The same as `pack` would have it."""
    names = [f.name for f in fields(batch) if isinstance(getattr(batch, f.name), Tensor)]
    arrays: Arrays = {name: getattr(batch, name).cpu().numpy() for name in names}
    if end_T is not None:
        arrays["end_T"] = end_T.cpu().numpy()
    lora = None
    if batch.lora is not None:
        foreign_TR = np.ones((len(batch.token_T), ROW_BLOCK), bool)
        rows = sent({"row_R": np.arange(ROW_BLOCK), "foreign_TR": foreign_TR}, device)
        lora = LoraBatch(**rows, span_C2=chunk_spans(torch.from_numpy(foreign_TR)))
    return Batch(**sent(arrays, device), lora=lora)


def _sample(ends: Ends, raw_SV: Tensor) -> None:
    """A greedy step; one that draws, of which a row tells likeliest tokens; one that edits; and
    scores of prompt tokens."""
    bias = ((0, _biased()),)
    for temperature, num_tops, edits in ((0, -1, ()), (1, 1, ()), (1, -1, bias)):
        rows = _rows(len(raw_SV), temperature, num_tops, edits)
        sampled(raw_SV, rows, {}, Ring(), 0, ends)
    score_rows(lambda start, end: raw_SV[start:end], np.zeros(len(raw_SV), np.int32), 1, ends)


def _rows(S: int, temperature: float, num_tops: int, edits: tuple) -> SamplingRows:
    return SamplingRows(
        temperature_S=np.full(S, temperature, np.float32),
        top_k_S=np.zeros(S, np.int32),
        top_p_S=np.ones(S),
        min_p_S=np.zeros(S, np.float32),
        stream_S=np.zeros(S, np.uint64),
        position_S=np.zeros(S, np.int32),
        num_tops_S=np.full(S, num_tops, np.int32),
        edits=edits,
    )


def _biased() -> LogitEdits:
    none = np.empty(0, np.int32)
    return LogitEdits(
        bias_id_E=np.zeros(1, np.int32),
        bias_E=np.zeros(1, np.float32),
        repetition_penalty=1.0,
        seen_E=none,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        drawn_E=none,
        count_E=none,
        banned_E=none,
        allowed_E=None,
        processor=None,
        processor_args=(),
        context=none,
    )
