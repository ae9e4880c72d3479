"""Edited logits are exactly those of transformers' processors, rows apart (SL-05, SL-09)."""

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from purestep.engine.extras import edits_after, edits_of
from purestep.engine.requests import submit_host
from purestep.engine.sampling import faults, packed_edits, process_
from purestep.engine.upload import sent
from purestep.ops.edit_logits import edit_
from purestep.simulation.world import EOS, VOCAB, toy_config, toy_state
from purestep.state.engine import progress
from purestep.state.request import Request, RequestState, frozen
from purestep.state.sampling import LogitEdits, SamplingParams

CONFIG = toy_config(processors=("odd", "raises", "short", "nan", "bans"))
ids = st.integers(0, VOCAB - 1)


def record_of(prompt: list[int], generated: list[int], **params: Any) -> RequestState:
    """A request that has generated so far, with checked parameters."""
    request = Request(id="r", tokens=prompt, sampling=SamplingParams(**params))
    record = progress(submit_host(CONFIG, toy_state(CONFIG).host, request), "r")
    return replace(record, generated=frozen(generated))


def edits_for(record: RequestState) -> LogitEdits | None:
    sampling = record.request.sampling
    edits = edits_of(CONFIG, sampling, early=len(record.generated) < sampling.min_tokens)
    return edits and edits_after(edits, record.request.tokens, [record.generated])


def chosen(records: list[RequestState]) -> list[tuple[int, LogitEdits]]:
    return [(s, e) for s, r in enumerate(records) if (e := edits_for(r)) is not None]


def edited(logits_SV: Tensor, records: list[RequestState]) -> Tensor:
    edits = chosen(records)
    mine = logits_SV.clone()
    if edits:
        edit_(mine, sent(packed_edits(edits), "cpu"))
    return mine


def oracle(logits_V: Tensor, record: RequestState) -> Tensor:
    """transformers' processors in transformers' order; counts as OpenAI documents them."""
    s, prompt = record.request.sampling, record.request.tokens.tolist()
    generated = record.generated.tolist()
    chain: list[LogitsProcessor] = []
    if s.logit_bias:
        bias = [[[token], value] for token, value in s.logit_bias]
        chain.append(SequenceBiasLogitsProcessor(bias))
    if s.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
    sequence = torch.tensor([prompt + generated])
    scores = LogitsProcessorList(chain)(sequence, logits_V[None].clone())
    for token in set(generated):
        count = float(generated.count(token))
        change = np.float32(count) * np.float32(s.frequency_penalty)
        scores[0, token] -= float(change + np.float32(s.presence_penalty))
    chain = []
    if s.banned_ids:
        chain.append(SuppressTokensLogitsProcessor(list(s.banned_ids)))
    stops = [*s.stop_ids, *([] if s.ignore_eos else [EOS])]
    if s.min_tokens and stops:
        chain.append(MinNewTokensLengthLogitsProcessor(len(prompt), s.min_tokens, stops))
    scores = LogitsProcessorList(chain)(sequence, scores)
    if s.allowed_ids is not None:
        others = [t for t in range(VOCAB) if t not in s.allowed_ids]
        scores = SuppressTokensLogitsProcessor(others)(sequence, scores) if others else scores
    return scores[0]


params = st.fixed_dictionaries(
    {},
    optional={
        "logit_bias": st.dictionaries(ids, st.floats(-9, 9, width=16).filter(bool), max_size=4),
        "repetition_penalty": st.sampled_from((0.5, 1.3, 2.0)),
        "presence_penalty": st.sampled_from((0.7, -0.3)),
        "frequency_penalty": st.sampled_from((0.7, -0.3)),
        "banned_ids": st.lists(ids, max_size=3),
        "allowed_ids": st.lists(ids, min_size=1, max_size=5),
        "min_tokens": st.integers(0, 6),
        "stop_ids": st.lists(ids, max_size=2).map(tuple),
        "ignore_eos": st.booleans(),
    },
)
rows = st.lists(
    st.tuples(st.lists(ids, min_size=1, max_size=8), st.lists(ids, max_size=8), params),
    min_size=1,
    max_size=4,
)


@given(rows, st.integers(0, 10**6))
def test_edits_are_transformers_and_each_row_has_its_own(
    words: list[tuple[list[int], list[int], dict[str, Any]]], seed: int
) -> None:
    logits = torch.randn(len(words), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    records = [record_of(prompt, generated, **fields) for prompt, generated, fields in words]
    mine = edited(logits, records)
    for row, record in enumerate(records):
        assert torch.equal(mine[row], oracle(logits[row], record)), record.request.sampling


def test_rows_without_edits_have_none() -> None:
    """The plan carries counts only for rows that use them."""
    assert edits_for(record_of([1], [3, 4])) is None
    assert edits_for(record_of([1], [3, 4], min_tokens=2)) is None
    counted = edits_for(record_of([1], [3, 4, 3], frequency_penalty=0.5))
    assert (counted.drawn_E.tolist(), counted.count_E.tolist()) == ([3, 4], [2, 1])
    assert not len(counted.seen_E)


def test_an_embedding_is_no_repeated_id() -> None:
    config, rows_ED = CONFIG, torch.zeros(2, 8)
    request = Request(
        id="r",
        tokens=[-1, 5, -1],
        prompt_embeds="digest",
        sampling=SamplingParams(repetition_penalty=2.0),
    )
    record = progress(submit_host(config, toy_state(config).host, request, rows_ED), "r")
    assert edits_for(record).seen_E.tolist() == [5]


PROCESSORS = {
    "odd": lambda seen, logits, shift=0: logits.roll(shift + len(seen)),
    "raises": lambda seen, logits: 1 / 0,
    "short": lambda seen, logits: logits[:3],
    "nan": lambda seen, logits: logits * float("nan"),
    "bans": lambda seen, logits: torch.full_like(logits, -torch.inf),
}


def processed(records: list[RequestState]) -> tuple[Tensor, dict[int, str]]:
    logits = torch.arange(VOCAB).float().repeat(len(records), 1)
    edits, had = chosen(records), logits.amax(-1).numpy()
    raised = process_(logits, edits, PROCESSORS)
    return logits, faults(edits, raised, had, logits.amax(-1).numpy())


def test_a_processor_sees_ids_and_logits_of_its_row_alone() -> None:
    """Design, section 5: (tuple of ids, fp32 logits [V]) and the request's arguments."""
    records = [
        record_of([1, 3], [4], processor="odd", processor_args=(2,)),
        record_of([1, 3], [4]),
        record_of([1], [], processor="odd"),
    ]
    logits, errors = processed(records)
    plain = torch.arange(VOCAB).float()
    assert not errors
    assert torch.equal(logits[0], plain.roll(5))
    assert torch.equal(logits[1], plain)
    assert torch.equal(logits[2], plain.roll(1))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", "logits processor 'raises': ZeroDivisionError"),
        ("short", "must be a tensor of shape"),
        ("nan", "returned nan as a logit"),
        ("bans", "logits processor 'bans' returned -inf for every id"),
    ],
)
def test_a_processor_that_fails_names_itself_and_hurts_nobody(name: str, words: str) -> None:
    records = [record_of([1], [], processor=name), record_of([1], [], processor="odd")]
    logits, errors = processed(records)
    assert set(errors) == {0}
    assert words in errors[0]
    assert torch.equal(logits[1], torch.arange(VOCAB).float().roll(1))


def test_a_row_whose_ids_are_all_banned_says_so() -> None:
    """SL-05."""
    everything = {token: -float("inf") for token in range(VOCAB)}
    record = record_of([1], [], logit_bias=everything)
    logits = torch.zeros(1, VOCAB)
    edits = chosen([record])
    edit_(logits, sent(packed_edits(edits), "cpu"))
    largest = logits.amax(-1).numpy()
    assert "no token is left" in faults(edits, {}, largest, largest)[0]
