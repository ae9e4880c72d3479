"""A run as a file: every call that changed a state and every StepResult, one JSON line each.

Folded by `replay` they give the same host states bit for bit, on any machine and Python hash seed,
without a device, weights or adapter files. A recording begins with the host state it starts from,
so any moment will do; after `fork` or `restore` begin another one.
"""

import inspect
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields, replace
from typing import Any, TextIO, TypeVar

from immutables import Map

from purestep.engine.adapters import (
    AdapterFailed,
    AdapterLoaded,
    deliver,
    deliver_loaded,
    info_of,
    load_adapter,
    load_adapter_tensors,
    pin_adapter,
    register_adapter,
    unload_adapter,
    unpin_adapter,
)
from purestep.engine.branch import branch
from purestep.engine.commit import commit
from purestep.engine.config import Config
from purestep.engine.embeds import take_embeds
from purestep.engine.policy import Order, Policy, fcfs
from purestep.engine.pool import owned
from purestep.engine.renewal import adopt, adopt_weights, flush
from purestep.engine.requests import abort, submit, submit_host
from purestep.engine.schedule import schedule
from purestep.engine.step import recover, step, step_ahead, without_flown, without_overwritten
from purestep.models.adapter_files import Adapter
from purestep.state.adapters import AdapterInfo
from purestep.state.canonical import from_plain, to_plain
from purestep.state.engine import EngineState, HostState, drop_blobs, quiet
from purestep.state.errors import SnapshotError
from purestep.state.plan import StepResult
from purestep.state.request import Request

FORMAT = "purestep/recording/4"
# Of a config: where it ran, which changes no host state, and what follows from other fields.
ELSEWHERE = ("device", "compile", "tower")
T = TypeVar("T")
Event = tuple[Any, ...]  # its kind, then what that needs


def begin_recording(file: TextIO, state: EngineState) -> None:
    """Write the first line: the config's numbers and the host state to start from.

    Raises StepError when a plan is in flight.
    """
    host = to_plain(quiet(state.host, "begin_recording"))
    head = {"format": FORMAT, "config": _numbers(state.config), "host": host}
    file.write(json.dumps(head, sort_keys=True) + "\n")


def record(file: TextIO, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """`call(*args, **kwargs)`, and a line that tells what it changed.

    `call` is one of submit, abort, branch, load_adapter, load_adapter_tensors, register_adapter,
    pin_adapter, unpin_adapter, unload_adapter, deliver, deliver_loaded, flush, adopt, recover, step
    and step_ahead. Where it raises nothing is written. Raises TypeError for another one.
    """
    if call is recover:
        return _record_recover(file, *args, **kwargs)
    if call in (step, step_ahead):
        return _record_step(file, call, *args, **kwargs)
    if call not in _EVENTS:
        raise TypeError(f"record: {getattr(call, '__name__', call)} is not a call that is recorded")
    given = inspect.signature(call).bind(*args, **kwargs)
    given.apply_defaults()
    after = call(*args, **kwargs)
    write_event(file, _EVENTS[call](given.arguments, after))
    return after


def _record_recover(file: TextIO, state: EngineState) -> EngineState:
    torn = owned(state.device).torn
    after = recover(state)
    if len(after.host.in_flight) < len(state.host.in_flight):
        write_event(file, ("lost",))
    if torn is not None:
        write_event(file, ("recover", torn))
    return after


def _record_step(
    file: TextIO, call: Callable, program: Any, state: EngineState, policy: Policy = fcfs
) -> Any:
    orders: list[Order] = []

    def ordered(host: HostState) -> Order:
        orders.append(policy(host))
        return orders[-1]

    told: list[StepResult] = []
    after, outputs = call(
        program,
        state,
        policy if policy is fcfs else ordered,
        sees=lambda plan, result: told.append(result),
    )
    if after.host.step > state.host.step:
        write_event(file, plan_event(orders[0] if orders else None))  # later ones are of guesses
    for result in told:
        write_event(file, result_event(result))
    return after, outputs


def write_event(file: TextIO, event: Event) -> None:
    """One line."""
    file.write(json.dumps(to_plain(event), sort_keys=True) + "\n")


def plan_event(order: Order | None = None) -> Event:
    """A step that is planned; `order` is what its policy chose, None for first come, first
    served."""
    return ("plan", None if order is None else (order.running, order.waiting))


def result_event(result: StepResult) -> Event:
    """The end of the oldest step in flight."""
    return ("result", result)


def _submitted(given: dict[str, Any], after: EngineState) -> Event:
    """The request in its checked form, with its embeddings."""
    request = after.host.requests[given["request"].id].request
    if request.prompt_embeds is not None:
        rows = after.blobs[request.prompt_embeds]
        request = replace(request, prompt_embeds=rows.float().numpy())
    return ("submit", request)


def _loaded(given: dict[str, Any], after: EngineState) -> Event:
    ledger, name = after.host.adapters, given["name"]
    return ("load", name, ledger.sources.get(name), ledger.registered[ledger.names[name]])


def _delivered(given: dict[str, Any], after: EngineState) -> Event:
    event = given["event"]
    if isinstance(event, AdapterFailed):
        return ("deliver", event.name, event.source, event.error)
    return ("deliver", event.name, event.source, info_of(event.adapter))


_EVENTS: dict[Callable, Callable[[dict[str, Any], EngineState], Event]] = {
    submit: _submitted,
    abort: lambda given, after: ("abort", given["request_id"]),
    branch: lambda given, after: ("branch", given["request_id"], tuple(given["new_ids"])),
    deliver_loaded: lambda given, after: (
        "load",
        given["event"].name,
        given["event"].source,
        info_of(given["event"].adapter),
    ),
    load_adapter: _loaded,
    load_adapter_tensors: _loaded,
    register_adapter: lambda given, after: (
        "register",
        after.host.adapters.sources[given["name"]],
        given["name"],
    ),
    pin_adapter: lambda given, after: ("pin", given["name"]),
    unpin_adapter: lambda given, after: ("unpin", given["name"]),
    unload_adapter: lambda given, after: ("unload", given["name"], given["running"]),
    deliver: _delivered,
    flush: lambda given, after: ("flush",),
    adopt: lambda given, after: ("adopt", after.config.weights),
}


def replay(config: Config, lines: Iterable[str]) -> HostState:
    """The host state after the last of a recording's lines.

    Raises SnapshotError for another format, for a config that differs from the recorded one in
    more than its device, and for a line that is damaged.
    """
    lines = iter(lines)
    head = _parsed(next(lines, "null"))
    found = head.get("format") if isinstance(head, dict) else None
    if found != FORMAT:
        raise SnapshotError(f"recording: format {found!r}, this version reads {FORMAT!r}")
    wanted = json.loads(json.dumps(_numbers(config)))
    differing = [key for key in wanted if head["config"].get(key) != wanted[key]]
    if differing:
        facts = (f"{k}: recorded {head['config'].get(k)}, given {wanted[k]}" for k in differing)
        raise SnapshotError(f"the recording does not fit the config: {'; '.join(facts)}")
    host = from_plain(head["host"])
    state = EngineState(config=config, host=host, device=None, blobs=Map())
    for line in lines:
        state = _folded(state, from_plain(_parsed(line)))
    return state.host


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise SnapshotError(f"recording: a line is damaged: {error}: {line[:80]!r}") from None


def _folded(state: EngineState, event: Event) -> EngineState:
    match event:
        case ("submit", Request(features=()) as request):
            return submit(state, request)
        case ("submit", Request() as request):
            return _submitted_again(state, request)
        case ("abort", request_id):
            return abort(state, request_id)
        case ("branch", request_id, new_ids):
            return branch(state, request_id, new_ids)
        case ("load", name, source, AdapterInfo() as info):
            return deliver_loaded(state, _without_tensors(name, source, info))
        case ("deliver", name, source, AdapterInfo() as info):
            return deliver(state, _without_tensors(name, source, info))
        case ("deliver", name, source, str(error)):
            return deliver(state, AdapterFailed(name=name, error=error, source=source))
        case ("register", source, name):
            return register_adapter(state, source, name=name)
        case ("pin", name):
            return pin_adapter(state, name)
        case ("unpin", name):
            return unpin_adapter(state, name)
        case ("unload", name, running):
            return unload_adapter(state, name, running=running)
        case ("flush",):
            return flush(state)
        case ("adopt", weights):
            return adopt_weights(state, weights)
        case ("lost",):
            return replace(state, host=without_flown(state.host))
        case ("recover", lost):
            return replace(state, host=without_overwritten(state.host, lost))
        case ("plan", order):
            return _planned(state, order)
        case ("result", StepResult() as result):
            host, outputs = commit(state.config, state.host, state.host.in_flight[0], result)
            state = replace(state, host=host)
            return drop_blobs(state) if outputs.finished else state
    raise SnapshotError(f"recording: no event is {str(event)[:80]}")


def _submitted_again(state: EngineState, request: Request) -> EngineState:
    """A request whose media's tensors are not there, and not needed: no plan is executed."""
    rows = None
    if request.prompt_embeds is not None:
        request, rows = take_embeds(state.config, request)
    return replace(state, host=submit_host(state.config, state.host, request, rows))


def _without_tensors(name: str, source: str | None, info: AdapterInfo) -> AdapterLoaded:
    adapter = Adapter(
        version=info.version,
        rank=info.rank,
        num_tensors=0,
        nbytes=info.nbytes,
        modules=info.modules,
        unused_targets=(),
        arenas=dict.fromkeys(info.linears),
    )
    return AdapterLoaded(name=name, source=source, adapter=adapter)


def _planned(
    state: EngineState, chosen: tuple[tuple[str, ...], tuple[str, ...]] | None
) -> EngineState:
    def recorded(host: HostState) -> Order:
        return Order(running=chosen[0], waiting=chosen[1])

    host, _ = schedule(state.config, state.host, fcfs if chosen is None else recorded)
    return replace(state, host=host)


def _numbers(config: Config) -> dict[str, Any]:
    """A config as JSON, but for what host states do not depend on."""
    found = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in ELSEWHERE}
    tokens = None if config.tokens is None else hash(config.tokens)  # of its content, not its id
    vision = None if config.vision is None else asdict(config.vision)
    return found | {"model": asdict(config.model), "tokens": tokens, "vision": vision}
