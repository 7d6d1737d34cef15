"""Continuous batching of transformers on a model with sharded layers: what it asks the model for.

transformers asks for a mesh of the ranks (``model._device_mesh``) and for the plan by which the
layers are sharded (``model.tp_plan``). It makes a paged cache for the key heads of the
configuration, or for an equal part of them. Here each rank makes one for the heads that it has.
"""

from __future__ import annotations

import copy
import sys
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pipekernels.huggingface.pretrained import communicators, replaced

_MEMORY = 0.6  # Of what is free on the host; transformers takes as much of all of it on each rank.


def _mesh_of(model: nn.Module) -> DeviceMesh | None:
    """A mesh over the ranks of the sharded layers, with the dimension "tp"; None unless these are
    processes of torch.distributed's default group. A collective."""
    comms = communicators(model)
    if len(comms) != 1 or not dist.is_initialized():
        return None
    ranks = comms[0]._exchange(dist.get_rank(), int)
    if len(set(ranks)) < len(ranks):
        return None  # Threads.
    group: Any = dist.group.WORLD
    if len(ranks) < dist.get_world_size():
        group = dist.new_group(ranks, use_local_synchronization=True)
    device = next(model.parameters()).device.type
    return DeviceMesh.from_group(group, device, mesh_dim_names=("tp",))


def init_continuous_batching(
    model: Any,
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    workload_hints: Any = None,
) -> Any:
    """The manager of transformers. A collective. Its cache has the key heads of this rank, and
    takes this rank's share of the memory unless the configuration says how much.

    Raises:
        ValueError: the ranks are threads, or no processes of torch.distributed's default group; or
            layers have caches of different shapes on this rank.
    """
    mesh = _mesh_of(model)
    if mesh is None:
        raise ValueError(
            "continuous batching needs one process per rank and torch.distributed, but the ranks "
            f"of {type(model).__name__} are threads or have no default group; start it by "
            "pipekernels run, and use Communicator.from_process_group()"
        )
    # The cache is made of a configuration, which gets this rank's numbers of heads.
    own = copy.deepcopy(model.config.get_text_config())
    own.num_key_value_heads = _key_heads(model, own)
    transformers: Any = sys.modules["transformers"]
    config = copy.copy(continuous_batching_config) or transformers.ContinuousBatchingConfig()
    if config.max_memory_percent is None and model.device.type == "cpu":
        # transformers takes for free what this process has not.
        _, total, _, used = _utils().get_device_and_memory_breakdown()
        free = import_module("psutil").virtual_memory().available / (total - used)
        config.max_memory_percent = _MEMORY * min(1, free) / mesh.size()
    with replaced(model, "_device_mesh", mesh):
        manager = type(model).init_continuous_batching(
            model, generation_config, config, workload_hints
        )
    manager.distributed_helper.tp_plan = {}  # Which would divide the heads again.
    create = manager._create_batch_processor

    def create_of_own_heads() -> Any:
        with replaced(model.config, "get_text_config", lambda: own):
            return create()

    manager._create_batch_processor = create_of_own_heads
    return manager


def _utils() -> Any:
    return import_module("transformers.generation.continuous_batching.utils")


@torch.no_grad()
def _key_heads(model: Any, config: Any) -> int:
    """How many heads of keys this rank has in each layer, from the keys of one token."""
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    layers = model.eval()(input_ids=token, use_cache=True).past_key_values.layers
    shapes: set[tuple[int, ...]] = {
        tuple(part.shape) for layer in layers for part in (layer.keys, layer.values)
    }
    size = _utils().find_head_dim(config)
    if len(shapes) != 1 or next(iter(shapes))[2:] != (1, size):
        raise ValueError(
            f"the layers of {type(model).__name__} keep keys and values of the shapes "
            f"{sorted(shapes)} for a token on this rank, but the paged cache of transformers needs "
            f"heads of {size} features, as many in each layer; use generate() for this model"
        )
    ((_, heads, *_),) = shapes
    return heads
