"""What the rows drew in a step, put behind what they had: tokens, likeliest tokens, scores.

R running rows, S rows that drew a token, F rows whose newest token fills a block, B block size.
"""

from dataclasses import replace

import numpy as np

from purestep.engine.config import Config
from purestep.state.engine import HostState
from purestep.state.hashing import ids_digest
from purestep.state.plan import StepPlan, StepResult
from purestep.state.pytree import evolve
from purestep.state.request import RequestState
from purestep.state.rows import Rows, with_tails
from purestep.state.scores import locked


def with_tokens(
    config: Config,
    host: HostState,
    at_S: np.ndarray,
    of_S: np.ndarray | slice,
    token_S: np.ndarray,
    logprob_S: np.ndarray,
) -> tuple[Rows, list[int]]:
    """The rows with the tokens that they drew, sealed where the newest one fills a block, and these
    rows; `of_S` picks the rows `at_S` of a column."""
    rows, B = host.rows, config.block_size
    position_S = rows.num_tokens_R[of_S]
    column_S = position_S % B
    place_S = at_S * B + column_S
    tail_RB, tail_logprob_RB = rows.tail_RB.copy(), rows.tail_logprob_RB.copy()
    num_tokens_R, newest_R = rows.num_tokens_R.copy(), rows.newest_R.copy()
    tail_RB.reshape(-1)[place_S] = token_S
    tail_logprob_RB.reshape(-1)[place_S] = logprob_S
    num_tokens_R[of_S] += 1
    newest_R[of_S] = token_S
    changes = {
        "tail_RB": locked(tail_RB),
        "tail_logprob_RB": locked(tail_logprob_RB),
        "num_tokens_R": locked(num_tokens_R),
        "newest_R": locked(newest_R),
    }
    full_F = at_S[column_S == B - 1]
    full = full_F.tolist()
    if full:
        tokens_FB = locked(tail_RB.take(full_F, axis=0))
        logprobs_FB = locked(tail_logprob_RB.take(full_F, axis=0))
        changes["sealed"] = _sealed(config, host, full, tokens_FB, logprobs_FB)
    return evolve(rows, **changes), full


def _sealed(
    config: Config,
    host: HostState,
    full: list[int],
    tokens_FB: np.ndarray,
    logprobs_FB: np.ndarray,
) -> tuple:
    """The column `sealed` with one more block for the rows `full`, which is as `host` has them."""
    rows, sealed, digest = host.rows, list(host.rows.sealed), b""
    ids, size = tokens_FB.astype("<i4", copy=False).tobytes(), 4 * config.block_size
    for n, (row, tokens, logprobs) in enumerate(zip(full, tokens_FB, logprobs_FB, strict=True)):
        before, of_block = sealed[row], ids[n * size : (n + 1) * size]
        if before:  # so the block stands behind the prompt
            if config.prefix_caching:
                digest = ids_digest(before[-1][2], of_block)
        else:
            begin = int(rows.num_tokens_R[row]) + 1 - config.block_size
            first = max(int(rows.num_known_R[row]) - begin, 0)
            tokens, logprobs = tokens[first:], logprobs[first:]
            if config.prefix_caching:
                digest = _next_digest(host.requests[rows.ids[row]], of_block)
        sealed[row] = (*before, (tokens, logprobs, digest))
    return tuple(sealed)


def _next_digest(record: RequestState, ids: bytes) -> bytes:
    """The digest of the block behind those that the record has digests of. Its chain may be as long
    as the context, so it is not put together for this."""
    prompt, generated, extras = record.prompt_digests, record.generated_digests, record.block_extras
    parent = (generated or prompt or (record.root,))[-1]
    place = len(prompt) + len(generated)
    return ids_digest(parent, ids, extras[place] if place < len(extras) else b"")


def with_longer_tails(
    host: HostState,
    rows: Rows,
    plan: StepPlan,
    result: StepResult,
    at_R: np.ndarray,
    drew: np.ndarray,
    full: list[int],
) -> tuple[Rows, dict[str, RequestState]]:
    """Rows with likeliest tokens and hidden states behind the tails of the few that asked; and the
    records of those whose tails they leave, as a block is `full`.

    `drew` are the running rows of the sampled ones; -1 for those that drew no token.
    """
    if "told_more" not in rows.traits:
        return rows, {}
    tops, hidden = list(rows.tail_tops), list(rows.tail_hidden)
    asked = drew[plan.sampling.num_tops_S >= 0].tolist()
    for row, found in zip(asked, result.tops, strict=True):
        if row >= 0:
            tops[row] = (*tops[row], found)
    for probe, states in zip(plan.hidden, result.hidden, strict=True):
        row = int(at_R[probe.row])
        if row >= 0:
            hidden[row] = (*hidden[row], states)
    rows, changed = evolve(rows, tail_tops=tuple(tops), tail_hidden=tuple(hidden)), {}
    for row in full:
        if tops[row] or hidden[row]:
            key = rows.ids[row]
            changed[key] = with_tails(rows, row, host.requests[key])
            tops[row] = hidden[row] = ()
    if changed:
        rows = evolve(rows, tail_tops=tuple(tops), tail_hidden=tuple(hidden))
    return rows, changed


def with_scores(
    host: HostState,
    plan: StepPlan,
    result: StepResult,
    at_R: np.ndarray,
    changed: dict[str, RequestState],
) -> dict[str, RequestState]:
    """The changed records, with the scores of the prompts that this step read."""
    scored = dict(changed)
    for probe, scores in zip(plan.scored, result.scored, strict=True):
        key = plan.row_ids[probe.row]
        if at_R[probe.row] >= 0:
            record = scored.get(key) or host.requests[key]
            scored[key] = replace(record, prompt_scores=(*record.prompt_scores, scores))
    return scored
