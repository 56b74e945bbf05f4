"""Build arguments of the GPU images, taken from a stack, so that versions live in configs/stacks alone."""

from __future__ import annotations

from configs.stack import Stack

GIN_TYPES = {"none": "0", "proxy": "2", "efa-gda": "5"}
"""NCCL's numbers for who starts a transfer (its core.h and aws-ofi-nccl's guide to GIN)."""


def gpu_arguments(stack: Stack) -> dict[str, str]:
    """Build arguments of images/gpu.Containerfile by name."""
    return {
        "PYTHON": stack.python,
        "CUDA": stack.cuda,
        "GDRCOPY": stack.gdrcopy,
        "EFA_INSTALLER": stack.efa_installer,
        "NCCL": stack.nccl,
        "GIN_TYPE": GIN_TYPES[stack.gin],
        "DEEP_EP": stack.deep_ep,
        "DEEP_EP_COMMIT": stack.deep_ep_commit,
    }
