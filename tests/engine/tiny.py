"""Tiny programs, adapters and requests for engine tests, and the oracles to hold them against."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from purestep.engine import (
    Completion,
    EngineState,
    Outputs,
    Program,
    Request,
    SamplingParams,
    init,
    load_adapter,
    make_program,
    step,
    submit,
)
from purestep.models.checkpoint import load_checkpoint
from purestep.models.config import ModelConfig
from purestep.models.decoder import Params
from purestep.models.room import make_room, moved_in
from purestep.state.checks import check_host
from tests.models.peft_fixtures import save, wrap
from tests.models.tiny import save_checkpoint

Driver = Callable[..., tuple[EngineState, Outputs]]

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

ADAPTERS: dict[str, dict[str, Any]] = {
    "a": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "b": {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"},
    "c": {"r": 16, "lora_alpha": 16, "target_modules": ["gate_proj", "down_proj", "k_proj"]},
    "d": {"r": 8, "lora_alpha": 8, "use_rslora": True, "target_modules": ["o_proj", "up_proj"]},
}


@cache
def checkpoint(family: str = "llama", **overrides: Any) -> tuple[Path, PreTrainedModel]:
    """A random checkpoint's folder, and the transformers model it was saved from."""
    folder = Path(mkdtemp(prefix="purestep-test-"))
    return folder, save_checkpoint(folder, family, **overrides)


@cache
def _loaded(family: str, dtype: str, **overrides: Any) -> Any:
    return load_checkpoint(checkpoint(family, **overrides)[0], dtype=getattr(torch, dtype))


def tiny_program(
    family: str = "llama",
    sizes: dict[str, Any] | None = None,
    dtype: str = "float32",
    **options: Any,
) -> Program:
    """A program over a tiny random model; `sizes` change the model, `options` the engine."""
    model, params, digest = _loaded(family, dtype, **(sizes or {}))
    defaults = {
        "block_size": 4,
        "num_blocks": 64,
        "max_rows": 8,
        "max_batched_tokens": 32,
        "max_active_adapters": 4,
        "lora_rows": 64,
    }
    return make_program(
        model, params, weights=digest, dtype=dtype, device="cpu", **defaults | options
    )


def gpu_twin(program: Program, **options: Any) -> Program:
    """The same model as a program on a GPU, with `options` of `make_program`."""
    params = pytree.tree_map(lambda t: None if t is None else t.cuda(), program.params)
    names = ("weights", "dtype", "block_size", "num_blocks", "max_rows", "max_batched_tokens")
    known = {name: getattr(program.config, name) for name in names}
    known |= {name: getattr(program.config, name) for name in ("max_active_adapters", "lora_rows")}
    return make_program(**in_room(program.config.model, params, known | options))


def in_room(model: ModelConfig, params: Params, options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `make_program` on a GPU for parameters that adapters lie beneath, as
    `load_program` gives them."""
    form = {"dtype": getattr(torch, options["dtype"]), "device": "cuda"}
    room = make_room(model, options["lora_rows"], **form)
    moved = {"params": moved_in(params, room), "room": room}
    return options | moved | {"model": model, "device": "cuda"}


@cache
def peft_model(name: str, family: str = "llama") -> PeftModel:
    """PEFT's own model of one of ADAPTERS."""
    return wrap(checkpoint(family)[1], seed=ord(name), **ADAPTERS[name])


@cache
def adapter_folder(name: str, family: str = "llama") -> Path:
    """One of ADAPTERS as PEFT saves it."""
    return save(peft_model(name, family))


def with_adapters(program: Program, names: Iterable[str] = "abcd") -> EngineState:
    """A fresh state that knows these adapters."""
    state = init(program)
    for name in names:
        state = load_adapter(state, adapter_folder(name), name=name)
    return state


def prompt(seed: int, length: int, vocab: int = 128) -> list[int]:
    """Random ids that are no end token."""
    return np.random.default_rng(seed).integers(3, vocab, size=length).tolist()


def request(id: str, tokens: Sequence[int], adapter: str | None = None, **sampling: Any) -> Request:
    """A greedy request of 8 tokens, unless `sampling` says otherwise."""
    return Request(
        id=id, tokens=list(tokens), adapter=adapter, sampling=replace(GREEDY, **sampling)
    )


def submit_all(state: EngineState, requests: Iterable[Request]) -> EngineState:
    for item in requests:
        state = submit(state, item)
    return state


def run(
    program: Program,
    state: EngineState,
    requests: Iterable[Request] = (),
    driver: Driver = step,
) -> tuple[EngineState, dict[str, Completion]]:
    """Submit, step until idle, check the laws after every step."""
    state, outputs = run_steps(program, submit_all(state, requests), driver)
    return state, {done.id: done for out in outputs for done in out.finished}


def run_steps(
    program: Program, state: EngineState, driver: Driver = step
) -> tuple[EngineState, list[Outputs]]:
    """Step until idle; every step's outputs."""
    outputs: list[Outputs] = []
    while not state.host.idle:
        state, news = driver(program, state)
        check_host(state.host, program.config.block_size)
        outputs.append(news)
        assert len(outputs) < 5_000, "the engine does not come to an end"
    return state, outputs


def alone(item: Request, family: str = "llama", **options: Any) -> Completion:
    """The request by itself: no cache, one chunk, ample memory (O-SOLO of cases.md)."""
    program = tiny_program(
        family,
        **{"num_blocks": 200, "max_batched_tokens": 256, "prefix_caching": False} | options,
    )
    state = with_adapters(program, [item.adapter] if item.adapter else [])
    return run(program, state, [item])[1][item.id]


def oracle_tokens(model: Any, tokens: Sequence[int], count: int) -> list[int]:
    """Greedy continuation by transformers, end tokens ignored."""
    with torch.no_grad():
        out = model.generate(
            input_ids=torch.tensor([list(tokens)]),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(tokens) :].tolist()


def oracle_logprobs(model: Any, tokens: Sequence[int], generated: Sequence[int]) -> np.ndarray:
    """Logprob of each generated token, by transformers in one pass."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*tokens, *generated]])).logits[0].float()
    rows = logits[len(tokens) - 1 : -1].log_softmax(-1)
    return rows.gather(1, torch.tensor(generated)[:, None])[:, 0].numpy()
