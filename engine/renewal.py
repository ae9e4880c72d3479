"""What makes cached KV worthless: `flush`, and other weights for the base model."""

from dataclasses import replace

from purestep.engine.config import Config
from purestep.engine.program import Program
from purestep.engine.requests import bind
from purestep.models.decoder import Params
from purestep.state.adapters import AdapterLedger
from purestep.state.blocks import BlockDraft
from purestep.state.encoder import dropped
from purestep.state.engine import EngineState, HostState, drop_copies, progress, quiet
from purestep.state.errors import ConfigError
from purestep.state.hashing import block_digests
from purestep.state.request import RequestState, all_tokens
from purestep.state.rows import take_rows


def flush(state: EngineState) -> EngineState:
    """Forget all cached prefixes, and encoder outputs that no running request needs. Running
    requests keep their blocks, which nobody else will find.

    Raises StepError when a plan is in flight.
    """
    host = quiet(state.host, "flush")
    draft = BlockDraft(host.blocks)
    for block in list(host.blocks.digest_of):
        draft.forget(block)
    encoder = dropped(host.encoder, host.encoder.evictable)
    return replace(state, host=replace(host, blocks=draft.finish(), encoder=encoder))


def with_weights(program: Program, params: Params, *, version: str) -> Program:
    """The same program over other weights of the same model, which `version` names.

    Give `adopt` every state that is to go on with it. On a GPU the program's own weights stay in
    memory as long as a state of it, whose adapters may lie beneath them (`models/room.py`). Raises
    ConfigError for the version it has.
    """
    if version == program.config.weights:
        raise ConfigError(f"with_weights: version={version!r} is the one the program has")
    config = replace(program.config, weights=version)
    return replace(program, params=params, room=None, config=config)


def adopt(program: Program, state: EngineState) -> EngineState:
    """The state, to be stepped by a program whose weights are other ones.

    Live requests keep the tokens, scores and hidden states they have; their KV, and what their
    media were encoded to, is computed anew, and KV of the old weights is never found again. Raises
    ConfigError where more than the weights differs, StepError when a plan is in flight.
    """
    config = replace(state.config, weights=program.config.weights)
    if replace(program.config, num_blocks=config.num_blocks) != config:
        raise ConfigError("adopt: the program differs from the state's in more than its weights")
    return adopt_weights(state, config.weights)


def adopt_weights(state: EngineState, weights: str) -> EngineState:
    """`adopt` without a program: the state for weights of this version."""
    config = replace(state.config, weights=weights)
    host = _recomputed(config, quiet(flush(state).host, "adopt"))
    return replace(state, config=config, host=host)


def _recomputed(config: Config, host: HostState) -> HostState:
    """All rows back in front of the queue, all digests made anew."""
    ledger = host.adapters
    records = {key: _rebound(config, ledger, progress(host, key)) for key in host.requests}
    draft = BlockDraft(host.blocks)
    for table in host.rows.tables:
        draft.release(table)
    return replace(
        host,
        requests=host.requests.update(records),
        waiting=(*host.rows.ids, *host.waiting),
        copies=drop_copies(host.copies, draft),
        rows=take_rows(host.rows, []),
        blocks=draft.finish(),
        encoder=dropped(host.encoder, sorted(host.encoder.outputs)),
    )


def _rebound(config: Config, ledger: AdapterLedger, record: RequestState) -> RequestState:
    if record.loading:
        return record
    record = bind(config, ledger, record, record.version)
    if not config.prefix_caching:
        return record
    digests = block_digests(record.root, all_tokens(record), config.block_size, record.block_extras)
    return replace(record, generated_digests=digests[len(record.prompt_digests) :])
