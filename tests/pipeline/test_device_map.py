"""Device maps for any module.

The interface is that of vision_architectures' pipeline parallelism, with extensions. ``meta`` is
used as a second device, without values, where there is no GPU.
"""

import copy
import pickle
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from pipekernels import (
    parallelize_module,
    parallelize_pipeline,
    unparallelize_module,
    unparallelize_pipeline,
)

CPU, META = torch.device("cpu"), torch.device("meta")


class Model(nn.Module):
    """Not a Sequential: it has keyword and nested arguments, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.encoder = nn.ModuleDict({"first": nn.Linear(4, 4), "norm": nn.LayerNorm(4)})
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])
        self.head = Head()

    def forward(self, x: torch.Tensor, *, bias: torch.Tensor | None = None) -> dict[str, Any]:
        hidden = self.encoder["norm"](self.encoder["first"](x))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head({"x": x, "hidden": hidden}, bias=bias)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, inputs: dict[str, Any], *, bias: torch.Tensor | None) -> dict[str, Any]:
        logits = self.out(inputs["hidden"] + inputs["x"]) * self.scale
        return {"logits": logits if bias is None else logits + bias, "name": "head"}


def devices_of(module: nn.Module) -> dict[str, str]:
    return {name: tensor.device.type for name, tensor in module.state_dict().items()}


def received(module: nn.Module) -> list[str]:
    """A list to which each call of ``module`` adds the devices of its tensor arguments."""
    seen: list[str] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.extend(t.device.type for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor))

    module.register_forward_pre_hook(note, with_kwargs=True)
    return seen


@pytest.mark.parametrize(
    ("processing", "output", "expected"), [("meta", None, META), ("cpu", "meta", META)]
)
def test_parallelize_module_and_back(processing: str, output: str | None, expected: Any) -> None:
    module = nn.Linear(4, 2)
    assert parallelize_module(module, processing, output) is module
    assert module.weight.device.type == processing
    assert module(torch.ones(3, 4)).device == expected
    assert unparallelize_module(module) is module
    assert module.weight.device.type == processing
    assert unparallelize_module(module, "meta").weight.device == META
    with pytest.raises(RuntimeError):
        module(torch.ones(3, 4))


def test_the_deepest_name_decides_regardless_of_order() -> None:
    mapping: dict[str, Any] = {"head.out": "cpu", "head": "meta", "": "cpu", "blocks.0": "meta"}
    model = parallelize_pipeline(Model(), MappingProxyType(mapping))  # It is not changed.
    expected = dict.fromkeys(model.state_dict(), "cpu")
    expected |= {"head.scale": "meta", "blocks.0.0.weight": "meta", "blocks.0.0.bias": "meta"}
    assert devices_of(model) == expected


def test_weights_move_directly_to_their_device_or_stay_where_they_are() -> None:
    """Moving them to the root's device first, here ``meta``, would lose their values."""
    expected = Model().blocks[1][0].weight
    model = parallelize_pipeline(Model(), {"": "meta", "blocks.1": "cpu"})
    assert torch.equal(model.blocks[1][0].weight, expected)
    model = Model()  # Without an entry for its encoder.
    model.encoder.to("meta")
    parallelize_pipeline(model, {"head": "cpu"})
    assert devices_of(model)["encoder.first.weight"] == "meta"


@pytest.mark.parametrize("pair", [("cpu", "meta"), ["cpu", "meta"]])
def test_arguments_and_results_are_moved(pair: Any) -> None:
    model = Model()
    calls = {name: received(model.get_submodule(name)) for name in ("blocks.0", "blocks.1", "head")}
    parallelize_pipeline(model, {"": pair, "blocks.1": "meta", "head": "meta"})
    output = model(torch.ones(2, 4), bias=torch.ones(3))
    assert calls == {"blocks.0": ["cpu"], "blocks.1": ["meta"], "head": ["meta"]}
    assert output["logits"].device == META and output["name"] == "head"


def test_an_entry_of_a_list_or_dict_is_for_each_of_its_modules() -> None:
    model = Model()
    calls = {name: received(model.get_submodule(name)) for name in ("encoder.first", "blocks.0")}
    calls["blocks.1"] = received(model.blocks[1])
    parallelize_pipeline(model, {"encoder": "meta", "blocks": "meta", "blocks.1": ["cpu", "meta"]})
    with pytest.raises(RuntimeError):  # No entry moves the head's arguments to the CPU.
        model(torch.ones(2, 4))
    assert calls == {"encoder.first": ["meta"], "blocks.0": ["meta"], "blocks.1": []}
    assert devices_of(model)["blocks.1.0.weight"] == "cpu"


def test_equals_the_unwrapped_model(device: torch.device) -> None:
    """If there is a GPU, half of the model is on it."""
    reference = Model().double()
    model = parallelize_pipeline(
        copy.deepcopy(reference),
        {"": "cpu", "blocks": device, "encoder.norm": device, "head": (device, "cpu")},
    )
    results = []
    for module in (model, reference):
        torch.manual_seed(0)
        x = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
        output = module(x, bias=torch.ones(3, dtype=torch.float64))
        output["logits"].square().sum().backward()
        grads = [x.grad, *(p.grad.cpu() for p in module.parameters())]
        results.append([output["logits"], *grads])
    torch.testing.assert_close(*results, rtol=0, atol=1e-10)


@pytest.mark.compile
def test_compiles_as_one_graph() -> None:
    model = parallelize_pipeline(Model(), {"": "cpu", "blocks": "cpu", "head": "cpu"})
    x = torch.randn(4, 4)
    expected = model(x)["logits"]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x)["logits"], expected)


def test_unparallelizing_restores_everything() -> None:
    model: Any = Model()
    model.head.forward = model.head.forward  # The user's own overrides.
    model.head.register_forward_hook(lambda *args: None)
    attributes = [snapshot(module) for module in model.modules()]
    x = torch.randn(5, 4)
    expected = model(x)["logits"]

    parallelize_pipeline(model, {"": "cpu", "blocks": "cpu", "head": "cpu"})
    torch.testing.assert_close(model(x)["logits"], expected)
    assert unparallelize_pipeline(model) is model

    assert [snapshot(module) for module in model.modules()] == attributes
    assert "forward" not in vars(model) and model.forward == Model.forward.__get__(model)
    assert torch.equal(model(x)["logits"], expected)


def hooked(model: nn.Module) -> int:
    """The number of modules whose results are moved."""
    return sum(bool(module._forward_hooks) for module in model.modules())


def snapshot(module: nn.Module) -> dict[str, Any]:
    """All attributes of a module; dicts, such as those of hooks, are copied."""
    return {
        name: copy.copy(value) if isinstance(value, dict) else value
        for name, value in vars(module).items()
    }


def test_unparallelizing_moves_to_the_common_device_if_there_is_one() -> None:
    model = parallelize_pipeline(Model(), {"": "cpu", "head": "meta"})
    assert devices_of(unparallelize_pipeline(model))["head.out.weight"] == "meta"
    unparallelize_pipeline(model, common_device="meta")
    assert set(devices_of(model).values()) == {"meta"}
    parallelize_pipeline(model, {"head": "meta"})
    assert hooked(model) == 1


@pytest.mark.parametrize(
    "again",
    [
        lambda model: parallelize_pipeline(model, {"": "cpu"}),
        lambda model: parallelize_pipeline(model.blocks, {}),
        lambda model: parallelize_module(model.blocks[0], "cpu"),
    ],
)
def test_parallelizing_twice(again: Callable[[nn.Module], Any]) -> None:
    model = parallelize_pipeline(Model(), {"blocks.0": "cpu"})
    with pytest.raises(RuntimeError, match="parallelized already; call unparallelize_pipeline"):
        again(model)
    assert model(torch.ones(4, 4))["logits"].shape == (4, 3)


def test_modules_may_be_parallelized_one_by_one_from_outside_to_inside() -> None:
    model: Any = parallelize_module(Model(), "cpu")
    parallelize_module(model.head, "cpu", "meta")
    assert model.head.out.weight.device == CPU
    assert hooked(model) == 2
    with pytest.raises(NotImplementedError):
        model(torch.ones(2, 4))
    unparallelize_pipeline(model, "cpu")
    assert model(torch.ones(2, 4))["logits"].shape == (2, 3)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_independent(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model = parallelize_pipeline(Model(), {"": "cpu", "head": "cpu"})
    other = duplicate(model)
    x = torch.randn(5, 4)
    expected = model(x)["logits"]
    with torch.no_grad():
        model.head.out.weight.zero_()
    assert torch.equal(other(x)["logits"], expected)
    unparallelize_pipeline(other)
    assert hooked(other) == 0 and hooked(model) == 2
    assert all(not module._forward_pre_hooks for module in other.modules())


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model


def held_twice() -> nn.Module:
    return nn.Sequential(*[nn.Linear(3, 3)] * 2)


def scripted() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), torch.jit.trace(nn.Linear(3, 3), torch.ones(1, 3)))


@pytest.mark.parametrize(
    ("build", "mapping", "error", "message"),
    [
        (scripted, {"": "meta", "1": "meta"}, TypeError, "Module takes no hooks.*place the"),
        (Model, {"haed": "cpu"}, ValueError, "names 'haed', and the model has no such module"),
        (Model, {"head": ("cpu",)}, ValueError, "'head' is mapped to 1 devices.*a pair"),
        (Model, {"head": ("cpu", None)}, TypeError, r"device\(\)"),
        (Model, {"head": "nowhere"}, RuntimeError, "nowhere"),
        (tied, {"": "cpu", "1": "meta"}, ValueError, "'weight' of module '1' .* cpu and meta"),
        (tied, {"0": "meta"}, ValueError, "'weight' .* by modules on meta and cpu"),
        (held_twice, {"0": "meta", "1": "cpu"}, ValueError, "a module has one place"),
    ],
)
def test_errors_do_not_change_the_model(
    build: Callable[[], nn.Module],
    mapping: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    model = build()
    before = [snapshot(module) for module in model.modules()]
    with pytest.raises(error, match=message):
        parallelize_pipeline(model, mapping)
    assert [snapshot(module) for module in model.modules()] == before
    assert {tensor.device for tensor in model.state_dict().values()} == {CPU}


def test_tied_weights_on_one_device() -> None:
    model = parallelize_pipeline(tied(), {"": "cpu", "1": "cpu"})
    assert model[0].weight is model[1].weight
