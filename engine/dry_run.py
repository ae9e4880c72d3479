"""A run without a model: everything but `execute`, whose place four lines of arithmetic take.

For checking a batch file, its adapters and its limits at the speed of the host, and for measuring
the host alone. S sampled rows.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from purestep.engine.commit import commit
from purestep.engine.config import Config
from purestep.engine.memory_plan import read_model_config, read_tower
from purestep.engine.policy import Policy, fcfs
from purestep.engine.prepare import load_tokenizer
from purestep.engine.program import Program, make_program
from purestep.engine.schedule import schedule
from purestep.engine.step import idle_outputs
from purestep.models.checkpoint import generation_defaults, stop_ids
from purestep.models.vision import Vision
from purestep.state.engine import EngineState, drop_blobs
from purestep.state.plan import Outputs, StepPlan, StepResult
from purestep.state.request import frozen
from purestep.state.sampling import SamplingParams
from purestep.state.scores import Scores

WEIGHTS = "dry run"  # in place of a digest, so that no state of a model fits


def dry_program(path: str | os.PathLike, **options: Any) -> Program:
    """A program without weights over a checkpoint folder, for `dry_step` alone; `options` as for
    `load_program`. Raises CheckpointError or ConfigError."""
    folder = Path(path)
    options |= {"device": "cpu", "dtype": "float32", "compile": False}
    options.setdefault("defaults", SamplingParams(**generation_defaults(folder)))
    if options.get("image_limit") != 0 and (tower := read_tower(folder)) is not None:
        options["vision"] = Vision(family=tower.family, config=tower.config, params=None)
        options.setdefault("image_processor", tower.processor)
    return make_program(
        read_model_config(folder),
        None,
        weights=WEIGHTS,
        stop_ids=stop_ids(folder),
        tokenizer=load_tokenizer(folder),
        **options,
    )


def dry_step(
    program: Program, state: EngineState, policy: Policy = fcfs
) -> tuple[EngineState, Outputs]:
    """`step`, but the tokens are made up; nothing reads or writes the state's memory. Raises
    PolicyError as it does."""
    if state.host.idle:
        return state, idle_outputs(state.host)
    host, plan = schedule(state.config, state.host, policy)
    host, outputs = commit(state.config, host, plan, made_up(state.config, plan))
    state = replace(state, host=host)
    return (drop_blobs(state) if outputs.finished else state), outputs


def made_up(config: Config, plan: StepPlan) -> StepResult:
    """A result of the right shape: the token depends on the row's last one and its place."""
    last_R = np.cumsum(plan.count_R) - 1
    last_S = plan.tokens_T[last_R][plan.sampled_R].astype(np.int64)
    token_S = (31 * last_S + plan.sampling.position_S) % config.model.vocab_size
    num_tops = [k for k in plan.sampling.num_tops_S.tolist() if k >= 0]
    return StepResult(
        token_S=frozen(token_S),
        logprob_S=frozen(np.full(len(token_S), -1.0), np.float32),
        tops=tuple(_scores(1, k) for k in num_tops),
        scored=tuple(_scores(len(row.target_N), row.num_tops) for row in plan.scored),
        hidden=tuple(
            frozen(np.zeros((len(row.layers), int(plan.count_R[row.row]) - row.first, 1)), "f4")
            for row in plan.hidden
        ),
    )


def _scores(count: int, num_tops: int) -> Scores:
    shape = (count, num_tops)
    return Scores(
        logprob_N=frozen(np.full(count, -1.0), np.float32),
        top_id_NK=frozen(np.broadcast_to(np.arange(num_tops), shape)),
        top_logprob_NK=frozen(np.full(shape, -1.0), np.float32),
    )
