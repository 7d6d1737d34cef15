"""Skip connections with and without a pipe (the interface of torchgpipe and fairscale)."""

import copy
import pickle
from typing import Any, cast

import pytest
import torch
from support.pipes import assert_equals_plain, on_cpus, pipe_of
from support.skip_layers import Pop, Stash
from torch import nn

from pipekernels.skip import Namespace, skippable, stash, verify_skippables


def stashing() -> Stash:
    return Stash(nn.Linear(5, 5))


def popping() -> Pop:
    return Pop(nn.Linear(5, 5))


@pytest.mark.parametrize(
    ("value", "join"),
    [
        (lambda x: x, lambda x, skip: skip * 3),  # Only the skip gets a gradient.
        (lambda x: None, lambda x, skip: x + (skip is None)),
        (lambda x: (x > 0).long(), lambda x, skip: x * skip),
    ],
    ids=["alone", "None", "integers"],
)
def test_what_may_be_stashed(value: Any, join: Any, place: torch.device) -> None:
    pipe = pipe_of(Stash(value=value), nn.Linear(5, 5).double(), Pop(join=join), device=place)
    assert_equals_plain(pipe, torch.randn(4, 5, dtype=torch.float64))


def test_layers_keep_their_class_and_state() -> None:
    layer = stashing()
    assert type(layer) is Stash and set(layer.state_dict()) == {"layer.weight", "layer.bias"}
    namespace = Namespace()
    assert layer.isolate(namespace) is layer
    assert layer.stashable() == [(namespace, "skip")] and layer.poppable() == []
    assert Stash().stashable() == [(None, "skip")]
    module = nn.Sequential(layer, Pop().isolate(namespace))
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        verify_skippables(copied)  # Both layers are still in one namespace.
        assert copied[0].stashable() == layer.stashable()


def test_skips_that_do_not_match_are_refused() -> None:
    for layers, message in (
        ([Stash(), nn.Tanh()], "layer '0' stashes 'skip', which no later layer pops"),
        ([nn.Tanh(), Pop()], "layer '1' pops 'skip', which no earlier layer stashes"),
        ([Pop(), Stash()], "no earlier layer stashes"),
        ([Stash(), Stash(), Pop()], "layer '1' stashes 'skip', which layer '0' stashes already"),
        ([Stash(), Pop(), Pop()], "layer '2' pops 'skip', which an earlier layer pops already"),
        ([Stash().isolate(Namespace()), Pop()], "no earlier layer stashes"),
    ):
        module = nn.Sequential(*layers)
        with pytest.raises(TypeError, match=message):
            verify_skippables(module)
        with pytest.raises(TypeError, match=message):
            on_cpus(module, [len(layers)])


def test_misuse_in_a_forward() -> None:
    def layer(forward: Any, **skips: Any) -> Any:
        return skippable(**skips)(type("Layer", (nn.Module,), {"forward": forward}))()

    def undeclared(self: Any, x: Any) -> Any:
        yield stash("other", x)

    def twice(self: Any, x: Any) -> Any:
        yield stash("skip", x)
        yield stash("skip", x)

    def never(self: Any, x: Any) -> Any:
        return x

    def wrong(self: Any, x: Any) -> Any:
        yield "skip"

    def number(self: Any, x: Any) -> Any:
        yield stash("skip", cast(Any, 3))

    x = torch.zeros(2)
    for forward, skips, error, message in (
        (undeclared, {"stash": ["skip"]}, RuntimeError, r"stash\('other'\) without declaring it"),
        (twice, {"stash": ["skip"]}, RuntimeError, r"stash\('skip'\) a second time"),
        (never, {"stash": ["skip"]}, RuntimeError, r"declares stash=\['skip'\] and did not"),
        (never, {"pop": ["skip"]}, RuntimeError, r"declares pop=\['skip'\] and did not"),
        (wrong, {"stash": ["skip"]}, TypeError, "yielded str"),
        (number, {"stash": ["skip"]}, TypeError, "'skip' must be a tensor or None, got int"),
    ):
        with pytest.raises(error, match=message):
            layer(forward, **skips)(x)
    with pytest.raises(RuntimeError, match="which no layer before it has stashed"):
        Pop()(x)
    with pytest.raises(ValueError, match="has no skip 'other'; its skips are 'skip'"):
        Stash().isolate(Namespace(), only=["other"])
    with pytest.raises(TypeError, match=r"subclass of nn\.Module"):
        skippable()(cast(Any, int))


@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
def test_a_skip_that_a_later_stage_overwrites_is_refused(checkpoint: Any) -> None:
    """Stages have separate graphs, so the skip's gradient would miss the overwriting layer's."""
    layers = [nn.Linear(5, 5), Stash(value=lambda x: x), nn.ReLU(inplace=True), Pop()]
    pipe = on_cpus(nn.Sequential(*layers), [2, 1, 1], chunks=2, checkpoint=checkpoint)
    with (
        pipe.timeline(),
        pytest.raises(RuntimeError, match="the skip 'skip' was modified in place by a stage betw"),
    ):
        pipe(torch.randn(4, 5))
    with torch.no_grad():
        x = torch.randn(4, 5)
        assert torch.equal(pipe(x), torch.cat([*map(pipe.to_sequential(), x.chunk(2))]))


def test_layers_with_skips_may_be_replaced_added_and_removed(tasks: str) -> None:
    layers = [stashing(), nn.Linear(5, 5), popping()]
    pipe = on_cpus(nn.Sequential(*layers), [1, 1, 1], chunks=2)
    x = torch.randn(4, 5)
    pipe.partitions[2][0] = popping()
    assert pipe(x).shape == x.shape
    for changed in (nn.Tanh(), nn.Sequential(layers[0], popping())):
        pipe.partitions[0][0] = changed
        for _ in range(2):
            with pytest.raises(TypeError, match="skips do not match"):
                pipe(x)
    pipe.partitions[2][0] = nn.Tanh()  # Both skips are in stage 0 now.
    expected = torch.cat([pipe.to_sequential()(part) for part in x.chunk(2)])
    torch.testing.assert_close(pipe(x), expected)
