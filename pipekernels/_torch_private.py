"""The only place that touches torch's private names: those with an underscore, of ``torch._C``, and
of modules with an underscore.

All of them are there in torch 2.6 to 2.13, unless it says otherwise, and each says what it is
needed for: torch has no public name for it. What costs a call that others wait for is torch's own
function under another name, not one around it.

Not here are the names that torch means for those who derive from its classes or walk modules:

* a module's ``_modules``, ``_parameters``, ``_buffers``, ``_apply()``, and its dicts of hooks, such
  as ``_forward_hooks``, and methods that subclasses override (``_load_from_state_dict``,
  ``_check_input_dim``, a process group's ``_allgather_base``): copying and serialisation of modules
  have rested on them since their beginnings;
* ``Tensor._version``, which the notes on autograd describe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.utils._device
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.utils import parametrize
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Public classes and functions in modules with an underscore: dispatch modes, the containers that
# libraries register (torch.utils.pytree is not in torch 2.6), the mode of ``with device:``, and the
# class of all batch norms, to tell a layer by and derive from.
__all__ = [
    "BatchNormBase",
    "DeviceContext",
    "TorchDispatchMode",
    "TreeSpec",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
]

# ---- autograd ----


def in_backward() -> bool:
    """Whether this thread is in a backward, in a hook or a node of Python."""
    return torch._C._current_graph_task_id() != -1


current_node = torch._C._current_autograd_node
"""The node that the backward of this thread is at, also in the hooks called for it: a hook that
held its node would keep it alive for ever."""

keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the backward that this thread is in has ``retain_graph=True``: a node that manages memory
of its own may throw it away otherwise."""


def run_backward(
    roots: Sequence[Tensor | GradientEdge], grads: Sequence[Tensor], *, keep_graph: bool
) -> None:
    """``torch.autograd.backward`` for gradients that autograd itself has computed. The public
    function first compares each gradient's shape with its root's in Python, which takes half as
    long again as the backward of a small layer; the engine checks shapes once more."""
    _engine_run_backward(
        tuple(roots),
        tuple(grads),
        keep_graph,
        False,  # create_graph
        (),  # inputs: all leaves
        allow_unreachable=True,
        accumulate_grad=True,
    )


below_autograd = torch._C._AutoDispatchBelowAutograd
"""Context manager: operations called in it go past autograd, as the kernel of an Autograd key calls
what is below it."""

increment_version = torch._C._increment_version
"""Tells autograd that tensors were written to where it cannot see it. ``torch.autograd.graph`` has
the same name for it, around this one, which C++ calls."""


def is_node_of_python(node: Node) -> bool:
    """Whether ``node`` is of a ``torch.autograd.Function``: such a node's Python object does not
    keep the graph alive."""
    return isinstance(node, torch._C._FunctionBase)


def function_of(node: Node) -> type[torch.autograd.Function] | None:
    """The ``torch.autograd.Function`` that ``node`` is of; None for torch's own nodes."""
    if not isinstance(node, BackwardCFunction):
        return None
    function: type[torch.autograd.Function] = node._forward_cls
    return function


_saved_tensors_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def has_saved_tensors_hooks() -> bool:
    """Whether this thread is in ``torch.autograd.graph.saved_tensors_hooks()``: other threads do
    not see them. False in torch 2.6, which does not tell."""
    return _saved_tensors_hooks is not None and _saved_tensors_hooks(True) is not None


def has_hooks(tensor: Tensor) -> bool:
    """Whether ``tensor`` has hooks of its own."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def are_parametrizations_cached() -> bool:
    """Whether the program is in ``parametrize.cached()``, whose values are of one graph."""
    return parametrize._cache_enabled > 0


# ---- data parallelism ----

active_ddp = nn.parallel.DistributedDataParallel._get_active_ddp_module
"""The ``DistributedDataParallel`` whose forward runs, if any: for layers that not all of its ranks
hold alike. torch.compile asks it, too."""

# ---- forward mode, torch.func ----


def in_forward_mode() -> bool:
    """Whether tensors may have tangents: inside ``forward_ad.dual_level()``. To ask each tensor
    takes longer than what is called with it."""
    return forward_ad._current_level >= 0


tangents_are_enabled = torch._C._is_fwd_grad_enabled
"""Whether operations compute tangents; off inside of their own derivatives."""

transforms_are_active = torch._C._are_functorch_transforms_active
"""Whether this thread is inside a transform of ``torch.func``. What has no rule for them has to
refuse: torch would leave something out of the result."""

is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a transform of ``torch.func`` has put a tensor around another one."""

tracks_gradient = torch._C._functorch.is_gradtrackingtensor
"""Whether that transform differentiates."""

unwrapped = torch._C._functorch.get_unwrapped
"""The tensor inside one that :data:`is_wrapped`."""


def is_functionalizing() -> bool:
    """Whether the innermost active transform is functionalization, which sees operations, not
    autograd functions as the others do."""
    functorch = torch._C._functorch
    return functorch.peek_interpreter_stack().key() == functorch.TransformType.Functionalize


def is_batched(tensor: Tensor) -> bool:
    """Whether ``tensor`` is one of vmap's: today's, or the former one that ``torch.autograd`` still
    has for ``is_grads_batched=True``."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


# ---- modes, the profiler, the compiler ----

disable_dynamo = torch._disable_dynamo
"""Decorator: one graph break to ``torch.compile``. Unlike ``torch.compiler.disable`` it loads the
compiler with the first call, not with the module."""

dispatch_mode_count = torch._C._len_torch_dispatch_stack
"""How many ``TorchDispatchMode`` this thread is in."""

dispatch_modes = _get_current_dispatch_mode_stack
"""Those modes, outermost first."""

is_profiler_enabled = torch._C._autograd._profiler_enabled
"""Whether this thread is profiled."""

no_function_modes = torch._C.DisableTorchFunction
"""Context manager: no function mode sees what is called in it."""


def function_modes() -> list[Any]:
    """The ``TorchFunctionMode`` objects that this thread is in, outermost first; the default device
    is one."""
    count = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(i) for i in range(count)] if count else []


def set_function_modes(modes: Iterable[Any]) -> None:
    """Leave all function modes and enter ``modes``: Ctrl-C may have come before a mode's own
    end."""
    while torch._C._len_torch_function_stack() > 0:
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


# Whether function modes are called at all; torch 2.6 may not tell.
function_modes_state = getattr(torch._C, "_get_torch_function_state", lambda: None)
set_function_modes_state = getattr(torch._C, "_set_torch_function_state", lambda state: None)


def device_setting() -> torch.device | None:
    """What torch takes for the default device beside its mode. To be brought back with that."""
    return torch.utils._device.CURRENT_DEVICE


def set_device_setting(device: torch.device | None) -> None:
    """Bring :func:`device_setting` back."""
    torch.utils._device.CURRENT_DEVICE = device


def have_all_modules_hooks(kinds: Sequence[str]) -> bool:
    """Whether there are hooks of these kinds, such as ``"_forward_hooks"``, on all modules: torch
    lets them be added and removed, not asked for."""
    return any(getattr(nn.modules.module, f"_global{kind}") for kind in kinds)


# ---- memory ----


def storage_key(storage: torch.UntypedStorage) -> int:
    """Tells storages apart, those without memory too; their Python objects come and go."""
    key: int = storage._cdata
    return key


def storage_references(storage: torch.UntypedStorage) -> int:
    """How many tensors and graphs refer to ``storage``; one more is this object."""
    return torch._C._storage_Use_Count(storage._cdata)


def storage_at(address: int, device: torch.device, size: int) -> torch.types.Storage:
    """``size`` bytes at ``address``, which the caller keeps. DLPack would take a capsule of C for
    it."""
    return torch._C._construct_storage_from_data_pointer(address, device, size)


def end_capture_allocations(device: int, pool: Any) -> None:
    """Have the allocator leave a capture into ``pool`` that failed: torch does that at the end of
    others only.

    Raises:
        RuntimeError: it had not begun to allocate there.
    """
    # The second until torch 2.6. Looked for when needed: no build for CPUs has them.
    names = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")
    end = next(getattr(torch._C, name) for name in names if hasattr(torch._C, name))
    end(device, pool)
    torch._C._cuda_releasePool(device, pool)


# ---- operations ----

add_to_each = torch._foreach_add_
"""``total += grad`` for lists, in one launch, as torch's optimizers do it."""

copy_to_each = torch._foreach_copy_
"""``copy_()`` for lists, likewise."""

scaled_mm = torch._scaled_mm
"""cuBLAS's product of float8 matrices; its public successor is not in torch 2.6."""


def occupy_gpu(cycles: int) -> None:
    """Have the current stream do nothing for so long, so that what is launched meanwhile is
    queued."""
    torch.cuda._sleep(cycles)


# ---- torch.distributed ----


def default_group() -> dist.ProcessGroup:
    """The group of all ranks. ``dist.group.WORLD`` is None where there is none; this says so."""
    return dist.distributed_c10d._get_default_group()


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """The store that the ranks of ``group`` have in common, to join something else over it."""
    return dist.distributed_c10d._get_process_group_store(group)


def group_named(name: str) -> dist.ProcessGroup:
    """The group that ``group.group_name`` is of. RuntimeError if it was destroyed."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def enclosing_mesh() -> DeviceMesh:
    """The mesh that ``with mesh:`` enters. RuntimeError if there is none."""
    from torch.distributed.device_mesh import _mesh_resources

    return _mesh_resources.get_current_mesh()


def register_backend(group: Any, device: torch.device, backend: Any) -> None:
    """Have ``group`` answer what it does not override by ``backend``, a Gloo one, as
    ``new_group()`` does for groups that it makes itself."""
    group._register_backend(device, dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)


def set_timeout(options: Any, timeout: Any) -> None:
    """The timeout, a ``timedelta``, of a group made with ``options`` by its own constructor."""
    options._timeout = timeout


def all_gather_into(group: Any, gathered: Tensor, tensor: Tensor) -> Any:
    """``all_gather_into_tensor()`` of a group that is not registered with ``torch.distributed``."""
    return group._allgather_base(gathered, tensor)


def shut_down(group: Any) -> None:
    """End a ``ProcessGroupNCCL`` that torch did not make. The name has its underscore in torch 2.6
    only."""
    (getattr(group, "shutdown", None) or group._shutdown)()
