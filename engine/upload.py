"""Numbers on their way to the device: from pinned memory, so that the host waits for nothing.

A copy from ordinary memory waits until the device has done all that was queued before it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from purestep.models.adapter_arenas import Arena

Arrays = dict[str, np.ndarray]
Fields = dict[str, tuple[tuple[int, ...], Any]]  # name -> shape, dtype
Spots = dict[str, tuple[int, tuple[int, ...], np.dtype]]  # name -> first byte, shape, dtype


def on_gpu(device: str | torch.device) -> bool:
    """Whether there is a bus to cross."""
    return torch.device(device).type == "cuda"


def layout(fields: Fields) -> tuple[Spots, int]:
    """Where each array lies in one buffer, and the buffer's bytes."""
    spots, size = {}, 0
    for name, (shape, dtype) in fields.items():
        spots[name] = (size, shape, np.dtype(dtype))
        size += -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // 16) * 16
    return spots, size


def fill_(buffer: Tensor, arrays: Arrays, spots: Spots) -> None:
    """Write each array at its place among a host buffer's bytes."""
    host = buffer.numpy()
    for name, (start, shape, dtype) in spots.items():
        nbytes = arrays[name].nbytes
        host[start : start + nbytes].view(dtype).reshape(shape)[...] = arrays[name]


def sent(arrays: Arrays, device: str | torch.device) -> dict[str, Tensor]:
    """Each array on the device, all by one copy, in memory of their own."""
    if not on_gpu(device):
        return {name: torch.from_numpy(np.array(a)).to(device) for name, a in arrays.items()}
    spots, size = layout({name: (a.shape, a.dtype) for name, a in arrays.items()})
    # torch's allocator of pinned memory hands it out again once the copy is done.
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    fill_(pinned, arrays, spots)
    there = pinned.to(device, non_blocking=True)
    return {
        name: there[start : start + arrays[name].nbytes].view(_kind(dtype)).view(shape)
        for name, (start, shape, dtype) in spots.items()
    }


def sent_tensor(host: Tensor, device: str | torch.device) -> Tensor:
    """A tensor of the host on the device."""
    if not on_gpu(device) or host.is_cuda:
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def copy_stream(device: str | torch.device) -> torch.cuda.Stream | None:
    """A stream for `sent_adapter`; None where there is no bus to cross."""
    return torch.cuda.Stream(device) if on_gpu(device) else None


def sent_adapter(
    index: Arrays,
    arenas: Mapping[str, Arena],
    device: str | torch.device,
    beside: torch.cuda.Stream | None,
) -> tuple[dict[str, Tensor], dict[str, Arena]]:
    """An adapter's arenas on the device, and where its rows go.

    On a GPU they are copied beside the steps that run, on the stream `beside` and into memory of
    their own; what is queued from then on waits for them, and their memory is not used again before
    that is done. Arenas that are not pinned are copied just as well, but the host waits.
    """
    if beside is None:
        return sent(index, device), {name: _moved(a, device) for name, a in arenas.items()}
    here = torch.cuda.current_stream(device)
    with torch.cuda.stream(beside):
        places = sent(index, device)
        there = {name: _moved(arena, device) for name, arena in arenas.items()}
    here.wait_stream(beside)
    for tensor in (*places.values(), *(t for a in there.values() for t in (a.a_LSRD, a.b_LRO))):
        tensor.record_stream(here)
    return places, there


def _moved(arena: Arena, device: str | torch.device) -> Arena:
    return Arena(
        a_LSRD=arena.a_LSRD.to(device, non_blocking=True),
        b_LRO=arena.b_LRO.to(device, non_blocking=True),
    )


def _kind(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
