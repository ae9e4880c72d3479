"""The offline driver: requests in, completions out, as they finish."""

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from purestep.engine.adapters import deliver, register_adapter
from purestep.engine.loader import Loader, Resolver
from purestep.engine.policy import Policy, fcfs
from purestep.engine.program import Program, init
from purestep.engine.requests import submit, with_default_adapter
from purestep.engine.step import step, step_ahead
from purestep.state.engine import EngineState
from purestep.state.errors import ConfigError, RequestError, UnknownAdapterError
from purestep.state.plan import Outputs
from purestep.state.request import Completion, FinishReason, Request, frozen
from purestep.state.request_rules import num_given

Advance = Callable[[Program, EngineState, Policy], tuple[EngineState, Outputs]]
_END = object()  # what an exhausted iterator gives


def generate(
    program: Program,
    requests: Iterable[Request],
    *,
    adapters: Mapping[str, str | os.PathLike] | None = None,
    resolver: Resolver | None = None,
    policy: Policy = fcfs,
    window: int | None = None,
    progress: bool = False,
    on_step: Callable[[Outputs], None] | None = None,
    advance: Advance | None = None,
    state: EngineState | None = None,
) -> Generator[Completion, None, EngineState]:
    """Run requests to their end in one continuous batch, yielding each as it finishes.

    `requests` may be any iterable; at most `window` requests (default: twice `max_rows`) are live
    and one more is pulled. Each of a request's `n` samples counts as a live one; the progress bar
    counts requests, by the end of their first samples. `adapters` maps names to PEFT folders, each
    read in the background when the first request needs it; `resolver` finds the folder of a name
    that is not there (see `folder_resolver`), once. `policy` says who is served first. A request
    that is refused or whose adapter fails yields a Completion with reason "error"; the others are
    unaffected. `on_step` sees every step's outputs; `progress` shows a bar. `advance` takes a
    step: `step`, `step_ahead`, which plans while the device computes, or `dry_step`, which asks no
    model; by default the second where the program has graphs, else the first. `state` is what to go
    on from, with its caches and adapters; by default `init(program)`. The state at the end is the
    generator's value (`state = yield from generate(...)`).

    Raises, once it is asked for the first completion, ConfigError for a window below 1 and
    AdapterError for what is no adapter's name; later whatever `requests` or `on_step` raise,
    TypeError for an element that is no Request, and what `step` raises.
    """
    if advance is None:
        advance = step_ahead if program.graphs else step
    state = init(program) if state is None else state
    for name, source in (adapters or {}).items():
        state = register_adapter(state, source, name=name)
    window = 2 * program.config.max_rows if window is None else window
    if window < 1:
        raise ConfigError(f"window={window} must be at least 1")
    total = len(requests) if hasattr(requests, "__len__") else None
    bar = tqdm(total=total, disable=not progress, unit="request", smoothing=0.1)
    with Loader(program.config) as loader, closing(bar):
        driver = _Driver(
            program=program, loader=loader, policy=policy, resolver=resolver, advance=advance
        )
        return (yield from _drive(driver, state, iter(requests), window, on_step, bar))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Driver:
    """What stays the same while requests run."""

    program: Program
    loader: Loader
    policy: Policy
    resolver: Resolver | None
    advance: Advance

    def submitted(self, state: EngineState, request: Request) -> EngineState:
        try:
            return submit(state, request)
        except UnknownAdapterError:
            name = with_default_adapter(self.program.config, request).adapter
            source = None if self.resolver is None else self.resolver(name)
            if source is None:
                raise
            return submit(register_adapter(state, source, name=name), request)


def _drive(
    driver: _Driver,
    state: EngineState,
    requests: Iterator[Request],
    window: int,
    on_step: Callable[[Outputs], None] | None,
    bar: tqdm,
) -> Generator[Completion, None, EngineState]:
    exhausted = False
    while True:
        while not exhausted and len(state.host.requests) < window:
            request = next(requests, _END)
            if request is _END:
                exhausted = True
                break
            if not isinstance(request, Request):
                raise TypeError(f"generate takes Requests (see prepare), got {request!r}")
            try:
                state = driver.submitted(state, request)
            except RequestError as error:
                bar.update()
                yield refused(request, error)
        if state.host.idle:
            return state
        flying = state.host.in_flight
        state, outputs = driver.advance(driver.program, state, driver.policy)
        told = flying or not state.host.in_flight  # else a plan was queued and nothing came back
        driver.loader.ask(outputs.loads)
        for event in driver.loader.events(block=bool(outputs.waiting_for)):
            state = deliver(state, event)
        if on_step is not None and told:
            on_step(outputs)
        for completion in outputs.finished:
            bar.update(completion.index == 0)  # the first of a request's samples
            yield completion


def refused(request: Request, error: RequestError) -> Completion:
    """The completion of a request that never ran."""
    return Completion(
        id=request.id,
        key=request.id,
        adapter=request.adapter,
        tokens=frozen(()),
        logprobs=frozen((), np.float32),
        text=None,
        finish_reason=FinishReason.ERROR,
        num_prompt_tokens=num_given(request.tokens) or num_given(request.prompt_embeds) or 0,
        error=str(error),
    )
