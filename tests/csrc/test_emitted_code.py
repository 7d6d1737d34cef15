"""Rules on the machine code of the CUDA kernels. No GPU is needed, but a CUDA toolkit is."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.emitted import build, rules
from support.emitted.build import ARCHITECTURES, Emitted

pytestmark = [pytest.mark.native]

COLLECTIVES = build.CSRC / "cuda" / "collectives"
WRONG = Path(build.__file__).with_name("wrong.cu")

# The accesses of device_team.cuh that order others, as PTX has them. All of them are needed.
ORDERED = {
    "ld.acquire.sys.global",
    "ld.relaxed.sys.global",
    "st.release.sys.global",
    "atom.acq_rel.gpu.global.exch",
    "fence.acq_rel.sys",
}
# Of words that hold data and flag, which nothing needs to order: OneShotBlock::pushed().
PUSH = "st.relaxed.sys.global"


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> list[Emitted]:
    """All kernels, for all architectures that there are."""
    return build.read(build.built_objects(), tmp_path_factory.mktemp("kernels"))


@pytest.fixture(params=ARCHITECTURES)
def kernels(emitted: list[Emitted], request: pytest.FixtureRequest) -> list[Emitted]:
    """All kernels for one architecture."""
    found = [kernel for kernel in emitted if kernel.architecture == request.param]
    if not found:
        build.skip(f"nothing was built for {request.param}; `make cuda-check` does")
    return found


@pytest.fixture
def collectives(kernels: list[Emitted]) -> list[Emitted]:
    stems = {path.stem for path in COLLECTIVES.rglob("*.cu")}
    return [kernel for kernel in kernels if kernel.file in stems]


def broken(kernels: list[Emitted], rule: Callable[[Emitted], object]) -> dict[str, object]:
    """What breaks a rule, by kernel."""
    assert kernels
    return {kernel.name: found for kernel in kernels if (found := rule(kernel))}


def pushes(kernel: Emitted) -> bool:
    """Whether it is the all-reduce in one step, in rank order."""
    return re.search(r"one_shot_kernel.*OrderE0E", kernel.name) is not None


RULES: dict[str, Callable[[Emitted], object]] = {
    "non-coherent loads": lambda kernel: rules.non_coherent_loads(kernel.sass),
    "non-coherent loads of PTX": lambda kernel: rules.non_coherent_loads_of_ptx(kernel.ptx),
    "accesses": lambda kernel: set(rules.ordered_accesses(kernel.ptx)) - ORDERED,
    "stores": lambda kernel: rules.unfenced_stores(kernel.sass),
    "exchanges": lambda kernel: rules.unfenced_exchanges(kernel.sass),
    "polls": lambda kernel: rules.polls_without_acquire(kernel.ptx),
    "invalidations": lambda kernel: rules.lost_invalidations(kernel.sass, kernel.ptx),
    "local memory": lambda kernel: rules.local_memory(kernel.sass),
    "stack": lambda kernel: kernel.stack_bytes,
}
OF_COLLECTIVES = ["non-coherent loads", "non-coherent loads of PTX", "exchanges", "polls"]


@pytest.mark.parametrize("rule", [*OF_COLLECTIVES, "invalidations"])
def test_collectives_break_no_rule(collectives: list[Emitted], rule: str) -> None:
    assert not broken(collectives, RULES[rule])


@pytest.mark.parametrize("rule", ["stack", "local memory"])
def test_no_kernel_keeps_data_in_local_memory(kernels: list[Emitted], rule: str) -> None:
    assert not broken(kernels, RULES[rule])


def test_collectives_order_accesses_by_those_of_the_team_only(collectives: list[Emitted]) -> None:
    def others(kernel: Emitted) -> set[str]:
        expected = ORDERED | {PUSH} if pushes(kernel) else ORDERED
        return set(rules.ordered_accesses(kernel.ptx)) ^ expected

    assert not broken(collectives, others)


def test_a_fence_of_system_scope_comes_before_every_release(collectives: list[Emitted]) -> None:
    others = [kernel for kernel in collectives if not pushes(kernel)]
    pushing = [kernel for kernel in collectives if pushes(kernel)]
    assert not broken(others, RULES["stores"])
    assert not broken(pushing, lambda kernel: rules.lost_fences(kernel.sass, kernel.ptx))


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Emitted]]:
    """The kernels of wrong.cu, by name."""
    folder = tmp_path_factory.mktemp("wrong")
    generations = [name.removeprefix("sm_") for name in ARCHITECTURES]
    build.run(
        build.compiler(), "-std=c++17", "-O3", "-c", WRONG, "-o", folder / "wrong.cu.o",
        *(f"-gencode=arch=compute_{n},code=[compute_{n},sm_{n}]" for n in generations),
    )  # fmt: skip
    found: dict[str, list[Emitted]] = {}
    for kernel in build.read([folder / "wrong.cu.o"], folder):
        found.setdefault(kernel.name, []).append(kernel)
    assert all(len(found[name]) == len(ARCHITECTURES) for name in found)
    return found


BREAKS = {
    "right": set(),
    "non_coherent": {"non-coherent loads", "non-coherent loads of PTX"},
    "array_in_memory": {"local memory", "stack"},
    "no_fence": {"accesses", "stores"},
    "fence_of_the_device": {"accesses", "stores"},
    "fence_on_one_way": {"accesses", "stores"},
    "fence_before_the_data": {"accesses", "stores"},
    "relaxed_exchange": {"accesses", "exchanges"},
    "poll_without_acquire": {"polls"},
    "volatile_poll": {"accesses"},
}


@pytest.mark.parametrize("name", BREAKS)
def test_the_rules_find_what_breaks_them(wrong: dict[str, list[Emitted]], name: str) -> None:
    for kernel in wrong[name]:
        assert {rule for rule, find in RULES.items() if find(kernel)} == BREAKS[name], kernel


def test_a_lost_invalidation_is_found(wrong: dict[str, list[Emitted]]) -> None:
    for polls, acquires in zip(wrong["poll_without_acquire"], wrong["right"], strict=True):
        assert rules.lost_invalidations(polls.sass, acquires.ptx) == 1
