"""The engine of the server continues many prompts at a time, each as if it were alone."""

import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from transformers import AutoModelForCausalLM

from realrl.engine.model import Model, make_unsharded_model
from realrl.huggingface import model_files
from realrl.model.arithmetic.ops import Products
from realrl.model.packing import Packing
from realrl.serving.engine import EngineClosedError, Piece, SamplingOptions
from realrl.serving.local import LocalEngine
from tests.conftest import World

END = 5
CONTEXT = 96


@dataclass
class Client:
    """What one request receives."""

    pieces: "queue.SimpleQueue[Piece]" = field(default_factory=queue.SimpleQueue)

    def wait(self) -> tuple[list[int], list[float], Piece]:
        """All tokens with their log-probabilities, and the last piece."""
        tokens: list[int] = []
        logprobs: list[float] = []
        while True:
            piece = self.pieces.get(timeout=60)
            tokens += piece.tokens
            logprobs += piece.logprobs
            if piece.finish or piece.error:
                return tokens, logprobs, piece


def ask(engine: LocalEngine, prompt: Sequence[int], max_tokens: int = 20, **options: object) -> Client:
    client = Client()
    asked = SamplingOptions(max_tokens=max_tokens, **options)  # type: ignore[arg-type]
    engine.submit(prompt, asked, client.pieces.put)
    return client


def make_prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(6, 320, (1 + 7 * i % 40,), generator=generator).tolist() for i in range(count)]


@pytest.fixture(scope="module")
def model(world: World) -> Model:
    shape = model_files.read_shape(world.actor)
    device = torch.device("cpu")
    model = make_unsharded_model(
        shape, "lm", dtype=torch.float32, device=device, products=Products(exact=True)
    )
    model_files.load(world.actor, shape, model.layout.specs, model.parameters)
    return model


def start(model: Model, *, rows: int = 4, kv_tokens: int = 1 << 12) -> LocalEngine:
    return LocalEngine(
        model, name="small", stop_token_ids=(END,), context_tokens=CONTEXT, rows=rows, kv_tokens=kv_tokens
    )


@pytest.fixture
def engine(model: Model) -> Iterator[LocalEngine]:
    engine = start(model)
    yield engine
    engine.close()


def test_greedy_tokens_are_those_of_transformers(engine: LocalEngine, world: World) -> None:
    reference = AutoModelForCausalLM.from_pretrained(world.actor)
    prompts = make_prompts(9)
    clients = [ask(engine, prompt, temperature=0.0) for prompt in prompts]
    for prompt, client in zip(prompts, clients, strict=True):
        tokens, logprobs, last = client.wait()
        expected = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=END,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        assert tokens == expected
        assert last.finish == ("stop" if END in expected else "length") and last.cached_tokens == 0
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        found = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), found, atol=1e-4, rtol=0)


OPTIONS = [
    {"seed": 1},
    {"seed": 2, "temperature": 0.5},
    {"seed": 1, "top_k": 5},
    {"seed": 3, "top_p": 0.5, "temperature": 1.5},
    {"seed": 4, "top_k": 3, "top_p": 0.9, "min_tokens": 6},
    {"seed": 5, "ignore_eos": True},
    {"temperature": 0.0, "stop_token_ids": tuple(range(150))},
]


@pytest.mark.parametrize("kv_tokens", [1 << 12, 1], ids=["everything", "one-request"])
def test_a_request_does_not_depend_on_others(model: Model, engine: LocalEngine, kv_tokens: int) -> None:
    prompts = make_prompts(14)
    alone = [ask(engine, prompt, **OPTIONS[i % 7]).wait()[:2] for i, prompt in enumerate(prompts)]
    other = start(model, rows=3, kv_tokens=kv_tokens)
    clients = [ask(other, prompt, **OPTIONS[i % 7]) for i, prompt in enumerate(prompts)]
    assert [client.wait()[:2] for client in clients] == alone
    other.close()


def test_options_of_a_request_restrict_its_tokens(engine: LocalEngine, model: Model) -> None:
    prompt = make_prompts(4)[-1]

    def draw(**options: object) -> set[int]:
        return {ask(engine, prompt, 1, seed=seed, **options).wait()[0][0] for seed in range(60)}

    hidden = model.transformer(torch.tensor(prompt), Packing.of([len(prompt)], "cpu"))
    logits = model.transformer.compute_logits(hidden)[-1].detach()
    order = logits.argsort(descending=True).tolist()
    assert draw(top_k=2) == set(order[:2])
    assert draw(temperature=0.0) == {order[0]}
    shares = logits.softmax(0)[order].cumsum(0)
    nucleus = set(order[: int((shares < 0.3).sum()) + 1])
    assert draw(top_p=0.3) <= nucleus
    assert len(draw()) > 20


def test_minimum_and_ends(engine: LocalEngine) -> None:
    prompt = make_prompts(4)[-1]
    first = ask(engine, prompt, temperature=0.0).wait()[0]
    tokens, _, last = ask(engine, prompt, temperature=0.0, stop_token_ids=(first[3],)).wait()
    assert tokens == first[: first.index(first[3]) + 1] and last.finish == "stop"
    later = ask(engine, prompt, temperature=0.0, stop_token_ids=(first[3],), min_tokens=9).wait()[0]
    assert later[:9] == first[:9], "a token ends nothing before the minimum"
    short = [ask(engine, prompt, 40, seed=seed, temperature=3.0) for seed in range(40)]
    ended = [seed for seed, client in enumerate(short) if client.wait()[0][-1] == END]
    assert ended, "some samples end by themselves"
    for seed in ended:
        longer = ask(engine, prompt, 40, seed=seed, temperature=3.0, min_tokens=40).wait()
        assert len(longer[0]) == 40 and END not in longer[0][:39]
        ignored = ask(engine, prompt, 40, seed=seed, temperature=3.0, ignore_eos=True).wait()
        assert len(ignored[0]) == 40 and END in ignored[0]


def test_the_context_ends_a_request(engine: LocalEngine) -> None:
    prompt = make_prompts(6)[-1]
    tokens, _, last = ask(engine, prompt, 1000, ignore_eos=True).wait()
    assert len(prompt) + len(tokens) == CONTEXT and last.finish == "length"


def test_a_conversation_prefills_only_what_is_new(engine: LocalEngine) -> None:
    prompt = make_prompts(6)[-1]
    for turn in range(4):
        tokens, _, last = ask(engine, prompt, 6, seed=turn, ignore_eos=True).wait()
        assert last.cached_tokens == (0 if turn == 0 else len(prompt) - 3)
        for other in make_prompts(2):
            ask(engine, other, 3).wait()
        prompt = [*prompt, *tokens, 7, 8]


def test_a_request_that_goes_back_keeps_what_is_equal(engine: LocalEngine) -> None:
    prompt = make_prompts(6)[-1]
    first = ask(engine, prompt, 10, temperature=0.0, ignore_eos=True).wait()[0]
    again = ask(engine, prompt, 10, temperature=0.0, ignore_eos=True).wait()
    assert again[0] == first and again[2].cached_tokens == len(prompt) - 1
    other = [*prompt[:-3], 9, 9]
    branch = ask(engine, other, 10, temperature=0.0, ignore_eos=True).wait()
    assert branch[2].cached_tokens == len(prompt) - 4


def test_cancelled_requests_free_their_row(engine: LocalEngine) -> None:
    clients = []
    for _ in range(12):
        client = Client()
        number = engine.submit(
            [7, 8], SamplingOptions(max_tokens=CONTEXT, ignore_eos=True), client.pieces.put
        )
        clients.append((number, client))
    for number, _ in clients[::2]:
        engine.cancel(number)
    for _, client in clients[1::2]:
        tokens, _, last = client.wait()
        assert len(tokens) == CONTEXT - 2 and last.finish == "length"
    assert ask(engine, [7], 2, ignore_eos=True).wait()[2].finish == "length"


def test_a_closed_engine_ends_its_requests(model: Model) -> None:
    engine = start(model, rows=1)
    clients = [ask(engine, [7, 8], CONTEXT, ignore_eos=True) for _ in range(3)]
    engine.close()
    ends = [client.wait()[2] for client in clients]
    assert all(last.finish == "length" or last.error == "the server stops" for last in ends)
    assert ends[-1].error
    with pytest.raises(EngineClosedError, match="the server stops"):
        ask(engine, [7], 2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failing_engine_says_why(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(model)

    def fail(*_: object) -> None:
        raise ValueError("out of luck")

    monkeypatch.setattr(model.transformer, "decode", fail)
    last = ask(engine, [7, 8, 9], 4).wait()[2]
    assert last.error == "the engine has failed: ValueError: out of luck"
    with pytest.raises(EngineClosedError, match="out of luck"):
        ask(engine, [7], 2)
    engine.close()
