"""The step: schedule, execute, commit, and the drivers around it. Open `step.py` first."""

from purestep.engine.adapters import (
    AdapterFailed,
    AdapterLoaded,
    AdapterStatus,
    deliver,
    list_adapters,
    load_adapter,
    load_adapter_tensors,
    pin_adapter,
    register_adapter,
    unload_adapter,
    unpin_adapter,
)
from purestep.engine.batch import run_batch
from purestep.engine.batch_job import BatchJob
from purestep.engine.branch import branch
from purestep.engine.commit import commit
from purestep.engine.config import Config
from purestep.engine.execute import execute, launch, wait
from purestep.engine.fork import fork
from purestep.engine.generate import generate
from purestep.engine.graphs import warm_up
from purestep.engine.loader import Loader, Resolver, folder_resolver
from purestep.engine.pictures import PictureOptions, read_picture
from purestep.engine.policy import Order, Policy, by_priority, fcfs
from purestep.engine.prepare import prepare, prepare_cached
from purestep.engine.program import Program, init, load_program, make_program
from purestep.engine.ray_batch import Workers, ray_processor
from purestep.engine.recording import begin_recording, record, replay
from purestep.engine.renewal import adopt, flush, with_weights
from purestep.engine.requests import abort, submit
from purestep.engine.schedule import plan_ahead, schedule
from purestep.engine.snapshot import restore, snapshot
from purestep.engine.step import recover, step, step_ahead
from purestep.state.canonical import digest
from purestep.state.engine import DeviceState, EngineState, HostState, progress
from purestep.state.media import Feature
from purestep.state.plan import BatchDescriptor, Outputs, StepPlan, StepResult
from purestep.state.processor_cache import ProcessorCache, empty_processor_cache
from purestep.state.request import (
    Completion,
    FinishReason,
    Request,
    for_adapters,
    logprob_dicts,
    prompt_logprob_dicts,
)
from purestep.state.sampling import SamplingParams

__all__ = [
    "AdapterFailed",
    "AdapterLoaded",
    "AdapterStatus",
    "BatchDescriptor",
    "BatchJob",
    "Completion",
    "Config",
    "DeviceState",
    "EngineState",
    "Feature",
    "FinishReason",
    "HostState",
    "Loader",
    "Order",
    "Outputs",
    "PictureOptions",
    "Policy",
    "ProcessorCache",
    "Program",
    "Request",
    "Resolver",
    "SamplingParams",
    "StepPlan",
    "StepResult",
    "Workers",
    "abort",
    "adopt",
    "begin_recording",
    "branch",
    "by_priority",
    "commit",
    "deliver",
    "digest",
    "empty_processor_cache",
    "execute",
    "fcfs",
    "flush",
    "folder_resolver",
    "for_adapters",
    "fork",
    "generate",
    "init",
    "launch",
    "list_adapters",
    "load_adapter",
    "load_adapter_tensors",
    "load_program",
    "logprob_dicts",
    "make_program",
    "pin_adapter",
    "plan_ahead",
    "prepare",
    "prepare_cached",
    "progress",
    "prompt_logprob_dicts",
    "ray_processor",
    "read_picture",
    "record",
    "recover",
    "register_adapter",
    "replay",
    "restore",
    "run_batch",
    "schedule",
    "snapshot",
    "step",
    "step_ahead",
    "submit",
    "unload_adapter",
    "unpin_adapter",
    "wait",
    "warm_up",
    "with_weights",
]
