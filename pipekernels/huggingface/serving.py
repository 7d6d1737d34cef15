"""``pipekernels serve`` on one rank: transformers' server, with a model that is sharded.

Every rank runs a manager of transformers' continuous batching. Rank 0 answers OpenAI's API through
transformers' server; its manager gives the others the requests, and all compute the same batches.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import transformers
import uvicorn
from fastapi import HTTPException
from transformers.cli.serving import chat_completion, completion, model_manager, response, server
from transformers.cli.serving.utils import CBGenerateManager, GenerationState
from transformers.generation.continuous_batching import cb_logits_processors, model_runner

from pipekernels.comm import Communicator
from pipekernels.huggingface.load import load_pretrained
from pipekernels.tensor_parallel import tensor_parallelize

_PAGE, _BATCH = 64, 512  # Tokens of a step: a longer prompt would hold up the answers beside it.
_GRACE, _UNHEALTHY = 8, 0.5  # Seconds: for what runs at the end; for /health to say 503.
# Others would load other models, or run this one on rank 0 alone.
_ROUTES = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/health"}


class Sampler(cb_logits_processors.ContinuousBatchingLogitsProcessorList):  # type: ignore[misc]
    """Changes the scores of each request in a batch by its own parameters, so that their argmax is
    its token: the same on all ranks, whatever else is in the batch.

    A sampled token is the argmax of scores with Gumbel noise, here by a generator with the seed of
    the request and the position (Maddison, Tarlow, Minka, "A* Sampling", 2014).
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(transformers.LogitsProcessorList())
        self.do_processing = True
        self.supported_keys = {"processors": list, "stop": list, "seed": int}
        self._tokenizer, self._generator = tokenizer, torch.Generator()

    def prepare_tensor_args(self, requests_in_batch: Any, arg_storage: Any) -> Any:
        self._states = [each.state for each in requests_in_batch if each.has_new_token]
        return arg_storage

    def __call__(self, input_ids: Any, scores: torch.Tensor, args: Any) -> torch.Tensor:
        # [batch, vocabulary]: a row for each request that gets a token, then rows of no meaning.
        for row, state in zip(scores, self._states, strict=False):
            asked = state.logit_processor_kwargs
            tokens = state.initial_tokens + state.generated_tokens
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


class Requests(CBGenerateManager):  # type: ignore[misc]
    """Gives requests to a manager, each with its own parameters, and with a name of ours, as names
    that clients give need not differ."""

    def __init__(self, manager: Any) -> None:
        super().__init__()
        self._cb, self._asked = manager, dict[str, dict[str, Any]]()
        add = manager.add_request

        def add_later(*args: Any, request_id: str, **more: Any) -> str:
            # In the next turn of the loop: transformers has registered who takes the answers then.
            more |= self._asked.pop(request_id)
            asyncio.get_running_loop().call_soon(lambda: add(*args, request_id=request_id, **more))
            return request_id

        manager.add_request = add_later
        room = model_runner.infer_max_single_request_tokens(manager.batch_processor.cache)
        self._config = manager.model.config.get_text_config()
        self._limit = min(room, getattr(self._config, "max_position_embeddings", room))

    def generate_streaming(self, *args: Any, request_id: str, **more: Any) -> Any:
        return super().generate_streaming(*args, request_id=self._admit(*args), **more)

    async def generate_non_streaming(self, *args: Any, request_id: str) -> Any:
        return await super().generate_non_streaming(*args, request_id=self._admit(*args))

    def _admit(self, model: Any, _: Any, inputs: Any, config: Any) -> str:
        """Name a request and note what it asks for. Its new tokens are limited to the room in the
        cache. An HTTPException, 400, for what would end the loop that all requests share."""
        tokens, own = inputs["input_ids"], model.generation_config
        # To ask for a temperature is to ask for sampling, which transformers leaves as it was.
        is_own = (config.temperature, config.top_p) == (own.temperature, own.top_p)
        config.do_sample = config.do_sample or (config.temperature != 0 and not is_own)
        room = self._limit - len(tokens)
        try:
            if not tokens or room < 1:
                raise ValueError(f"{len(tokens)} tokens in the prompt, not 1 to {self._limit - 1}")
            if config.guidance_scale not in (None, 1):
                raise ValueError("guidance_scale is not supported here; leave it out")
            config.validate()
            config.max_new_tokens = min(room, config.max_new_tokens or room)
            model._prepare_special_tokens(config)
            processors = model._get_logits_processor(config, len(tokens))
            # An error in these would show on all ranks otherwise.
            processors(torch.tensor([tokens]), torch.zeros(1, self._config.vocab_size))
        except Exception as error:
            raise HTTPException(400, str(error)) from error
        stop = config.stop_strings or []
        stop = [stop] if isinstance(stop, str) else stop
        # The handler has seeded torch's generator, if the request has a seed.
        seed = int(torch.randint(2**31, ())) if config.do_sample else -1
        name = os.urandom(16).hex()
        self._asked[name] = {"processors": processors, "stop": stop, "seed": seed}
        return name


class Server(uvicorn.Server):
    """Ends soon after one of the ranks, of these processes, has died."""

    def __init__(self, config: uvicorn.Config, status: Any, pids: list[int]) -> None:
        super().__init__(config)
        self._status, self._pids = status, pids

    async def on_tick(self, counter: int) -> bool:
        # The launcher ends this rank, too, when it has seen another one die: maybe before the
        # manager notices, so that a signal alone does not mean that all is well.
        status = self._status
        if status.fatal_error or not all(os.path.exists(f"/proc/{pid}") for pid in self._pids):
            status.fatal_error = status.fatal_error or RuntimeError("a rank has died")
            await asyncio.sleep(_UNHEALTHY)
            os._exit(1)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.should_exit = True  # A second Ctrl-C changes nothing: the launcher repeats the first.


def _manager(options: argparse.Namespace, comm: Communicator) -> tuple[Any, Any]:
    """The manager of this rank, whose tokens are the argmax of the sampler's, and the tokenizer."""
    folder, pages = Path(options.folder), options.cache_tokens and -(-options.cache_tokens // _PAGE)
    config = transformers.AutoConfig.from_pretrained(folder)
    dtype = config.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    tensor_parallelize(model.eval(), "auto", comm)
    load_pretrained(model, folder, bits=options.bits, progress=comm.rank == 0)
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1)
    batching = transformers.ContinuousBatchingConfig(page_size=_PAGE, num_blocks=pages)
    batching.max_batch_tokens = _BATCH
    manager = model.init_continuous_batching(greedy, batching)
    manager.logit_processor = Sampler(tokenizer)
    manager.warmup()  # Makes the cache, on all ranks.
    # A full cache blocks new requests until an active one ends; but the last may be cancelled.
    type(manager.batch_processor.scheduler).block_new_requests = property(
        lambda self: self.__dict__["blocks"] and bool(self.active_requests),
        lambda self, blocks: self.__dict__.update(blocks=blocks),
    )
    return manager, tokenizer


def _app(name: str, manager: Any, tokenizer: Any) -> Any:
    """transformers' server, of this model alone."""
    models, state = model_manager.ModelManager(), GenerationState(continuous_batching=True)
    models.force_model = name
    own = {"id": name, "object": "model", "created": 0, "owned_by": "pipekernels"}
    models.get_gen_models = lambda: [own]
    state._cb_manager, state._cb_model_id = Requests(manager), models.process_model_name(name)
    models.load_model_and_processor = lambda *_, **__: (manager.model, tokenizer)
    chat = chat_completion.ChatCompletionHandler(models, state)
    complete = completion.CompletionHandler(models, state)
    respond = response.ResponseHandler(models, state)
    app = server.build_server(models, chat, complete, respond, None, None, state)
    app.router.routes = [route for route in app.router.routes if route.path in _ROUTES]
    return app


def serve(options: argparse.Namespace) -> NoReturn:
    """Be one rank of a server, with the options of ``pipekernels serve``. Ends the process."""
    transformers.logging.set_verbosity_error()  # It would name every request.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    comm = Communicator.from_process_group()
    pids = comm._exchange(os.getpid(), int)
    torch.seed()
    manager, tokenizer = _manager(options, comm)
    status, router = manager.background_thread_status, manager.output_router
    for each in (signal.SIGTERM, signal.SIGINT):  # Rank 0 ends the others.
        signal.signal(each, signal.SIG_IGN)
    if comm.rank == 0:
        app = _app(options.folder, manager, tokenizer)
        config = uvicorn.Config(app, options.host, options.port, log_level="warning")
        config.timeout_graceful_shutdown = _GRACE
        listening = config.bind_socket()  # Ends this process if the port has been taken.
        listening.listen()
        manager.start()
        host = f"[{options.host}]" if ":" in options.host else options.host
        port = listening.getsockname()[1]
        print(f"{options.folder} is served on http://{host}:{port}/v1", flush=True)
        Server(config, status, pids).run([listening])
        router.result_handlers.clear()  # Of a loop that is closed.
        manager.stop(hard_stop=True, timeout=1)
    else:
        router.deliver = router.deliver_batch = lambda outputs: None  # Nobody takes answers here.
        manager.start()
    while manager.is_running() and status.fatal_error is None:
        time.sleep(0.1)
    # Without waiting for a rank that has died, or for threads of libraries.
    os._exit(status.fatal_error is not None)
