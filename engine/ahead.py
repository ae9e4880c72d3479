"""The next decode step, put behind the present one on a GPU before its tokens are known.

Nothing but the host is faster for it: what is put there is the plan that follows if no request ends
or arrives, with ids gathered on the device. The next `step` schedules from the true tokens, and
takes the work over only where it makes the same plan. S sampled rows.
"""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from purestep.engine.commit import commit
from purestep.engine.config import Config
from purestep.engine.graphs import can_replay, enqueue
from purestep.engine.policy import Policy
from purestep.engine.pool import owned
from purestep.engine.program import Program
from purestep.engine.schedule import schedule
from purestep.state.engine import EngineState, HostState
from purestep.state.plan import StepPlan, StepResult
from purestep.state.request import frozen
from purestep.state.scores import nothing


def look_ahead(
    program: Program, state: EngineState, host: HostState, plan: StepPlan, policy: Policy
) -> Callable[[Tensor], StepPlan | None] | None:
    """What `execute` may do between queueing `plan` and waiting for its tokens, if anything; it
    tells which plan it has queued.

    `host` has `plan` in flight. Safe whatever the tokens turn out to be: the work is begun only if
    it overwrites nothing that a state counts on, so that all it writes is free or uncomputed.
    """
    if not program.graphs or not plan.sampled_R.all() or plan.scored or plan.hidden:
        return None

    def meanwhile(token_S: Tensor) -> StepPlan | None:
        guessed, _ = commit(state.config, host, plan, guess(state.config, plan))
        if guessed.idle:
            return None
        try:
            _, following = schedule(state.config, guessed, policy)
        except Exception:  # a policy's own; where the true state brings it about, it raises there
            return None
        if not follows(state.config, plan, following):
            return None
        enqueue(program, owned(state.device), following, token_S)
        return following

    return meanwhile


def guess(config: Config, plan: StepPlan) -> StepResult:
    """A result in which every row draws a token that ends nothing."""
    count = int(plan.sampled_R.sum())
    token = next(i for i in range(len(config.stop_ids) + 1) if i not in config.stop_ids)
    asked = plan.sampling.num_tops_S[plan.sampling.num_tops_S >= 0].tolist()
    return StepResult(
        token_S=frozen(np.full(count, token)),
        logprob_S=frozen(np.zeros(count), np.float32),
        tops=tuple(nothing(1, num_tops) for num_tops in asked),
    )


def follows(config: Config, plan: StepPlan, following: StepPlan) -> bool:
    """Whether `following` decodes just the rows of `plan` and overwrites nothing of value."""
    untouched = (
        not (following.uploads or following.copies or following.drops)
        and following.overwrites.empty
    )
    decodes = following.descriptor.uniform_decode and following.row_ids == plan.row_ids
    return untouched and decodes and can_replay(config, following)
