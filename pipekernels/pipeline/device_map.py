"""Device maps: places the modules of any model on devices by name, and undoes that."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from pipekernels._arguments import check_kind
from pipekernels._torch_private import pytree_node
from pipekernels.device.streams import has_streams, usable, with_index
from pipekernels.ops.device_copy import p2p_copy
from pipekernels.pipeline.nested import NoChunk
from pipekernels.pipeline.partition import deny_sharing

DeviceLike = torch.device | str | int
Placement = DeviceLike | tuple[DeviceLike, DeviceLike] | list[DeviceLike]
"""A device, or a pair: that on which a module computes, and that to which its results go."""

_UNDO = "_parallelized"  # Attribute of a parallelized module: its hooks, to remove.


def get_device(device: DeviceLike) -> torch.device:
    """``device`` as a ``torch.device``; ``"cuda"`` is the current CUDA device where there is one.

    Raises:
        TypeError: it is neither a device, nor a string, nor an index.
        RuntimeError: torch knows no device of that name.
    """
    return with_index(device)


def move_to_device(data: Any, device: DeviceLike) -> Any:
    """``data`` with every tensor in it on ``device``, differentiably.

    Tuples, lists, dicts and other containers that torch's pytree knows are rebuilt with the copies.
    Objects with a ``to`` method (``PackedSequence``, Hugging Face's ``BatchEncoding``) are moved by
    it. Other objects, and modules, are returned unchanged: register your own classes, such as
    dataclasses, by ``torch.utils._pytree.register_pytree_node``. Tensors go to and from CUDA
    devices by :func:`pipekernels.ops.p2p_copy`.

    Raises:
        TypeError: ``device`` is not one; see :func:`get_device`.
        RuntimeError: torch knows no device of that name, or cannot use it.
    """
    return _moved(data, usable(device))[0]


def _moved(value: Any, device: torch.device) -> tuple[Any, bool]:
    """``value`` on ``device``, and whether that is another object: torch.compile does not trace
    "is" between containers."""
    is_leaf = isinstance(value, (torch.Tensor, PackedSequence))
    node = None if is_leaf else pytree_node(value)
    if node is None:
        leaf = _moved_leaf(value, device)
        return leaf, leaf is not value
    entries, context = node.flatten_fn(value)
    moved = [_moved(entry, device) for entry in entries]
    if not any(changed for _, changed in moved):
        return value, False  # Not a copy: a module may append to a list that it is given.
    return node.unflatten_fn([new for new, _ in moved], context), True


def _moved_leaf(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, torch.Tensor):
        overlaps = has_streams(device) or has_streams(leaf.device)
        if overlaps and leaf.device != device and leaf.layout is torch.strided:
            return p2p_copy(leaf, device)
        return leaf.to(device)
    if isinstance(leaf, NoChunk):
        tensor = _moved_leaf(leaf.tensor, device)
        return leaf if tensor is leaf.tensor else NoChunk(tensor)
    if hasattr(leaf, "to") and not isinstance(leaf, nn.Module):
        return leaf.to(device)
    return leaf


def parallelize_module(
    module: nn.Module, processing_device: DeviceLike, output_device: DeviceLike | None = None
) -> nn.Module:
    """Place one module: :func:`parallelize_pipeline` with it as the root alone.

    Args:
        module: moved to ``processing_device`` with its submodules; returned.
        processing_device: where it computes; its arguments are moved there.
        output_device: where its results are moved. Default: ``processing_device``.
    """
    output = processing_device if output_device is None else output_device
    return parallelize_pipeline(module, {"": (processing_device, output)})


def unparallelize_module(module: nn.Module, common_device: DeviceLike | None = None) -> nn.Module:
    """Undo :func:`parallelize_module`; the same as :func:`unparallelize_pipeline`."""
    return unparallelize_pipeline(module, common_device)


def parallelize_pipeline(model: nn.Module, module_to_device: Mapping[str, Placement]) -> nn.Module:
    """Place the modules of ``model`` on devices, in place, and move their arguments there.
    :doc:`/guides/device_maps` says what a name covers, and how devices work at the same time.
    Gradients are the unwrapped model's.

    Args:
        model: any module; returned.
        module_to_device: names as in ``model.named_modules()``; a value is a device, or a pair
            (processing device, output device). Not changed.

    Raises:
        ValueError: a name that the model does not have, or two names of one module with different
            places; a tuple or list that is not a pair; a parameter or buffer shared by modules on
            different devices.
        TypeError: ``model`` is not an ``nn.Module``, a module to be placed a ``ScriptModule``, or a
            value neither a device nor a pair of them.
        RuntimeError: ``model`` or a module in it is parallelized already, or torch knows no device
            of a name, or cannot use it.

    After an error, nothing has been changed.
    """
    check_kind("model", model, nn.Module, "an nn.Module")
    check_kind("module_to_device", module_to_device, Mapping, "a mapping of names to devices")
    modules = dict(model.named_modules(remove_duplicate=False))
    mapped = {name: _devices(name, value) for name, value in module_to_device.items()}
    computing, called = _placed(modules, mapped)
    for name, module in modules.items():
        device = computing[name]
        if device is not None:
            # Without recursion: else the root would move the whole model to its device first. A
            # module without submodules may override _apply() without that parameter.
            recurse = {"recurse": False} if module._modules else {}
            module._apply(lambda tensor, device=device: tensor.to(device), **recurse)
    for module, devices in called.items():
        vars(module)[_UNDO] = [
            # Run before and after the existing hooks, which find all tensors on one device.
            module.register_forward_pre_hook(devices.receive, prepend=True, with_kwargs=True),
            module.register_forward_hook(devices.send),
        ]
    vars(model).setdefault(_UNDO, [])
    return model


def unparallelize_pipeline(model: nn.Module, common_device: DeviceLike | None = None) -> nn.Module:
    """Undo :func:`parallelize_pipeline`, in place. A model that is not parallelized is only
    moved.

    Args:
        model: returned.
        common_device: where to move the model. Default: its modules are not moved.

    Raises:
        RuntimeError: ``common_device`` cannot be used. Nothing has been changed then.
    """
    check_kind("model", model, nn.Module, "an nn.Module")
    device = None if common_device is None else usable(common_device)
    for module in model.modules():
        for hook in vars(module).pop(_UNDO, []):
            hook.remove()
    return model if device is None else model.to(device)


class _Devices(NamedTuple):
    """Where a module computes, and where its results go, with the hooks that move them."""

    processing: torch.device
    output: torch.device

    def receive(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _moved((args, kwargs), self.processing)[0]

    def send(self, module: nn.Module, args: Any, result: Any) -> Any:
        return _moved(result, self.output)[0]


def _devices(name: str, value: Placement) -> _Devices:
    pair = value if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2:
        raise ValueError(
            f"module {name!r} is mapped to {len(pair)} devices; give one device, or a pair of "
            "them (processing device, output device)"
        )
    return _Devices(*map(usable, pair))


def _placed(
    modules: Mapping[str, nn.Module], mapped: Mapping[str, _Devices]
) -> tuple[dict[str, torch.device | None], dict[nn.Module, _Devices]]:
    """The device of each module, its own or else its parent's, None if there is neither; and the
    modules whose calls move tensors."""
    for name in mapped:
        if name not in modules:
            raise ValueError(
                f"module_to_device names {name!r}, and the model has no such module; take "
                "names from model.named_modules(); '' is the model itself"
            )
    mapped = dict(mapped)
    computing: dict[str, torch.device | None] = {}
    called: dict[nn.Module, _Devices] = {}
    owners: dict[int, torch.device] = {}
    for name, module in modules.items():  # A module comes before its submodules.
        if _UNDO in vars(module):
            raise RuntimeError(
                f"module {name!r} is parallelized already; call unparallelize_pipeline first"
            )
        devices = mapped.get(name)
        device = devices.processing if devices else computing.get(name.rpartition(".")[0])
        computing[name] = device
        # These are never called, so the modules in them move tensors in their place.
        if devices and isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            for key, _ in module.named_children():
                mapped.setdefault(f"{name}.{key}" if name else key, devices)
        elif devices and called.setdefault(module, devices) != devices:
            raise ValueError(
                f"module {name!r} is mapped to {tuple(devices)}, and by another of its names to "
                f"{tuple(called[module])}; a module has one place"
            )
        elif devices and isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"a {type(module).__name__} takes no hooks, so nothing can follow it to its "
                "device; place the module that it was made from, or one that calls it"
            )
        # A tensor has one place. What no name covers stays where it is.
        named = (module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        for key, tensor in chain(*named):
            what = [(f"{key!r} of module {name!r}", tensor)]
            remedy = "map the modules that share it to one device"
            deny_sharing(what, device or tensor.device, owners, "modules on", remedy)
    return computing, called
