"""Plans in flight, scheduled and not committed: whose rows they hold, what they draw, and which
blocks they still use.

R running rows, S sampled rows of a plan.
"""

from collections.abc import Sequence

import numpy as np

from purestep.state.blocks import BlockDraft
from purestep.state.engine import HostState
from purestep.state.errors import InFlightError
from purestep.state.plan import StepPlan


def plan_places(host: HostState, plan: StepPlan) -> np.ndarray:
    """Where each row of a plan in flight stands among the running ones; -1 for those that left."""
    if plan.row_ids == host.rows.ids and not host.departed:
        return np.arange(len(plan.row_ids))
    row_of = {key: row for row, key in enumerate(host.rows.ids)}
    for step, key, _ in host.departed:
        if step >= plan.step:  # a row of this name is another request's
            row_of.pop(key, None)
    return np.array([row_of.get(key, -1) for key in plan.row_ids], np.intp)


def drawn_in_flight(host: HostState) -> np.ndarray:
    """int32 [R]: the place of each running row among the draws of the newest plan in flight, whose
    tokens nobody knows yet; -1 for a row that it does not draw for."""
    place_R = np.full(len(host.rows.ids), -1, np.int32)
    if host.in_flight:
        plan = host.in_flight[-1]
        at_S = plan_places(host, plan)[plan.sampled_R]
        there = at_S >= 0
        place_R[at_S[there]] = np.flatnonzero(there)
    return place_R


def num_coming(host: HostState) -> np.ndarray:
    """int32 [R]: the tokens that the plans in flight draw for each running row."""
    coming_R = np.zeros(len(host.rows.ids), np.int32)
    for plan in host.in_flight:
        at_S = plan_places(host, plan)[plan.sampled_R]
        coming_R[at_S[at_S >= 0]] += 1
    return coming_R


def released(
    host: HostState, keys: Sequence[str], tables: Sequence[np.ndarray], draft: BlockDraft
) -> tuple[tuple[int, str, np.ndarray], ...]:
    """Free the blocks of rows that leave, now or with the newest plan in flight that has the row,
    since it still reads and writes them; returns who has departed by then."""
    departed = list(host.departed)
    users = [
        (plan.step, set(plan.row_ids), [target for _, target in plan.copies])
        for plan in reversed(host.in_flight)
    ]
    for key, table in zip(keys, tables, strict=True):
        for step, ids, copied in users:
            if key in ids:
                departed.append((step, key, table))
                break
            if np.isin(copied, table).any():  # a branch's, in a step with no token of its row
                departed.append((step, "", table))
                break
        else:
            draft.release(table)
    return tuple(departed)


def commit_first(host: HostState, why: str) -> InFlightError:
    """What `schedule` raises where it cannot go on before the plan in flight is committed."""
    return InFlightError(f"schedule: commit step {host.in_flight[0].step} first, since {why}")
