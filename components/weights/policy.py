"""The policy model: built from a geometry or read from a Hugging Face folder, and its tensors under checkpoint names.

transformers 5 keeps a layer's experts fused in memory (`mlp.experts.gate_up_proj` [E, 2I, H], `down_proj` [E, H, I]),
while checkpoints, and engines that take updates by name, know one matrix an expert. A fused name sent to such an
engine is silently ignored, so everything that leaves the trainer uses checkpoint names. Because the fused layout is
the plain stack of the expert matrices, every checkpoint tensor is a view of the model's own memory: naming costs no copy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from components.weights.manifest import on_host
from components.weights.shard import Part, header_of, planned, write_file
from configs.failure import BadData
from configs.run import ModelConfig

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

ARCHITECTURE = "Qwen3MoeForCausalLM"
PAD, BOS, EOS = 0, 1, 2
"""Special tokens of a new policy; a given one names its own in config.json."""


def new_policy(geometry: ModelConfig, vocab_size: int, seed: int) -> PreTrainedModel:
    """A randomly initialised Qwen3-MoE in float32.

    Args:
        geometry: Sizes of the model.
        vocab_size: Tokens of the tokenizer, special tokens included.
        seed: Seed of the initialisation.
    """
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=geometry.hidden_size,
        intermediate_size=2 * geometry.moe_intermediate_size,
        num_hidden_layers=geometry.num_hidden_layers,
        num_attention_heads=geometry.num_attention_heads,
        num_key_value_heads=geometry.num_key_value_heads,
        head_dim=geometry.head_dim,  # type: ignore[call-arg]
        num_experts=geometry.num_experts,
        num_experts_per_tok=geometry.num_experts_per_tok,
        moe_intermediate_size=geometry.moe_intermediate_size,
        norm_topk_prob=True,
        max_position_embeddings=geometry.context_length,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    config.architectures = [ARCHITECTURE]
    return Qwen3MoeForCausalLM(config).float()


def load_policy(folder: Path) -> PreTrainedModel:
    """Read a policy from a Hugging Face folder, in float32 and evaluation mode.

    Raises:
        BadData: the folder holds another architecture, or no readable safetensors checkpoint.
    """
    from transformers import Qwen3MoeForCausalLM

    config_file = folder / "config.json"
    try:
        architectures = json.loads(config_file.read_text()).get("architectures") or []
    except (OSError, ValueError):
        raise BadData(f"{config_file}: is missing or not JSON; give a folder that save_pretrained wrote") from None
    if architectures != [ARCHITECTURE]:
        raise BadData(
            f"{config_file}: architecture is {', '.join(architectures) or 'not named'}, but the policy must be"
            f" {ARCHITECTURE}; start from such a checkpoint or leave model.checkpoint empty"
        )
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True).eval()
    except OSError as error:
        raise BadData(f"{folder}: no safetensors weights can be read there ({str(error).splitlines()[0]})") from None


def save_policy(
    model: PreTrainedModel, tokenizer: Tokenizer, folder: Path, tensors: dict[str, torch.Tensor] | None = None
) -> None:
    """Write a Hugging Face folder: config, safetensors weights under checkpoint names, tokenizer.

    Args:
        tensors: The weights under checkpoint names, where the model's own parameters are but shards of them.
    """
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    model.config.dtype = model.dtype
    model.config.save_pretrained(folder)
    # transformers 5 writes `num_local_experts` only; engines and transformers 4 read `num_experts`.
    written = json.loads((folder / "config.json").read_text())
    written["num_experts"] = model.config.num_experts
    (folder / "config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    _save_tensors(checkpoint_tensors(model) if tensors is None else tensors, folder / "model.safetensors")
    named = {}
    for role in ("bos", "eos", "pad"):
        ids = getattr(model.config, f"{role}_token_id", None)
        token = ids[0] if isinstance(ids, list) else ids
        if token is not None:
            named[f"{role}_token"] = tokenizer.id_to_token(token)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **named).save_pretrained(folder)


def _save_tensors(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Write one safetensors file, a tensor at a time: the package's own writer wants a second copy of them all."""
    host = {name: on_host(tensor) for name, tensor in tensors.items()}
    parts = [Part(name, each.dtype, each.shape, each.data.nbytes) for name, each in host.items()]
    (ordered,) = planned(parts, sum(part.bytes for part in parts))
    write_file(file, [header_of(ordered), *(host[part.name].data for part in ordered)])


def policy_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder.

    Raises:
        BadData: the folder has no readable tokenizer.json.
    """
    file = folder / "tokenizer.json"
    if not file.exists():
        raise BadData(f"{file}: is missing; a policy folder needs the tokenizer it was trained with")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise BadData(f"{file}: cannot be read as a tokenizer ({error})") from None


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The policy's parameters under checkpoint names, each a contiguous view of the model's memory."""
    return checkpoint_views({name: parameter.data for name, parameter in model.named_parameters()})


def checkpoint_views(fused: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Views of in-memory parameters under checkpoint names.

    Writing into a view changes the parameter. The order is that of `fused`, experts ascending.

    Args:
        fused: Parameters as transformers names them, experts stacked: `gate_up_proj` [E, 2I, H], `down_proj` [E, H, I].
    """
    named: dict[str, torch.Tensor] = {}
    for name, parameter in fused.items():
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            for expert, matrix in enumerate(parameter):
                named[f"{prefix}{expert}.gate_proj.weight"], named[f"{prefix}{expert}.up_proj.weight"] = matrix.chunk(2)
        elif name.endswith("experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            for expert, matrix in enumerate(parameter):
                named[f"{prefix}{expert}.down_proj.weight"] = matrix
        else:
            named[name] = parameter
    return named
