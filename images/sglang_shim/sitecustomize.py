"""Lets an SGLang server on a CPU return routed experts.

That buffer is registered with CUDA as soon as it is allocated, which a build of torch without a GPU refuses. Registering
only speeds up copies from a GPU, so on a CPU it may be left out.
"""

import importlib.abc
import importlib.machinery
import sys
from typing import Any

MODULE = "sglang.srt.mem_cache.pool_host.common"


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        module._cuda_host_register = lambda *arguments, **options: None


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
