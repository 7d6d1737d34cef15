"""The rules on asynchronous products find what breaks them."""

from support.emitted.products import early_uses, of_sass, overlaps_steps
from support.emitted.ptx import parse
from support.emitted.sass import kernels

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


def overlaps(body: str) -> bool:
    return overlaps_steps(parse(ptx(body)))


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


def test_loops_that_wait_for_all_products_do_not_overlap() -> None:
    assert overlaps(f"{STEP}{WAIT} 1;\n{AGAIN}{WAIT} 0;")
    assert overlaps(f"{STEP}{WAIT} 1;\n@%p1 bra $L_on;\n{WAIT} 0;\n$L_on: {AGAIN}")
    assert not overlaps(f"{STEP}{WAIT} 1;\n{WAIT} 0;\n{AGAIN}")
    assert not overlaps(f"{STEP}{WAIT} 0;\n{AGAIN}")
    assert not overlaps(f"{STEP}{WAIT} 1;\n{WAIT} 0;")  # No loop.
    inner = "{ $L_poll: @%p1 bra $L_poll; }\n"
    assert not overlaps(f"{STEP}{WAIT} 0;\n{inner}{WAIT} 1;\n{inner}")  # Labels of other scopes.


def test_loops_in_sass() -> None:
    def code(*lines: str) -> str:
        placed = (
            line if line[0] == "." else f"  /*{at:04x}*/  {line} ;" for at, line in enumerate(lines)
        )
        return "\n".join(["\t.section\t.text.kernel,", ".text.kernel:", *placed])

    def overlap(*lines: str) -> bool:
        (kernel,) = kernels(code(*lines))
        return overlaps_steps(of_sass(kernel))

    product, some, every = (
        "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0",
        "WARPGROUP.DEPBAR.LE gsb0, 0x1",
        "WARPGROUP.DEPBAR.LE gsb0, 0x0",
    )
    again = "@P0 BRA `(.L_x_1)"
    assert overlap(".L_x_1:", product, some, again, every, "EXIT")
    assert overlap(".L_x_1:", product, some, "BRA `(.L_x_2)", "NOP", ".L_x_2:", again, "EXIT")
    assert not overlap(".L_x_1:", product, every, product, some, again, "EXIT")
    assert not overlap(".L_x_1:", product, some, "EXIT", again)
    assert not overlap(".L_x_1:", product, some, "BRA `(.L_x_2)", again, ".L_x_2:", "EXIT")
