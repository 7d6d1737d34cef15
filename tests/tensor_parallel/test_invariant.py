"""Layers and models whose bits do not depend on the number of ranks."""

import copy
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks import assert_raises
from support.levels import in_gate
from support.ranks import on_ranks, run_threads
from support.sweeps.collectives import same_bits
from torch import Tensor, nn

from pipekernels import Communicator, tensor_parallelize
from pipekernels.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    clip_grad_norm_,
    full_state_dict,
    vocab_parallel_cross_entropy,
)
from pipekernels.tensor_parallel.invariant.exact_sums import exact_sum

RANKS = (1, 2, 4, 8)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Results = dict[str, Tensor]


def assert_same_bits(
    body: Callable[[Communicator], Results], ranks: tuple[int, ...] = RANKS
) -> Results:
    """``body`` gives full tensors, on every rank. Returns those of one rank."""

    def on_one_thread(comm: Communicator) -> Results:
        torch.set_num_threads(1)  # Products on two may have other bits.
        return body(comm)

    expected, *others = [run_threads(count, on_one_thread) for count in ranks]
    for found in (rank for all_ranks in others for rank in all_ranks):
        assert found.keys() == expected[0].keys()
        for name, value in expected[0].items():
            differs = (value != found[name]).sum()
            assert same_bits(value, found[name]), f"{name}: {differs} elements differ"
    return expected[0]


def gradients(module: Any) -> Results:
    """Of all parameters of a sharded layer, gathered."""
    return {
        f"grad of {name}": module.gather(name, p.grad)
        if name in module.shard_dims
        else p.grad.clone()
        for name, p in module.named_parameters()
    }


def random_case(number: int) -> tuple[Callable[[Communicator], Results], str]:
    """A layer and an input, of random sizes and dtypes."""
    choose = random.Random(number)
    dtype = choose.choice(DTYPES)
    rows = choose.choice([1, 2, 4, 5, choose.randint(1, 40), 8 * choose.randint(1, 5)])
    sharded, other = 64 * choose.randint(1, 5), choose.randint(1, 90)
    kind = choose.choice(["row", "row, scattered", "column", "column, gathered", "blocks"])
    bias = kind != "row, scattered" and choose.random() < 0.5
    torch.manual_seed(number)
    if kind.startswith("row"):
        rows = 8 * choose.randint(1, 4) if kind == "row, scattered" else rows
        full, width = nn.Linear(sharded, other, bias, dtype=dtype), sharded
    else:
        full, width = nn.Linear(other, 2 * sharded, bias, dtype=dtype), other
    x = torch.randn(rows, width, dtype=torch.float64).to(dtype)
    weights = torch.randn(rows, full.out_features, dtype=torch.float64).to(dtype)

    def body(comm: Communicator) -> Results:
        part = slice(
            comm.rank * width // comm.world_size, (comm.rank + 1) * width // comm.world_size
        )
        found: Results = {}
        if kind.startswith("row"):
            reduce = "reduce_scatter" if kind == "row, scattered" else "all_reduce"
            layer = RowParallelLinear.from_linear(full, comm, reduce=reduce, invariant=True)
            leaf = x[:, part].clone().requires_grad_()
            y = layer(leaf)
            own = weights.chunk(comm.world_size)[comm.rank] if reduce != "all_reduce" else weights
            (y * own).sum().backward()
            found["output"] = comm.all_gather(y) if reduce != "all_reduce" else y.detach()
            joined = comm.all_gather(leaf.grad.t().contiguous())
            found["grad of x"] = joined.t().contiguous()
        else:
            options: dict[str, Any] = {"gather_output": kind == "column, gathered"}
            if kind == "blocks":
                options = {"blocks": [sharded, sharded]}
            layer = ColumnParallelLinear.from_linear(full, comm, invariant=True, **options)
            leaf = x.clone().requires_grad_()
            y = layer(leaf)
            spans = layer.spans("weight")
            if kind == "column, gathered":
                own, found["output"] = weights, y.detach()
            else:
                own = torch.cat([weights[:, a : a + n] for a, n in spans], 1)
                output = layer.gather("weight", y.detach().t().contiguous())
                found["output"] = output.t().contiguous()
            (y * own).sum().backward()
            found["grad of x"] = leaf.grad
        with torch.no_grad():
            again = layer(leaf)
        assert torch.equal(again, y)
        return found | gradients(layer)

    return body, f"{kind}, {dtype}, {rows} rows, {full}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "numbers", in_gate([range(30)], [range(n, n + 30) for n in range(0, 150, 30)])
)
def test_random_layers(numbers: range) -> None:
    for number in numbers:
        body, description = random_case(number)
        print(description)
        assert_same_bits(body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_is_no_larger_than_the_plain_layers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    full, x = nn.Linear(1024, 128, bias=False, dtype=dtype), torch.randn(64, 1024).to(dtype)
    exact = nn.functional.linear(x.double(), full.weight.double())

    def body(comm: Communicator) -> tuple[float, float]:
        own = x.chunk(comm.world_size, 1)[comm.rank]
        errors = []
        for invariant in (False, True):
            layer = RowParallelLinear.from_linear(full, comm, invariant=invariant)
            errors.append((layer(own).double() - exact).square().mean().sqrt().item())
        return errors[0], errors[1]

    plain, invariant = run_threads(2, body)[0]
    assert invariant <= 1.05 * plain  # Root mean squares of 8192 samples: noise of a per cent.


def test_embedding_and_cross_entropy() -> None:
    torch.manual_seed(0)
    full, head = nn.Embedding(64, 24, padding_idx=3), nn.Linear(24, 64, bias=False)
    with torch.no_grad():
        full.weight[5] = -0.0
    ids = torch.randint(64, (5, 7))
    ids[0, :3] = torch.tensor([3, 5, 63])

    def body(comm: Communicator) -> Results:
        embedding = VocabParallelEmbedding.from_embedding(full, comm, invariant=True)
        last = ColumnParallelLinear.from_linear(head, comm, invariant=True)
        hidden = embedding(ids)
        loss = vocab_parallel_cross_entropy(
            last(hidden), ids, 64, comm, label_smoothing=0.1, invariant=True
        )
        loss.backward()
        found = {"hidden": hidden.detach(), "loss": loss.detach()}
        found |= {f"embedding: {k}": v for k, v in gradients(embedding).items()}
        return found | {f"head: {k}": v for k, v in gradients(last).items()}

    found = assert_same_bits(body)
    expected = nn.functional.cross_entropy(
        head(full(ids)).flatten(0, 1), ids.flatten(), label_smoothing=0.1
    )
    torch.testing.assert_close(found["loss"], expected)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_norms_of_gradients(norm_type: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 256), nn.GELU(), nn.Linear(256, 24), nn.LayerNorm(24))
    x = torch.randn(16, 24)

    def body(comm: Communicator) -> Results:
        plan = {"0": "column", "2": "row"}
        sharded = tensor_parallelize(copy.deepcopy(model), plan, comm, invariant=True)
        sharded(x).square().sum().backward()
        found = {"norm": clip_grad_norm_(sharded, 0.1, norm_type)}
        for layer in (sharded[0], sharded[2]):
            found |= {f"{layer.name} {key}": value for key, value in gradients(layer).items()}
        return found

    found = assert_same_bits(body)
    model(x).square().sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    bound = sum(grad.numel() for grad in grads) * torch.finfo(torch.float32).eps / 2
    expected = nn.utils.get_total_norm([grad.double() for grad in grads], norm_type)
    torch.testing.assert_close(found["norm"].double(), expected, rtol=bound, atol=0)


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, 128, shape, generator=torch.Generator().manual_seed(1))


def whole_model(name: str, dtype: torch.dtype) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 128,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    if name == "Llama":
        config = transformers.LlamaConfig(**sizes, intermediate_size=512, num_key_value_heads=8)
    elif name == "Qwen3":  # With norms of queries and keys.
        more = {"intermediate_size": 512, "num_key_value_heads": 8, "head_dim": 32}
        config = transformers.Qwen3Config(**sizes, **more)
    else:
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(**sizes, n_positions=128, **off)
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "ranks"),
    in_gate(
        [("Llama", torch.float32, (1, 2))],
        [
            ("Llama", torch.float32, (1, 2)),
            *itertools.product(
                ["Llama", "GPT-2", "Qwen3"], [torch.float32, torch.bfloat16], [RANKS]
            ),
        ],
    ),
)
def test_training_and_generation(
    name: str, dtype: torch.dtype, ranks: tuple[int, ...], one_thread: None
) -> None:
    model = whole_model(name, dtype)
    ids = tokens(3, 17)

    def body(comm: Communicator) -> Results:
        sharded: Any = tensor_parallelize(copy.deepcopy(model), "auto", comm, invariant=True)
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
        found: Results = {}
        for step in range(10):
            optimizer.zero_grad()
            result = sharded(input_ids=ids, labels=ids)
            result.loss.backward()
            if step == 0:
                found["logits"] = result.logits.detach().clone()
            found[f"loss {step}"] = result.loss.detach()
            found[f"norm {step}"] = clip_grad_norm_(sharded, 1.0).clone()
            optimizer.step()
        found |= full_state_dict(sharded)
        prompt = {"input_ids": ids[:2, :5], "attention_mask": torch.ones(2, 5, dtype=torch.long)}
        with torch.no_grad():
            found["tokens"] = sharded.eval().generate(
                **prompt, max_new_tokens=64, min_new_tokens=64, do_sample=False
            )
        return found

    found = assert_same_bits(body, ranks)
    assert found["loss 9"] < found["loss 0"] and found["tokens"].shape == (2, 69)


def norms_of_heads(norm: Callable[[int], nn.Module]) -> nn.Sequential:
    """A layer per rank of heads, a norm that all heads share, and a layer that joins them."""
    torch.manual_seed(0)
    parts = [nn.Linear(24, 256), nn.Unflatten(-1, (-1, 32)), norm(32), nn.Flatten(-2)]
    return nn.Sequential(*parts, nn.Linear(256, 24))


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.bias + self.weight * nn.functional.rms_norm(x, x.shape[-1:])


NORMS_PLAN = {"0": "column", "2": "replicated_with_grad_allreduce", "4": "row"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_norms_that_all_heads_share(dtype: torch.dtype) -> None:
    """They are the sums of the rows' gradients, rounded once."""
    model = norms_of_heads(Norm).to(dtype)
    x = torch.randn(5, 7, 24).to(dtype)
    rows: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        rows.append(args[0].detach())
        output.register_hook(lambda grad: rows.append(grad.clone()))

    def body(comm: Communicator) -> Results:
        sharded: Any = tensor_parallelize(copy.deepcopy(model), NORMS_PLAN, comm, invariant=True)
        hooked = copy.deepcopy(sharded)  # A copy, whose parameters have lost their hooks.
        if comm.world_size == 1:
            hooked[2].register_forward_hook(note)
        hooked(x).add_(1).square().sum().backward()
        return {name: p.grad for name, p in hooked[2].named_parameters()}

    found = assert_same_bits(body)
    heads, grad = rows
    terms = {"weight": grad * nn.functional.rms_norm(heads, (32,)), "bias": grad}
    for name, each in terms.items():
        columns = each.double().flatten(0, -2).t().tolist()
        expected = torch.tensor([math.fsum(column) for column in columns], dtype=torch.float64)
        bound = expected.abs() * torch.finfo(dtype).eps / 2 + sum_error(each.flatten(0, -2))
        assert ((found[name].double() - expected).abs() <= bound).all()


def sum_error(terms: Tensor) -> float:
    """The bound that :func:`exact_sum` states, half a unit for each term, and one rounding to
    float64."""
    count, largest = terms.shape[0], terms.abs().max().item()
    unit = 2.0 ** (1 - (62 - count.bit_length())) * largest
    return count * (unit / 2 + largest * 2.0**-53)


def test_a_norm_whose_gradients_cannot_be_taken_by_rows_is_refused() -> None:
    model = norms_of_heads(nn.RMSNorm)
    nested = norms_of_heads(lambda width: nn.Sequential(Norm(width)))

    def body(comm: Communicator) -> None:
        sharded: Any = tensor_parallelize(copy.deepcopy(model), NORMS_PLAN, comm, invariant=True)
        y = sharded(torch.ones(3, 24))
        with pytest.raises(RuntimeError, match=r"gradients of RMSNorm.*freeze them by .requires"):
            y.sum().backward()
        with pytest.raises(RuntimeError, match=r"RMSNorm, .*one positional argument.*but got 0"):
            sharded[2](x=torch.ones(3, 32))
        sharded[2].requires_grad_(False)
        sharded(torch.ones(3, 24)).sum().backward()
        with pytest.raises(ValueError, match=r"'2' \(Sequential\).*name these modules in the plan"):
            tensor_parallelize(nested, NORMS_PLAN, comm, invariant=True)
        assert isinstance(nested[0], nn.Linear)

    run_threads(2, body)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_exact_sums(dtype: torch.dtype) -> None:
    """The same bits in any order, and the error that is promised."""
    generator = torch.Generator().manual_seed(1)
    spread = torch.randn(512, 9, generator=generator).mul(4).exp2()
    terms = (torch.randn(512, 9, generator=generator) * spread).to(dtype)
    tiny = torch.finfo(dtype).tiny

    def body(comm: Communicator) -> Results:
        def own(x: Tensor) -> Tensor:
            return x.chunk(comm.world_size)[comm.rank]

        shuffled = terms[torch.randperm(512, generator=torch.Generator().manual_seed(2))]
        found = {"terms": exact_sum(own(terms), comm)}
        assert torch.equal(exact_sum(own(shuffled), comm), found["terms"])
        found["zeros"] = exact_sum(torch.zeros(2, 3, dtype=dtype), comm)
        found["nothing"] = exact_sum(torch.zeros(0, 3, dtype=dtype), comm)
        found["tiny"] = exact_sum(own(torch.full((8, 1), tiny, dtype=dtype)), comm)
        for value in (float("nan"), float("inf")):
            wrong = terms.clone()
            wrong[3, 5] = value
            assert exact_sum(own(wrong), comm).isnan().all()
        return found

    found = assert_same_bits(body)
    expected = torch.tensor([math.fsum(c) for c in terms.t().tolist()], dtype=torch.float64)
    assert (found["terms"] - expected).abs().max() <= sum_error(terms)
    assert not found["zeros"].any() and not found["nothing"].any()
    assert found["tiny"].item() == 8 * tiny


@on_ranks(2, run_threads)
def test_errors(comm: Communicator) -> None:
    def refused(message: str, call: Callable[..., Any], *args: Any, **options: Any) -> None:
        assert_raises(ValueError, message, call, *args, **{"comm": comm, **options}, invariant=True)

    row, column = RowParallelLinear, ColumnParallelLinear
    refused("a multiple of 8, but there are 8; use a multiple of 64", row, 8, 4)
    multiple = "a multiple of 8, but there are 72; use a multiple of 64"
    refused(multiple, column, 4, 136, blocks=[64, 72])
    refused("reduce='none' returns partial sums", row, 64, 4, bias=False, reduce="none")
    refused("with a bias: .*depends on their number", row, 64, 4, reduce="reduce_scatter")
    uneven = "2 ranks do not divide 3; use a number of ranks that does"
    refused(uneven, column, 4, 192, heads=(3, 3))
    refused(uneven, row, 192, 4, heads=(3, 3))
    model = nn.Sequential(nn.Linear(4, 192), nn.GELU(), nn.Linear(192, 4))
    message = "'0' .*192 features have 8 slabs of 24; use a multi"
    refused(message, tensor_parallelize, model, {"0": "column", "2": "row"})
    three = Communicator.threads(3)[0]
    refused("8 slabs, which 3 ranks cannot share evenly", row, 192, 4, comm=three)
