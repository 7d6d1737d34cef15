"""Weights of a model from a folder of safetensors files, of which each rank reads its slices."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from pipekernels._arguments import check_kind
from pipekernels._torch_private import non_persistent_buffers
from pipekernels.tensor_parallel.data_parallel import distributed_like
from pipekernels.tensor_parallel.sharded import ShardedLayer

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"

Slice: TypeAlias = Callable[[], Any]  # Gives safetensors' slice of a whole tensor.


def load_pretrained(
    model: nn.Module, folder: str | Path, device: torch.device | str = "cpu"
) -> None:
    """Load what ``save_pretrained`` of transformers has written, in place. Of a sharded layer, each
    rank reads its slices of the files, so no rank ever holds the whole model::

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        tensor_parallelize(model, "auto", comm)
        load_pretrained(model, folder)

    Not a collective.

    Args:
        model: a model of transformers or any other module whose state dict has the files' names;
            for one of transformers, these may lack its ``base_model_prefix`` or have it as well.
            Parameters and buffers may be on the meta device.
        folder: has ``model.safetensors``, or ``model.safetensors.index.json`` and the files that it
            names.
        device: for what is on the meta device; the rest stays where it is.

    Values are converted to the dtype of the model's parameters and buffers. Of several names of one
    tied parameter the files need only one. Names that the model does not have are ignored, as by
    ``from_pretrained``. Where transformers gives tensors other names in files than in the model,
    these are known; where it joins or splits tensors as it loads, load by ``from_pretrained`` and
    shard the model then.

    Raises:
        FileNotFoundError: there is none of these files, or one that the index names is missing.
        ValueError: a file or the index is malformed, or the index names files of other folders;
            the files lack a parameter or persistent buffer of the model, or have one of
            another shape; or the value of another buffer on the meta device is not known. The model
            is then unchanged.
        ImportError: safetensors is not installed.
    """
    check_kind("model", model, nn.Module, "an nn.Module")
    check_kind("folder", folder, (str, Path), "a path")
    folder = Path(folder)
    with ExitStack() as stack:
        files = _renamed(_open(folder, stack), model)
        targets = list(_targets(model))
        found = [_find(target, files, model) for target in targets]
        problems = [problem for _, problem in found if problem]
        if problems:
            shown = "; ".join(problems[:8]) + ("; ..." if len(problems) > 8 else "")
            raise ValueError(
                f"{folder} does not fit {type(model).__name__}: {shown}; make the model of the "
                "configuration with which the files were saved, or load it by from_pretrained and "
                "shard it then"
            )
        computed = _computed_buffers(model, device)
        for target, (key, _) in zip(targets, found, strict=True):
            with torch.no_grad():
                _put(target, _read(target, files[key]()), device)
    for module, buffers in computed:
        module._buffers.update(buffers)


class _Target(NamedTuple):
    """A parameter or buffer and where it is: a tied one is in several places."""

    tensor: Tensor
    keys: list[str]
    owners: list[tuple[nn.Module, str]]

    @property
    def full_shape(self) -> tuple[int, ...]:
        module, name = self.owners[0]
        if isinstance(module, ShardedLayer) and name in module.shard_dims:
            return module.full_shape(name)
        return tuple(self.tensor.shape)


def _open(folder: Path, stack: ExitStack) -> dict[str, Slice]:
    """Every tensor of the files."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError("load_pretrained needs safetensors: pip install safetensors") from error
    if (folder / _INDEX).is_file():
        names = _weight_map(folder / _INDEX)
    elif (folder / _SINGLE).is_file():
        names = None
    else:
        raise FileNotFoundError(
            f"{folder} has neither {_SINGLE} nor {_INDEX}; save the model with "
            "save_pretrained(folder), which writes them"
        )
    wanted = sorted(set(names.values())) if names is not None else [_SINGLE]
    missing = [name for name in wanted if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder / _INDEX} names {', '.join(missing)}, which {folder} lacks; copy all files "
            "of the checkpoint there"
        )
    opened: dict[str, Any] = {}
    for name in wanted:
        try:
            opened[name] = stack.enter_context(safe_open(folder / name, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{folder / name} is not a file of safetensors: {error}; copy it there again"
            ) from error
    held = {name: set(file.keys()) for name, file in opened.items()}
    places = names if names is not None else dict.fromkeys(held[_SINGLE], _SINGLE)
    lost = sorted(f"{key} in {name}" for key, name in places.items() if key not in held[name])
    if lost:
        raise ValueError(
            f"{folder / _INDEX} names {', '.join(lost[:8])}, which the files lack; copy all files "
            "of one checkpoint there"
        )
    return {key: partial(opened[name].get_slice, key) for key, name in places.items()}


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor. An index may come from anywhere: it names files beside it only.

    Raises:
        ValueError: it is malformed, or names a file in another folder.
    """
    try:
        names: Any = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{index} has no weight_map ({type(error).__name__}); save the model with "
            "save_pretrained(folder), which writes it"
        ) from error
    files = set(map(str, names.values())) if isinstance(names, dict) else {repr(names)}
    wrong = sorted(name for name in files if Path(name).name != name or "\0" in name)
    if wrong or not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
        raise ValueError(
            f"the weight_map of {index} must map tensors to names of files beside it, got "
            f"{', '.join(wrong or files)[:200]}; save the model with save_pretrained(folder)"
        )
    return names


def _renamed(files: dict[str, Slice], model: nn.Module) -> dict[str, Slice]:
    """``files``, also by the names that transformers gives their tensors in ``model``."""
    transformers: Any = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return files
    try:
        mapping: Any = import_module("transformers.conversion_mapping")
    except ImportError:  # Before transformers 5, names are the same.
        return files
    transforms = mapping.get_model_conversion_mapping(model)
    # Others have operations that make tensors of tensors.
    renamings = [transform for transform in transforms if not hasattr(transform, "operations")]
    renamed = {}
    for key, tensor in files.items():
        for renaming in renamings:
            key, _ = renaming.rename_source_key(key)
        renamed[key] = tensor
    return {**renamed, **files}


def _targets(model: nn.Module) -> Iterator[_Target]:
    targets: dict[Tensor, _Target] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        named: dict[str, Tensor | None] = {**module._parameters, **module._buffers}
        for name, tensor in named.items():
            if tensor is None or name in non_persistent_buffers(module):
                continue
            target = targets.setdefault(tensor, _Target(tensor, [], []))
            target.keys.append(f"{prefix}.{name}" if prefix else name)
            target.owners.append((module, name))
    yield from targets.values()


def _find(target: _Target, files: dict[str, Slice], model: nn.Module) -> tuple[str, str]:
    """The key in the files, and what is wrong."""
    base = getattr(model, "base_model_prefix", "")
    for key in target.keys:
        for candidate in (key, key.removeprefix(f"{base}."), f"{base}.{key}"):
            if candidate in files:
                shape = tuple(files[candidate]().get_shape())
                if shape == target.full_shape:
                    return candidate, ""
                return "", f"{key!r} has the shape {target.full_shape}, in the files {shape}"
    return "", f"they lack {target.keys[0]!r}"


def _read(target: _Target, file: Any) -> Tensor:
    """This rank's part of a tensor in a file."""
    module, name = target.owners[0]
    if not (isinstance(module, ShardedLayer) and name in module.shard_dims):
        whole: Tensor = file[...]
        return whole
    dim, parts = module.shard_dim(name), []
    for start, size in module.spans(name):
        index = (slice(None),) * dim + (slice(start, start + size),)
        parts.append(file[index])
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _put(target: _Target, value: Tensor, device: torch.device | str) -> None:
    tensor = target.tensor
    if not tensor.is_meta:
        tensor.copy_(distributed_like(tensor, value.to(tensor.device, tensor.dtype)))
        return
    value = value.to(device, tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    for module, name in target.owners:
        places: dict[str, Any] = module._parameters
        (places if name in places else module._buffers)[name] = value


def _computed_buffers(
    model: nn.Module, device: torch.device | str
) -> list[tuple[nn.Module, dict[str, Tensor]]]:
    """New values of the buffers on the meta device that are not saved, such as the frequencies of
    rotary embeddings. transformers' models compute them in their method for initial weights."""
    computed = []
    for prefix, module in model.named_modules():
        meta = {
            name: buffer
            for name, buffer in module._buffers.items()
            if name in non_persistent_buffers(module) and buffer is not None and buffer.is_meta
        }
        if not meta:
            continue
        initialise = getattr(model, "_init_weights", None)
        values: list[dict[str, Tensor]] = []
        parameters = [p for p in module._parameters.values() if p is not None]
        if initialise is not None and all(p.is_meta for p in parameters):  # No value is lost.
            for fill in (0, 1):  # What it leaves as it was shows as a difference.
                for name, buffer in meta.items():
                    module._buffers[name] = torch.full_like(buffer, fill, device=device)
                try:
                    initialise(module)
                    values.append({name: module._buffers[name] for name in meta})
                finally:
                    module._buffers.update(meta)
        if not values or any(not torch.equal(values[0][name], values[1][name]) for name in meta):
            raise ValueError(
                f"{prefix!r} has buffers on the meta device, {', '.join(meta)}, that no file has; "
                "make the model, or these buffers, on a real device"
            )
        computed.append((module, values[0]))
    return computed
