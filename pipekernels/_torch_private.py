"""The only module that uses torch's private names: those with an underscore, of ``torch._C``, and
of modules with an underscore.

Each exists in torch 2.6 to 2.13, unless noted, has no public equivalent, and has its purpose noted.
On hot paths torch's function itself is renamed, without a wrapper.

Other modules may use the names that torch intends for subclasses and for walking modules:

* a module's ``_modules``, ``_parameters``, ``_buffers``, ``_apply()``, its dicts of hooks, such as
  ``_forward_hooks``, and methods that subclasses override (``_load_from_state_dict``,
  ``_check_input_dim``, a process group's ``_allgather_base``): copying and serialisation of modules
  have always relied on them;
* ``Tensor._version``, which the notes on autograd describe.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.utils._device
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.utils import _python_dispatch, _pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    treespec_dumps,
    treespec_loads,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import ParamSpec, TypeVar

    P = ParamSpec("P")
    T = TypeVar("T")

# Public classes and functions in modules with an underscore: dispatch modes, pytrees
# (torch.utils.pytree is not in torch 2.6), the mode of ``with device:``, and the base class of all
# batch norms.
__all__ = [
    "BatchNormBase",
    "DeviceContext",
    "TorchDispatchMode",
    "TreeSpec",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "treespec_dumps",
    "treespec_loads",
    "vary_size",
]

# ---- autograd ----


current_backward = torch._C._current_graph_task_id
"""The number of the backward that this thread is inside (in a hook or a Python node), or -1."""

keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether this thread's backward has ``retain_graph=True``; otherwise a node may free its memory
after its backward."""


when_backward_ends = torch.autograd.Variable._execution_engine.queue_callback
"""Has a function called at the end of this thread's backward; its errors are the backward's."""


def run_backward(
    roots: Sequence[Tensor | GradientEdge],
    grads: Sequence[Tensor],
    *,
    keep_graph: bool,
    inputs: Sequence[Tensor | GradientEdge] = (),
) -> None:
    """``torch.autograd.backward`` for gradients of the right shapes. The public function first
    compares each gradient's shape with its root's in Python, which takes half as long again as the
    backward of a small layer, and at the first call imports sympy; the engine also checks them."""
    _engine_run_backward(
        tuple(roots),
        tuple(grads),
        keep_graph,
        False,  # create_graph
        tuple(inputs),  # None: all leaves
        allow_unreachable=True,
        accumulate_grad=True,
    )


below_autograd = torch._C._AutoDispatchBelowAutograd
"""Context manager: operations in it bypass autograd. For kernels of the Autograd key."""

increment_version = torch._C._increment_version
"""Tells autograd that tensors were written by native code. C++ calls this function directly, not
the wrapper of the same name in ``torch.autograd.graph``."""


PythonNode = torch._C._FunctionBase
"""A node of a ``torch.autograd.Function``, whose Python object does not keep the graph alive."""


def function_of(node: Node) -> type[torch.autograd.Function] | None:
    """The ``torch.autograd.Function`` of ``node``; None for torch's own nodes."""
    if not isinstance(node, BackwardCFunction):
        return None
    function: type[torch.autograd.Function] = node._forward_cls
    return function


def has_hooks(tensor: Tensor) -> bool:
    """Whether hooks are registered on ``tensor``."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def module_has_hooks(module: nn.Module) -> bool:
    """Whether ``module`` itself has forward or backward hooks."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in names)


has_global_hooks = nn.modules.module._has_any_global_hook
"""Whether hooks are registered for all modules, which torch.compile does not guard."""


# ---- data parallelism ----

active_ddp = nn.parallel.DistributedDataParallel._get_active_ddp_module
"""The ``DistributedDataParallel`` whose forward runs, if any: for layers that not all of its ranks
hold in the same way. torch.compile asks it as well."""

# ---- forward mode ----


def in_forward_mode() -> bool:
    """Whether tensors may have tangents: inside ``forward_ad.dual_level()``. Checking each tensor
    would take longer than a small operation."""
    return forward_ad._current_level >= 0


tangents_are_enabled = torch._C._is_fwd_grad_enabled
"""Whether operations compute tangents; off inside a jvp."""


# ---- modes, the profiler, the compiler ----


def inductor(
    graph: torch.fx.GraphModule, inputs: list[Any], options: dict[str, Any]
) -> Callable[..., Sequence[Any]]:
    """The default compiler of ``torch.compile``, as a part of another backend."""
    import torch._inductor

    compiled: Callable[..., Sequence[Any]] = torch._inductor.compile(graph, inputs, options)
    return compiled


def accepted_program(
    function: FunctionType, arguments: dict[str, Any]
) -> tuple[Callable[..., Any], Any] | None:
    """What ``torch.compile`` has made of ``function`` for ``arguments``: a program, all of whose
    guards hold now and which checks none, and the number of its compilation."""
    for entry in torch._C._dynamo.eval_frame._debug_get_cache_entry_list(function.__code__):
        if entry.guard_manager.check(arguments):
            # A copy of the globals, from which the compiler deletes programs whose guards broke.
            return FunctionType(entry.code, dict(function.__globals__)), entry.compile_id
    return None


def current_compilation() -> tuple[Any, bool]:
    """For a backend: the number of its compilation, and whether the program sets attributes or
    items of objects that are there before, on which its own guards may depend."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    effects = InstructionTranslator.current_tx().output.side_effects
    variables = effects.id_to_variable.values()
    changes = any(each.source is not None and effects.is_modified(each) for each in variables)
    return torch._guards.CompileContext.current_compile_id(), changes


def guarding_hooks(recompile_limit: int) -> contextlib.AbstractContextManager[None]:
    """Let ``torch.compile`` guard that modules have no hooks, which it leaves out by default."""
    import torch._dynamo

    options = {"skip_nnmodule_hook_guards": False, "recompile_limit": recompile_limit}
    context: contextlib.AbstractContextManager[None] = torch._dynamo.config.patch(options)
    return context


def vary_size(tensor: Tensor, dim: int) -> None:
    """Let ``torch.compile`` take this size of a tensor as a variable."""
    import torch._dynamo

    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def refusals() -> tuple[type[Exception], ...]:
    """What ``torch.compile`` raises where it cannot trace a function; its backend raises others."""
    from torch._dynamo import exc
    from torch.fx.experimental import symbolic_shapes

    untraced = exc.Unsupported, exc.UserError, exc.UncapturedHigherOrderOpError
    failed = exc.TorchRuntimeError, exc.InternalTorchDynamoError, exc.FailOnRecompileLimitHit
    return *untraced, *failed, symbolic_shapes.GuardOnDataDependentSymNode


def disable_dynamo(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: a graph break for ``torch.compile``.

    ``torch.compiler.disable`` imports the compiler, which takes seconds, and ``_disable_dynamo``
    does so at the first call. While the compiler has not been imported, nothing is compiled.
    """
    disabled = torch._disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        return disabled(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


dispatch_mode_count = torch._C._len_torch_dispatch_stack
"""The number of active ``TorchDispatchMode`` objects of this thread."""


@contextlib.contextmanager
def below_modes(mode: TorchDispatchMode) -> Iterator[None]:
    """Has ``mode`` called last of the dispatch modes, but for torch's own, such as
    ``FakeTensorMode``, which come after all others."""
    stack = _python_dispatch._get_current_dispatch_mode_stack()
    count = sum(getattr(each, "_mode_key", None) is None for each in stack)
    above = [_python_dispatch._pop_mode() for _ in range(count)][::-1]
    for each in (mode, *above):
        _python_dispatch._push_mode(each)
    try:
        yield
    finally:
        for _ in range(count + 1):
            _python_dispatch._pop_mode()
        for each in above:
            _python_dispatch._push_mode(each)


def wraps(tensor: Tensor) -> bool:
    """Whether operators on ``tensor`` are calls of its class, as for fake tensors."""
    return torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python)


def is_seen(tensors: Iterable[Tensor]) -> bool:
    """Whether the profiler, a dispatch mode, or the class of one of ``tensors`` sees operators."""
    sees = is_profiler_enabled() or dispatch_mode_count() > 0 or any(map(wraps, tensors))
    key = torch._C.DispatchKey.Python
    return sees and not torch._C._dispatch_tls_is_dispatch_key_excluded(key)


is_profiler_enabled = torch._C._autograd._profiler_enabled
"""Whether this thread is profiled."""


def function_modes() -> list[Any]:
    """The active ``TorchFunctionMode`` objects of this thread, outermost first; the default device
    is one of them."""
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


# ---- containers ----


def pytree_node(value: Any) -> _pytree.NodeDef | None:
    """How torch's pytree opens ``value`` and rebuilds it; None for a leaf."""
    # The function takes a microsecond to see that a tuple is not a named one.
    node_type = tuple if type(value) is tuple else _pytree._get_node_type(value)
    return _pytree.SUPPORTED_NODES.get(node_type)


# ---- memory ----


storage_key: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Identifies a storage, also one without memory; its Python object may be recreated."""

storage_references = torch._C._storage_Use_Count
"""References to a storage, given by its :func:`storage_key`, of tensors, graphs and Python."""

# ---- streams ----

current_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""The handle of a device's current stream, in a tenth of the time that it takes to make the object
of ``torch.cuda.current_stream()``. None in builds without CUDA."""


# ---- operations ----

scaled_mm = torch._scaled_mm
"""cuBLAS's product of float8 matrices; its public successor is not in torch 2.6."""

tensors_of = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs
"""The tensors of capsules that own references in C++, which they give up."""


def reference_to(tensor: Tensor) -> Any:
    """A capsule of a new reference in C++ to ``tensor``, for its receiver to own."""
    return torch._C._aoti.unsafe_alloc_void_ptr_from_tensor(tensor)


# ---- torch.distributed ----


def default_group() -> dist.ProcessGroup:
    """The default group; raises if there is none, where ``dist.group.WORLD`` would be None."""
    return dist.distributed_c10d._get_default_group()


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """The store that the ranks of ``group`` share, to connect something else over it."""
    return dist.distributed_c10d._get_process_group_store(group)


def timeout_of(group: dist.ProcessGroup | None) -> float:
    """Seconds that the collectives of ``group`` wait: its devices have the same timeout."""
    group = default_group() if group is None else group
    return group._get_backend(group._device_types[0]).options._timeout.total_seconds()


def enclosing_mesh() -> DeviceMesh:
    """The mesh of the innermost ``with mesh:``. RuntimeError if there is none."""
    from torch.distributed.device_mesh import _mesh_resources

    return _mesh_resources.get_current_mesh()


def register_backend(group: Any, device: torch.device, backend: Any) -> None:
    """Make ``backend``, a Gloo one, serve the methods that ``group`` does not override, as
    ``new_group()`` does for its groups."""
    group._register_backend(device, dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)


def non_persistent_buffers(module: torch.nn.Module) -> set[str]:
    """Names of the module's own buffers that are not in its state dict."""
    return module._non_persistent_buffers_set


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile(module)`` wraps; other modules themselves. The wrapper's
    class would import the compiler."""
    return module._modules.get("_orig_mod") or module
