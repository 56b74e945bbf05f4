"""The numpy form of SGLang's GPU checksum, against SGLang's own kernels in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np

from components.rollout.sglang_server import find_python
from components.weights.tile_hash import TILE, TILES, TileHash
from configs.sglang import SGLangConfig

TILE_BYTES = TILE * 4
SIZES = (2, 4, 6, 100, TILE_BYTES, TILE_BYTES + 2, 2 * TILE_BYTES - 4, TILES * TILE_BYTES, TILES * TILE_BYTES + 2)

# The wrapper insists on a GPU; its kernels do not.
KERNELS = """
import importlib.util, json, sys
import numpy as np, torch, triton
from pathlib import Path
found = importlib.util.find_spec("sglang").submodule_search_locations[0]
file = Path(found) / "kernels/ops/memory/gpu_tensor_hash.py"
spec = importlib.util.spec_from_file_location("gpu_tensor_hash", file)
kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
seed = 0x243F6A88
for size in json.loads(sys.argv[1]):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    words = torch.from_numpy(np.frombuffer(data + bytes(-size % 4), np.uint32).copy())
    sums = torch.empty(triton.cdiv(words.numel(), 8192), dtype=torch.uint64)
    kernels.hash_tiles32_kernel_blocked[(sums.numel(),)](
        words, sums, words.numel(), seed1=seed, seed2=((seed * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF,
        FM_C1=kernels.FMIX32_C1, FM_C2=kernels.FMIX32_C2, POS_A=kernels.POS_C1, POS_B=kernels.POS_C2,
        TILE=8192, BLOCK=256, USE_CG=True,
    )
    while sums.numel() > 1:
        fewer = torch.empty(triton.cdiv(sums.numel(), 1024), dtype=torch.uint64)
        kernels.add_tree_reduce_u64_kernel[(fewer.numel(),)](sums, fewer, sums.numel(), CHUNK=1024)
        sums = fewer
    print(f"{kernels._final_splitmix64(int(sums.item())):016x}")
"""


def test_equals_the_kernels(tmp_path: Path) -> None:
    script = tmp_path / "kernels.py"
    script.write_text(KERNELS)
    done = subprocess.run(
        [find_python(SGLangConfig()), str(script), json.dumps(SIZES)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = []
    for size in SIZES:
        data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
        running = TileHash(size)
        for start in range(0, size, 40_001):  # parts that end anywhere
            running.update(data[start : start + 40_001])
        found.append(running.hexdigest())
    assert found == done.stdout.split()
