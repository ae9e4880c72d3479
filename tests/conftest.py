"""Settings for all tests."""

import os

import torch
from hypothesis import HealthCheck, settings

# Tiny tensors gain nothing from threads, and lose much on a busy machine.
torch.set_num_threads(1)

if not torch.cuda.is_available():
    # Kernels run in triton's interpreter. Read as triton is imported, which others may do first.
    os.environ["TRITON_INTERPRET"] = "1"

# A shared machine makes any deadline flaky; on CI the same examples run every time.
settings.register_profile(
    "local", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
