"""What happens when a rank's symmetric memory on CUDA is full (on a pretended GPU)."""

import pytest
import torch
from support.cuda.host_time import DEVICE, Native, pretended_gpu

from pipekernels import Communicator


def test_an_error_says_how_much_was_wanted_how_much_there_is_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIPEKERNELS_SYMMETRIC_BYTES", "4096")
    comm = Communicator.threads(1)[0]
    with pretended_gpu():
        kept = comm.empty(512, dtype=torch.bfloat16, device=DEVICE)
        monkeypatch.setattr(Native, "allocate", lambda self, sizes, dtype, stream: None)
        with pytest.raises(RuntimeError) as raised:
            comm.empty(3, 1024, dtype=torch.bfloat16, device=DEVICE)
    assert kept.shape == (512,)
    assert str(raised.value) == (
        "no room for 6144 bytes of symmetric memory on cuda:0; drop symmetric tensors that are no "
        "longer needed, free device memory, or set PIPEKERNELS_SYMMETRIC_BYTES to more than 4096"
    )
