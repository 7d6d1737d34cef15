"""``pipekernels serve``, asked by OpenAI's own client."""

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

pytestmark = [pytest.mark.slow, pytest.mark.processes]
WORDS = [chr(0x4E00 + i) for i in range(94)]  # A token each, so that texts tell tokens.
CACHE, NEW = 2048, 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose greedy tokens are far from all others, and a tokenizer."""
    from tokenizers import Tokenizer, decoders, models

    folder = tmp_path_factory.mktemp("served") / "model@1"
    names = ["<s>", "</s>", *WORDS]
    bpe = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    bpe.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = "{% for each in messages %}{{ each.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=3,  # Two on one rank, one on the other.
        num_key_value_heads=3,
        vocab_size=len(names),
        bos_token_id=0,
        eos_token_id=1,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def greedy(model: Any, prompt: str, new: int = NEW) -> str:
    """What ``generate`` answers, where no rounding decides."""
    ids = torch.tensor([[2 + WORDS.index(word) for word in prompt]])
    options = {"output_logits": True, "return_dict_in_generate": True}
    found = model.generate(ids, max_new_tokens=new, do_sample=False, **options)
    best = torch.stack(found.logits).topk(2).values
    # A logit, of 10 at most, sums some 300 terms on its way: 300 * 10 * 2^-24 is 2e-4.
    assert (best[..., 0] - best[..., 1]).min() > 1e-3
    answer = found.sequences[0, len(prompt) :].tolist()
    return "".join(WORDS[token - 2] for token in answer if token > 1)


class Running:
    """A server on two ranks, as its users see it."""

    def __init__(self, folder: Path, port: int = 0, *more: str) -> None:
        self.model = f"./{os.path.relpath(folder)}"  # Its name is what was typed.
        command = [sys.executable, "-m", "pipekernels", "serve", self.model, "--ranks", "2"]
        command += ["--port", str(port), "--cache-tokens", str(CACHE), *more]
        self.errors = (folder.parent / f"errors of {id(self)}").open("w+")
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.url = line.split()[-1] if line else "nothing"
        assert line.startswith(f"{self.model} is served on http://127.0.0.1:"), self.said()
        self.port = int(self.url.split(":")[2].removesuffix("/v1"))
        options = {"base_url": self.url, "api_key": "any", "timeout": 60}
        self.client = openai.OpenAI(**options)
        self.make_async = lambda: openai.AsyncOpenAI(**options)

    def said(self) -> str:
        self.errors.seek(0)
        return self.errors.read()

    def health(self) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health") as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def ranks(self) -> dict[int, int]:
        """Process ids by rank."""
        parent, found = self.process.pid, dict[int, int]()
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            variables = Path(f"/proc/{child}/environ").read_text().split("\0")
            found |= {int(v[5:]): int(child) for v in variables if v.startswith("RANK=")}
        return found

    def complete(self, prompt: str, **options: Any) -> str:
        options = {"max_tokens": NEW, "temperature": 0} | options
        answer = self.client.completions.create(model=self.model, prompt=prompt, **options)
        return str(answer.choices[0].text)

    def ended(self) -> int:
        """The code with which the server has ended, and has left nothing."""
        code = self.process.wait(40)
        pids = list(self.pids)
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        assert not [name for name in self.shared if Path(name).exists()]
        return code

    def send(self, number: int, pid: int) -> None:
        self.pids = self.ranks().values()
        maps = "".join(Path(f"/proc/{each}/maps").read_text() for each in self.pids)
        self.shared = set(re.findall(r"/dev/shm/\S+", maps))
        os.kill(pid, number)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    running = Running(folder)
    yield running
    if running.process.poll() is None:
        running.send(signal.SIGTERM, running.process.pid)
        assert running.ended() == 0, running.said()


async def asked_at_once(running: Running, prompts: list[str]) -> list[Any]:
    """Texts of 32 requests at once: every fourth is left after two pieces (None), every fourth
    other one is sampled with a seed; by turns they stream."""
    client = running.make_async()

    async def ask(n: int, prompt: str) -> str | None:
        sampling = {"seed": n, "temperature": 1.5} if n % 4 == 1 else {"temperature": 0}
        options = {"model": running.model, "prompt": prompt, "max_tokens": NEW, **sampling}
        if n % 2:
            return str((await client.completions.create(**options)).choices[0].text)
        stream = await client.completions.create(**options, stream=True)
        pieces = []
        async for piece in stream:
            pieces.append(piece.choices[0].text)
            if n % 4 == 2 and len(pieces) == 2:
                await stream.close()
                return None
        return "".join(pieces)

    try:
        return await asyncio.gather(*(ask(n, prompt) for n, prompt in enumerate(prompts)))
    finally:
        await client.close()


def test_many_at_once_get_what_each_would_alone(server: Running, plain: Any) -> None:
    generator = torch.Generator().manual_seed(6)
    lengths = torch.randint(1, 150, (32,), generator=generator).tolist()
    prompts = [
        "".join(WORDS[i] for i in torch.randint(94, (n,), generator=generator)) for n in lengths
    ]
    texts = asyncio.run(asked_at_once(server, prompts))
    assert texts[2::4] == [None] * 8
    for n in (*range(0, 32, 4), *range(3, 32, 4)):
        assert texts[n] == greedy(plain, prompts[n]), n
    for n in (1, 13):
        alone = {"seed": n, "temperature": 1.5}
        assert server.complete(prompts[n], **alone) == texts[n] != greedy(plain, prompts[n])


def test_chats_and_streams_and_stops(server: Running, plain: Any) -> None:
    prompt = "".join(WORDS[:9])
    expected = greedy(plain, prompt)
    chat = {"model": server.model, "messages": [{"role": "user", "content": prompt}]}
    options = {"max_tokens": NEW, "temperature": 0}
    answer = server.client.chat.completions.create(**chat, **options)
    assert answer.choices[0].message.content == expected
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (9, NEW)
    assert answer.choices[0].finish_reason == "length"
    pieces = list(server.client.chat.completions.create(**chat, **options, stream=True))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected
    word = expected[3:5]
    assert server.complete(prompt, stop=[word, "never"]) == expected[: expected.index(word) + 2]
    assert [model.id for model in server.client.models.list()] == [server.model]
    assert server.health() == 200


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", {"prompt": WORDS[0] * CACHE}, "2048 tokens in the prompt, not 1 to 20.."),
        ("completions", {}, "0 tokens in the prompt"),
        ("completions", {"prompt": WORDS[0], "max_tokens": 0}, "must be greater than 0"),
        ("completions", {"prompt": WORDS[0], "temperature": -1.0}, "strictly positive float"),
        ("completions", {"prompt": WORDS[0], "model": "other"}, "requested 'other'"),
        ("chat/completions", None, "Input should be|Field required"),
    ],
    ids=("too long", "empty", "no tokens", "negative temperature", "unknown model", "no body"),
)
def test_what_is_wrong_is_refused(server: Running, path: str, body: Any, message: str) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        server.client.post(f"/{path}", body=body, cast_to=object)
    assert re.search(message, caught.value.response.text)
    assert len(server.complete(WORDS[5], max_tokens=3)) == 3


def test_a_dead_rank_ends_the_server_which_starts_again(server: Running, folder: Path) -> None:
    server.send(signal.SIGKILL, server.ranks()[1])
    codes: list[int] = []
    while not codes or codes[-1]:
        codes.append(server.health())
    assert 503 in codes
    assert server.ended() == 1
    assert "rank      : 1 (local_rank: 1)\n  exitcode  : -9" in server.said()
    again = Running(folder, server.port, "--bits", "8", "--dtype", "bfloat16")
    assert len(again.complete(WORDS[5])) == NEW
    options = {"model": again.model, "max_tokens": 50, "temperature": 0, "stream": True}
    streams = [again.client.completions.create(prompt=word, **options) for word in WORDS[:4]]
    assert all(next(stream).choices[0].text for stream in streams)
    again.send(signal.SIGTERM, again.process.pid)
    for stream in streams:  # What is cut off has no reason in the end.
        assert [*stream][-1].choices[0].finish_reason in ("length", "stop")
    assert again.ended() == 0, again.said()


@pytest.mark.full
def test_requests_at_random_and_ranks_that_die(folder: Path) -> None:
    """300, 16 at once: sampled, stopped, left, too long. After 70 of each 100 the server gets a
    signal, or one of its ranks does, and starts again on the same port."""
    chance = random.Random(5)

    async def ask(client: Any, model: str) -> None:
        prompt = "".join(chance.choices(WORDS, k=chance.choice([0, 1, 9, 200, 600, CACHE])))
        options: Any = {"max_tokens": chance.randint(1, 400)}
        options["temperature"] = chance.choice([0, 0.7])
        if chance.random() < 0.3:
            options["stop"] = chance.choice(WORDS)
        stream = await client.completions.create(prompt=prompt, model=model, stream=True, **options)
        async for _ in stream:
            if chance.random() < 0.02:
                await stream.close()
                break

    async def ask_all(running: Running, number: int, pid: int) -> tuple[int, float]:
        """How many were lost, and the seconds from the signal until the port is closed."""
        places, asked, lost, begin = asyncio.Semaphore(16), 0, 0, 0.0

        async def ask_in_turn(client: Any) -> None:
            nonlocal asked, lost, begin
            async with places:
                asked += 1
                if asked == 70:
                    running.send(number, pid)
                    begin = time.monotonic()
                try:
                    await ask(client, running.model)
                except openai.BadRequestError:
                    pass
                except Exception:  # noqa: BLE001 - of the client, or of its transport
                    lost += 1

        async with running.make_async() as client:
            tasks = [asyncio.create_task(ask_in_turn(client)) for _ in range(100)]
            while await asyncio.to_thread(running.health):
                await asyncio.sleep(0.02)
            seconds = time.monotonic() - begin
            await asyncio.gather(*tasks)
        return lost, seconds

    running, port_closed = Running(folder), []
    for rank, number in ((1, signal.SIGKILL), (0, signal.SIGKILL), (None, signal.SIGTERM)):
        pid = running.process.pid if rank is None else running.ranks()[rank]
        lost, seconds = asyncio.run(ask_all(running, number, pid))
        assert running.ended() == (number == signal.SIGKILL), running.said()
        assert 0 < lost <= 31 + 16
        port_closed.append(seconds)
        running = Running(folder, running.port)
    assert max(port_closed) < 10, port_closed  # Within a second on a quiet machine.
    assert running.health() == 200 and len(running.complete(WORDS[5], max_tokens=3)) == 3
    running.send(signal.SIGINT, running.process.pid)
    assert running.ended() == 0, running.said()
