"""One step, before and after: what the device is to do, what came back, what the caller gets.

R rows, S sampled rows among them, T tokens. Arrays are read-only.
"""

from dataclasses import dataclass

import numpy as np

from purestep.state.adapters import Residence
from purestep.state.pytree import tree
from purestep.state.request import Completion
from purestep.state.sampling import LogitEdits
from purestep.state.scores import Scores
from purestep.state.tables import Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDescriptor:
    """The shape of a step. On a GPU the same value captures a graph and finds it.

    Sizes count padding. `num_active_loras` is 0 or a power of two or the largest count allowed;
    rows without an adapter are never a group, and ranks are data, not shape.
    """

    num_tokens: int
    num_rows: int
    uniform_decode: bool  # one token a row
    num_active_loras: int
    lora_form: str = "grouped"

    @property
    def has_lora(self) -> bool:
        """Whether any row has an adapter."""
        return self.num_active_loras > 0


@tree
class SamplingRows:
    """Parameters of the rows that sample in this step, one entry each."""

    temperature_S: np.ndarray  # float32, 0 = greedy
    top_k_S: np.ndarray  # int32, 0 = off
    top_p_S: np.ndarray  # float64, 1 = off
    min_p_S: np.ndarray  # float32, 0 = off
    stream_S: np.ndarray  # uint64
    position_S: np.ndarray  # int32, place in the sequence of the token to be drawn
    num_tops_S: np.ndarray  # int32, likeliest tokens to tell; -1 = none asked for
    edits: tuple[tuple[int, LogitEdits], ...]  # (place among them, what changes its logits first)


@tree
class ScoredRow:
    """A row whose prompt tokens are scored: N of them, which follow its tokens of this step."""

    row: int  # among the plan's rows
    first: int  # the row's token of this step whose logits score the first of them
    target_N: np.ndarray  # int32, -1 where there is no id to score
    num_tops: int


@tree
class EmbeddedSpan:
    """Tokens of the plan that enter as rows of a blob and not of the embedding table."""

    blob: str
    first_row: int
    index_E: np.ndarray  # int32, places among the plan's tokens


@tree
class EncodedItem:
    """A media item that an encoder turns into embeddings."""

    identifier: str
    blob: str  # digest of its processed tensors
    modality: str
    version: str | None  # of the adapter on the encoder, one of `residents`; None = base
    num_embeds: int
    keep: bool  # behind this step, or for it alone


@tree
class MergedSpan:
    """Tokens of the plan that enter as rows of one item's encoder output."""

    identifier: str
    blob: str
    modality: str
    num_embeds: int  # of the whole output, as the request says
    first_row: int
    index_E: np.ndarray  # int32, places among the plan's tokens
    version: str | None = None  # as of the item


@tree
class HiddenRow:
    """A row whose hidden states are returned, from its token `first` of this step onwards."""

    row: int
    first: int
    layers: tuple[int, ...]  # as asked for, negative ones count from the end


@tree
class Overwrites:
    """Content the step's input state counts on and the step may destroy."""

    blocks: tuple[int, ...] = ()  # cached or held in the input state
    adapters: tuple[str, ...] = ()  # versions whose rows are taken over
    outputs: tuple[str, ...] = ()  # encoder outputs that are dropped

    @property
    def empty(self) -> bool:
        return not (self.blocks or self.adapters or self.outputs)


@tree
class StepPlan:
    """Everything the device will do, in this order: encoder outputs dropped, adapters uploaded,
    items encoded, blocks copied, one forward pass."""

    step: int
    descriptor: BatchDescriptor
    uploads: tuple[Residence, ...]
    copies: tuple[tuple[int, int], ...]  # (from block, to block), one after the other
    overwrites: Overwrites
    row_ids: tuple[str, ...]
    start_R: np.ndarray  # int32, position of the row's first token in this step
    count_R: np.ndarray  # int32, its tokens in this step
    tokens_T: np.ndarray  # int32, row after row, without padding; -1 where no id is known
    gathered_T: np.ndarray  # int32, place of the id among the draws of the plan before, else -1
    tables: Tables  # one table a row
    slot_R: np.ndarray  # int32, -1 = base
    residents: tuple[Residence, ...]  # the adapters of these rows, by slot
    sampled_R: np.ndarray  # bool: the row's last token in this step is its last known one
    sampling: SamplingRows
    scored: tuple[ScoredRow, ...]
    hidden: tuple[HiddenRow, ...]
    embedded: tuple[EmbeddedSpan, ...]
    drops: tuple[str, ...]  # identifiers of encoder outputs
    encodes: tuple[EncodedItem, ...]  # each output once
    merges: tuple[MergedSpan, ...]
    position_3T: np.ndarray | None  # int32, where they are not places in the sequence (M-RoPE)
    ended: tuple[Completion, ...]  # requests that end without another token
    loads: tuple[tuple[str, str], ...]  # (adapter name, source) for the loader to read
    num_hit_tokens: int = 0
    num_preempted: int = 0
    # int32, where tokens see each other in both directions: the position behind the last that a
    # token sees, 0 for its own
    end_T: np.ndarray | None = None


@tree
class StepResult:
    """What the device found, for the sampled rows in plan order. Owns its memory."""

    token_S: np.ndarray  # int32
    logprob_S: np.ndarray  # float32, of the raw distribution; NaN where logits were not finite
    tops: tuple[Scores, ...] = ()  # of the sampled rows that asked, in their order
    errors: tuple[tuple[int, str], ...] = ()  # (place among the sampled rows, what went wrong)
    # (identifier, embeddings that it was said to have, what its output is instead): what requests
    # that say so compute of it is void
    faults: tuple[tuple[str, int, str], ...] = ()
    scored: tuple[Scores, ...] = ()  # one for each of the plan's
    hidden: tuple[np.ndarray, ...] = ()  # float32 [layers, n, D], one for each of the plan's


@tree
class Outputs:
    """One step's news: a column for each new token, an object for each finished request only."""

    step: int
    ids: tuple[str, ...]
    tokens_S: np.ndarray  # int32, the new token of each id
    logprobs_S: np.ndarray  # float32
    finished: tuple[Completion, ...]
    # (id, new text) of requests with `stream`. What was held back (half a character, the beginning
    # of a stop string) when one ends by capacity or an error is in its completion's text alone.
    texts: tuple[tuple[str, str], ...] = ()
    loads: tuple[tuple[str, str], ...] = ()  # (adapter name, source) to read and `deliver`
    waiting_for: tuple[str, ...] = ()  # adapters still loading, when nothing else can run
    num_tokens: int = 0  # computed in this step, without padding
    num_rows: int = 0
    num_active_adapters: int = 0
    num_hit_tokens: int = 0  # tokens of admitted requests found in the prefix cache
    num_preempted: int = 0
