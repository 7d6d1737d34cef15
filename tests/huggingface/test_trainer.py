"""transformers' Trainer and accelerate with sharded models, beside one process without shards."""

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from support.levels import in_gate
from support.models import assert_close_to_largest, model_of, tokens
from support.ranks import on_ranks, run_processes
from torch import nn
from torch.utils.data import DataLoader

from pipekernels import Communicator, tensor_parallelize
from pipekernels.tensor_parallel import TrainerMixin, adapt_accelerator

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")

pytestmark = [pytest.mark.slow, pytest.mark.processes]
LIMIT = 0.2  # Of the norm of gradients.


Trainer: Any = transformers.Trainer


class ShardedTrainer(TrainerMixin, Trainer):
    pass


def build(kind: str) -> nn.Module:
    model = model_of("Llama").train()
    if kind == "LoRA":
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False
        )
        model = peft.get_peft_model(model, config)
    return model


def as_torchrun(comm: Communicator) -> None:
    """Sets what torchrun does."""
    if comm.world_size > 1:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", LOCAL_RANK=str(comm.rank))
        os.environ.update(RANK=str(comm.rank), WORLD_SIZE=str(comm.world_size))
        os.environ["OMP_NUM_THREADS"] = "1"  # accelerate would give each rank all cores.


def train(
    comm: Communicator, kind: str, output: str, resume: str | None = None, **options: Any
) -> dict[str, list[Any]]:
    """Six steps, with checkpoints after three and six; then predictions."""
    as_torchrun(comm)
    data = [{"input_ids": row, "labels": row} for row in tokens(30, 9).tolist()]
    arguments = transformers.TrainingArguments(
        output, max_steps=6, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        per_device_eval_batch_size=2, learning_rate=1e-2, weight_decay=0.1, max_grad_norm=LIMIT,
        logging_steps=1, save_steps=3, eval_strategy="steps", eval_steps=3, use_cpu=True,
        load_best_model_at_end=True, report_to="none", disable_tqdm=True,
        include_num_input_tokens_seen="all", **options,
    )  # fmt: skip
    model, trainer_class = build(kind), transformers.Trainer
    if comm.world_size > 1:
        model, trainer_class = tensor_parallelize(model, "auto", comm), ShardedTrainer
    trainer = trainer_class(model, arguments, train_dataset=data[:25], eval_dataset=data[25:])
    trainer.train(resume_from_checkpoint=resume)
    log = trainer.state.log_history
    keys = ("loss", "grad_norm", "eval_loss", "num_input_tokens_seen")
    found = {key: [e[key] for e in log if key in e] for key in keys}
    found["grad_norm"] = [float(norm) for norm in found["grad_norm"]]
    predicted = trainer.predict(data[25:])
    speeds = {**next(e for e in log if "eval_loss" in e), **predicted.metrics}
    found["steps"] = [  # Of the five samples.
        round(5 * speeds[f"{kind}_steps_per_second"] / speeds[f"{kind}_samples_per_second"], 1)
        for kind in ("eval", "test")
    ]
    found["shape"] = list(predicted.predictions.shape)
    found["predictions"] = predicted.predictions.flatten().tolist()
    return found


def alone_in_counting(comm: Communicator, kind: str, output: str) -> dict[str, list[Any]]:
    return train(comm, kind, output, average_tokens_across_devices=False)


def assert_like(found: dict[str, list[Any]], expected: dict[str, list[Any]]) -> None:
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=1e-4, abs=1e-5), key


@pytest.mark.parametrize("kind", in_gate(["whole"], ["whole", "LoRA"]))
def test_trainer_gives_what_one_process_does_and_either_goes_on(kind: str, tmp_path: Path) -> None:
    alone, sharded = str(tmp_path / "alone"), str(tmp_path / "sharded")
    [expected] = run_processes(1, train, kind, alone)
    assert min(expected["grad_norm"]) > LIMIT and expected["loss"][-1] < expected["loss"][0]
    assert (
        expected["shape"] == [5, 9, 61]
        and expected["steps"] == [3, 3]
        and len(expected["eval_loss"]) == 2
    )
    first, second = run_processes(2, train, kind, sharded)
    assert_like(first, expected)
    # Losses and norms are logged from 32-bit copies.
    assert first["predictions"] == second["predictions"] and first["loss"] == second["loss"]

    file = "adapter_model.safetensors" if kind == "LoRA" else "model.safetensors"
    for name in (file, "optimizer.pt"):
        found, wanted = (load(Path(folder) / "checkpoint-6" / name) for folder in (sharded, alone))
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)

    for ranks, folder in ((2, alone), (1, sharded)):
        for found in run_processes(ranks, train, kind, folder, f"{folder}/checkpoint-3"):
            assert_like(found, expected)
    for found in run_processes(2, alone_in_counting, kind, sharded):
        assert_like(found, expected)


def load(path: Path) -> dict[str, Any]:
    if path.suffix == ".safetensors":
        return pytest.importorskip("safetensors.torch").load_file(path)
    return torch.load(path, weights_only=True)["state"]


def train_with_accelerate(comm: Communicator, folder: str) -> list[Any]:
    """Losses, norms and metrics; the Accelerator in a loop as its documentation has it."""
    as_torchrun(comm)
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = build("whole")
    if comm.world_size > 1:
        adapt_accelerator(accelerator, tensor_parallelize(model, "auto", comm))
    loader: Any = DataLoader(cast(Any, tokens(11, 9)), batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found: list[Any] = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), LIMIT)
                found.append(norm.item())
            optimizer.step()
            optimizer.zero_grad()
        found += [loss.item(), accelerator.gather_for_metrics(batch).shape[0]]
        found.append(len(accelerator.gather_for_metrics(batch.tolist(), use_gather_object=True)))
    accelerator.save_model(model, folder)
    if comm.world_size > 1:
        with pytest.raises(ValueError, match=r"got 1 parameters, not the parameters of the model"):
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            accelerator.clip_grad_norm_(next(model.parameters()), LIMIT)
        for method in (accelerator.save_state, accelerator.load_state):
            message = "shards of one rank and load them on all"
            with pytest.raises(NotImplementedError, match=message):
                method(folder)
    return found


def test_accelerate_gives_what_one_process_does(tmp_path: Path) -> None:
    folders = [tmp_path / "alone", tmp_path / "sharded"]
    [expected] = run_processes(1, train_with_accelerate, str(folders[0]))
    first, second = run_processes(2, train_with_accelerate, str(folders[1]))
    # In each of six forwards and backwards, a norm may round to the next number of float32.
    bound = 12 * 2**-22
    assert first == second == pytest.approx(expected, rel=bound)
    wanted, found = (load(folder / "model.safetensors") for folder in folders)
    assert_close_to_largest(found, wanted, bound)


@on_ranks(2)
def test_errors(comm: Communicator, tmp_path: Path) -> None:
    as_torchrun(comm)
    model = build("whole")
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(ValueError, match=r"sharded not at all, but accelerate has 2 processes"):
        adapt_accelerator(accelerator, model)
    part = Communicator.from_process_group(
        dist.new_group([comm.rank], use_local_synchronization=True)
    )
    with pytest.raises(ValueError, match=r"sharded over 1 ranks, but accelerate has 2 processes"):
        adapt_accelerator(accelerator, tensor_parallelize(build("whole"), "auto", part))
    layers = {"*.gate_proj": "column", "*.up_proj": "column", "*.down_proj": "row"}
    tensor_parallelize(model, layers, comm)
    options = {"use_cpu": True, "report_to": "none", "max_steps": 1}
    arguments = transformers.TrainingArguments(str(tmp_path), **options)
    data = [{"input_ids": row, "labels": row} for row in tokens(8, 9).tolist()]
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel averages over .*TrainerMixin"):
        transformers.Trainer(model, arguments, train_dataset=data).train()


def test_an_accelerator_that_shards_or_scales_is_refused() -> None:
    [comm] = Communicator.threads(1)
    model = tensor_parallelize(build("whole"), "auto", comm)
    accelerator = SimpleNamespace(
        num_processes=1, distributed_type=SimpleNamespace(name="FSDP"), mixed_precision="no"
    )
    with pytest.raises(ValueError, match="by FSDP, which would shard the shards again"):
        adapt_accelerator(accelerator, model)
    accelerator.distributed_type.name, accelerator.mixed_precision = "NO", "fp16"
    with pytest.raises(ValueError, match="use 'bf16', which needs no scaling"):
        adapt_accelerator(accelerator, model)


def test_the_mixin_without_a_trainer_is_refused() -> None:
    with pytest.raises(TypeError, match=re.escape("have no method create_accelerator")):
        type("Wrong", (transformers.Trainer, TrainerMixin), {})
