"""The checks of random collectives detect errors."""

import pytest
import torch
from support.sweeps.collectives import bits, check

pytestmark = pytest.mark.full


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_one_wrong_bit_is_detected(dtype: torch.dtype) -> None:
    right = torch.arange(1, 1000).to(dtype)
    check(right.clone(), right, special=False)
    check(torch.stack([right, right], 1)[:, 0], right, special=False)
    for special in (False, True):
        wrong = right.clone()
        wrong.view(torch.uint8)[137] ^= 1
        with pytest.raises(AssertionError, match="1 of 999 elements differ"):
            check(wrong, right, special)
        with pytest.raises(AssertionError, match="shape"):
            check(right[:, None], right, special)


def test_only_special_values_may_differ_in_the_sign_of_zero_and_the_bits_of_nan() -> None:
    a, b = torch.tensor([0.0, float("nan")]), torch.tensor([-0.0, -float("nan")])
    assert not torch.equal(bits(a), bits(b))
    check(a, b, special=True)
    with pytest.raises(AssertionError):
        check(a, b, special=False)
