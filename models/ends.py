"""What a step runs before and behind the layers: embedding, head, sampler.

One value, so that a program holds all of them eager (`EAGER`) or all of them compiled
(models/compiled.py), which give the same bits. T token rows, D hidden, S sampled rows, N scored
ones, V vocabulary, K likeliest tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from purestep.models.decoder import AdapterRows, EmbedFn, Params, embed, logits
from purestep.ops.edit_logits import edited
from purestep.ops.lora_linear import head_linear
from purestep.ops.sample import Draws, draw, greedy, likeliest, score
from purestep.state.batch import LoraBatch

HeadFn = Callable[[Tensor, Tensor, Tensor | None], Tensor]
LogitsFn = Callable[[Params, Tensor, Tensor, AdapterRows | None, LoraBatch | None], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ends:
    """Each function has the name of the eager one, which says what it takes and gives."""

    embed: EmbedFn  # [T, D]
    logits: LogitsFn  # fp32 [S, V]
    head_linear: HeadFn  # the same for steps that have a graph's shape
    edited: Callable[[Tensor, Mapping[str, Tensor]], tuple[Tensor, Tensor]]  # [S, V] and [S]
    greedy: Callable[[Tensor], Tensor]  # int32 [2, S]
    draw: Callable[[Tensor, Tensor, Draws, int], Tensor]  # int32 [2, S]
    likeliest: Callable[[Tensor, int], tuple[Tensor, Tensor]]  # [N, K] twice
    score: Callable[[Tensor, Tensor], Tensor]  # [N]


EAGER = Ends(
    embed=embed,
    logits=logits,
    head_linear=head_linear,
    edited=edited,
    greedy=greedy,
    draw=draw,
    likeliest=likeliest,
    score=score,
)
