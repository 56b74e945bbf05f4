"""The Triton kernels: without a GPU in Triton's interpreter, which has to be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ROOT = Path(__file__).parents[3]


def test_kernels_in_the_interpreter() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "tests/kernels/triton/interpreted.py"],
        cwd=ROOT, env=environment | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


ROWS = {"hidden": "i32", "row_stride": "i32", "column_stride": "i32"}
QUANTIZED = {"values": "*fp8e4nv", "scales": "*fp32", "blocks": "i32"}
BLOCKS = {"BLOCK": 128, "BLOCKS": 8}


@pytest.mark.parametrize("capability", [90, 100])
def test_kernels_compile_for_a_gpu(capability: int) -> None:
    """The interpreter takes what a compiler refuses; the compiler needs no GPU."""
    from kernels.triton import fp8, permute

    compiled(permute._gather, capability, {"x": "*bf16", "rows": "*i64", "made": "*bf16", **ROWS}, {"WIDTH": 1024})
    summed = {"y": "*bf16", "order": "*i64", "ends": "*i64", "weights": "*fp32", "made": "*bf16", **ROWS}
    for weighted in (False, True):
        compiled(permute._sum, capability, summed, {"WEIGHTED": weighted, "WIDTH": 1024})
    limits = {"LARGEST": fp8.LARGEST, "TINY": fp8.TINY}
    there = compiled(fp8._quantize, capability, {"x": "*bf16", **QUANTIZED, **ROWS}, BLOCKS | limits)
    # Exact division and rounding to nearest, as PyTorch's.
    assert "div.rn.f32" in there and "div.full" not in there and "cvt.rn.satfinite.e4m3x2.f32" in there
    compiled(fp8._dequantize, capability, {**QUANTIZED, "made": "*bf16", "hidden": "i32"}, BLOCKS)


def compiled(kernel: Any, capability: int, types: dict[str, str], constants: dict[str, Any]) -> str:
    """Compile for a GPU that need not be there; returns the PTX."""
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    positions = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=positions)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert made.asm["cubin"]
    return str(made.asm["ptx"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("hidden", [130, 2048, 7168])
def test_kernels_on_a_gpu(hidden: int) -> None:
    from kernels.dispatch import fp8 as plain
    from kernels.dispatch import grouping
    from kernels.triton import fp8, permute

    x = torch.randn(513, hidden, device="cuda", dtype=torch.bfloat16)
    idx = torch.randint(-1, 8, (513, 8), device="cuda")
    made = grouping.group(idx, 8)
    rows = permute.gather_rows(x, made.rows)
    assert torch.equal(rows, x[made.rows])
    want = torch.zeros(513, hidden, device="cuda").index_add_(0, made.rows, rows.float())
    torch.testing.assert_close(permute.sum_rows(rows, made.rows, 513).float(), want, rtol=1e-2, atol=1e-2)
    if fp8.supported(x.device):
        values, scales = fp8.quantize(x)
        cpu_values, cpu_scales = plain.quantize(x.cpu())
        assert torch.equal(scales.cpu(), cpu_scales)
        assert torch.equal(values.cpu().view(torch.uint8), cpu_values.view(torch.uint8))
