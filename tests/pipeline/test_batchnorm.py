"""Deferred batch normalisation: one update of the statistics per mini-batch, from all its rows."""

import copy
from typing import Any, cast

import pytest
import torch
from support.pipes import on_cpus
from torch import nn

from pipekernels import Pipe
from pipekernels.pipeline.batchnorm import DeferredBatchNorm, convert_deferred_batch_norm


def test_layers_may_be_converted_before_and_after_the_pipe_is_made() -> None:
    plain = nn.Sequential(nn.BatchNorm1d(3), nn.Tanh()).double()
    pipe = Pipe(convert_deferred_batch_norm(copy.deepcopy(plain)), [1, 1], chunks=4)
    later = Pipe(copy.deepcopy(plain), [1, 1], chunks=4)
    later.eval()(torch.ones(8, 3, dtype=torch.float64))
    convert_deferred_batch_norm(later.train())
    for trained in (pipe, copy.deepcopy(pipe), later):
        x = 5 + torch.randn(8, 3, dtype=torch.float64)
        norm = copy.deepcopy(plain[0])
        norm(x), trained(x)
        assert_same_statistics(norm, trained[0])


def test_conversion_keeps_parameters_and_keys_and_refuses_bad_chunks() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2, affine=False)))
    keys, weight = list(module.state_dict()), module[0].weight
    converted = convert_deferred_batch_norm(module, 4)
    assert converted is module and isinstance(module[1][0], DeferredBatchNorm)
    assert list(module.state_dict()) == keys and module[0].weight is weight
    with pytest.raises(ValueError, match="chunks is 0"):
        convert_deferred_batch_norm(module, 0)
    plain = nn.Sequential(nn.BatchNorm1d(2))
    weight = plain[0].weight
    assert DeferredBatchNorm.convert_deferred_batch_norm(plain, cast(Any, 4.0)) is plain
    assert isinstance(plain[0], DeferredBatchNorm) and plain[0].weight is weight
    with pytest.raises(ValueError, match="at least 2"):
        DeferredBatchNorm(3)(torch.zeros(3))


class NormAndRelu(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


def test_conversion_for_another_number_of_chunks() -> None:
    first = convert_deferred_batch_norm(nn.Sequential(nn.BatchNorm1d(3)), 2)[0]
    first(torch.randn(4, 3))
    assert convert_deferred_batch_norm(first, 2) is first
    second = convert_deferred_batch_norm(first, 3)
    assert second is first and second.chunks == 3
    for _ in range(3):
        assert second.num_batches_tracked == 0
        second(torch.randn(4, 3))
    assert second.num_batches_tracked == 1


@pytest.mark.parametrize("which", ["subclass", "lazy", "parametrized"])
def test_layers_that_would_lose_behaviour_are_not_converted(which: str) -> None:
    norm: nn.Module = NormAndRelu(2)
    if which == "lazy":
        norm = nn.LazyBatchNorm1d()
    elif which == "parametrized":
        norm = nn.utils.parametrizations.weight_norm(nn.BatchNorm1d(2), dim=None)
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(norm))
    before = type(norm)
    convert_deferred_batch_norm(module)
    assert type(module[0]) is DeferredBatchNorm and type(norm) is before


def test_conversion_keeps_hooks_attributes_and_sharing() -> None:
    norm = nn.BatchNorm1d(2)
    norm.note = "mine"  # type: ignore[assignment]
    seen = []
    norm.register_forward_hook(lambda *_: seen.append(1))
    module = convert_deferred_batch_norm(nn.Sequential(norm, nn.Sequential(norm.eval())))
    module(torch.randn(3, 2))
    assert module[0] is module[1][0] and isinstance(module[0], DeferredBatchNorm)
    assert len(seen) == 2 and module[0].note == "mine" and not module[0].training


# ---- outside of a pipe: what torchgpipe's layer promises -----------------------------------------


def in_chunks(module: nn.Module, x: torch.Tensor, chunks: int) -> torch.Tensor:
    return torch.cat([module(part) for part in x.chunk(chunks)])


def assert_same_statistics(norm: nn.Module, deferred: nn.Module) -> None:
    torch.testing.assert_close(deferred.state_dict(), norm.state_dict())


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_layer_commits_by_itself_after_its_chunks(
    chunks: int, requires_grad: bool, momentum: float | None
) -> None:
    """A pipe's layers have the bits of this loop's, see ``test_equals_the_loop.py``."""
    norm = nn.BatchNorm2d(3, momentum=momentum)
    deferred = DeferredBatchNorm.convert_deferred_batch_norm(copy.deepcopy(norm), chunks)
    for _ in range(2):
        x = torch.randn(15, 3, 5, 5) * torch.randint(1, 9, (3, 1, 1))
        x.requires_grad_(requires_grad)
        norm(x)
        in_chunks(deferred, x, chunks)
        assert_same_statistics(norm, deferred)
    norm.eval(), deferred.eval()
    torch.testing.assert_close(in_chunks(deferred, x, chunks), norm(x))
    assert_same_statistics(norm, deferred)


def test_a_layer_without_statistics_is_left_as_it_is() -> None:
    for kind in (nn.BatchNorm1d, NormAndRelu):
        layers = nn.Sequential(kind(3, track_running_stats=False))
        assert type(on_cpus(layers, [1], deferred_batch_norm=True)[0]) is kind


def test_a_pipe_commits_whatever_the_chunks_of_its_layers() -> None:
    norm = nn.BatchNorm1d(3)
    module = nn.Sequential(convert_deferred_batch_norm(copy.deepcopy(norm), chunks=2))
    pipe = on_cpus(module, [1], chunks=3)
    x = torch.randn(9, 3)
    norm(x), pipe(x)
    assert_same_statistics(norm, pipe[0])
    norm(x), in_chunks(pipe[0], x, 2)  # And by itself again.
    assert_same_statistics(norm, pipe[0])
