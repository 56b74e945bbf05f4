"""The adapter's calls against the sources of the real deep_ep: what changes there fails here."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from kernels.dispatch import deep_ep_buffers
from kernels.dispatch.deep_ep_environment import LEGACY_RANKS, Library, describe
from tests.kernels.dispatch import deep_ep_double as double
from tests.kernels.dispatch.deep_ep_wheel import Signature, assigned, requirement, signatures, wheel

ROOT = Path(__file__).parents[3]
CLASSES = {"ElasticChannel": ("ElasticBuffer", "elastic.py"), "LegacyChannel": ("Buffer", "legacy.py")}
RELIED = {
    ("ElasticBuffer", "dispatch"): {
        "do_expand": "False",  # rows come once a rank, not once an expert
        "do_cpu_sync": "None",  # a first dispatch waits for the number of rows
        "expert_alignment": "None",
        "async_with_compute_stream": "False",  # the current stream waits
        "do_handle_copy": "True",
        "num_qps": "0",
        "use_tma_aligned_col_major_sf": "False",
    },
    ("ElasticBuffer", "combine"): {"num_sms": "0", "async_with_compute_stream": "False", "bias": "None"},
    ("ElasticBuffer", "__init__"): {"num_cpu_bytes": "0", "use_fp8_dispatch": "False"},
    ("Buffer", "__init__"): {"low_latency_mode": "False"},
    ("Buffer", "dispatch"): {
        "async_finish": "False",
        "num_worst_tokens": "0",
        "expert_alignment": "1",
        "config": "None",
    },
    ("Buffer", "combine"): {"async_finish": "False", "config": "None", "bias": "None"},
    ("Buffer", "get_dispatch_layout"): {"async_finish": "False"},
}
"""Defaults that the adapter leaves as they are, and needs."""


class Call(NamedTuple):
    """A call of deep_ep in the adapter."""

    owner: str
    method: str
    positional: int
    keywords: tuple[str, ...]
    unpacked: int
    """Names the result is unpacked into; 0 if it is not."""


def adapter_calls() -> list[Call]:
    """Every call of a deep_ep class in deep_ep_buffers.py."""
    tree = ast.parse(Path(inspect.getfile(deep_ep_buffers)).read_text())
    found = []
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or node.name not in CLASSES:
            continue
        owner = CLASSES[node.name][0]
        unpacked = {
            id(each.value): len(target.elts)
            for each in ast.walk(node)
            if isinstance(each, ast.Assign)
            for target in each.targets
            if isinstance(target, ast.Tuple)
        }
        for call in (each for each in ast.walk(node) if isinstance(each, ast.Call)):
            called = ast.unparse(call.func)
            method = {f"library.{owner}": "__init__"}.get(called, "")
            if called.startswith((f"library.{owner}.", "self.buffer.")):
                method = called.rpartition(".")[2]
            if method:
                keywords = tuple(str(each.arg) for each in call.keywords)
                found.append(Call(owner, method, len(call.args), keywords, unpacked.get(id(call), 0)))
    return found


@pytest.fixture(scope="module")
def real() -> dict[str, dict[str, Signature]]:
    folder = wheel() / "buffers"
    return {name: signatures(folder / file, name) for name, file in CLASSES.values()}


def test_every_call_is_one_the_wheel_knows(real: dict[str, dict[str, Signature]]) -> None:
    calls = adapter_calls()
    assert {call.method for call in calls} >= {"__init__", "dispatch", "combine", "destroy", "get_buffer_size_hint"}
    for call in calls:
        signature = real[call.owner][call.method]
        names = list(signature.defaults)
        given = [*names[: call.positional], *call.keywords]
        assert call.positional <= len(names) and set(given) <= set(names), call
        assert len(set(given)) == len(given), call
        needed = {name for name, default in signature.defaults.items() if default is None}
        assert needed <= set(given), call
        if call.unpacked:
            assert signature.returned == {call.unpacked}, call


def test_what_is_relied_on_is_the_default(real: dict[str, dict[str, Signature]]) -> None:
    for (owner, method), relied in RELIED.items():
        for name, default in relied.items():
            assert real[owner][method].defaults[name] == default, f"{owner}.{method} {name}"
        left = {
            name for call in adapter_calls() if (call.owner, call.method) == (owner, method) for name in call.keywords
        }
        assert not set(relied) & left, f"{owner}.{method} is given what it is said to be left to"


def test_what_is_read_is_there(real: dict[str, dict[str, Signature]]) -> None:
    folder = wheel()
    assert "num_rdma_ranks" in assigned(folder / "buffers" / "elastic.py", "ElasticBuffer")
    assert {"num_sms", "num_experts"} <= assigned(folder / "buffers" / "elastic.py", "EPHandle")
    exported = (folder / "__init__.py").read_text()
    assert "topk_idx_t" in exported and "import Buffer" in exported and "import ElasticBuffer" in exported
    binary = next(folder.glob("_C*.so")).read_bytes()
    assert b"get_nvl_buffer_size_hint" in binary and b"get_rdma_buffer_size_hint" in binary


def test_the_double_has_the_wheels_signatures(real: dict[str, dict[str, Signature]]) -> None:
    for owner, methods in real.items():
        for name, method in vars(getattr(double, owner)).items():
            function = method.__func__ if isinstance(method, staticmethod) else method
            if not inspect.isfunction(function):
                continue
            signature = list(inspect.signature(function).parameters.values())
            signature = signature[0 if isinstance(method, staticmethod) else 1 :]
            theirs = {
                each.name: None if each.default is inspect.Parameter.empty else repr(each.default) for each in signature
            }
            assert theirs == methods[name].defaults, f"{owner}.{name}"


def test_the_facts_behind_the_rules_still_hold() -> None:
    folder = wheel()
    elastic, legacy = ((folder / "buffers" / name).read_text() for name in ("elastic.py", "legacy.py"))
    found = describe(folder)
    # Upstream's kernels: it may not run with GPU-initiated EFA.
    assert found == Library(str(folder), elastic=True, ibgda=True, unordered=False)
    assert "'NVSHMEM_IB_ENABLE_IBGDA'] = '1'" in legacy
    for ranks in LEGACY_RANKS:
        assert f"            {ranks}: Config(" in legacy
    # Auto-sizing divides by a speed that is read from one named interface, 0 if it is not there.
    assert "rdma_traffic / rdma_gbs" in elastic
    envs = (folder / "utils" / "envs.py").read_text()
    assert "os.getenv('EP_NIC_NAME', 'mlx5_0')" in envs
    assert "def get_rdma_gbs(" in envs and "def get_nvlink_gbs(" in envs and "nvlink_traffic / nvlink_gbs" in elastic
    layout = (folder / "include" / "deep_ep" / "common" / "layout.cuh").read_text()
    assert f"kNumMaxExperts = {deep_ep_buffers.ElasticChannel.most_experts};" in layout
    assert f"kNumMaxExpertsPerRank = {deep_ep_buffers.ElasticChannel.most_local};" in layout
    # It would compute a number of multiprocessors before it looks at the handle.
    body = elastic[elastic.index("    def dispatch(") :]
    assert body.index("self.get_theoretical_num_sms(num_experts, num_topk) if num_sms == 0") < body.index(
        "if handle is not"
    )
    assert "os.getenv('EP_REUSE_NCCL_COMM', '1')" in (folder / "utils" / "comm.py").read_text()
    kernels = folder / "include" / "deep_ep" / "impls"
    assert "kHidden % (32 * sizeof(int4) / sizeof(nv_bfloat16)) == 0" in (kernels / "combine.cuh").read_text()
    copied = (kernels / "dispatch_copy_epilogue.cuh").read_text()
    assert "ptx::deduplicate(dst_expert_idx, lane_idx) or dst_expert_idx == -1" in copied
    assert 'kNumTopk <= 32, "Too many top-k selections"' in copied


IMPORTS = """
import mmap, sys
files = [open(name, "rb") for name in sys.argv[2:]]
maps = [mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) for file in files]
sys.path.insert(0, sys.argv[1])
from configs.kernels import DeepEPConfig
from kernels.dispatch.deep_ep_environment import load
print(load(DeepEPConfig(), 1, 8).checked)
"""
"""Without torch, which may map an NCCL of its own."""


def _import_among(folder: Path, *mapped: str) -> subprocess.CompletedProcess[str]:
    """Import a package with the wheel's own check of mapped files, in a process that has these mapped."""
    tree = ast.parse((wheel() / "__init__.py").read_text())
    check = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check_nccl_so")
    lines = ["import filecmp, glob, os", f"def find_nccl_root(): return {str(folder)!r}", ast.unparse(check)]
    lines += ["check_nccl_so()", "checked = not os.environ.get('EP_SUPPRESS_NCCL_CHECK')"]
    package = folder / "package" / "deep_ep"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("\n".join(lines))
    for name in mapped:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"library")
    files = [str(folder / name) for name in mapped]
    return subprocess.run(
        [sys.executable, "-c", IMPORTS, str(package.parent), *files], cwd=ROOT, capture_output=True, text=True, timeout=120,
        check=False, env={**os.environ, "OMP_NUM_THREADS": "1", "EP_REUSE_NCCL_COMM": "0"},
    )  # fmt: skip


def test_a_network_plugin_is_not_taken_for_a_second_nccl(tmp_path: Path) -> None:
    nccl, plugin = "lib/libnccl.so.2", "plugin/libnccl-net-ofi.so"
    alone = _import_among(tmp_path / "before", nccl)
    assert alone.stdout == "True\n", alone.stderr[-2000:]
    # The process's first communicator came earlier.
    late = _import_among(tmp_path / "after", nccl, plugin)
    assert late.stdout == "False\n", late.stderr[-2000:]
    twice = _import_among(tmp_path / "twice", nccl, "other/libnccl.so.2", plugin)
    assert "BadConfig: two copies of NCCL are mapped" in twice.stderr


def test_the_wheel_is_pinned_by_hash() -> None:
    assert requirement().startswith("sgl-deep-ep==") and "--hash=sha256:" in requirement()
