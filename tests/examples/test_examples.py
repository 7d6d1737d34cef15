"""The programs in examples/ start as their first lines say, and give the results of one process."""

import re
from pathlib import Path

import pytest
import torch
from support.programs import python, run_program
from torch.torch_version import TorchVersion

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
pytestmark = [pytest.mark.processes, pytest.mark.slow]
needs_the_backend = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.7", reason="the backend needs torch 2.7"
)


def command_of(program: str) -> tuple[str, list[str]]:
    """What its docstring says to start it with: ``torchrun`` or ``python``, and the arguments."""
    text = (ROOT / "examples" / program).read_text()
    [(starter, line)] = re.findall(r"^    (torchrun|python) (.*)$", text, re.MULTILINE)
    return starter, line.split()


def run(program: str, *more: str) -> str:
    """What it prints, with the ranks and arguments that its docstring says, and more arguments."""
    starter, arguments = command_of(program)
    ranks = None
    if starter == "torchrun":
        option, count, *arguments = arguments
        assert option == "--nproc-per-node"
        ranks = int(count)
    path, *arguments = arguments
    return run_program(ROOT / path, *arguments, *more, folder=ROOT, ranks=ranks)


def assert_losses_fall(printed: str, before: str = ": +", after: str = "") -> None:
    """The program compares them with those of one process, which it prints as well."""
    losses = rf"{before}((?:\d\.\d{{6}} ?)+){after}"
    ranks, one = (found.split() for found in re.findall(losses, printed, re.MULTILINE))
    assert len(ranks) == len(one) == 5 and float(ranks[-1]) < float(ranks[0])


@pytest.mark.parametrize("sample", [[], ["--sample"]])
def test_generate(sample: list[str]) -> None:
    pytest.importorskip("transformers")
    printed = run("generate.py", "--new", "8", *sample)
    assert "one process gives the same tokens" in printed
    assert re.search(r"new tokens: \[(\d+, ){7}\d+\]", printed)
    assert "lm_head" in printed  # The plan.


def test_generate_with_experts() -> None:
    pytest.importorskip("transformers")
    printed = run("generate.py", "--new", "8", "--experts", "8")
    assert "one process gives the same tokens" in printed and "mlp.experts" in printed
    sharded, whole = map(float, re.findall(r"(\S+) MiB of weights on rank 0", printed))
    planned = re.search(r"([\d,]+) bytes on each rank, of which one token reads ([\d,]+)", printed)
    assert planned is not None
    held, read = (int(text.replace(",", "")) / 2**20 for text in planned.groups())
    assert abs(held - sharded) <= 0.1 and sharded < 0.6 * whole and read < 0.4 * held


def test_generate_with_weights_of_a_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=61, pad_token_id=0,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    printed = run("generate.py", "--folder", str(tmp_path), "--new", "4")
    assert "one process gives the same tokens" in printed


@pytest.mark.full
def test_train_pipeline_tensor_as_a_user_starts_it() -> None:
    starter, arguments = command_of("train_pipeline_tensor.py")
    assert starter == "torchrun"
    command = ["-m", "torch.distributed.run", "--standalone", *arguments, "--steps", "5"]
    assert_losses_fall(python(*command, cwd=ROOT).stdout)


@needs_the_backend
@pytest.mark.parametrize("ranks", [2, 3])
def test_ddp(ranks: int) -> None:
    program = ROOT / "examples" / "ddp.py"
    assert_losses_fall(run_program(program, "--steps", "5", folder=ROOT, ranks=ranks))


@pytest.mark.full
def test_finetune_lora(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    assert_losses_fall(run("finetune_lora.py", "--steps", "5", "--output", str(tmp_path)))
    assert (tmp_path / "checkpoint-5" / "adapter_model.safetensors").is_file()


def test_from_fairscale() -> None:
    assert_losses_fall(run("from_fairscale.py", "--steps", "5"))


def test_schedule_timeline(tmp_path: Path) -> None:
    printed = run("schedule_timeline.py", "--folder", str(tmp_path))
    assert "all gradients are those of the plain model" in printed
    for name in ("gpipe", "1f1b", "eager"):
        assert (tmp_path / f"{name}.json").stat().st_size > 0
    # The last lane of 1F1B alternates, and is idle at the ends.
    assert "   .  .  0 [0   ] 1 [1   ] 2 [2   ] 3 [3   ] 4 [4   ] 5 [5   ] .  .  .  .\n" in printed
    assert printed.count("idle: 25% of the time") == 3


def test_hosts() -> None:
    printed = run("hosts.py", "--steps", "5")
    assert "4 ranks on 2 hosts, 2 on each" in printed
    assert_losses_fall(printed)


@needs_the_backend
def test_fsdp() -> None:
    assert_last_loss_is_lower("fsdp.py", "2 ranks")


@needs_the_backend
@pytest.mark.full
def test_hsdp() -> None:
    program = ROOT / "examples" / "fsdp.py"
    printed = run_program(program, "--steps", "5", folder=ROOT, ranks=4)
    assert "2 x 2 ranks: " in printed


@needs_the_backend
def test_dtensor() -> None:
    loss, one = re.findall(r"2 ranks: (\S+), one process: (\S+)", run("dtensor.py"))[0]
    assert loss == one


@needs_the_backend
def test_tp_plan() -> None:
    pytest.importorskip("transformers", minversion="5")
    assert "one process gives the same" in run("tp_plan.py", "--new", "4")


@needs_the_backend
@pytest.mark.full
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_trainer_ddp(launcher: str) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    if launcher == "torchrun":
        printed = run("trainer_ddp.py", "--steps", "3")
    else:
        launch = ["-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes", "2"]
        launch += ["--multi_gpu", "examples/trainer_ddp.py", "--steps", "3"]
        printed = python(*launch, cwd=ROOT).stdout
    assert "Trainer: DistributedDataParallel on pipekernels, 2 ranks" in printed
    assert "accelerate: DistributedDataParallel, averaged gradients [1.0]" in printed


@needs_the_backend
def test_lightning_ddp() -> None:
    pytest.importorskip("lightning")
    assert_last_loss_is_lower("lightning_ddp.py", "pipekernels, 2 ranks")


def assert_last_loss_is_lower(program: str, who: str) -> None:
    printed = run(program, "--steps", "5")
    first, last = re.findall(rf"{who}: (\S+) to (\S+)", printed)[0]
    assert float(last) < float(first)


def test_ray_train() -> None:
    pytest.importorskip("ray.train.torch")
    printed = run("ray_train.py", "--steps", "5")
    assert_losses_fall(printed, "(?:pipekernels|process): ", "$")


def test_every_program_is_run_here() -> None:
    own = Path(__file__).read_text()
    assert PROGRAMS and all(f'"{program}"' in own for program in PROGRAMS)
