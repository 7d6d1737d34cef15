"""Plans derived for models some of whose layers do what only their code says."""

import copy

import pytest
import torch
from support.checks import full_gradients
from support.levels import in_gate
from support.ranks import run_threads
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from support.sweeps.invented_models import Invented, InventedConfig, invented

from pipekernels import Communicator, tensor_parallelize
from pipekernels.tensor_parallel import plan_for

pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize("seed", in_gate(range(2), range(150)))
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


@pytest.mark.parametrize(
    ("size", "odd", "when"),
    in_gate(
        [(72, "groups of 8", "last")],
        [
            (size, odd, when)
            for size, odd in ((72, "groups of 8"), (80, "pieces of 16"))
            for when in ("always", "last")
        ],
    ),
)
def test_groups_that_a_share_would_cut_are_not_cut(size: int, odd: str, when: str) -> None:
    config = InventedConfig(intermediate_size=size, num_hidden_layers=3, when=when, odd=odd)
    assert is_sharded_rightly(Invented(config).double(), 2) == (odd == "pieces of 16")
