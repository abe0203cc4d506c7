"""Agents of all sorts: what they may do, what is refused, and how they fail."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from realrl.cli.app import run_app
from realrl.testing.ranks import run_on_ranks, sampled
from tests.conftest import World, read_metrics, write_jsonl
from tests.runtime.environments.test_agents import TEMPLATE

pytest.importorskip("openai")

AGENT = """
import asyncio
import json
import shutil
import os
import threading
import time
from pathlib import Path

import openai

HERE = Path(__file__).parent
STOP = ["e", "a", "t", "i", "o", "n", "s", " "]


class Agent:
    def run(self, base_url, api_key, model, case, prompt):
        self.client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        self.model, self.case = model, case
        self.messages = [{"role": "user", "content": prompt}]
        self.seen = []
        reward = getattr(self, "play_" + case)()
        if not asyncio.iscoroutine(reward):
            self.write()
        return reward

    def write(self):
        trajectory = Path(self.client.base_url.path).parts[1]
        with open(HERE / f"{self.case}-{trajectory}-{time.monotonic_ns()}.json", "w") as file:
            json.dump(self.seen, file)

    def ask(self, **options):
        answer = self.client.chat.completions.create(
            model=self.model, messages=self.messages,
            **{"max_tokens": 5, "extra_body": {"return_token_ids": True}, **options},
        )
        self.note(answer)
        return answer.choices[0].message

    def note(self, answer):
        ids, choice = answer.prompt_token_ids, answer.choices[0]
        mask = self.seen[-1][1] if self.seen else []
        mask = mask + [0] * (len(ids) - len(mask)) + [1] * len(choice.token_ids)
        self.seen.append([ids + choice.token_ids, mask, choice.finish_reason])

    def answer(self, message, text="Go on."):
        self.messages += [message.to_dict(), {"role": "user", "content": text}]

    def refused(self, code, **options):
        try:
            self.ask(**options)
        except openai.APIStatusError as error:
            assert error.body["code"] == code, error
            with open(HERE / f"refused-{code}", "w") as file:
                file.write(error.body["message"])
        else:
            raise AssertionError(f"{code} was not refused")

    def play_repeat(self):
        self.answer(self.ask())
        self.answer(self.ask())
        del self.messages[-2:]
        self.refused("another_conversation")
        return 1.0

    def play_stop(self):
        said = self.ask(max_tokens=40, stop=STOP)
        assert not any(stop in said.content for stop in STOP)
        self.answer(said)
        self.ask(max_tokens=40, stop=STOP)
        return 2.0

    def play_stop_at_the_end(self):
        self.ask(max_tokens=60, stop=STOP)
        assert self.seen[-1][2] == "stop"  # one of so many letters comes soon
        return 3.0

    def play_asynchronous(self):
        async def play():
            client = openai.AsyncOpenAI(base_url=self.client.base_url, api_key=self.client.api_key)
            for _ in range(3):
                answer = await client.chat.completions.create(
                    model=self.model, messages=self.messages, max_tokens=4, extra_body={"return_token_ids": True}
                )
                self.note(answer)
                self.answer(answer.choices[0].message)
            self.write()
            return 4.0

        return play()

    def play_streaming(self):
        text, ids = "", []
        stream = self.client.chat.completions.create(
            model=self.model, messages=self.messages, max_tokens=6, stream=True, temperature=0.5
        )
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        self.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
        self.seen = []
        self.ask()
        self.seen[0][1] = None  # this agent does not know which tokens were sampled first
        return 5.0

    def play_refused(self):
        self.refused("unsupported_parameter", extra_body={"ignore_eos": True})
        first = self.ask()
        self.answer(first)
        self.messages[0] = {"role": "user", "content": "Something else."}
        self.refused("another_conversation")
        self.messages[0] = {"role": "user", "content": self.messages[0]["content"]}
        self.messages = [self.messages[0]]
        self.refused("another_conversation")
        return 6.0

    def play_tokens(self):
        ids = []
        for _ in range(3):
            ids += [70, 71, 72]
            answer = self.client.completions.create(
                model=self.model, prompt=ids, max_tokens=4, extra_body={"return_token_ids": True}
            )
            choice = answer.choices[0]
            mask = self.seen[-1][1] if self.seen else []
            mask = mask + [0] * (len(ids) - len(mask)) + [1] * len(choice.token_ids)
            ids = ids + choice.token_ids
            self.seen.append([ids, mask, choice.finish_reason])
        return 7.0

    def play_late(self):
        # Its own time limit ends before the answer; what it asked for is asked again.
        try:
            self.ask(timeout=0.001)
        except openai.APITimeoutError:
            pass
        self.answer(self.ask())
        self.ask()
        return 8.0

    def play_abandoned(self):
        # It asks, gives up, and asks for fewer tokens.
        for most in (3, 2):
            try:
                self.ask(timeout=0.001, max_tokens=40)
            except openai.APITimeoutError:
                pass
            self.answer(self.ask(max_tokens=most))
        return 10.0

    def play_together(self):
        async def play():
            client = openai.AsyncOpenAI(base_url=self.client.base_url, api_key=self.client.api_key)
            asked = (
                client.chat.completions.create(
                    model=self.model, messages=self.messages, max_tokens=most, extra_body={"return_token_ids": True}
                )
                for most in (30, 4)
            )
            answers = await asyncio.gather(*asked, return_exceptions=True)
            (refused,) = (one for one in answers if isinstance(one, openai.BadRequestError))
            # The second one is refused when it is tried, or after the first one has been answered meanwhile.
            assert refused.body["code"] in ("request_in_progress", "another_conversation")
            (answer,) = (one for one in answers if one is not refused)
            self.note(answer)
            self.write()
            return 11.0

        return play()

    def play_in_the_background(self):
        # A request is still in progress when the agent has ended.
        self.answer(self.ask())
        threading.Thread(target=self.ask_and_ignore, daemon=True).start()
        time.sleep(0.05)
        return 12.0

    def ask_and_ignore(self):
        try:
            self.ask(max_tokens=100)
            self.write()  # this answer came before the end
        except openai.APIError:
            pass

    def play_full(self):
        try:
            while True:
                self.answer(self.ask(), "What comes next, and after that, and then?" * 3)
        finally:
            self.reward = 9.0
            self.write()

    def play_raise(self):
        self.ask()
        raise KeyError("lost")

    def play_exit(self):
        self.ask()
        os._exit(3)

    def play_hang(self):
        self.ask()
        time.sleep(1000)

    def play_silent(self):
        return 1.0

    def play_wrong(self):
        self.ask()
        return "a lot"

    def play_wrong_at_a_limit(self):
        try:
            self.play_full()
        except openai.APIError:
            return "a lot"

    def play_cancelled(self):
        async def play():
            raise asyncio.CancelledError

        self.ask()
        return play()

    def play_stubborn(self):
        # It does not see that every request is refused.
        while True:
            try:
                self.answer(self.ask())
            except openai.APIError:
                time.sleep(0.05)

    def play_slow(self):
        # Each pause is shorter than the limit, but all of them together are longer.
        for _ in range(4):
            time.sleep(2)
            self.answer(self.ask())
        return 10.0
"""
PLAYS = {
    "repeat": 1.0,
    "stop": 2.0,
    "stop_at_the_end": 3.0,
    "asynchronous": 4.0,
    "streaming": 5.0,
    "refused": 6.0,
    "tokens": 7.0,
    "late": 8.0,
    "full": 9.0,
    "abandoned": 10.0,
    "together": 11.0,
    "in_the_background": 12.0,
}
"""What an agent does, and its reward."""
FAULTS = {
    "raise": "raised KeyError: 'lost'",
    "exit": "ended its process (status 3)",
    "hang": "did not answer within 2 s (environment.timeout)",
    "silent": "ended without an answer of the model",
    "wrong": "run gave str 'a lot'; it must give the reward, a finite number, or None",
    "wrong_at_a_limit": "run gave str 'a lot'; it must give the reward",
    "cancelled": "raised CancelledError",
    "stubborn": "did not answer within 2 s (environment.timeout)",
}


def write_recipe(world: World, directory: Path, cases: list[str], **environment: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "agent.py").write_text(AGENT)
    records = [{"prompt": f"the film {case}", "case": case} for case in cases]
    file = world.recipe(
        "grpo",
        directory,
        data={
            "train": write_jsonl(directory / "data.jsonl", records),
            "batch": len(records),
            "chat_template": TEMPLATE,
            "max_prompt_tokens": 60,
        },
        training__steps=1,
        policy={"samples": 2, "kl": {"coef": 0.0}},
        generation__max_new_tokens=250,
        micro_batch_tokens=8192,
        environment={
            "factory": f"{directory / 'agent.py'}:Agent",
            "workers": 1,
            "threads": 32,
            **environment,
        },
    )
    document = yaml.safe_load(file.read_text())
    del document["models"]["reward"]
    file.write_text(yaml.safe_dump(document))
    return file


def test_whatever_agents_do_only_what_they_saw_is_learnt(world: World, tmp_path: Path) -> None:
    file = write_recipe(world, tmp_path, list(PLAYS))
    run_on_ranks(1, [file])
    tokens = sampled(file)
    learnt = [(tokens[f"0/{i}"][0], tokens[f"0/{i} mask"][0]) for i in range(2 * len(PLAYS))]
    for case in PLAYS:
        seen: dict[str, list[tuple[list[int], list[int] | None]]] = {}
        for file in tmp_path.glob(f"{case}-*.json"):
            row, mask, _ = json.loads(file.read_text())[-1]
            seen.setdefault(file.name.split("-")[1], []).append((row, mask))
        assert len(seen) == 2, case
        for rows in seen.values():
            assert any((row, mask or known) == (ids, known) for row, mask in rows for ids, known in learnt), (
                case
            )
    (metrics,) = read_metrics(tmp_path / "run")
    assert metrics["actor.generate/failed"] == 0.0
    assert metrics["actor.generate/environment_reward"] == pytest.approx(sum(PLAYS.values()) / len(PLAYS))
    assert "does not continue the trajectory" in (tmp_path / "refused-another_conversation").read_text()


@pytest.mark.parametrize("stage", [2])
def test_the_same_under_two_stages(world: World, tmp_path: Path, stage: int) -> None:
    # What comes first is a matter of chance in the others.
    cases = [case for case in PLAYS if case not in ("together", "in_the_background")]
    alone, parted = (write_recipe(world, tmp_path / name, cases) for name in ("alone", "parted"))
    entry = {"mesh": "0-1", "dp": 1, "tp": 1, "pp": stage}
    calls = dict.fromkeys(("actor.generate", "actor.train"), entry)
    calls["reward.function"] = {"mesh": "0-1", "dp": 2}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({"cluster": "1x2", "calls": calls}))
    document = yaml.safe_load(parted.read_text()) | {"cluster": "1x2", "plan": str(tmp_path / "plan.yaml")}
    parted.write_text(yaml.safe_dump(document))
    run_on_ranks(1, [alone])
    run_on_ranks(2, [parted])
    assert sampled(parted) == sampled(alone)


def test_agents_that_fail_are_left_out_and_counted(world: World, tmp_path: Path) -> None:
    cases = [*FAULTS, "repeat"]
    file = write_recipe(world, tmp_path, cases, timeout=4, retries=0, on_error="skip")
    assert run_app(["train", str(file)]) == 0
    (metrics,) = read_metrics(tmp_path / "run")
    assert metrics["actor.generate/failed"] == pytest.approx(len(FAULTS) / len(cases))
    assert metrics["actor.generate/environment_reward"] == PLAYS["repeat"]


def test_the_time_limit_holds_for_each_pause_of_an_agent(world: World, tmp_path: Path) -> None:
    file = write_recipe(world, tmp_path, ["slow"], timeout=7, retries=0)  # a busy machine adds to a pause
    assert run_app(["train", str(file)]) == 0
    (metrics,) = read_metrics(tmp_path / "run")
    assert metrics["actor.generate/environment_reward"] == 10.0


def test_options_that_the_recipe_decides_and_a_start_that_failed_are_noted(
    world: World, tmp_path: Path, realrl: Callable[..., tuple[int, str]]
) -> None:
    file = write_recipe(world, tmp_path, ["streaming", "raise"], on_error="skip")
    status, printed = realrl("train", str(file))
    assert status == 0
    assert "note: an agent asks for temperature=0.5; generation.temperature=1 is used" in printed
    assert "raised KeyError: 'lost'" in printed and "(it starts again, environment.retries;" in printed


@pytest.mark.parametrize("fault", FAULTS)
def test_without_skipping_the_first_failure_ends_the_run(
    world: World, tmp_path: Path, realrl: Callable[..., tuple[int, str]], fault: str
) -> None:
    file = write_recipe(world, tmp_path, [fault], timeout=2, retries=0)
    status, printed = realrl("train", str(file))
    last = printed.strip().splitlines()[-1]
    assert status == 2 and FAULTS[fault] in last and "record " in last, printed


def test_the_maximum_number_of_turns_ends_an_agent_with_its_reward(world: World, tmp_path: Path) -> None:
    file = write_recipe(world, tmp_path, ["full"], max_turns=2)
    assert run_app(["train", str(file)]) == 0
    (metrics,) = read_metrics(tmp_path / "run")
    assert metrics["actor.generate/turns"] == 2.0
    assert metrics["actor.generate/environment_reward"] == 9.0


FEW = """
import json
import shutil
from urllib.request import Request, urlopen


class Agent:
    def run(self, base_url, api_key, model=None, answer=None):
        assert model == "actor" and answer == "yes"
        body = {"messages": [{"role": "user", "content": "Say something."}], "max_tokens": 4}
        headers = {"Authorization": f"Bearer {api_key}"}
        urlopen(Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers))
        return 1.0


class Fewer(Agent):
    def run(self, base_url, api_key):
        return super().run(base_url, api_key, "actor", "yes")
"""


@pytest.mark.parametrize("name", ["Agent", "Fewer"])
def test_run_gets_what_it_names_and_no_proxy_is_asked(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    file = write_recipe(world, tmp_path, ["repeat"], factory=f"{tmp_path / 'agent.py'}:{name}")
    (tmp_path / "agent.py").write_text(FEW)
    write_jsonl(
        tmp_path / "data.jsonl", [{"prompt": "the", "answer": "yes", "model": "another", "base_url": "?"}]
    )
    assert run_app(["train", str(file)]) == 0
    (metrics,) = read_metrics(tmp_path / "run")
    assert metrics["actor.generate/environment_reward"] == 1.0


def test_a_model_whose_logits_are_not_finite_is_not_the_fault_of_its_agent(
    world: World, tmp_path: Path, realrl: Callable[..., tuple[int, str]]
) -> None:
    broken = tmp_path / "actor"
    shutil.copytree(world.actor, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"].fill_(3e38)
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    file = write_recipe(world, tmp_path, ["repeat"])
    status, printed = realrl("train", str(file), f"models.actor.path={broken}")
    last = printed.strip().splitlines()[-1]
    assert status != 0 and "the logits of token" in last and "environment=" not in last, printed
