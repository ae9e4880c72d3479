"""What a step has found, on its way to the host: begun when the step is queued, read when it is
waited for. S sampled rows, X
numbers of each."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from purestep.state.errors import StepError, TornStateError
from purestep.state.plan import StepResult


@dataclass(slots=True, eq=False)
class Pending:
    """A step that was launched. `read` waits for the device, and is called once."""

    step: int
    read: Callable[[], StepResult]
    result: StepResult | None = None
    failed: bool = False


def landed(launched: tuple[Pending, ...]) -> StepResult:
    """The result of the oldest step; waits for it. Raises StepError where nothing was launched,
    TornStateError where waiting has failed before."""
    if not launched:
        raise StepError("wait: no step was launched that has not been waited for")
    check_sound(launched)
    pending = launched[0]
    if pending.result is None:
        try:
            pending.result = pending.read()
        except Exception:
            pending.failed = True
            raise
    return pending.result


def check_sound(launched: tuple[Pending, ...]) -> None:
    """Raises TornStateError where a step was launched and its result cannot be had."""
    for pending in launched:
        if pending.failed:
            raise TornStateError(f"step {pending.step} failed in flight; call recover(state)")


def fetched(*tensors: Tensor) -> Callable[[], tuple[np.ndarray, ...]]:
    """Begin copies to the host; what is returned waits for them."""
    if not any(tensor.is_cuda for tensor in tensors):
        return lambda: tuple(tensor.numpy() for tensor in tensors)
    pinned = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    copied = _event()

    def read() -> tuple[np.ndarray, ...]:
        copied.synchronize()
        return tuple(tensor.numpy().copy() for tensor in pinned)

    return read


def _event() -> Any:
    event = torch.cuda.Event()
    event.record()
    return event


@dataclass(slots=True, eq=False)
class Ring:
    """Two pinned buffers, for even and for odd steps, through which a step's draws reach the host:
    one is read while the next step's are on their way into the other. A step that is queued again,
    as after an interrupt, takes its own again and not that of the step before."""

    buffers: list[Tensor] = field(default_factory=lambda: [torch.empty(0, dtype=torch.int32)] * 2)

    def receive(self, found_XS: Tensor, step: int) -> Callable[[], np.ndarray]:
        """Begin the copy of int32 [X, S]; what is returned waits for it, and gives it once."""
        if not found_XS.is_cuda:
            return found_XS.numpy
        place = step % 2
        if self.buffers[place].numel() < found_XS.numel():
            size, pin = 2 * found_XS.numel(), torch.cuda.is_available()
            self.buffers[place] = torch.empty(size, dtype=torch.int32, pin_memory=pin)
        host_XS = self.buffers[place][: found_XS.numel()].view(found_XS.shape)
        host_XS.copy_(found_XS, non_blocking=True)
        copied = _event()

        def read() -> np.ndarray:
            copied.synchronize()
            return host_XS.numpy().copy()

        return read
