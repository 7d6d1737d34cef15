"""``tensor_parallelize``: whole models, sharded by the names of their layers."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.checks import assert_full_gradients, assert_same_state
from support.ranks import on, on_ranks, run_threads
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

from pipekernels import ColumnParallelLinear, Communicator, RowParallelLinear, tensor_parallelize
from pipekernels.tensor_parallel import full_state_dict

FEATURES, HEADS = 12, 4
PLAN = {"*.[qkv]_proj": "column", "*.o_proj": "row", "*.up": "column", "*.down": "row"}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(FEATURES, FEATURES, bias=name == "o_proj"))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, FEATURES // HEADS)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(FEATURES)
        self.mlp = nn.ModuleDict({"up": nn.Linear(FEATURES, 30), "down": nn.Linear(30, FEATURES)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp["down"](functional.gelu(self.mlp["up"](x)))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, FEATURES), Block(), Block(), nn.Linear(FEATURES, 3)).double()


# Of layers that take and return all features, so that the number of heads stays the same.
GATHERED = dict.fromkeys(("*_proj", "3"), "column_gather_output") | {"*.down": "row_split_input"}


@pytest.mark.parametrize(
    ("plan", "world_size"), [*((PLAN, n) for n in (1, 2, 4)), *((GATHERED, n) for n in (1, 2, 3))]
)
def test_a_sharded_transformer_equals_the_plain_one(
    plan: dict[str, str], world_size: int, device: torch.device
) -> None:
    plain = model().to(device)
    copies = [copy.deepcopy(plain) for _ in range(world_size)]  # Threads share torch's generator.
    x = torch.randn(2, 6, 5, dtype=torch.float64).to(device)
    expected = plain(x)
    expected.square().sum().backward()

    def on_rank(comm: Communicator) -> None:
        sharded = copies[comm.rank]
        assert tensor_parallelize(sharded, plan, comm) is sharded
        for block in list(sharded)[1:3]:
            block.attention.num_heads //= world_size if plan is PLAN else 1
            kinds = [type(layer) for layer in (block.attention.q_proj, block.mlp["down"])]
            assert kinds == [ColumnParallelLinear, RowParallelLinear]
            assert block.mlp["down"].input_is_parallel == (plan is PLAN)
        assert type(sharded[0]) is nn.Linear
        assert type(sharded[3]) is (nn.Linear if plan is PLAN else ColumnParallelLinear)
        y = sharded(x)
        y.square().sum().backward()
        torch.testing.assert_close(y, expected)
        assert_same_state(full_state_dict(sharded), plain.state_dict())
        assert_full_gradients(sharded, plain)

    run_threads(world_size, on(device, on_rank))


def test_a_layer_with_two_names_is_sharded_once() -> None:
    (comm,) = Communicator.threads(1)
    layer = nn.Linear(4, 4)
    twice = nn.Sequential(layer, nn.ReLU(), layer)
    tensor_parallelize(twice, {"0": "column"}, comm)
    assert type(twice[0]) is ColumnParallelLinear
    assert twice[0] is twice[2]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("masked", [False, True])
def test_sharded_layers_of_torchs_encoders_are_called_in_evaluation_mode_too(
    training: bool, masked: bool
) -> None:
    """Torch's fast path would pass the shards to a fused kernel as if they were full weights."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    plain = nn.TransformerEncoder(layer, 2).double().train(training)
    copies = [copy.deepcopy(plain) for _ in range(2)]
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    padded = torch.tensor([[False, False, True], [False, False, False]]) if masked else None
    kept = torch.ones(2, 3, dtype=torch.bool) if padded is None else ~padded
    with torch.no_grad():
        expected = plain(x, src_key_padding_mask=padded)

    def on_rank(comm: Communicator) -> None:
        sharded = copies[comm.rank]
        tensor_parallelize(sharded, {"*.linear1": "column", "*.linear2": "row"}, comm)
        with torch.no_grad():
            y = sharded(x, src_key_padding_mask=padded)
        torch.testing.assert_close(y[kept], expected[kept])

    run_threads(2, on_rank)


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


LORA = nn.Parameter(torch.zeros(2, 4))
CHANGES: list[tuple[Callable[[nn.Linear], object], str]] = [
    (parametrizations.weight_norm, "parametrizations.weight.original0"),
    (partial(prune.l1_unstructured, name="weight", amount=2), "weight_mask, weight_orig"),
    (lambda layer: setattr(layer, "lora_a", LORA), "additional state \\(lora_a\\)"),
    (lambda layer: layer.register_forward_hook(print), "hooks"),
    (lambda layer: layer.weight.register_hook(print), "hooks"),
    (lambda layer: layer.bias.register_post_accumulate_grad_hook(print), "hooks"),
    (lambda layer: setattr(layer, "forward", print), "an overridden forward"),
]


@pytest.mark.parametrize(("change", "what"), CHANGES)
def test_a_layer_with_more_than_a_weight_and_a_bias_is_refused(
    change: Callable[[nn.Linear], object], what: str
) -> None:
    (comm,) = Communicator.threads(1)
    layer = nn.Linear(4, 4)
    change(layer)
    holder = nn.Sequential(layer)
    with pytest.raises(TypeError, match=f"linear has .*{what}.* lost; remove it first"):
        RowParallelLinear.from_linear(layer, comm)
    with pytest.raises(TypeError, match=f"'0'.*({what}|ParametrizedLinear)"):
        tensor_parallelize(holder, {"0": "row"}, comm)
    assert holder[0] is layer
    with pytest.raises(TypeError, match="an overridden forward"):
        RowParallelLinear.from_linear(Scaled(4, 4), comm)


def test_a_bad_plan_is_refused_and_the_model_unchanged() -> None:
    comm, _ = Communicator.threads(2)
    tied = nn.ModuleDict({"embed": nn.Embedding(6, FEATURES), "head": nn.Linear(FEATURES, 6)})
    tied["head"].weight = tied["embed"].weight
    cases: list[tuple[nn.Module, Any, type[Exception], str]] = [
        (model(), {**PLAN, "*.z_proj": "row"}, ValueError, r"no module's name matches '\*.z_proj'"),
        (model(), {"*.o_proj": "rows"}, ValueError, "'row', 'row_split_input', .*got 'rows'"),
        (model(), {"*.o_proj": ("row", {})}, ValueError, r"must be one of .*, got \('row', {}\)"),
        (model(), {"*.norm": "row"}, TypeError, "'1.norm', a torch.*LayerNorm, but only nn.Linear"),
        (model(), {"1.*": "row"}, TypeError, "'1.attention', a .*Attention, .*narrower pattern"),
        (model(), {"[03]": "column", "3": "row"}, ValueError, "'3' both 'column' and 'row'"),
        (nn.Linear(4, 4), {"*": "row"}, ValueError, "the model itself.*from_linear"),
        (nn.Sequential(nn.Linear(4, 1)), {"0": "column"}, ValueError, "'0'.* 1 features over 2"),
        (tied, {"head": "column"}, ValueError, "'embed' and 'head' share a parameter; name all"),
    ]
    for bad, plan, error, message in cases:
        before = list(bad.modules())
        with pytest.raises(error, match=message):
            tensor_parallelize(bad, plan, comm)
        assert list(bad.modules()) == before
    (one,) = Communicator.threads(1)
    done = tensor_parallelize(model(), PLAN, one)
    with pytest.raises(TypeError, match="a pipekernels.*ColumnParallelLinear, but only"):
        tensor_parallelize(done, PLAN, one)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop(1), r"ranks \[1\] shard other layers than rank 0: names"),
        (lambda m: m[2].mlp.update({"up": nn.Linear(FEATURES, 32)}), "kinds or sizes differ"),
        (lambda m: nn.init.ones_(m[1].mlp["down"].weight), "'1.mlp.down' on rank 1 .* seed"),
    ],
)
def test_different_models_raise_on_all_ranks(
    change: Callable[[nn.Sequential], object], message: str
) -> None:
    models = [model(), model(), model()]
    change(models[1])

    def on_rank(comm: Communicator) -> None:
        before = list(models[comm.rank].modules())
        with pytest.raises(ValueError, match=message):
            tensor_parallelize(models[comm.rank], PLAN, comm)
        assert list(models[comm.rank].modules()) == before
        comm.barrier()

    run_threads(3, on_rank)


def test_ranks_may_differ_in_unsharded_layers_and_load_weights_later() -> None:
    models, state = list[Any]((model(), model())), model().state_dict()
    nn.init.ones_(models[1][0].weight)
    models[1][1].to("meta")

    def on_rank(comm: Communicator) -> None:
        attention = {"*_proj": "column_gather_output"}
        sharded = tensor_parallelize(models[comm.rank], attention, comm)
        tensor_parallelize(sharded, {"*.up": "column", "*.down": "row"}, comm)
        sharded.load_state_dict(state, assign=True)
        assert_same_state(full_state_dict(sharded), state)

    run_threads(2, on_rank)


class Softmax(nn.Module):
    """A softmax over all features between two layers that could be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).softmax(-1))


def test_a_check_finds_functions_that_need_all_features() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Softmax(), nn.Linear(8, 8)).double()
    copies = [copy.deepcopy(model) for _ in range(2)]
    x = torch.linspace(-2, 2, 24).view(3, 8).double()
    plan = {"1.up": "column", "1.down": "row"}

    def body(comm: Communicator) -> None:
        own = copies[comm.rank]
        with pytest.raises(ValueError, match=r"'1.down' is the first module whose output differs"):
            tensor_parallelize(own, plan, comm, check=x)
        torch.testing.assert_close(own(x), model(x))
        assert type(own[1].up) is nn.Linear and own.training
        assert tensor_parallelize(own, {"0": "column_gather_output"}, comm, check={"input": x})
        torch.testing.assert_close(own(x), model(x))

    run_threads(2, body)


def test_weights_of_other_classes_are_refused() -> None:
    class Quantized(nn.Parameter):
        pass

    class OfBitsAndBytes(nn.Linear):
        pass

    comm = Communicator.threads(1)[0]
    for kind in (nn.Linear, OfBitsAndBytes):
        model = nn.Sequential(kind(4, 4))
        model[0].weight = Quantized(torch.zeros(4, 4))
        with pytest.raises(
            TypeError, match=r"a .*Quantized, which cannot be cut.*quantize_weights\(\)"
        ):
            tensor_parallelize(model, {"0": "column"}, comm)
        assert type(model[0]) is kind


@on_ranks(2)
def test_a_plan_and_a_communicator_are_found(comm: Communicator) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    x = torch.randn(3, 2, 8)
    expected = layer(x)
    assert isinstance(tensor_parallelize(layer).linear2, RowParallelLinear)
    torch.testing.assert_close(layer(x), expected)


def test_a_compiled_model_is_understood() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    compiled: list[Any] = [torch.compile(copy.deepcopy(model), backend="eager") for _ in range(2)]
    x = torch.ones(2, 8)

    def body(comm: Communicator) -> None:
        own = tensor_parallelize(compiled[comm.rank], {"0": "column", "2": "row"}, comm)
        assert own is compiled[comm.rank]
        torch.testing.assert_close(own._orig_mod(x), model(x))

    run_threads(2, body)
