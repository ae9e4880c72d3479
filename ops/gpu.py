"""What ops ask of the GPU that a tensor lies on, by its number, to choose the form of a kernel."""

from functools import cache

import torch


@cache
def num_multiprocessors(device: int) -> int:
    """0 of a CPU (-1) and without CUDA."""
    if device < 0 or not torch.version.cuda:
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def capability(device: int) -> tuple[int, int]:
    """The compute capability: (9, 0) of a Hopper GPU. (0, 0) of a CPU (-1) and without CUDA."""
    if device < 0 or not torch.version.cuda:
        return 0, 0
    return torch.cuda.get_device_capability(device)
