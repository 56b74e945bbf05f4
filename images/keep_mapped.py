"""Run in an image that is being built for CPUs: deletes what a training step maps none of, from NVIDIA's packages.

torch for x86-64 is linked with the CUDA libraries, so they have to be there for `import torch`, GPU or not. But the
packages also hold what only a GPU calls: libraries opened by need, headers, static libraries, programs. A training step
of the model the pipeline trains runs here, with the optimizer and the exchange between processes; the shared libraries
that are mapped afterwards stay, and nothing else does.
"""

import os
import sysconfig
from pathlib import Path


def train_a_step() -> None:
    """One step of a small Mixture-of-Experts model on the CPU, and everything torch loads for it."""
    import torch
    import torch.distributed
    from safetensors.torch import load, save
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(64, (2, 8))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.distributed.all_reduce(loss.detach())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    load(save({"weight": model.lm_head.weight.detach().clone()}))
    model.generate(tokens, max_new_tokens=2, do_sample=True)
    torch.distributed.destroy_process_group()


def mapped_files() -> set[str]:
    """Real paths of the files this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {os.path.realpath(line.split(maxsplit=5)[5]) for line in lines if len(line.split(maxsplit=5)) == 6}


def delete_unmapped(folder: Path) -> tuple[int, int]:
    """Delete the files below `folder` that are neither mapped nor Python.

    Returns:
        Bytes kept and bytes deleted.
    """
    mapped = mapped_files()
    kept = deleted = 0
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file() or path.suffix in (".py", ".pyc"):
            continue
        size = path.stat().st_size
        if os.path.realpath(path) in mapped:
            kept += size
        else:
            deleted += size
            path.unlink()
    return kept, deleted


if __name__ == "__main__":
    train_a_step()
    kept, deleted = delete_unmapped(Path(sysconfig.get_path("purelib")) / "nvidia")
    print(f"NVIDIA's packages: kept {kept / 1e6:.0f} MB, deleted {deleted / 1e6:.0f} MB")
