"""What a step has found, on its way to the host: begun when the step is queued, read when it is
waited for. S sampled rows."""

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


@dataclass(slots=True, eq=False)
class Ring:
    """Two pinned buffers, for even and for odd steps, through which a step's draws reach the host:
    one is read while the next step's are on their way into the other. A step that is queued again,
    as after an interrupt, takes its own again and not that of the step before."""

    buffers: list[Tensor] = field(default_factory=lambda: [torch.empty(0, dtype=torch.int32)] * 2)

    def receive(self, found_2S: Tensor, step: int) -> Callable[[], np.ndarray]:
        """Begin the copy of int32 numbers; what is returned waits for them, and gives them once."""
        if not found_2S.is_cuda:
            return found_2S.numpy
        place = step % 2
        if self.buffers[place].numel() < found_2S.numel():
            size, pin = 2 * found_2S.numel(), torch.cuda.is_available()
            self.buffers[place] = torch.empty(size, dtype=torch.int32, pin_memory=pin)
        host_2S = self.buffers[place][: found_2S.numel()].view(found_2S.shape)
        host_2S.copy_(found_2S, non_blocking=True)
        copied: Any = torch.cuda.Event()
        copied.record()

        def read() -> np.ndarray:
            copied.synchronize()
            return host_2S.numpy().copy()

        return read
