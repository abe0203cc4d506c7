"""A loop of one's own equals the built-in algorithms, on any micro-batches and ranks; mistakes get one message."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import realrl
from tests.conftest import World

LR = 1e-3


def open_session(world: World, **settings: Any) -> realrl.Session:
    actor = {"path": world.actor, "optimizer": {"lr": LR}}
    models = settings.pop("models", {"actor": actor, "ref": world.actor})
    return realrl.Session(
        models, **{"train": "actor", "device": "cpu", "cluster": "1x1", "micro_batch_tokens": 256, **settings}
    )


@pytest.fixture
def session(world: World) -> Iterator[realrl.Session]:
    with open_session(world) as opened:
        yield opened


def read_prompts(world: World, count: int) -> list[str]:
    lines = (world.root / "ppo.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines[:count]]


def assert_equal_models(first: Path, second: Path, limit: float) -> None:
    ours, theirs = (load_file(model / "model.safetensors") for model in (first, second))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=limit)


def clipped_loss(model: Any, batch: Any) -> torch.Tensor:
    ratio = (model.logprobs - batch.logprobs).exp()
    loss = -torch.minimum(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages)
    gap = batch.ref_logprobs - model.logprobs
    return loss + 0.04 * (gap.exp() - 1 - gap)


def score(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def test_grpo_as_a_loop_equals_the_algorithm(world: World, session: realrl.Session, tmp_path: Path) -> None:
    prompts = read_prompts(world, 12)
    data = [{"prompt": prompt} for prompt in prompts]
    run = realrl.GRPO(
        model=world.actor, reward=score, data=data, samples=4, batch=4, steps=3, max_new_tokens=8, lr=LR,
        shuffle=False, device="cpu", cluster="1x1", run_dir=str(tmp_path / "run"), micro_batch_tokens=256,
        **{"models.actor.optimizer.schedule": "constant"},
    ).train()  # fmt: skip
    for step in range(3):
        batch = session.sample(prompts[4 * step : 4 * step + 4], n=4, max_new_tokens=8)
        rewards = torch.tensor(score(batch.completions)).view(4, 4)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        batch["advantages"] = advantages.flatten()
        batch["ref_logprobs"] = session.infer("ref", batch)
        session.forward_backward("actor", batch, clipped_loss, aggregate="sequence_mean")
        metrics = session.step("actor")
        assert metrics["grad_norm"] == pytest.approx(run.metrics[step]["actor.train/grad_norm"], rel=1e-4)
    session.save_model("actor", tmp_path / "saved")
    assert_equal_models(run.model, tmp_path / "saved", 1e-6)


def test_dpo_as_a_loop_equals_the_algorithm(world: World, session: realrl.Session, tmp_path: Path) -> None:
    pairs = [json.loads(line) for line in (world.root / "reward.jsonl").read_text().splitlines()[:8]]
    prompts = [pair["prompt"] for pair in pairs for _ in range(2)]
    answers = [pair[side] for pair in pairs for side in ("chosen", "rejected")]
    run = realrl.DPO(
        model=world.actor, data=pairs, batch=8, steps=1, lr=LR, shuffle=False, device="cpu", cluster="1x1",
        run_dir=str(tmp_path / "run"), micro_batch_tokens=256, **{"preference.beta": 0.1},
    ).train()  # fmt: skip

    def loss(model: Any, batch: Any) -> torch.Tensor:
        chosen, rejected = batch.sum(model.logprobs - batch.ref_logprobs).view(-1, 2).T
        return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected))

    batch = session.batch(prompts, answers)
    batch["ref_logprobs"] = session.infer("ref", batch)
    metrics = session.forward_backward("actor", batch, loss, aggregate="per_group", group=2)
    assert metrics["loss"] == pytest.approx(run.metrics[0]["actor.train/loss"], rel=1e-5)
    session.step("actor")
    session.save_model("actor", tmp_path / "saved")
    assert_equal_models(run.model, tmp_path / "saved", 1e-6)


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", "sequence_sum"])
def test_gradients_do_not_depend_on_micro_batches_and_add_up(world: World, aggregate: Any) -> None:
    prompts, answers = read_prompts(world, 6), ["one", "two three", "four", "five six seven", "eight", "nine"]
    norms = []
    for tokens, times in ((16, 1), (4096, 1), (4096, 2)):
        with open_session(world, micro_batch_tokens=tokens) as session:
            batch = session.batch(prompts, answers)
            for _ in range(times):
                session.forward_backward(
                    "actor", batch, lambda model, _: -model.logprobs, aggregate=aggregate
                )
            norms.append(session.step("actor")["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert norms[2] == pytest.approx(2 * norms[1], rel=1e-5)


def test_an_own_loss_agrees_with_autograd_of_transformers(world: World, session: realrl.Session) -> None:
    from transformers import AutoModelForCausalLM

    batch = session.batch(read_prompts(world, 3), ["one", "two three", "four"])
    session.forward_backward("actor", batch, lambda model, _: -model.logprobs)
    model = AutoModelForCausalLM.from_pretrained(world.actor)
    losses = []
    for row, cut in zip(batch.sequences, batch.prompt_lengths, strict=True):
        logprobs = model(torch.tensor([row])).logits[0].log_softmax(-1)
        losses += [-logprobs[i - 1, row[i]] for i in range(cut, len(row))]
    torch.stack(losses).mean().backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert session.step("actor")["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_scalar_heads_score_and_learn(world: World) -> None:
    from transformers import AutoModelForSequenceClassification

    models = {"reward": {"path": world.reward, "optimizer": {"lr": 1e-2}}}
    with open_session(world, models=models, train="reward", scalar="reward") as session:
        batch = session.batch(read_prompts(world, 3), ["one", "two three", "four"])
        model = AutoModelForSequenceClassification.from_pretrained(world.reward)
        for row, values in zip(batch.sequences, session.infer("reward", batch), strict=True):
            assert float(values[-1]) == pytest.approx(model(torch.tensor([row])).logits.item(), abs=1e-4)
        batch["returns"] = [1.0, -1.0, 0.5]

        def loss(model: Any, batch: Any) -> torch.Tensor:
            return (model.values - batch.returns) ** 2

        before = session.forward_backward("reward", batch, loss)["loss"]
        session.step("reward")
        assert session.forward_backward("reward", batch, loss)["loss"] < before
        with pytest.raises(realrl.UserError, match="scalar head"):
            session.sample(["one"])


def test_a_failed_loss_leaves_no_gradients(world: World) -> None:
    prompts, norms = read_prompts(world, 6), []
    with open_session(world, micro_batch_tokens=16) as session:
        batch = session.batch(prompts, ["one", "two three", "four", "five six seven", "eight", "nine"])
        for fails in (False, True):
            calls = iter(range(99))

            def broken(model: Any, _: Any, calls: Any = calls) -> torch.Tensor:
                if next(calls) == 2:
                    raise IndexError
                return -model.logprobs  # type: ignore[no-any-return]

            if fails:
                with pytest.raises(realrl.UserError, match="the loss raised IndexError"):
                    session.forward_backward("actor", batch, broken)
            session.forward_backward("actor", batch, lambda model, _: -model.logprobs)
            norms.append(session.step("actor", lr=0.0)["grad_norm"])
    assert norms[0] == norms[1]


def test_batches_hold_columns_and_select(session: realrl.Session) -> None:
    batch = session.sample(["one two", "three"], n=2, max_new_tokens=4, temperature=0.7)
    assert len(batch) == 4 and batch.prompts == ["one two"] * 2 + ["three"] * 2
    batch["weights"] = [[1.0] * len(ids) for ids in batch.completion_ids]
    row, cut = batch["weights"][0], batch.prompt_lengths[0]
    assert row[:cut].sum() == 0 and row[cut:].sum() == len(row) - cut
    batch["score"] = torch.tensor([1, 2, 3, 4])
    half = batch.select([3, 1])
    assert half["score"].tolist() == [4, 2] and half.completions == [
        batch.completions[3],
        batch.completions[1],
    ]
    again = session.sample(batch.sequences, max_new_tokens=2)
    assert again.prompt_lengths == [len(row) for row in batch.sequences]


SCRIPT = """
import json, os, sys, torch, realrl
from tests.api.test_session import clipped_loss, score

session = realrl.Session(
    {{"actor": {{"path": {actor!r}, "optimizer": {{"lr": 1e-3}}}}, "ref": {actor!r}}}, train="actor",
    device="cpu", micro_batch_tokens=256, plan={plan!r}, cluster=os.environ.get("CLUSTER", "auto"),
)
batch = session.sample({prompts!r}, n=4, max_new_tokens=8)
rewards = torch.tensor(score(batch.completions)).view(-1, 4)
batch["advantages"] = (rewards - rewards.mean(1, keepdim=True)).flatten()
batch["ref_logprobs"] = session.infer("ref", batch)
first = session.forward_backward("actor", batch, clipped_loss)
norm = session.step("actor")["grad_norm"]
session.save_model("actor", sys.argv[1])
found = [batch.sequences, first["loss"], norm, [row.tolist() for row in session.infer("actor", batch)]]
with open(sys.argv[1] + "-" + os.environ.get("RANK", "0") + ".json", "w") as file:
    json.dump(found, file)
"""


def run_script(
    world: World, directory: Path, ranks: int, plan: Any, *, torchrun: bool = False
) -> list[list[Any]]:
    """Run the script on some ranks; what each of its processes found."""
    file = directory / "script.py"
    code = SCRIPT.format(actor=world.actor, prompts=read_prompts(world, 4), plan=plan)
    file.write_text(textwrap.dedent(code))
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if torchrun else []
    command = [sys.executable, *launch, str(file), str(directory / f"saved-{ranks}")]
    cluster = {} if torchrun else {"CLUSTER": f"1x{ranks}"}
    environment = (
        os.environ | cluster | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(file.read_text()) for file in directory.glob(f"saved-{ranks}-*.json")]


@pytest.fixture(scope="module")
def alone(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory in which one process has run the script."""
    directory = tmp_path_factory.mktemp("alone")
    run_script(world, directory, 1, "symmetric")
    return directory


PLACED = {
    "actor.generate": "d1 t2 p1 @0-1 mb=256",
    "actor.train": "d1 t1 p2 @0-1 mb=64",
    "ref.inference": "d1 t1 p1 @1 mb=64",
}


@pytest.mark.parametrize(
    ("plan", "torchrun"),
    [
        pytest.param("symmetric", True, id="torchrun", marks=pytest.mark.exhaustive),
        pytest.param(PLACED, False, id="script"),
    ],
)
def test_ranks_agree_and_equal_one_process(
    plan: Any, torchrun: bool, alone: Path, world: World, tmp_path: Path
) -> None:
    expected = json.loads((alone / "saved-1-0.json").read_text())
    found = run_script(world, tmp_path, 2, plan, torchrun=torchrun)
    assert len(found) == 1 + torchrun and found[0] == found[-1]
    first = found[0]
    assert first[0] == expected[0]
    assert first[1:3] == pytest.approx(expected[1:3], rel=1e-4, abs=1e-6)
    for ours, theirs in zip(first[3], expected[3], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert_equal_models(alone / "saved-1", tmp_path / "saved-2", 1e-5)


def test_a_saved_session_continues_on_another_session(world: World, tmp_path: Path) -> None:
    prompts, runs = read_prompts(world, 4), []

    def step(session: realrl.Session) -> list[Any]:
        batch = session.sample(prompts, n=2, max_new_tokens=4)
        session.forward_backward("actor", batch, lambda model, _: -model.logprobs)
        return [batch.sequences, session.step("actor")]

    for saves in (False, True):
        session = open_session(world)
        runs.append([step(session)])
        if saves:
            session.save(tmp_path / "state")
            session.close()
            session = open_session(world)
            session.load(tmp_path / "state")
        runs[-1].append(step(session))
        session.forward_backward("actor", session.batch(["one"], ["two"]), lambda model, _: -model.logprobs)
        with pytest.raises(realrl.UserError, match=r"call step\('actor'\) first"):
            session.save(tmp_path / "state")
        with pytest.raises(realrl.UserError, match="is not a saved session"):
            session.load(tmp_path / "absent")
        session.close()
        session.close()
        with pytest.raises(realrl.UserError, match="the session is closed"):
            session.infer("actor", session.batch(["one"], ["two"]))
    assert runs[0] == runs[1]


def test_a_language_model_answers_like_vllm(world: World) -> None:
    llm = realrl.LLM(world.actor, device="cpu", cluster="1x1")
    first, second = llm.generate(["one two", "three"], realrl.Sampling(n=2, max_tokens=3))
    assert first.prompt == "one two" and len(second.outputs) == 2
    answer = first.outputs[1]
    assert answer.index == 1 and len(answer.logprobs) == len(answer.token_ids) <= 3
    assert answer.cumulative_logprob == pytest.approx(sum(answer.logprobs)) and answer.cumulative_logprob < 0
    assert answer.finish_reason == ("stop" if len(answer.token_ids) < 3 else answer.finish_reason)
    (alone,) = llm.generate(first.prompt_token_ids, temperature=0, max_tokens=3)
    (again,) = llm.generate("one two", greedy=True, max_new_tokens=3)
    assert alone.outputs[0].token_ids == again.outputs[0].token_ids
    assert llm.generate([]) == []
    llm.close()


def test_mistakes_get_one_message(world: World, session: realrl.Session) -> None:
    batch = session.batch(["one"], ["two"])

    def train(loss: Any, **options: Any) -> None:
        session.forward_backward("actor", batch, loss, **options)

    for call, message in (
        (lambda: session.infer("critic", batch), "there is no model 'critic'; the session has actor, ref"),
        (lambda: session.step("ref"), "ref is not trained"),
        (lambda: train(lambda m, b: m.logprobs.mean()), "do not average it yourself"),
        (lambda: train(lambda m, b: m.logprobs, group=2), "group=2 does not divide"),
        (lambda: session.sample([]), "prompts: there are none"),
        (lambda: session.sample(["one"], max_tokns=3), "max_tokns"),
        (lambda: session.sample([[]]), "prompt 0 has no tokens"),
        (lambda: session.batch(["one"], []), "1 prompts and 0 completions"),
        (lambda: batch.__setitem__("x", [1, 2]), "one number or row for each of the 1 sequences"),
        (lambda: batch.__setitem__("x", [[1.0] * 99]), "row 0 has shape"),
        (lambda: batch.__setitem__("sequences", [1]), "not free"),
    ):  # fmt: skip
        with pytest.raises(realrl.UserError, match=message):
            call()  # type: ignore[no-untyped-call]
    for settings, message in (
        ({"train": "critic"}, "train: critic is not one of the models"),
        ({"plan": "search"}, "plan=search needs a recipe"),
        ({"plan": {"actor.sample": "d1 t1 p1 @0 mb=64"}}, "there is no call actor.sample"),
        ({"cluster": "2x2"}, "torchrun"),
        ({"micro_batch": 3}, "micro_batch"),
    ):
        with pytest.raises(realrl.UserError, match=message):
            open_session(world, **settings)


def test_failures_in_other_processes_reach_the_script(world: World) -> None:
    def broken(model: Any, batch: Any) -> torch.Tensor:
        raise ZeroDivisionError("my own mistake")

    with open_session(world, cluster="1x2") as session:
        batch = session.batch(["one", "two"], ["three", "four"])
        with pytest.raises(realrl.UserError, match="do not average it yourself"):
            session.forward_backward("actor", batch, lambda model, _: model.logprobs.mean())
        assert session.forward_backward("actor", batch, lambda model, _: -model.logprobs)["loss"] > 0
        assert session.step("actor")["skipped_steps"] == 0
        with pytest.raises(realrl.UserError, match=r"ZeroDivisionError: my own mistake \(.*\d+"):
            session.forward_backward("actor", batch, broken)
        # Both processes have found the same mistake, so the session goes on.
        assert session.forward_backward("actor", batch, lambda model, _: -model.logprobs)["loss"] > 0
        with pytest.raises(realrl.RunError, match="ended with status 7"):
            session.forward_backward("actor", batch, lambda model, _: os._exit(7))
        with pytest.raises(realrl.UserError, match=r"the session is closed; it ended after: .*status 7"):
            session.step("actor")


def test_sampling_takes_the_names_of_vllm() -> None:
    ours = realrl.Sampling(n=2, max_new_tokens=5, greedy=True, stop=["x"])
    theirs = realrl.Sampling(n=2, max_tokens=5, temperature=0, top_k=-1, stop="x")
    assert ours.config == theirs.config
    with pytest.raises(realrl.UserError, match="the same setting"):
        realrl.Sampling(max_tokens=5, max_new_tokens=5)
    with pytest.raises(realrl.UserError, match="n=0"):
        realrl.Sampling(n=0)


def test_a_mistake_in_a_loss_names_its_line_and_the_session_goes_on(
    session: realrl.Session, world: World, tmp_path: Path
) -> None:
    batch = session.batch(read_prompts(world, 2), ["one", "two three"])
    assert batch.prompt_length.tolist() == batch["prompt_length"].tolist()
    with pytest.raises(
        realrl.UserError, match=r"the loss raised AttributeError: .*'advantage'.*test_session\.py"
    ):
        session.forward_backward("actor", batch, lambda model, given: model.logprobs * given.advantage)
    session.forward_backward("actor", batch, lambda model, _: -model.logprobs)
    assert session.step("actor")["grad_norm"] > 0
    with pytest.raises(AttributeError, match="no column 'absent'"):
        batch.absent  # noqa: B018
    with pytest.raises(realrl.UserError, match="is not a saved session"):
        session.load(tmp_path / "absent")
