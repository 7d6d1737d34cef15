"""Loads a model from a folder of safetensors files, of which each rank reads only its slices.

Experts that the files hold one by one are read as the stacked tensors of the model."""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from pipekernels._arguments import check_kind
from pipekernels._torch_private import non_persistent_buffers
from pipekernels.huggingface.pretrained import communicators, raised_on_all
from pipekernels.tensor_parallel.data_parallel import distributed_like
from pipekernels.tensor_parallel.sharded import ShardedLayer

Slice: TypeAlias = Callable[[], Any]  # Gives safetensors' slice of a whole tensor.


class Stacked:
    """``[experts, rows, columns]``, read like a slice of safetensors: only the requested part.

    Args:
        fused: for each of the matrices that are joined along the rows, such as gate and up, its
            tensors ``[rows, columns]`` by expert.
    """

    def __init__(self, fused: list[list[Slice]]) -> None:
        self._fused = fused
        self._rows = [matrix[0]().get_shape()[0] for matrix in fused]
        self._columns = fused[0][0]().get_shape()[1]

    def get_shape(self) -> list[int]:
        """Experts, rows and columns."""
        return [len(self._fused[0]), sum(self._rows), self._columns]

    def get_dtype(self) -> str:
        """The dtype of the first, by safetensors' name."""
        return str(self._fused[0][0]().get_dtype())

    def __getitem__(self, index: Any) -> Tensor:
        """Read a range of each dimension; of dimensions that ``index`` leaves out, all."""
        given = index if isinstance(index, tuple) else ()
        ranges = [*given, *[slice(None)] * (3 - len(given))]
        experts, rows, columns = (
            range(size)[part] for part, size in zip(ranges, self.get_shape(), strict=True)
        )
        own_columns = slice(columns.start, columns.stop)
        stacked, start = [], 0
        for matrix, size in zip(self._fused, self._rows, strict=True):
            begin, end = max(rows.start, start), min(rows.stop, start + size)
            if begin < end:
                own_rows = slice(begin - start, end - start)
                stacked.append(torch.stack([matrix[e]()[own_rows, own_columns] for e in experts]))
            start += size
        return torch.cat(stacked, 1)


def stacked(files: Mapping[str, Slice], transforms: Iterable[Any]) -> dict[str, Slice]:
    """The tensors that transformers makes of several of ``files`` by stacking, by their names in a
    model. Those that it makes otherwise are left out.

    Args:
        files: by their names in the model, where these differ only.
        transforms: of transformers' mapping for the model.
    """
    found: dict[str, Slice] = {}
    for transform in filter(_stacks, transforms):
        parts: dict[str, dict[str, dict[int, Slice]]] = defaultdict(lambda: defaultdict(dict))
        for key, tensor in files.items():
            name, source = transform.rename_source_key(key)
            if source is not None:
                expert = int(re.findall(r"\.(\d+)\.", key)[-1])
                parts[name][source][expert] = tensor
        for name, by_source in parts.items():
            if by_source.keys() != set(transform.source_patterns):
                continue
            fused = [by_source[source] for source in transform.source_patterns]
            if all(sorted(matrix) == list(range(len(fused[0]))) for matrix in fused):
                own = [[matrix[i] for i in range(len(matrix))] for matrix in fused]
                found[name] = partial(Stacked, own)
    return found


def _stacks(transform: Any) -> bool:
    """Whether ``transform`` stacks experts, and joins matrices along their rows."""
    steps = [
        (type(operation).__name__, getattr(operation, "dim", None))
        for operation in getattr(transform, "operations", ())
    ]
    return steps in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])


_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DISTRIBUTED = "shard-*-model-*-of-*.safetensors"  # from_pretrained prefers these to the others.
_PART = re.compile(r"(.+)\.[a-z_]*(scale|block|quant|absmax|zero)[a-z_]*(\..+)?")
_FLOATS = ("F64", "F32", "F16", "BF16")  # Of these, a conversion is a value of the other dtype.


def load_pretrained(
    model: nn.Module, folder: str | Path, device: torch.device | str = "cpu"
) -> None:
    """Load the files that transformers' ``save_pretrained`` wrote, in place. Each rank reads only
    its slices of sharded layers, so no rank ever holds the whole model
    (:doc:`/guides/transformers`). A collective over the ranks of the sharded layers: what one rank
    raises, all raise, with its rank.

    Args:
        model: a transformers model, or any module whose state dict has the names in the files.
            Parameters and buffers may be on the meta device. They keep their dtypes.
        folder: has ``model.safetensors``, or else ``model.safetensors.index.json`` and the files
            that it names; or the one of such files that its ``config.json`` names in
            ``transformers_weights``: as for ``from_pretrained``.
        device: receives what is on the meta device; the rest stays where it is.

    Raises:
        FileNotFoundError: there are only files of other formats or variants, or a file that the
            index names is missing.
        ValueError: a file or the index is malformed, or the index names files of other folders;
            the files lack a parameter or persistent buffer of the model, or have one of another
            shape, or of integers or float8 in place of floats; the weights are quantized (load
            them by ``from_pretrained`` and shard the model then); or the value of another buffer
            is not known. The model is then unchanged on all ranks.
        ImportError: safetensors is not installed.
        RuntimeError: a rank of several has another error, such as of reading.
    """
    check_kind("model", model, nn.Module, "an nn.Module")
    check_kind("folder", folder, (str, Path), "a path")
    comms = communicators(model)
    # All checks come first, on all ranks: the model is to stay unchanged if one fails.
    with raised_on_all(comms):
        sources = _sources(model, Path(folder))
        computed = _computed_buffers(model, device)
    with raised_on_all(comms), torch.no_grad():
        for target, source in sources:
            target.put(target.read(source()), device)
    for module, buffers in computed:
        module._buffers.update(buffers)


def _sources(model: nn.Module, folder: Path) -> list[tuple[_Target, Slice]]:
    """What is to be loaded, and from where; raises as :func:`load_pretrained`."""
    files = _renamed(_slices(folder), model)
    targets = _targets(model)
    keys = [_key_of(target, files, model) for target in targets]
    _check_not_quantized(folder, files, keys)
    sources = [None if key is None else files[key] for key in keys]
    found = [
        target.problem(None if source is None else source())
        for target, source in zip(targets, sources, strict=True)
    ]
    if problems := list(filter(None, found)):
        shown = "; ".join(problems[:8]) + ("; ..." if len(problems) > 8 else "")
        raise ValueError(
            f"{folder} does not fit {type(model).__name__}: {shown}; make the model of the "
            "configuration with which the files were saved, or load it by from_pretrained and "
            "shard it then"
        )
    return [(t, s) for t, s in zip(targets, sources, strict=True) if s is not None]


class _Target(NamedTuple):
    """A parameter or buffer and where it is: a tied one is in several places."""

    tensor: Tensor
    names: list[str]
    owners: list[tuple[nn.Module, str]]

    @property
    def full_shape(self) -> tuple[int, ...]:
        layer, name = self.owners[0]
        if isinstance(layer, ShardedLayer) and name in layer.shard_dims:
            return layer.full_shape(name)
        return tuple(self.tensor.shape)

    def problem(self, file: Any) -> str | None:
        """Why the value cannot be that of ``file``, a tensor in a file, if there is one."""
        name, tensor = self.names[0], self.tensor
        if file is None:
            return f"they lack {name!r}"
        shape = tuple(file.get_shape())
        if shape != self.full_shape:
            return f"{name!r} has the shape {self.full_shape}, in the files {shape}"
        dtype = file.get_dtype()
        is_byte = dtype.startswith("F8") and tensor.element_size() == 1
        if tensor.is_floating_point() and dtype not in _FLOATS and not is_byte:
            return f"{name!r} has the dtype {tensor.dtype}, in the files {dtype} without a scale"
        return None

    def read(self, file: Any) -> Tensor:
        """This rank's part of a tensor in a file, perhaps a view of the mapped file."""
        layer, name = self.owners[0]
        if not (isinstance(layer, ShardedLayer) and name in layer.shard_dims):
            whole: Tensor = file[...]
            return whole
        dim, parts = layer.shard_dim(name), []
        for start, size in layer.spans(name):
            parts.append(file[(slice(None),) * dim + (slice(start, start + size),)])
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def put(self, value: Tensor, device: torch.device | str) -> None:
        """Set the value; on the meta device, by a new tensor with memory of its own."""
        tensor = self.tensor
        if not tensor.is_meta:
            tensor.copy_(distributed_like(tensor, value.to(tensor.device, tensor.dtype)))
            return
        value = torch.empty_like(tensor, device=device).copy_(value)
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=tensor.requires_grad)
        for module, name in self.owners:
            places: dict[str, Any] = module._parameters
            (places if name in places else module._buffers)[name] = value


def _targets(model: nn.Module) -> list[_Target]:
    targets: dict[Tensor, _Target] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        named: dict[str, Tensor | None] = {**module._parameters, **module._buffers}
        for name, tensor in named.items():
            if tensor is not None and name not in non_persistent_buffers(module):
                target = targets.setdefault(tensor, _Target(tensor, [], []))
                target.names.append(f"{prefix}.{name}" if prefix else name)
                target.owners.append((module, name))
    return list(targets.values())


def _check_not_quantized(
    folder: Path, files: Mapping[str, Slice], keys: Sequence[str | None]
) -> None:
    """Raise ValueError if the files hold weights that are no values by themselves: the
    configuration beside them says so, or a tensor is a part of another, such as its scale."""
    fields = _fields(folder / "config.json")
    found = "quantization_config" if fields.get("quantization_config") else None
    for key in files if found is None else ():
        part = None if key in keys else _PART.fullmatch(key)
        if part is not None and (part[1] in keys or f"{part[1]}.weight" in keys):
            found = key
            break
    if found is not None:
        raise ValueError(
            f"the weights in {folder} are quantized: they have {found!r}, and load_pretrained "
            "applies no scales; load the model by from_pretrained with dequantize=True in its "
            "quantization config, and shard it then"
        )


def _key_of(target: _Target, files: Mapping[str, Slice], model: nn.Module) -> str | None:
    base = f"{getattr(model, 'base_model_prefix', '')}."
    candidates = [
        key for name in target.names for key in (name, name.removeprefix(base), base + name)
    ]
    return next((key for key in candidates if key in files), None)


def _slices(folder: Path) -> dict[str, Slice]:
    """Every tensor of the files."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError("load_pretrained needs safetensors: pip install safetensors") from error
    places: dict[str, str] = {}
    for name in _files_in(folder):
        try:
            with safe_open(folder / name, framework="pt") as file:
                places |= dict.fromkeys(file.keys(), name)
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{folder / name} is not a file of safetensors: {error}; copy it there again"
            ) from error

    # Each opens its file anew: what was read of a mapped file is memory of this process until the
    # mapping ends, with the last slice or view of it.
    def slice_of(key: str, name: str) -> Any:
        with safe_open(folder / name, framework="pt") as file:
            return file.get_slice(key)

    return {key: partial(slice_of, key, name) for key, name in places.items()}


def _files_in(folder: Path) -> list[str]:
    """The files of the weights that ``from_pretrained`` takes, in its order: a tensor is that of
    the last file that has it, wherever an index has it."""
    chosen = _fields(folder / "config.json").get("transformers_weights")
    shards = [] if chosen else sorted(path.name for path in folder.glob(_DISTRIBUTED))
    present = (name for name in (_SINGLE, _INDEX) if (folder / name).is_file())
    name = chosen or next(present, None)
    if shards or name is None:
        others = shards or sorted(path.name for path in folder.glob("*model*"))
        raise FileNotFoundError(
            f"{folder} has neither {_SINGLE} nor {_INDEX} alone, but {others[:8] or 'no weights'}; "
            "load the model by from_pretrained, and save it with save_pretrained(folder), which "
            "writes them"
        )
    by_config = _beside(folder / "config.json", "transformers_weights", [name])
    if not name.endswith(".index.json"):
        return by_config
    places = _fields(folder / name).get("weight_map")
    values = places.values() if isinstance(places, dict) else [places]
    names = _beside(folder / name, "weight_map", values)
    if missing := [each for each in names if not (folder / each).is_file()]:
        raise FileNotFoundError(
            f"{folder / name} names {', '.join(missing)}, which {folder} lacks; copy all files of "
            "the checkpoint there"
        )
    return names


def _fields(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no file. Raises ValueError for other content."""
    try:
        fields = json.loads(path.read_text()) if path.is_file() else {}
        if isinstance(fields, dict):
            return fields
    except (ValueError, RecursionError) as error:
        fields = error
    raise ValueError(f"{path} has no JSON object, but {fields!r:.200}; copy it there again")


def _beside(path: Path, field: str, names: Iterable[Any]) -> list[str]:
    """``names`` without repetitions, sorted; ValueError unless all are of files beside ``path``,
    which may come from anywhere."""
    wrong = [n for n in names if not isinstance(n, str) or Path(n).name != n or "\0" in n]
    if wrong:
        raise ValueError(
            f"{field} of {path} must name files beside it, got "
            f"{', '.join(sorted(set(map(str, wrong))))[:200]}; save the model with "
            "save_pretrained(folder)"
        )
    return sorted(set(names))


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
    return {**stacked(renamed, transforms), **renamed, **files}


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
                new = {name: torch.full_like(b, fill, device=device) for name, b in meta.items()}
                module._buffers.update(new)
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
