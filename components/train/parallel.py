"""Parallelism, applied from outside the model: FSDP2 for everything, expert parallelism for the experts.

The experts of a layer are divided among the ranks of an expert-parallel group (consecutive ranks, so that a group stays
inside a node where it can), and every expert's matrices among the ranks that hold the same experts; all else is divided
among all ranks. The shape is torchtitan's: the model knows of nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Parameter

from components.train.ranks import Ranks
from configs.failure import BadConfig
from configs.run import RunConfig
from kernels.dispatch.choose import Choice, Shapes, choose_dispatcher, open_dispatcher
from kernels.dispatch.topology import topology_of
from kernels.experts import experts_of, use_grouped_experts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def apply_parallelism(model: PreTrainedModel, config: RunConfig, ranks: Ranks) -> Choice | None:
    """Divide a model, which every rank holds whole, among the ranks; each keeps its share on its device.

    Gradients are summed over the ranks, not averaged: every rank's loss is its share of the global one.

    Returns:
        How tokens travel to the experts; None without expert parallelism.

    Raises:
        BadConfig: the model cannot be divided as asked.
    """
    if ranks.alone:
        nn.Module.to(model, ranks.device)
        return None
    if model.config.tie_word_embeddings:
        raise BadConfig(
            "the policy ties its embeddings to its head (tie_word_embeddings), which several training ranks cannot share;"
            " set train.ranks to 1 or start from a policy that does not"
        )
    choice = None
    experts = config.train.expert_parallel
    whole = init_device_mesh(ranks.device.type, (ranks.size,), mesh_dim_names=("ranks",))
    if experts > 1:
        names = ("expert_data", "expert")
        grid = init_device_mesh(ranks.device.type, (ranks.size // experts, experts), mesh_dim_names=names)
        choice = _choice(model, config, ranks, grid["expert"])
        use_grouped_experts(model, choice.dispatcher)
        for each in experts_of(model):
            _divide_experts(each, grid)
    else:
        use_grouped_experts(model)
    # The head is called by itself, for completion tokens only, so it stands beside the rest.
    for module in (*model.model.layers, model.model, model.lm_head):
        # Each goes to this rank's device as it is divided: the whole policy is never there.
        _summed(fully_shard(module, mesh=whole))
    return choice


def _choice(model: PreTrainedModel, config: RunConfig, ranks: Ranks, mesh: DeviceMesh) -> Choice:
    rows = config.train.batch_groups * config.rollout.group_size // (config.train.minibatches * ranks.size)
    shapes = Shapes(
        # About as long as its completion is a prompt, as far as the configuration knows.
        tokens=max(1, rows) * 2 * config.rollout.max_new_tokens,
        hidden=model.config.hidden_size,
        experts=model.config.num_experts,
        top=model.config.num_experts_per_tok,
        dtype=model.dtype,
    )
    topology = topology_of(mesh.get_group())
    choice = choose_dispatcher(config.kernels, topology, shapes, ranks.device)
    # Groups that measured at the same time may differ; rank 0's speaks for all.
    name = ranks.spread(choice.dispatcher.name.encode()).decode()
    if name == choice.dispatcher.name:
        return choice
    choice.dispatcher.close()
    dispatcher = open_dispatcher(name, config.kernels, topology, shapes)
    return Choice(dispatcher, f"{name}: the choice of rank 0's group", choice.figures)


def _divide_experts(experts: Any, grid: DeviceMesh) -> None:
    width = grid["expert_data"].size()
    for name, parameter in list(experts.named_parameters()):
        check_divisible(name, parameter.shape[1], width)
        # Every rank holds the whole tensor and takes its part of that: nothing travels.
        held = distribute_tensor(parameter.data, grid["expert"], [Shard(0)], src_data_rank=None)
        setattr(experts, name, Parameter(held))
    _summed(fully_shard(experts, mesh=grid["expert_data"], shard_placement_fn=lambda parameter: Shard(1)))


def check_divisible(name: str, rows: int, width: int) -> None:
    """Whether an expert's matrix can be shared by the ranks that hold the expert.

    Args:
        name: Of the parameter.
        rows: Rows of each matrix.
        width: Ranks.

    Raises:
        BadConfig: not evenly.
    """
    if rows % width:
        raise BadConfig(
            f"the {rows} rows of an expert's {name} cannot be shared evenly by the {width} ranks that hold it; choose"
            " train.ranks and train.expert_parallel so that their quotient divides the model's sizes"
        )


def _summed(module: FSDPModule) -> None:
    module.set_gradient_divide_factor(1.0)
    # gloo cannot scale while it reduces.
    module.set_force_sum_reduction_for_comms(True)


def clip_gradients(parameters: list[Parameter], limit: float, ranks: Ranks) -> torch.Tensor:
    """Scale all gradients down to a global norm of `limit`; returns the norm before.

    The shards of the ranks do not overlap, whatever mesh they are on, so the sum of their squares is that of the whole.
    """
    if ranks.alone:
        return torch.nn.utils.clip_grad_norm_(parameters, limit)
    gradients = [local(each.grad) for each in parameters if each.grad is not None]
    squares = torch.stack([each.square().sum() for each in gradients]).sum()
    norm = ranks.total(squares).sqrt()
    # As torch.nn.utils.clip_grad_norm_ does it.
    torch._foreach_mul_(gradients, torch.clamp(limit / (norm + 1e-6), max=1.0))
    return norm


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
