"""The tensors of a checkpoint, a folder of safetensors files, by the names that a model has.

Each is a :class:`Source`. A layout that keeps a tensor of the model in several tensors is a
subclass, such as :class:`Stacked` and the classes of ``formats``.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from pipekernels.huggingface.formats import with_weights
from pipekernels.huggingface.sources import FileTensor, Source, Stacked

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DISTRIBUTED = "shard-*-model-*-of-*.safetensors"  # from_pretrained prefers these to the others.
_PART = re.compile(r"(.+)\.[a-z_]*(scale|block|quant|absmax|zero)[a-z_]*(\..+)?")


def checkpoint_for(model: nn.Module, folder: Path) -> dict[str, Source]:
    """Every tensor of the files in ``folder``, by its name there and by those that transformers
    gives it in ``model``; raises as :func:`load_pretrained`."""
    files = _tensors(folder)
    config = _fields(folder / "config.json").get("quantization_config")
    if config:
        files = with_weights(files, config)
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
    return {**_stacked(renamed, transforms), **renamed, **files}


def _tensors(folder: Path) -> dict[str, Source]:
    """Every tensor of the files."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError("load_pretrained needs safetensors: pip install safetensors") from error
    tensors: dict[str, Source] = {}
    for name in _files_in(folder):
        try:
            with safe_open(folder / name, framework="pt") as file:
                found = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
                for key, part in found.items():
                    shape, dtype = part.get_shape(), part.get_dtype()
                    tensors[key] = FileTensor(folder / name, key, shape, dtype)
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{folder / name} is not a file of safetensors: {error}; copy it there again"
            ) from error
    return tensors


def _files_in(folder: Path) -> list[str]:
    """The files of the weights that ``from_pretrained`` takes, in its order: a tensor is read
    from the last file that has it, wherever an index has it."""
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
    # Names may come from anywhere, and only files of the folder are read.
    files = [path.name for path in folder.iterdir()]
    names, source = [name], "config.json"
    if name in files and name.endswith(".index.json"):
        places, source = _fields(folder / name).get("weight_map"), name
        names = list(places.values()) if isinstance(places, dict) else [places]
    if missing := {str(each) for each in names if each not in files}:
        raise FileNotFoundError(
            f"{folder / source} names {', '.join(sorted(missing))[:200]}, which {folder} lacks; "
            "copy all files of the checkpoint there"
        )
    return sorted(set(names))


def _fields(path: Path) -> dict[str, Any]:
    """Read the object of a JSON file; a missing file is empty. ValueError for other JSON."""
    try:
        fields = json.loads(path.read_text()) if path.is_file() else {}
        if isinstance(fields, dict):
            return fields
    except (ValueError, RecursionError) as error:
        fields = error
    raise ValueError(f"{path} has no JSON object, but {fields!r:.200}; copy it there again")


def check_not_quantized(
    folder: Path, files: Mapping[str, Source], keys: Sequence[str | None]
) -> None:
    """Raise ValueError if a tensor of ``files`` is a part of another, such as its scale."""
    for key in files:
        part = None if key in keys else _PART.fullmatch(key)
        if part is not None and (part[1] in keys or f"{part[1]}.weight" in keys):
            raise ValueError(
                f"the weights in {folder} are quantized: they have {key!r}, which belongs to no "
                "format that load_pretrained reads; load the model by from_pretrained with "
                "dequantize=True in its quantization config, and shard it then"
            )


def _stacked(files: Mapping[str, Source], transforms: Iterable[Any]) -> dict[str, Source]:
    """The tensors that transformers makes of several of ``files`` by stacking, by their names in a
    model. Those that it makes otherwise are left out.

    Args:
        files: by their names in the model, where these differ only.
        transforms: of transformers' mapping for the model.
    """
    found: dict[str, Source] = {}
    for transform in filter(_stacks, transforms):
        parts: dict[str, dict[str, dict[int, Source]]] = defaultdict(lambda: defaultdict(dict))
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
                found[name] = Stacked(own)
    return found


def _stacks(transform: Any) -> bool:
    """Whether ``transform`` stacks experts, and joins matrices along their rows."""
    steps = [
        (type(operation).__name__, getattr(operation, "dim", None))
        for operation in getattr(transform, "operations", ())
    ]
    return steps in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])
