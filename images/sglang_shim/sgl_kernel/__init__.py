"""Stands in for SGLang's compiled kernels where there is no GPU.

The released wheel of the kernels is for CUDA and fails at import without libcuda. SGLang imports names from it on every
device, but on a CPU it calls none of them: with no operator registered it takes its plain torch paths. So any name can
be imported from here, and calling one says what is wrong.
"""

from typing import Any, NoReturn

__version__ = "0.0.0"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*arguments: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} is a compiled CUDA kernel and this environment has none; run SGLang on a GPU with its"
            " own sgl_kernel, or leave out the option that calls it"
        )

    absent.__name__ = absent.__qualname__ = name
    return absent
