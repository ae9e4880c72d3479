"""What ops ask of the GPU that a tensor lies on, by its number, to choose the form of a kernel."""

from functools import cache

import torch


@cache
def num_multiprocessors(device: int) -> int:
    """0 where there is no CUDA."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count if torch.version.cuda else 0
    )


@cache
def capability(device: int) -> tuple[int, int]:
    """The compute capability: (9, 0) of a Hopper GPU. (0, 0) where there is no CUDA."""
    return torch.cuda.get_device_capability(device) if torch.version.cuda else (0, 0)
