"""From one row of a batch file to the request it asks for."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from purestep.engine.batch_job import BatchJob
from purestep.engine.batch_media import MediaRule, read_media
from purestep.engine.batch_rows import Row
from purestep.engine.prepare import prepare_cached
from purestep.engine.program import Program
from purestep.state.errors import BatchLineError, RequestError
from purestep.state.processor_cache import ProcessorCache
from purestep.state.request import Request
from purestep.state.sampling import GREEDY_BELOW, SamplingParams


def request_of(
    program: Program, cache: ProcessorCache, job: BatchJob, request_id: str, row: Row
) -> tuple[ProcessorCache, Request]:
    """The cache that knows a row's pictures, and the request that it asks for. What the row leaves
    open is as the checkpoint's generation_config.json has it. Raises BatchLineError, RequestError.
    """
    _check_adapter(job, row)
    prompt = row.prompt
    if row.images:
        prompt = with_pictures(job.media or MediaRule(folder=job.input.parent), prompt)
        if program.vision is None:
            raise BatchLineError("modality_not_supported", "this model takes no images")
    sampling = _sampling(program.defaults, job, row)
    try:
        return prepare_cached(
            program,
            cache,
            prompt,
            id=request_id,
            adapter=row.adapter,
            salt=row.salt,
            sampling=sampling,
            chat_template_kwargs=row.chat_template_kwargs,
        )
    except RequestError:
        raise
    except Exception as error:  # a chat template raises what it likes
        why = f"{type(error).__name__}: {error}"
        raise BatchLineError("invalid_request", f"the prompt cannot be prepared: {why}") from error


def with_pictures(
    rule: MediaRule, messages: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The messages with the bytes of each picture in its part. Raises BatchLineError."""

    def filled(part: Mapping[str, Any]) -> Mapping[str, Any]:
        if part["type"] != "image":
            return part
        return {"type": "image", "image": read_media(rule, part["url"])}

    return [
        message
        if isinstance(message["content"], str)
        else {**message, "content": [filled(part) for part in message["content"]]}
        for message in messages
    ]


def _check_adapter(job: BatchJob, row: Row) -> None:
    name = row.adapter
    if name is None or name in job.adapters or (job.resolver and job.resolver(name)):
        return
    known = ", ".join(map(repr, sorted({*job.base_names, *job.adapters})))
    more = " and the folders of --adapter-dir" if job.resolver else ""
    raise BatchLineError(
        "model_not_found", f"no model or adapter is called {name!r}; known are {known}{more}", 404
    )


def _sampling(defaults: SamplingParams, job: BatchJob, row: Row) -> SamplingParams:
    given = {"max_tokens": job.max_tokens, **row.sampling}
    warmth = given.get("temperature", defaults.temperature)
    if isinstance(warmth, int | float) and warmth < GREEDY_BELOW:  # then these have no effect
        given = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **given}
    return replace(defaults, **given)
