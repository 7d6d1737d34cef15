"""The rules on asynchronous products find what breaks them."""

from support.emitted.products import early_uses
from support.emitted.ptx import parse

PRODUCT = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1,%f2}, %rd1, %rd2, 1, 1, 1;"
COMMIT = "wgmma.commit_group.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned"
STEP = f"$L_step: {PRODUCT}\n{COMMIT}\n"
AGAIN = "@%p1 bra $L_step;\n"


def ptx(body: str) -> str:
    head = ".visible .entry kernel(.param .u64 a)\n{\n.reg .pred %p<2>;\n.loc 1 2 3\n"
    return f"{head}{body}\nret;\n}}"


def uses(body: str) -> list[str]:
    return early_uses(parse(ptx(body)))


def test_a_use_before_the_wait_is_found() -> None:
    add = "add.f32 %f3, %f3, %f1;\n"
    (found,) = uses(f"{PRODUCT}\n{add}{COMMIT}\n{WAIT} 0;")
    assert "add.f32" in found and "%f1" in found
    assert uses(f"{PRODUCT}\n{COMMIT}\n{add}{WAIT} 0;")
    assert uses(f"{PRODUCT}\n{COMMIT}\n{WAIT} 1;\n{add}")  # The wait leaves this group in flight.
    assert uses(f"{PRODUCT}\n{COMMIT}\n@%p1 bra $L_end;\n{WAIT} 0;\n$L_end: {add}")  # One way.
    assert not uses(f"{PRODUCT}\n{COMMIT}\n// {add}{WAIT} 0;\n{add}")
    assert not uses(f"{PRODUCT}\n{COMMIT}\n{COMMIT}\n{WAIT} 1;\n{add}")  # A later group may be.
    assert not uses(add)


def test_a_use_in_the_next_iteration_is_found() -> None:
    add = "add.f32 %f3, %f3, %f2;\n"
    assert uses(f"$L_step: {add}{PRODUCT}\n{COMMIT}\n{WAIT} 1;\n{AGAIN}{WAIT} 0;")
    assert not uses(f"$L_step: {add}{PRODUCT}\n{COMMIT}\n{WAIT} 0;\n{AGAIN}")
    assert not uses(f"{STEP}{WAIT} 1;\n{AGAIN}{WAIT} 0;\n{add}")  # Products add to one sum.


def test_groups_without_a_wait_and_other_sums_are_found() -> None:
    assert uses(f"{STEP}{AGAIN}{WAIT} 0;")
    assert uses(f"{PRODUCT}\n{PRODUCT.replace('%f2', '%f3')}\n{COMMIT}\n{WAIT} 0;")
