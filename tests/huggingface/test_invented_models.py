"""Plans derived for models some of whose layers do what only their code says."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks import full_gradients
from support.levels import in_gate
from support.ranks import run_threads
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from pipekernels import Communicator, tensor_parallelize
from pipekernels.tensor_parallel import plan_for

pytestmark = pytest.mark.slow


# What needs more than a rank's share of the features [..., F], or all heads [B, H, T, D].
ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "flip": lambda x: x.flip(-1),
    "roll": lambda x: x.roll(1, -1),
    "cumsum": lambda x: x.cumsum(-1) / x.shape[-1],
    "mean": lambda x: x - x.mean(-1, keepdim=True),
    "first": lambda x: x * x[..., :1],
    "groups of 8": lambda x: x.unflatten(-1, (-1, 8)).softmax(-1).flatten(-2),
    "groups of 12": lambda x: x.unflatten(-1, (-1, 12)).softmax(-1).flatten(-2),
    "three groups": lambda x: x.unflatten(-1, (3, -1)).softmax(-1).flatten(-2),
    "pieces of 16": lambda x: torch.cat([part.softmax(-1) for part in x.split(16, -1)], -1),
}
ODD_HEADS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(1),
    "flip": lambda x: x.flip(1),
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "by number": lambda x: x * torch.arange(1, x.shape[1] + 1).view(-1, 1, 1),
}
PLAIN = {"tanh": torch.tanh, "silu": nn.functional.silu, "gelu": nn.functional.gelu}
WHEN = (
    "never always period index last first training evaluating longer shorter function kind changed"
)


Configuration: Any = transformers.PretrainedConfig
PreTrained: Any = transformers.PreTrainedModel


class InventedConfig(Configuration):
    model_type = "invented"

    def __init__(self, **fields: Any) -> None:
        defaults: Any = {"hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 2}
        defaults |= {"num_attention_heads": 4, "vocab_size": 61, "when": "never", "where": "mlp"}
        defaults |= {"odd": "softmax", "plain": "tanh", "number": 2, "gated": False, "views": True}
        defaults |= {"experts": 0}
        super().__init__(**defaults | fields)


class Part(nn.Module):
    """An MLP or an attention, which may be odd."""

    def __init__(self, config: Any, index: int, place: str) -> None:
        super().__init__()
        last = config.num_hidden_layers - 1
        chosen = {"always": True, "period": index % config.number == config.number - 1}
        chosen |= {"last": index == last, "first": index == 0}
        self.layer_idx, self.number = index, config.number
        self.when = config.when if place == config.where else "never"
        self.is_odd = chosen.get(self.when, False)
        odd = (ODD if place == "mlp" else ODD_HEADS)[
            config.odd if place == config.where else "flip"
        ]
        self.act: Any = PLAIN[config.plain]
        self.odd = odd
        if self.when == "function" and index == last:
            plain = self.act
            self.act = lambda x: odd(plain(x))

    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args)

    def functions(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        is_odd = self.is_odd or {
            "index": self.layer_idx == self.number,
            "training": self.training,
            "evaluating": not self.training,
            "longer": length > 10 * self.number,
            "shorter": length < 3 * self.number,
        }.get(self.when, False)
        x = self.act(x)
        return self.odd(x) if is_odd else x


class Mlp(Part):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index, "mlp")
        sizes = config.hidden_size, config.intermediate_size
        self.up, self.down = nn.Linear(*sizes), nn.Linear(*sizes[::-1])
        self.gate = nn.Linear(*sizes) if config.gated else None

    def forward(self, x: Tensor) -> Tensor:
        inner = self.functions(self.up(x))
        return self.down(inner if self.gate is None else inner * self.gate(x))


class OddMlp(Mlp):
    def functions(self, x: Tensor) -> Tensor:
        return self.odd(super().functions(x))


class Mixture(nn.Module):
    """Experts that are modules of linear layers, two of which each token takes."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.router = nn.Linear(config.hidden_size, config.experts, bias=False)
        self.experts = nn.ModuleList(Mlp(config, index) for _ in range(config.experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        y = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            if len(token):
                y = y.index_add(0, token, expert(flat[token]) * weights[token, place, None])
        return y.view_as(x)


class Attention(Part):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index, "attention")
        size, self.num_heads = config.hidden_size, config.num_attention_heads
        self.head_dim, self.views = size // self.num_heads, config.views
        self.q, self.k, self.v, self.o = (nn.Linear(size, size) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = (-1, self.head_dim) if self.views else (self.num_heads, -1)
        q, k, v = (f(x).unflatten(-1, heads).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = (q @ k.mT / self.head_dim**0.5).softmax(-1) @ self.functions(v)
        return self.o(mixed.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        is_last = index == config.num_hidden_layers - 1
        kind: Any = OddMlp if config.when == "kind" and config.where == "mlp" and is_last else Mlp
        kind = Mixture if config.experts else kind
        self.attention, self.mlp = Attention(config, index), kind(config, index)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Invented(PreTrained):
    config_class, main_input_name = InventedConfig, "input_ids"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.all_tied_weights_keys: dict[str, str] = {}

    def forward(self, input_ids: Tensor, attention_mask: Any = None) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return {"output": x}


def invented(seed: int) -> tuple[Invented, int]:
    """A model and a number of ranks."""
    choose = random.Random(seed)
    where = choose.choice(["mlp", "mlp", "attention"])
    ranks, when = choose.choice([2, 3, 4]), choose.choice(WHEN.split())
    config = InventedConfig(
        hidden_size=48, intermediate_size=choose.choice([48, 72, 80, 96]),
        num_hidden_layers=choose.randint(2, 6), num_attention_heads=choose.choice([3, 4, 6, 12]),
        when=when, where=where, odd=choose.choice(list(ODD if where == "mlp" else ODD_HEADS)),
        plain=choose.choice(list(PLAIN)), number=choose.randint(2, 4),
        gated=choose.random() < 0.5, views=choose.random() < 0.5,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Invented(config).double()
    if when == "changed":  # By whoever has made the model.
        part: Any = model.layers[-1]
        getattr(part, where).is_odd = True
    return model, ranks


def results(model: nn.Module) -> list[dict[str, Tensor]]:
    """Outputs and gradients in both modes, of a short text and a long one."""
    found = []
    for length in (5, 50):
        for training in (False, True):
            own = copy.deepcopy(model).train(training)
            ids = torch.arange(2 * length).view(2, length) * 7 % 61
            output = own(ids)["output"]
            (output.square() * torch.linspace(0, 1, output.shape[-1])).mean().backward()
            found.append({"output": output.detach()} | full_gradients(own))
    return found


def is_sharded_rightly(model: nn.Module, ranks: int) -> bool:
    """False if it is refused."""
    try:
        plan_for(model, ranks)
    except ValueError:
        return False
    expected, copies = results(model), [copy.deepcopy(model) for _ in range(ranks)]

    def body(comm: Communicator) -> None:
        found = results(tensor_parallelize(copies[comm.rank], "auto", comm))
        for own, values in zip(found, expected, strict=True):
            # Of the others: it is all that a key's bias has for a gradient.
            rounding = 4096 * 2**-53 * max(value.abs().max() for value in values.values())
            for key, value in values.items():
                assert own[key].shape == value.shape, key
                assert (own[key] - value).abs().max() <= 1e-9 * value.abs().max() + rounding, key

    run_threads(ranks, body)
    return True


@pytest.mark.parametrize("seed", in_gate((0, 1, 51), range(150)))
def test_an_invented_model_is_whole_or_equal(seed: int) -> None:
    is_sharded_rightly(*invented(seed))


@pytest.mark.parametrize(
    "when", in_gate(["index", "kind"], ["period", "index", "training", "longer", "kind"])
)
def test_only_the_odd_part_is_gathered(when: str) -> None:
    config = InventedConfig(num_hidden_layers=4, when=when, number=3)
    model = Invented(config).double()
    kinds = {layer.name.rpartition(".")[2]: layer.kind for layer in plan_for(model, 2).layers}
    assert kinds.keys() == {"q", "k", "v", "o", "up", "down"}
    gathered = {name for name, kind in kinds.items() if kind == "column_gather_output"}
    assert gathered == {"up", "down"}
    assert is_sharded_rightly(model, 2)


def test_a_model_that_was_changed_is_refused_by_name() -> None:
    model = Invented(InventedConfig(num_hidden_layers=4)).double()
    assert is_sharded_rightly(model, 2)
    model.layers[2].mlp.is_odd = True
    with pytest.raises(ValueError, match=r"'layers.2.mlp' is not like the small copy.*\(is_odd\)"):
        plan_for(model, 2)


@pytest.mark.parametrize("ranks", in_gate([2], [2, 4]))
def test_each_rank_holds_a_slice_of_every_expert(ranks: int) -> None:
    torch.manual_seed(0)
    model = Invented(InventedConfig(intermediate_size=96, gated=True, experts=8)).double()
    rows = {(layer.name, layer.kind, layer.count) for layer in plan_for(model, ranks).layers}
    assert ("layers.*.mlp.experts.*.down", "row", 16) in rows
    assert not any("router" in name for name, *_ in rows)
    assert is_sharded_rightly(model, ranks)
