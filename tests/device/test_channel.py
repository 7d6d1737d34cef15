"""Channels: who holds which memory until when, on recorded streams."""

import gc
from typing import Any

import pytest
import torch
from support.cuda.recorded_channel import RecordedChannel
from support.cuda.recorded_streams import Machine, Race, machine

from pipekernels.device import streams
from pipekernels.device.channel import Channel, channel
from pipekernels.ops import p2p_copy

CPU, GPU, OTHER = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


def on(device: torch.device, size: int = 5) -> torch.Tensor:
    return p2p_copy(torch.arange(float(size)), device)


def test_nothing_is_issued_on_a_stream_that_is_captured() -> None:
    with machine() as made:
        channel = Channel(GPU, OTHER)
        x = on(GPU)
        (y,), pending = channel.send([x])
        made.current(GPU).is_captured = True
        with pytest.raises(RuntimeError, match="cannot be part of a CUDA graph"):
            channel.send([x])
        channel.settle()
        assert channel._sources  # Their stream cannot wait for the copy now.
        made.current(GPU).is_captured = False
        made.current(OTHER).is_captured = True
        with pytest.raises(RuntimeError, match="cuda:1 is being captured, and a CUDA graph cannot"):
            pending.wait()
        made.current(OTHER).is_captured = False
        channel.settle()
        assert not channel._sources
        pending.wait()
        assert torch.equal(p2p_copy(y, CPU), torch.arange(5.0))


def test_a_buffer_is_kept_while_a_stream_that_used_it_is_captured() -> None:
    with machine() as made:
        channel = Channel(GPU, OTHER)
        copies, pending = channel.send([on(GPU)])
        pending.wait()
        del copies
        made.current(OTHER).is_captured = True
        channel.settle()
        assert len(channel._received) == 1
        made.current(OTHER).is_captured = False
        channel.settle()
        made.poll()
        assert not channel._received and not channel._unused


@pytest.mark.parametrize("source", [CPU, GPU], ids=str)
def test_memory_may_run_out_midway(source: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a buffer, or in the extension: later copies are as if nothing had been."""

    def run_out(*args: Any) -> None:
        raise RuntimeError("out of memory")

    with machine() as made:
        channel = Channel(source, OTHER)
        sources = [on(source), on(source, 40)]
        channel.send(sources)
        for owner, name in ((streams, "empty_like"), (channel._native, "send")):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, run_out)
                with pytest.raises(RuntimeError, match="out of memory"):
                    channel.send(sources)
            made.poll()
            copies, pending = channel.send(sources)
            pending.wait()
            for copy, given in zip(copies, sources, strict=True):
                assert torch.equal(p2p_copy(copy, CPU), p2p_copy(given, CPU))
            del copies, pending, copy
        channel.settle()
        made.poll()
        assert not channel._sources and not channel._received


def test_the_garbage_collector_may_settle_an_edge_during_a_copy() -> None:
    """It must not drop what the copy is about to read."""

    class Settled(RecordedChannel):
        def send(self, *args: Any) -> bool:
            edge.settle(blocking=False)
            return super().send(*args)

    with machine() as made:
        edge = Channel(GPU, OTHER)
        edge._native.__class__ = Settled
        copies, _ = edge.send([on(GPU)])
        assert len(edge._sources) == len(edge._received) == len(copies) == 1
        gc.collect()
        made.poll()


def drop_at_once(made: Machine, channel: Channel) -> None:
    channel.send([on(GPU)])
    made.poll()


def test_pinned_memory_is_kept_until_the_copy_is_done() -> None:
    """Even if nobody waits for the copy."""
    with machine() as made:
        channel = Channel(GPU, CPU)
        drop_at_once(made, channel)
        channel.settle()
        made.poll()
        assert len(channel._pending_host_copies) == 1
        made.synchronize()
        channel.settle()
        made.poll()
        assert not channel._pending_host_copies
        drop_at_once(made, channel)
        channel._pending_host_copies.clear()
        with pytest.raises(Race, match="memory goes back to thread while"):
            made.poll()
        made.synchronize()


def test_pinned_memory_is_read_until_the_copy_is_done() -> None:
    """No thread waits for it, but where it holds a gradient, which may become a parameter's."""
    with machine() as made:
        x = made.pinned_empty((4,), (1,), torch.float32)
        p2p_copy(x.fill_(1), GPU)
        p2p_copy(x, GPU)
        assert len(channel(CPU, GPU)._sources) == 2
        with pytest.raises(Race):
            x.zero_()
        channel(CPU, GPU).settle()
        x.zero_()
        there = on(GPU, 4).requires_grad_()
        p2p_copy(there, CPU).backward(x)
        x.fill_(1)


def test_snapshots_need_no_settling() -> None:
    """Sources may be overwritten at once, also those with holes, whose values are copied once."""
    with machine() as made:
        channel = Channel(GPU, OTHER)
        x = on(GPU, 12).view(3, 4)
        copies, pending = channel.send([x[:, ::2], x], snapshot=True)
        x.zero_()
        pending.wait()
        expected = torch.arange(12.0).view(3, 4)
        assert torch.equal(p2p_copy(copies[0], CPU), expected[:, ::2])
        assert torch.equal(p2p_copy(copies[1], CPU), expected)
        channel.settle()
        copies, pending = channel.send([x])
        with pytest.raises(Race):
            x.zero_()
        made.current(GPU).wait_event(channel._native.leaving.record_event())
