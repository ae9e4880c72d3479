"""Where kernels are tested: on a GPU, else by triton's interpreter (see tests/conftest.py)."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    from triton.runtime import interpreter

    _patch_tensor = interpreter._patch_lang_tensor

    def _patched(tensor, scope) -> None:
        """numpy 2.4 makes no int of an array of one element, which triton 3.6 relies on."""
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patched
