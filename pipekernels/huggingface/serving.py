"""``pipekernels serve`` on one rank: transformers' server, with a model that is sharded.

Every rank runs a manager of transformers' continuous batching. Rank 0 answers OpenAI's API through
transformers' own server and gives its manager the requests, each with all that it asks for; the
managers of the other ranks get them from there, and all compute the same batches.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import transformers
import uvicorn
from fastapi import HTTPException
from torch import Tensor
from transformers.cli.serving import chat_completion, completion, model_manager, response, server
from transformers.cli.serving.utils import CBGenerateManager, GenerationState
from transformers.generation.continuous_batching import cb_logits_processors, model_runner

from pipekernels.comm import Communicator
from pipekernels.huggingface.load import load_pretrained
from pipekernels.tensor_parallel import tensor_parallelize

_Manager: Any = CBGenerateManager
_PAGE, _BATCH = 64, 512  # Tokens of a step: a longer prompt would hold up the answers beside it.
_GRACE = 8  # Seconds for what runs when the server is to end.
_UNHEALTHY = 0.5  # Seconds for which /health tells of a dead rank before the server ends.
# Others would load other models, or run this one on rank 0 alone.
_ROUTES = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/health"}


class Sampler(cb_logits_processors.ContinuousBatchingLogitsProcessorList):
    """Changes the scores of each request in a batch by its own parameters, so that their argmax is
    its token: the same on all ranks, whatever else is in the batch.

    A sampled token is the argmax of scores with Gumbel noise, here by a generator with the seed of
    the request and the position (Maddison, Tarlow, Minka, "A* Sampling", 2014).
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(transformers.LogitsProcessorList())
        self.do_processing = True
        self.supported_keys = {"processors": list, "stop": list, "seed": int}
        self._tokenizer = tokenizer
        self._states: list[Any] = []
        self._generator = torch.Generator()

    def prepare_tensor_args(self, requests_in_batch: Sequence[Any], arg_storage: Tensor) -> Tensor:
        self._states = [each.state for each in requests_in_batch if each.has_new_token]
        return arg_storage

    def __call__(self, input_ids: Tensor, scores: Tensor, args: Tensor) -> Tensor:
        # Of [batch, vocabulary]; behind those of the requests that get a token, rows of no meaning.
        for row, state in zip(scores, self._states, strict=False):
            asked = state.logit_processor_kwargs
            tokens = state.initial_tokens + state.generated_tokens
            if asked["processors"]:
                row.copy_(asked["processors"](torch.tensor([tokens]), row[None])[0])
            if asked["seed"] >= 0:
                seeded = self._generator.manual_seed(asked["seed"] << 32 | len(tokens))
                row -= torch.empty_like(row).exponential_(generator=seeded).log_()
            if asked["stop"]:
                token = int(row.argmax())
                text = self._tokenizer.decode([*state.generated_tokens, token])
                if any(word in text for word in asked["stop"]):
                    state._eos_token_ids.add(token)
        return scores


class Requests(_Manager):  # type: ignore[misc]
    """Gives requests to a manager, each with its own parameters, and with a name of ours, as names
    that clients give need not differ."""

    def __init__(self, manager: Any) -> None:
        super().__init__()
        self._cb = manager
        self._asked: dict[str, dict[str, Any]] = {}
        add = manager.add_request

        def add_later(*args: Any, request_id: str, **more: Any) -> str:
            # In the next turn of the loop: transformers has registered who takes the answers then.
            more |= self._asked.pop(request_id)
            asyncio.get_running_loop().call_soon(partial(add, *args, request_id=request_id, **more))
            return request_id

        manager.add_request = add_later
        room = model_runner.infer_max_single_request_tokens(manager.batch_processor.cache)
        config = manager.model.config.get_text_config()
        self._limit = min(room, getattr(config, "max_position_embeddings", room))
        self._vocabulary = config.vocab_size

    def generate_streaming(self, *args: Any, request_id: str, **more: Any) -> Any:
        return super().generate_streaming(*args, request_id=self._admit(*args), **more)

    async def generate_non_streaming(self, *args: Any, request_id: str) -> Any:
        return await super().generate_non_streaming(*args, request_id=self._admit(*args))

    def _admit(self, model: Any, _: Any, inputs: Any, config: Any) -> str:
        """Name a request and note what it asks for. Its new tokens are limited to the room in the
        cache. An HTTPException, 400, for what would end the loop that all requests share."""
        tokens, asked, own = inputs["input_ids"], config.max_new_tokens, model.generation_config
        # To ask for a temperature is to ask for sampling, which transformers leaves as it was.
        is_own = (config.temperature, config.top_p) == (own.temperature, own.top_p)
        config.do_sample = config.do_sample or (config.temperature != 0 and not is_own)
        room = self._limit - len(tokens)
        try:
            if not tokens or room < 1:
                raise ValueError(f"{len(tokens)} tokens in the prompt, not 1 to {self._limit - 1}")
            if asked is not None and asked < 1:
                raise ValueError(f"max_tokens must be 1 or more, got {asked}")
            if config.guidance_scale not in (None, 1):
                raise ValueError("guidance_scale is not supported here; leave it out")
            config.max_new_tokens = min(room, room if asked is None else asked)
            model._prepare_special_tokens(config)
            processors = model._get_logits_processor(config, len(tokens))
            # An error in these would show on all ranks otherwise.
            processors(torch.tensor([tokens]), torch.zeros(1, self._vocabulary))
        except Exception as error:
            raise HTTPException(400, str(error)) from error
        stop, name = config.stop_strings or [], uuid.uuid4().hex
        self._asked[name] = {
            "processors": processors,
            "stop": [stop] if isinstance(stop, str) else stop,
            # The handler has seeded torch's generator, if the request has a seed.
            "seed": int(torch.randint(2**31, ())) if config.do_sample else -1,
        }
        return name


class Server(uvicorn.Server):
    """Says where it listens; ends soon after a rank has died."""

    def __init__(self, config: Any, manager: Any, folder: Path, pids: Sequence[int]) -> None:
        super().__init__(config)
        self._manager, self._folder, self._pids = manager, folder, pids

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"{self._folder} is served on http://{shown}:{port}/v1", flush=True)

    async def on_tick(self, counter: int) -> bool:
        # The launcher ends this rank, too, when it has seen another one die: maybe before the
        # manager notices, so that a signal alone does not mean that all is well.
        ends: bool = await super().on_tick(counter)
        status = self._manager.background_thread_status
        dead = [rank for rank, pid in enumerate(self._pids) if not Path(f"/proc/{pid}").exists()]
        if dead and status.fatal_error is None:
            status.record_fatal_error(RuntimeError(f"rank {dead[0]} has died"))
        if status.fatal_error is not None:
            await asyncio.sleep(_UNHEALTHY)
            os._exit(1)
        return ends

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.should_exit = True  # A second Ctrl-C changes nothing: the launcher repeats the first.


def _load(options: argparse.Namespace, comm: Communicator) -> tuple[Any, Any]:
    """The sharded model and its tokenizer."""
    folder = options.folder
    config = transformers.AutoConfig.from_pretrained(folder)
    dtype = config.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    tensor_parallelize(model.eval(), "auto", comm)
    load_pretrained(model, folder, bits=options.bits, progress=comm.rank == 0)
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def _manager(model: Any, tokenizer: Any, cache_tokens: int | None) -> Any:
    """The manager of this rank, running: each token is the argmax of what the sampler makes."""
    config = transformers.ContinuousBatchingConfig(
        page_size=_PAGE,
        num_blocks=cache_tokens and -(-cache_tokens // _PAGE),
        max_batch_tokens=_BATCH,
    )
    greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1)
    manager = model.init_continuous_batching(greedy, config)
    manager.logit_processor = Sampler(tokenizer)
    manager.warmup()  # Makes the cache, on all ranks.
    scheduler = manager.batch_processor.scheduler
    clear = scheduler.clear_cancelled_requests

    def clear_and_go_on() -> Any:
        # A full cache blocks new requests until one ends; but the last one may be cancelled.
        cancelled = clear()
        scheduler.block_new_requests &= bool(scheduler.active_requests)
        return cancelled

    scheduler.clear_cancelled_requests = clear_and_go_on
    manager.start()
    return manager


def _answer(
    options: argparse.Namespace, model: Any, tokenizer: Any, manager: Any, pids: Sequence[int]
) -> None:
    """Serve until a signal comes or a rank has ended; ``pids`` are the processes of all ranks."""
    models: Any = model_manager.ModelManager()
    models.force_model = str(options.folder)
    own = {"id": models.force_model, "object": "model", "created": 0, "owned_by": "pipekernels"}
    models.get_gen_models = lambda: [own]
    state = GenerationState(continuous_batching=True)
    state._cb_manager = Requests(manager)
    state._cb_model_id = models.process_model_name(models.force_model)
    timed = model_manager.TimedModel(model, timeout_seconds=-1, processor=tokenizer)  # For good.
    models.loaded_models[state._cb_model_id] = timed
    build: Any = server.build_server
    app = build(
        models,
        chat_completion.ChatCompletionHandler(models, state),
        completion.CompletionHandler(models, state),
        response.ResponseHandler(models, state),
        None,
        None,
        state,
    )
    app.router.routes = [route for route in app.router.routes if route.path in _ROUTES]
    config = uvicorn.Config(
        app, options.host, options.port, log_level="warning", timeout_graceful_shutdown=_GRACE
    )
    Server(config, manager, options.folder, pids).run()


def serve(options: argparse.Namespace) -> NoReturn:
    """Be one rank of a server, with the options of ``pipekernels serve``. Ends the process."""
    transformers.logging.set_verbosity_error()  # It would name every request.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    comm = Communicator.from_process_group()
    pids = comm._exchange(os.getpid(), int)
    torch.seed()
    model, tokenizer = _load(options, comm)
    manager = _manager(model, tokenizer, options.cache_tokens)
    for each in (signal.SIGTERM, signal.SIGINT):  # Rank 0 ends the others.
        signal.signal(each, signal.SIG_IGN)
    if comm.rank > 0:  # Nobody takes answers here.
        manager.output_router.deliver = manager.output_router.deliver_batch = lambda outputs: None
    else:
        _answer(options, model, tokenizer, manager, pids)
        manager.output_router.result_handlers.clear()  # Of a loop that is closed.
        manager.stop(hard_stop=True, timeout=1)
    while manager.is_running() and manager.background_thread_status.fatal_error is None:
        time.sleep(0.1)
    # Without waiting for a rank that has died, or for threads of libraries.
    os._exit(manager.background_thread_status.fatal_error is not None)
