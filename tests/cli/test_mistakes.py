"""Mistakes that people make: each is one error message and exit status 2, without a traceback and before any work.

A table of what has been met or may be; and every field of every recipe with every kind of wrong value, which is
either refused in one message or means something valid.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from realrl.cli.app import run_app
from realrl.config.base import Settings
from realrl.config.errors import UserError
from realrl.config.explain import section_class
from realrl.config.load import (
    apply_override,
    dump_experiment,
    experiment_class,
    experiment_classes,
    parse_experiment,
)
from realrl.config.yaml_file import parse_yaml, read_yaml
from tests.conftest import World

SENTENCE = 700
"""Characters of the longest error message. Some list all that there is to choose from."""

DEEP, DEEPER = "[" * 1500, "[" * 100_000
"""Too deep for YAML, and for JSON."""
CONFIG_JSON: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CALLS = """cluster: 1x2
calls:
  actor.generate: {mesh: 0-1, dp: 2}
  reward.inference: {mesh: 0, dp: 1}
  ref.inference: {mesh: 1, dp: 1}
  critic.inference: {mesh: 0-1, dp: 2}
  actor.train: {mesh: 0-1, dp: 2}
  critic.train: {mesh: 0-1, dp: 2}
"""
GROUP = "groups: [{device: h100, nodes: 1, devices_per_node: 2%s}]\n"


@pytest.fixture(scope="module")
def place(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a recipe of each algorithm, and files to be named by mistake."""
    directory = tmp_path_factory.mktemp("mistakes")
    for algorithm in experiment_classes():
        (directory / algorithm).mkdir()
        world.recipe(algorithm, directory / algorithm)
    (directory / "empty").write_text("")
    (directory / "text.txt").write_text("hello\n")
    (directory / "records.csv").write_text("prompt,answer\na,b\n")
    (directory / "records.JSONL").write_text('{"prompt": "a", "answer": "b"}\n')
    (directory / "records.jsonl.gz").write_bytes(b"\x1f\x8b")
    (directory / "folder").mkdir()
    (directory / "folder" / "records.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (directory / "nothing").mkdir()
    for family in ("qwen2", "mistral", "qwen3"):
        (directory / family).mkdir()
        (directory / family / "config.json").write_text(json.dumps({**CONFIG_JSON, "model_type": family}))
    return directory


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    """Run a command line that must end with one error message that has `words` in it."""
    assert run_app(arguments) == 2, "accepted"
    captured = capsys.readouterr()
    assert captured.err.startswith("realrl: ") and captured.err.count("\n") == 1, captured.err
    assert len(captured.err) <= SENTENCE and "Traceback" not in captured.err
    assert words in captured.err, captured.err


def recipe_of(place: Path, algorithm: str) -> str:
    return str(place / algorithm / "recipe.yaml")


OVERRIDES: list[tuple[str, str]] = [
    # Names and syntax.
    ("data.btach=3", "data.btach: unknown key; did you mean data.batch?"),
    ("batch=3", "did you mean data.batch?"),
    ("lr=1e-5", "did you mean models.actor.optimizer.lr?"),
    ("models.actr.path=a", "models.actr: unknown key; did you mean models.actor?"),
    ("ppo.kl_coef=0.1", "ppo.kl_coef: unknown key"),
    ("generation.max_tokens=8", "generation.max_tokens: unknown key; did you mean generation."),
    ("training.resume=true", "training.resume: unknown key; known keys are epochs, steps"),
    ("zzz=1", "zzz: unknown key; known keys are algorithm"),
    ("data.batch", "override 'data.batch' is not understood; write key=value"),
    ("=3", "override '=3' is not understood"),
    ("data..batch=3", "is not understood; write key=value"),
    (".batch=3", "is not understood; write key=value"),
    ("data.batch.=3", "is not understood; write key=value"),
    ("--batch=3", "No such option"),
    ("data.batch.x=3", "data.batch is 16, which has no keys inside"),
    ("run_dir.x=3", "which has no keys inside"),
    ("data.train=[a", "override data.train=[a: not valid YAML"),
    ("data.train={a", "not valid YAML"),
    ("data.train=a: b: c", "not valid YAML"),
    ("data.train=@a", "not valid YAML"),
    ("data.train=%a", "not valid YAML"),
    ("data.train=*a", "not valid YAML"),
    ("data.train=!!python/name:os.system", "not valid YAML"),
    ("data={train: a, train: b}", "key 'train' twice"),
    ('run_dir="a\\0b"', "text with a character that no file can have"),
    ('run_dir="\\ud800"', "text with a character that no file can have"),
    ("models=" + DEEP, "lists or sections are nested too deep"),
    ("seed=" + "9" * 5000, "not valid YAML"),
    ("seed=" + "9" * 50, "not valid YAML (a number above 10^20)"),
    # Types.
    ("data.batch=many", "data.batch: 'many' is not a whole number"),
    ("data.batch='8'", "data.batch: '8' is not a whole number"),
    ("data.batch=8.0", "data.batch: 8.0 is not a whole number"),
    ("data.batch=true", "data.batch: true is not a whole number"),
    ("data.batch=null", "data.batch: null is not a whole number"),
    ("data.batch=", "data.batch: null is not a whole number"),
    ("data.batch=[8]", "data.batch: [8] is not a whole number"),
    ("data.batch={a: 8}", "data.batch: {'a': 8} is not a whole number"),
    ("data.batch=1e3", "data.batch: 1000.0 is not a whole number"),
    ("data.batch=0x10", "data.batch: '0x10' is not a whole number"),
    ("data.batch=010", "data.batch: '010' is not a whole number"),
    ("data.batch=1:30", "data.batch: '1:30' is not a whole number"),
    ("data.batch=2024-01-01", "data.batch: '2024-01-01' is not a whole number"),
    ("data.batch=!!timestamp 2024-01-01", "data.batch: 2024-01-01 is not a whole number"),
    ("data.batch=1 000", "data.batch: '1 000' is not a whole number"),
    ("data.batch=1,000", "data.batch: '1,000' is not a whole number"),
    ("models.actor.optimizer.lr=1e-5x", "models.actor.optimizer.lr: '1e-5x' is not a number"),
    ("models.actor.optimizer.lr=fast", "'fast' is not a number"),
    ("models.actor.optimizer.lr='1e-5'", "'1e-5' is not a number"),
    ("models.actor.optimizer.lr=true", "true is not a number"),
    ("models.actor.optimizer.lr=.nan", "nan is not a finite number"),
    ("ppo.reward_bias=.inf", "inf is not a finite number"),
    ("ppo.reward_bias=-.inf", "-inf is not a finite number"),
    ("overwrite=1", "overwrite: 1 is not true or false"),
    ("overwrite=maybe", "overwrite: 'maybe' is not true or false"),
    ("overwrite='true'", "overwrite: 'true' is not true or false"),
    ("overwrite=null", "overwrite: null is not true or false"),
    ("data.shuffle=[]", "data.shuffle: [] is not true or false"),
    ("run_dir=5", "run_dir: 5 is not text; in quotes, '5', it would be"),
    ("run_dir=true", "in quotes, 'true', it would be"),
    ("run_dir=1.5", "in quotes, '1.5', it would be"),
    ("run_dir=", "run_dir: null is not text"),
    ("run_dir=''", "run_dir: must not be empty"),
    ("run_dir=[a]", "run_dir: ['a'] is not text"),
    ("run_dir=!!timestamp 2024-01-01", "run_dir: 2024-01-01 is not text"),
    ("run_dir=!!binary aGk=", "run_dir: b'hi' is not text"),
    ("data.train=[a.jsonl, b.jsonl]", "data.train: ['a.jsonl', 'b.jsonl'] is not text"),
    ("data.train=null", "data.train: null is not text"),
    ("plan=3", "plan: 3 is not text"),
    ("plan=[symmetric]", "plan: ['symmetric'] is not text"),
    ("profile=7", "profile: 7 is not text"),
    ("data=null", "data: null is not a section of keys"),
    ("data=5", "data: 5 is not a section of keys"),
    ("data=[]", "data: [] is not a section of keys"),
    ("data={}", "data.train: missing"),
    ("data={1: 2}", "is not text, so it is no name of a key"),
    ("models=null", "models: null is not a section of keys"),
    ("models={}", "models.actor: missing"),
    ("models.actor=gpt", "models.actor: 'gpt' is not a section of keys"),
    ("models.actor.optimizer=adam", "models.actor.optimizer: 'adam' is not a section of keys"),
    ("models.actor.optimizer=null", "models.actor.optimizer: null is not a section of keys"),
    ("ppo=true", "ppo: true is not a section of keys"),
    ("models.actor.optimizer.betas=0.9", "models.actor.optimizer.betas: 0.9 is not a list"),
    ("models.actor.optimizer.betas=[]", "betas.0: missing; the list has too few entries"),
    ("models.actor.optimizer.betas=[0.9]", "betas.1: missing; the list has too few entries"),
    ("models.actor.optimizer.betas=[0.9, 0.9, 0.9]", "has 3 entries; at most 2 can be used"),
    ("models.actor.optimizer.betas=[0.9, x]", "betas.1: 'x' is not a number"),
    ("models.actor.optimizer.betas=[0.9, 1]", "betas.1: 1 must be below 1"),
    ("models.actor.optimizer.betas=&a [*a, 1]", "betas.0: "),
    ("models.actor.optimizer.schedule=cosin", "did you mean cosine?"),
    ("models.actor.optimizer.schedule=1", "1 is not 'constant', 'linear' or 'cosine'"),
    ("models.actor.dtype=float16", "'float16' is not 'float32' or 'bfloat16'; did you mean bfloat16?"),
    ("models.actor.dtype=16", "16 is not 'float32' or 'bfloat16'"),
    ("device=gpu", "'gpu' is not 'auto', 'cpu' or 'cuda'"),
    ("device=cuda:0", "'cuda:0' is not 'auto', 'cpu' or 'cuda'"),
    ("ppo.value_norm=true", "true is not 'none', 'running' or 'exponential'"),
    ("data.on_error=ignore", "'ignore' is not 'fail' or 'skip'"),
    ("algorithm=grpo", "algorithm: 'grpo' is not one of sft, reward, ppo"),
    ("algorithm=PPO", "algorithm: 'PPO' is not one of"),
    ("algorithm=pppo", "did you mean ppo?"),
    ("algorithm=null", "algorithm: missing; give one of sft, reward, ppo"),
    ("algorithm=[ppo]", "algorithm: ['ppo'] is not one of"),
    ("algorithm=sft", "models.critic: unknown key"),
    # Bounds.
    ("data.batch=0", "data.batch: 0 must be above 0"),
    ("data.batch=-1", "data.batch: -1 must be above 0"),
    ("data.max_tokens=0", "data.max_tokens: 0 must be above 0"),
    ("data.max_prompt_tokens=-5", "must be above 0"),
    ("data.max_pairs_per_prompt=0", "must be above 0"),
    ("micro_batch_tokens=0", "micro_batch_tokens: 0 must be above 0"),
    ("seed=-1", "seed: -1 must be at least 0"),
    ("seed=9223372036854775808", "must be at most 9223372036854775807"),
    ("training.steps=0", "training.steps: 0 must be above 0"),
    ("training.steps=2000000000", "must be at most 1000000000"),
    ("training.epochs=0", "training.epochs: 0 must be above 0"),
    ("training.epochs=-1", "must be above 0"),
    ("training.epochs=1e300", "training.epochs: 1e+300 must be at most 1e+06"),
    ("training.eval_every=0", "must be above 0"),
    ("training.save_every=-1", "must be above 0"),
    ("training.samples=0", "must be above 0"),
    ("models.actor.optimizer.lr=0", "must be above 0"),
    ("models.actor.optimizer.lr=-1e-5", "must be above 0"),
    ("models.actor.optimizer.lr=1e30", "models.actor.optimizer.lr: 1e+30 must be at most 1"),
    ("models.actor.optimizer.lr=10", "must be at most 1"),
    ("models.actor.optimizer.eps=0", "must be above 0"),
    ("models.actor.optimizer.eps=1e9", "must be at most 1"),
    ("models.actor.optimizer.weight_decay=-0.1", "must be at least 0"),
    ("models.actor.optimizer.weight_decay=1e6", "lr=0.001 times weight_decay=1e+06 must be below 1"),
    ("models.actor.optimizer.grad_clip=0", "must be above 0"),
    ("models.actor.optimizer.warmup_steps=-1", "must be at least 0"),
    ("models.actor.optimizer.min_lr_ratio=2", "must be at most 1"),
    ("generation.temperature=0", "generation.temperature: 0 must be at least 0.01"),
    ("generation.temperature=1e-30", "must be at least 0.01"),
    ("generation.temperature=-1", "must be at least 0.01"),
    ("generation.temperature=1e9", "must be at most 100"),
    ("generation.top_p=0", "must be above 0"),
    ("generation.top_p=1.5", "must be at most 1"),
    ("generation.top_k=-1", "must be at least 0"),
    ("generation.max_new_tokens=0", "must be above 0"),
    ("generation.max_new_tokens=1000000000", "must be at most 10000000"),
    ("generation.min_new_tokens=-1", "must be at least 0"),
    ("ppo.gamma=0", "ppo.gamma: 0 must be above 0"),
    ("ppo.gamma=1.1", "must be at most 1"),
    ("ppo.lam=-0.1", "must be at least 0"),
    ("ppo.clip=0", "must be above 0"),
    ("ppo.kl.coef=-1", "must be at least 0"),
    ("ppo.minibatches=0", "must be above 0"),
    ("ppo.epochs=0", "must be above 0"),
    ("ppo.ref_ema=0", "must be above 0"),
    # One limit beside another.
    ("generation.min_new_tokens=13", "min_new_tokens=13 is above max_new_tokens=12"),
    ("data.max_tokens=256 data.max_prompt_tokens=500", "max_prompt_tokens=500 is above max_tokens=256"),
    ("data.max_prompt_tokens=2000", "max_prompt_tokens=2000 is above max_tokens=1024"),
    ("data.max_tokens=12", "together are above data.max_tokens=12"),
    ("generation.max_new_tokens=600", "together are above data.max_tokens=1024"),
    ("ppo.minibatches=3", "data.batch=16 is not divisible by ppo.minibatches=3"),
    ("ppo.minibatches=32", "data.batch=16 is not divisible by ppo.minibatches=32"),
    ("data.batch=15", "data.batch=15 is not divisible by ppo.minibatches=2"),
    ("ppo.ref_ema=0.1 models.ref.dtype=bfloat16", "ppo.ref_ema needs models.ref.dtype=float32"),
    ("training.judge=a.py:f", "training.judge scores what evaluations generate; give data.eval"),
    # Devices and memory.
    ("cluster=2", "cluster: 2 is not understood; write nodes x devices per node, for example 1x2"),
    ("cluster=null", "cluster: null is not understood"),
    ("cluster=[1, 2]", "cluster: [1, 2] is not understood"),
    ("cluster=0x2", "cluster 0x2: both numbers must be at least 1"),
    ("cluster=1x0", "both numbers must be at least 1"),
    ("cluster=two", "cluster='two' is not understood"),
    ("cluster=1x2x3", "is not understood; write nodes x devices per node"),
    ("cluster=-1x2", "is not understood"),
    ("cluster=1*2", "is not understood"),
    ("cluster=1x" + "9" * 30, "is not understood"),
    ("cluster=h10:1x2", "device 'h10' is not known"),
    ("cluster=h100:1", "write kind:nodes x devices per node"),
    ("cluster=nowhere.yaml", "nowhere.yaml does not exist"),
    ("cluster=h100:1000x1000", "has 1,000,000 devices; 4,096 can be planned"),
    ("device_memory=80", "device_memory: 80 has no unit; write for example 80GiB"),
    ("device_memory=0.5", "device_memory: 0.5 has no unit; write for example 80GiB"),
    ("device_memory=-1", "device_memory: -1 has no unit"),
    ("device_memory='80'", "device_memory: '80' is no size; write a number and a unit"),
    ("device_memory=80G", "'80G' is no size"),
    ("device_memory=-80GiB", "'-80GiB' is no size"),
    ("device_memory=0GiB", "'0GiB' is no size"),
    ("device_memory=0.1B", "'0.1B' is no size"),
    ("device_memory=" + "9" * 400 + "GiB", "is no size"),
    ("device_memory=99999999TiB", "is no size"),
    ("device_memory=true", "device_memory: true is not text"),
    ("device_memory=[80GiB]", "device_memory: ['80GiB'] is not text"),
    ("device_memory=1MiB", "are less than what drivers and the buffers of messages take"),
    # Models.
    ("models.actor.path=null", "models: actor needs a path (weights to load) or a shape"),
    ("models.reward.path=null", "models: reward needs a path (weights to load) or a shape"),
    ("models.actor.shape=llama-2-7b", "for the shape set models.actor.path=null, for the weights models."),
    (
        "models.actor.shape=llama-2-7b models.reward.shape=llama-2-7b",
        "for the shape set models.actor.path=null models.reward.path=null",
    ),
    ("models.actor.path=null models.actor.shape=lama-2-7b", "did you mean llama-2-7b?"),
    ("models.actor.path=null models.actor.shape=llama-2", "known models are llama-2-7b"),
    ("models.actor.path=null models.actor.shape=qwen3-8b", "known models are llama-2-7b"),
    ("models.actor.path=null models.actor.shape=llama-3.1-8b", "known models are llama-2-7b"),
    ("models.actor.path=null models.actor.shape=7", "7 is neither the name of a published model"),
    ("models.actor.path=null models.actor.shape=[7]", "neither the name of a published model"),
    ("models.actor.path=null models.actor.shape=true", "true is neither the name of a published model"),
    ("models.actor.path=null models.actor.shape=''", "models.actor.shape: must not be empty"),
    ("models.actor.path=null models.actor.shape=./nowhere", "./nowhere: no such file"),
    ("models.actor.path=null models.actor.shape=DIR/qwen3", "model_type 'qwen3' is not supported"),
    ("models.actor.path=null models.actor.shape=DIR/nothing", "config.json: no such file"),
    ("models.actor.path=null models.actor.shape=DIR/text.txt", "not valid JSON"),
    ("models.actor.path=null models.actor.shape=DIR/empty", "not valid JSON"),
    ("models.actor.path=null models.actor.shape=" + "x" * 300, "is too long for a path"),
    ("models.actor.path=null models.actor.shape={layers: 2}", "models.actor.shape.vocab_size: missing"),
    ("models.actor.path=" + "x" * 300, "is too long for a path"),
    ("models.actor.path=DIR/nothing/x", "no such directory"),
    ("models.actor.path=~nobody-of-that-name/x", "no such directory"),
    ("models.actor.path=/proc/x", "no such directory"),
    ("models.actor.path=DIR/text.txt", "no such directory"),
    ("models.actor.path=DIR/qwen2", "model_type 'qwen2' is not supported; supported is: llama"),
    ("models.actor.path=''", "models.actor.path: must not be empty"),
    ("models.actor.tokenizer=DIR/gone", "models.actor.tokenizer="),
    # Plans.
    ("plan=symetric", "did you mean symmetric?"),
    ("plan=serach", "did you mean search?"),
    ("plan=plan.json", "nor a .yaml file"),
    ("plan=''", "plan: must not be empty"),
    ("plan=nowhere.yaml", "nowhere.yaml does not exist"),
    ("plan=DIR/ppo/recipe.yaml", "unknown key"),
    ("plan=disjoint", "plan disjoint needs at least 4 devices"),
    ("plan=separate", "plan separate needs at least 2 devices"),
    ("cluster=1x5 plan=heuristic", "tp=5 is more than the 4 attention heads"),
    ("cluster=3x1 plan=heuristic", "pp=3 is more pipeline stages than the model has layers (2)"),
    ("cluster=1x16", "leaves some of the 16 data-parallel ranks of"),
]
"""Overrides of a PPO recipe, several with spaces between, and what is said. DIR is the directory of `place`."""


@pytest.mark.parametrize(("overrides", "words"), OVERRIDES, ids=[text[:50] for text, _ in OVERRIDES])
def test_a_wrong_override_is_one_error_message(
    place: Path, capsys: pytest.CaptureFixture[str], overrides: str, words: str
) -> None:
    overrides = overrides.replace("DIR", str(place))
    arguments = re.split(r" (?=[a-z_.]+=)", overrides)
    command = "train" if "no such directory" in words or "tokenizer" in words else "show"
    if words == "No such option":
        assert run_app([command, recipe_of(place, "ppo"), *arguments]) == 2
        assert words in capsys.readouterr().err
    else:
        refused(capsys, [command, recipe_of(place, "ppo"), *arguments], words)


TRAIN: list[tuple[str, str, str]] = [
    ("sft", "models.actor.shape=qwen2.5-0.5b", "models of family qwen2 can be planned for"),
    ("sft", "models.actor.shape=DIR/qwen2", "models.actor.shape: models of family qwen2"),
    ("sft", "models.actor.shape=DIR/mistral", "not trained yet; trained are: llama"),
    ("ppo", "models.critic.shape=DIR/qwen2", "models.critic.shape: models of family qwen2"),
    ("sft", "models.actor.shape.family=qwen2", "models of family qwen2 can be planned for"),
    ("sft", "models.actor.tokenizer=null", "a model that starts from scratch needs a tokenizer"),
    ("sft", "models.actor.tokenizer=DIR/nothing", "has no tokenizer"),
    ("sft", "data.max_tokens=2049", "data.max_tokens=2049 is more than the 2048 positions"),
    ("ppo", "generation.top_k=321", "generation.top_k=321 is more than the 320 tokens"),
    ("sft", "run_dir=DIR/text.txt", "is a file; choose a directory"),
    ("sft", "run_dir=DIR/folder", "holds something other than a run"),
    ("sft", "run_dir=DIR/text.txt/run", "cannot be written"),
    ("sft", "run_dir=/proc/x", "cannot be written"),
    ("sft", "run_dir=" + "x" * 300, "is too long for a path"),
    ("sft", "profile=DIR/gone.json", "no such file"),
    ("sft", "profile=DIR/text.txt", "not valid JSON"),
    ("sft", "device=cuda", "torch finds no"),
    ("sft", "cluster=2x1", "has 2 nodes; start it on each of them with"),
    ("sft", "cluster=h100:1x1", "names h100, but this run computes on CPUs"),
    ("ppo", "data.eval=DIR/folder/records.jsonl training.judge=judge", "write FILE.py:FUNCTION"),
    ("ppo", "data.eval=DIR/folder/records.jsonl training.judge=gone.py:f", "with a file that exists"),
    ("sft", "training.judge=a.py:f data.eval=x", "scores generated text, and sft generates none"),
    ("sft", "data.batch=81", "data.batch=81 is more than the 80 records of the training data"),
    ("sft", "data.train=DIR/gone.jsonl", "does not exist"),
    ("sft", "data.train=DIR/gone", "does not exist; give a .jsonl, .json or .parquet file"),
    ("sft", "data.train=DIR/*.parquet", "does not exist"),
    ("sft", "data.train=DIR/text.txt", "is of no kind that is read; write its records as .jsonl"),
    ("sft", "data.train=DIR/records.csv", "is of no kind that is read; write its records as .jsonl"),
    ("sft", "data.train=DIR/records.JSONL", "write the end of its name in small letters, .jsonl"),
    ("sft", "data.train=DIR/records.jsonl.gz", "is compressed; unpack it"),
    ("sft", "data.train=DIR/folder", "folder/*.jsonl for its files"),
    ("sft", "data.train=DIR/nothing", "is a directory that Dataset.save_to_disk has not written"),
    ("sft", "data.train=DIR/nothing:train", "is not a saved data set"),
    ("sft", "data.train=" + "x" * 300 + ".jsonl", "is too long for a path"),
]
"""Algorithm, overrides, and what `realrl train` says, before the first step."""


@pytest.mark.parametrize(("algorithm", "overrides", "words"), TRAIN)
def test_what_cannot_be_trained_is_one_error_message(
    place: Path, capsys: pytest.CaptureFixture[str], algorithm: str, overrides: str, words: str
) -> None:
    arguments = overrides.replace("DIR", str(place)).split(" ")
    refused(capsys, ["train", recipe_of(place, algorithm), *arguments], words)
    assert not (place / algorithm / "run").exists()


DATA: list[tuple[str, str, str]] = [
    ("sft", "", "it is empty"),
    ("sft", "\n\n", "it is empty"),
    ("sft", "{", ":1: not valid JSON"),
    ("sft", "nonsense", ":1: not valid JSON"),
    ("sft", "[]", ":1: not a JSON object"),
    ("sft", "3", "not a JSON object but 3"),
    ("sft", '"text"', "not a JSON object"),
    ("sft", "null", "not a JSON object but null"),
    ("sft", "{}", ":1: "),
    ("sft", '{"prompt": "a"}', "no field 'answer'"),
    ("sft", '{"answer": "a"}', "no field 'prompt'"),
    ("sft", '{"text": "a"}', "a record must be {prompt, answer} or {messages}"),
    ("sft", '{"prompt": 3, "answer": "a"}', "field 'prompt' must be text"),
    ("sft", '{"prompt": "a", "answer": ["b"]}', "field 'answer' must be text"),
    ("sft", '{"prompt": "a", "answer": {"b": 1}}', "field 'answer' must be text"),
    ("sft", '{"instruction": "a", "output": "b"}', "a record must be"),
    ("sft", '{"conversations": [{"from": "human", "value": "a"}]}', "a record must be"),
    ("sft", '{"messages": "a"}', "messages"),
    ("sft", '{"messages": []}', "messages"),
    ("sft", '{"messages": [{"role": "user"}]}', "messages"),
    ("sft", '{"messages": [{"role": "user", "content": null}]}', "messages"),
    ("sft", '{"messages": [{"role": "user", "content": "a"}]}', ":1: "),
    (
        "sft",
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
        "template",
    ),
    ("sft", DEEPER, ":1: "),
    ("sft", '{"prompt": "a", "answer": "%s"}' % ("b " * 3000), "more than data.max_tokens=1024"),
    ("sft", '{"prompt": "%s", "answer": "b"}' % ("b " * 600), "more than data.max_prompt_tokens=512"),
    ("reward", '{"prompt": "a", "chosen": "b"}', "rejected"),
    ("reward", '{"prompt": "a", "chosen": "b", "rejected": 3}', "field 'rejected' must be text"),
    ("reward", '{"chosen": "b", "rejected": "c"}', "no field 'prompt'"),
    ("reward", '{"prompt": "a", "answer": "b"}', "a record must be"),
    ("reward", '{"prompt": "a", "pos_answers": "b", "neg_answers": "c"}', "pos_answers"),
    ("reward", '{"prompt": "a", "pos_answers": [], "neg_answers": []}', ":1: "),
    ("ppo", '{"text": "a"}', "no field 'prompt'"),
    ("ppo", '{"prompt": null}', "no field 'prompt'"),
    ("ppo", '{"prompt": 3}', "field 'prompt' must be"),
    ("ppo", '{"prompt": "%s"}' % ("b " * 600), "more than data.max_prompt_tokens=512"),
]
"""Algorithm, the first line of a data file, and what is said of it."""


@pytest.mark.parametrize(
    ("algorithm", "line", "words"), DATA, ids=[f"{name}-{text[:40]}" for name, text, _ in DATA]
)
def test_a_record_that_cannot_be_used_is_one_error_message(
    place: Path, capsys: pytest.CaptureFixture[str], algorithm: str, line: str, words: str
) -> None:
    file = place / "data.jsonl"
    file.write_text(line + "\n")
    arguments = ["train", recipe_of(place, algorithm), f"data.train={file}", "data.batch=1"]
    refused(capsys, [*arguments, *(["ppo.minibatches=1"] if algorithm == "ppo" else [])], words)


PLANS: list[tuple[str, str]] = [
    ("", "null is not a section of keys"),
    ("[]", "[] is not a section of keys"),
    ("text", "'text' is not a section of keys"),
    ("calls: [", "not valid YAML"),
    (DEEP, "nested too deep"),
    ("calls: {}", "cluster: missing"),
    ("cluster: 1x2", "calls: missing"),
    ("cluster: 1x2\ncalls: null", "calls: null is not a section of keys"),
    ("cluster: 1x2\ncalls: [a]", "calls: ['a'] is not a section of keys"),
    ("cluster: 1x2\ncalls: {}", "call actor.generate has no placement"),
    ("cluster: 1x2\ncalls: {actor.generate: 3}", "actor.generate: 3 is not a section of keys"),
    ("cluster: 1x2\ncalls: {1: {mesh: 0, dp: 1}}", "is no name of a key"),
    (CALLS.replace("1x2", "2"), "cluster: 2 is not understood; write nodes x devices per node"),
    (CALLS.replace("1x2", "0x2"), "cluster 0x2: both numbers must be at least 1"),
    (CALLS.replace("1x2", "1x4"), "is for cluster 1x4; this run has 1x2"),
    (CALLS + "cals: {}\n", "cals: unknown key; did you mean calls?"),
    (CALLS + "calls: {}\n", "key 'calls' twice"),
    (CALLS + "keep: actor\n", "keep: 'actor' is not a list"),
    (CALLS + "keep: [actor, actor]\n", "keep: 'actor' is named twice"),
    (CALLS + "offload: [ref, ref]\n", "offload: 'ref' is named twice"),
    (CALLS + "offload_optimizer: [critic, critic]\n", "offload_optimizer: 'critic' is named twice"),
    (CALLS + "keep: [1]\n", "keep.0: 1 is not text"),
    (CALLS + "keep: [critc]\n", "keep: critc is none of actor, reward, ref, critic"),
    (CALLS + "offload_optimizer: [ref]\n", "ref is none of actor, critic"),
    (CALLS + "offload: null\n", "offload: null is not a list"),
    (CALLS.replace("{mesh: 0, dp: 1}", "{dp: 1}"), "reward.inference: mesh: missing"),
    (CALLS.replace("{mesh: 0, dp: 1}", "{mesh: 0}"), "reward.inference: dp: missing"),
    (
        CALLS.replace("{mesh: 0, dp: 1}", "{mesh: [0], dp: 1}"),
        "mesh: [0] is not understood; write FIRST-LAST",
    ),
    (CALLS.replace("{mesh: 0, dp: 1}", "{mesh: 0.5, dp: 1}"), "mesh: 0.5 is not understood"),
    (CALLS.replace("{mesh: 0, dp: 1}", "{mesh: null, dp: 1}"), "mesh: null is not text"),
    (CALLS.replace("{mesh: 0, dp: 1}", "{mesh: -1, dp: 1}"), "mesh '-1' is not understood"),
    (CALLS.replace("{mesh: 0, dp: 1}", "{mesh: 1-0, dp: 1}"), "mesh '1-0' is not understood"),
    (CALLS.replace("{mesh: 0, dp: 1}", "{mesh: all, dp: 1}"), "mesh 'all' is not understood"),
    (CALLS.replace("{mesh: 0, dp: 1}", "{mesh: 2, dp: 1}"), "lies outside the 2 devices"),
    (CALLS.replace("{mesh: 0, dp: 1}", "{mesh: 0, dp: 0}"), "dp: 0 must be above 0"),
    (CALLS.replace("{mesh: 0, dp: 1}", "{mesh: 0, dp: '1'}"), "dp: '1' is not a whole number"),
    (CALLS.replace("{mesh: 0, dp: 1}", "{mesh: 0, dp: 2}"), "needs 2 devices, but mesh 0 has 1"),
    (
        CALLS.replace("{mesh: 0, dp: 1}", "{mesh: 0, dp: 1, ep: 2}"),
        "ep: unknown key; known keys are mesh, dp",
    ),
    (
        CALLS.replace("{mesh: 0, dp: 1}", "{mesh: 0, dp: 1, dtype: fp8}"),
        "'fp8' is not 'float32' or 'bfloat16'",
    ),
    (
        CALLS.replace("{mesh: 0, dp: 1}", "{mesh: 0, dp: 1, recompute: true}"),
        "recompute is for calls that train",
    ),
    (
        CALLS.replace("{mesh: 0, dp: 1}", "{mesh: 0, dp: 1, recompute: 1}"),
        "recompute: 1 is not true or false",
    ),
    (
        CALLS.replace("critic.train", "critic.tarin"),
        "there is no call critic.tarin; did you mean critic.train?",
    ),
    (
        CALLS.replace("actor.train: {mesh: 0-1, dp: 2}", "actor.train: {mesh: 0-1, dp: 2, dtype: bfloat16}"),
        "dtype is for calls that do not train",
    ),
]
"""Plan files for a PPO recipe on 1x2."""


@pytest.mark.parametrize(("text", "words"), PLANS, ids=[text[-40:] for text, _ in PLANS])
def test_a_wrong_plan_file_is_one_error_message(
    place: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    file = place / "plan.yaml"
    file.write_text(text)
    refused(capsys, ["show", recipe_of(place, "ppo"), "cluster=1x2", f"plan={file}"], words)


CLUSTERS: list[tuple[str, str]] = [
    ("", "null is not a section of keys"),
    ("3", "3 is not a section of keys"),
    (DEEP, "nested too deep"),
    ("groups: []", "groups: [] has 0 entries; at least 1 are needed"),
    ("groups: 3", "groups: 3 is not a list"),
    ("groups: [3]", "group 1: 3 is not a section of keys"),
    ("groups: [{}]", "group 1: device: missing"),
    ("groups: [{device: h100}]", "group 1: nodes: missing"),
    (GROUP.replace("h100", "h10") % "", "group 1: device: device 'h10' is not known"),
    (GROUP.replace("h100", "3") % "", "group 1: device: 3 is neither the name of a kind"),
    (GROUP.replace("h100", "[h100]") % "", "['h100'] is neither the name of a kind"),
    (GROUP.replace("h100", "{}") % "", "group 1: device: like: missing"),
    (GROUP.replace("h100", "{like: h10}") % "", "device 'h10' is not known"),
    (GROUP.replace("h100", "{like: 3}") % "", "like: 3 is not text"),
    (
        GROUP.replace("h100", "{like: h100, memory: 80}") % "",
        "memory: 80 has no unit; write for example 80GiB",
    ),
    (GROUP.replace("h100", "{like: h100, memory: 80G}") % "", "memory: '80G' is no size"),
    (GROUP.replace("h100", "{like: h100, memroy: 80GiB}") % "", "memroy: unknown key; did you mean memory?"),
    (GROUP.replace("h100", "{like: h100, bf16_tflops: 0}") % "", "bf16_tflops: 0 must be above 0"),
    (GROUP.replace("nodes: 1", "nodes: 0") % "", "group 1: nodes: 0 must be above 0"),
    (GROUP.replace("nodes: 1", "nodes: x") % "", "group 1: nodes: 'x' is not a whole number"),
    (GROUP.replace("nodes: 1", "nodes: 1.0") % "", "group 1: nodes: 1.0 is not a whole number"),
    (GROUP.replace("nodes: 1", "nodes: 100000") % "", "has 200,000 devices; 4,096 can be planned"),
    (GROUP % ", nodes: 2", "key 'nodes' twice"),
    (GROUP % ", node_gbit_per_s: 0", "node_gbit_per_s: 0 must be above 0"),
    (GROUP % ", price_per_device_hour: -1", "price_per_device_hour: -1 must be at least 0"),
    (GROUP % ", price: 2", "price: unknown key; known keys are device, nodes"),
    (GROUP % "" + "name: 3\n", "name: 3 is not text"),
    (GROUP % "" + "nodes: 3\n", "nodes: unknown key"),
]
"""Cluster files."""


@pytest.mark.parametrize(("text", "words"), CLUSTERS, ids=[text[-50:] for text, _ in CLUSTERS])
def test_a_wrong_cluster_file_is_one_error_message(
    place: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    file = place / "cluster.yaml"
    file.write_text(text)
    refused(capsys, ["plan", recipe_of(place, "ppo"), "--cluster", str(file)], words)


CONFIGS: list[tuple[dict[str, Any] | str, str]] = [
    ("", "not valid JSON"),
    ("[]", "a JSON object is expected"),
    ("{", "not valid JSON"),
    (DEEPER, "nested too deep"),
    ('{"model_type": "llama", "model_type": "llama"}', "key 'model_type' twice"),
    ({"model_type": None}, "model_type null is not supported"),
    ({"model_type": "mixtral"}, "'mixtral' is not supported; supported is: llama, qwen2, mistral"),
    ({"model_type": ["llama"]}, "model_type ['llama'] is not supported"),
    ({"vocab_size": None}, "vocab_size is missing"),
    ({"vocab_size": "320"}, "vocab_size='320' is not a whole number above 0"),
    ({"hidden_size": 0}, "hidden_size=0 is not a whole number above 0"),
    ({"hidden_size": -32}, "hidden_size=-32 is not a whole number above 0"),
    ({"intermediate_size": 1.5}, "intermediate_size=1.5 is not a whole number above 0"),
    ({"num_hidden_layers": True}, "num_hidden_layers=true is not a whole number above 0"),
    ({"num_hidden_layers": 10**9}, "layers: 1000000000 must be at most 10000"),
    ({"num_attention_heads": 3, "head_dim": 8}, "heads=3 is not a multiple of kv_heads=2"),
    ({"num_key_value_heads": 3}, "heads=4 is not a multiple of kv_heads=3"),
    ({"num_key_value_heads": "2"}, "kv_heads: '2' is not a whole number"),
    ({"head_dim": 7}, "head_dim=7 is odd; rotary embeddings need an even one"),
    ({"head_dim": 8.0}, "head_dim: 8.0 is not a whole number"),
    ({"rms_norm_eps": "1e-5"}, "norm_eps: '1e-5' is not a number"),
    ({"rms_norm_eps": 0}, "norm_eps: 0 must be above 0"),
    ({"initializer_range": -1}, "init_std: -1 must be above 0"),
    ({"max_position_embeddings": 0}, "max_positions: 0 must be above 0"),
    ({"tie_word_embeddings": "yes"}, "tied_embeddings: 'yes' is not true or false"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; it must be 'silu'"),
    ({"attention_bias": True}, "attention_bias=true is not supported; it must be false"),
    ({"rope_scaling": "linear"}, "rope_scaling='linear' is not a section of keys"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type 'yarn' is not supported"),
    ({"rope_scaling": {"rope_type": "llama3"}}, "factor is missing from the llama3 rotary settings"),
    ({"rope_theta": "high"}, "rope_theta: 'high' is not a number"),
    (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 512,
            }
        },
        "rope_scaling: low_freq_factor=4 must be below high_freq_factor=1",
    ),
]
"""What a `config.json` says, or its text."""


@pytest.mark.parametrize("command", ["show", "generate"])
@pytest.mark.parametrize(("content", "words"), CONFIGS)
def test_a_wrong_config_json_is_one_error_message(
    place: Path,
    capsys: pytest.CaptureFixture[str],
    content: dict[str, Any] | str,
    words: str,
    command: str,
) -> None:
    (place / "model").mkdir(exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(CONFIG_JSON | content)
    (place / "model" / "config.json").write_text(text)
    more = {"show": [f"models.actor.shape={place / 'model'}"], "generate": ["--prompt", "a"]}[command]
    model = {"show": recipe_of(place, "sft"), "generate": str(place / "model")}[command]
    words = words.replace("llama, qwen2, mistral", "llama") if command == "generate" else words
    refused(capsys, [command, model, *more], words)


FILES: list[tuple[str, str, str]] = [
    ("--lengths", "", "not valid JSON"),
    ("--lengths", "3", "a JSON object is expected"),
    ("--lengths", "[1, 2]", "a JSON object is expected"),
    ("--lengths", DEEPER, "nested too deep"),
    ("--lengths", '{"prompts": [1], "prompts": [2]}', "key 'prompts' twice"),
    ("--lengths", '{"prompt": [1]}', "must hold"),
    ("--lengths", '{"prompts": 3}', "must be a list of numbers of tokens"),
    ("--lengths", '{"prompts": ["3"]}', "must be a list of numbers of tokens"),
    ("--lengths", '{"prompts": [1.5]}', "must be a list of numbers of tokens"),
    ("--lengths", '{"prompts": [-1]}', "must be a list of numbers of tokens"),
    ("--lengths", '{"prompts": [true]}', "must be a list of numbers of tokens"),
    ("--lengths", '{"prompts": [0]}', "0 is not between 1 and data.max_prompt_tokens=512"),
    ("--lengths", '{"prompts": [513]}', "513 is not between 1 and data.max_prompt_tokens=512"),
    ("--lengths", '{"answers": [0]}', "every answer must have at least 1 token"),
    ("--lengths", '{"answers": [%s]}' % ("9" * 5000), "not valid JSON"),
    ("--profile", "", "not valid JSON"),
    ("--profile", "[1]", "a JSON object is expected"),
    ("--profile", DEEPER, "nested too deep"),
    ("--profile", "{}", "this is no file that `realrl profile` has written"),
    ("--profile", '{"a": 1, "a": 2}', "key 'a' twice"),
    ("--profile", '[{"prompt": "%s"}]' % ("a" * 20000), "a JSON object is expected"),
    ("--profile", '{"prompt": "%s"}' % ("a" * 20000), "this is no file that `realrl profile` has written"),
    ("--profile", '{"format": "realrl profile", "version": 9}', "has version 9, not 1; measure again"),
    ("--profile", '{"format": "realrl profile", "version": 1}', "device: missing"),
    (
        "--profile",
        '{"format": "realrl profile", "version": 1, "device": "cpu", "software": {}, "layers": 3}',
        "layers: 3 is not a list",
    ),
    ("--profile", "\xff", "not valid JSON"),
]
"""Files that `realrl plan` reads besides a recipe."""


@pytest.mark.parametrize(("option", "text", "words"), FILES)
def test_a_wrong_file_beside_a_recipe_is_one_error_message(
    place: Path, capsys: pytest.CaptureFixture[str], option: str, text: str, words: str
) -> None:
    file = place / "file.json"
    file.write_text(text, encoding="latin-1")
    command = ["plan", recipe_of(place, "ppo"), "--cluster", "cpu:1x2", option, str(file)]
    refused(capsys, command, words)


RECIPES: list[tuple[str | bytes, str]] = [
    ("", "holds no recipe"),
    ("- 1", "holds no recipe"),
    ("text", "holds no recipe"),
    ("3", "holds no recipe"),
    ("null", "holds no recipe"),
    ("{}", "algorithm: missing; give one of sft, reward, ppo"),
    ("algorithm: sft", "missing"),
    ("algorithm: sft\nalgorithm: ppo", "line 2: not valid YAML (key 'algorithm' twice)"),
    ("algorithm: sft\n  data: 3", "line 2: not valid YAML"),
    ("\talgorithm: sft", "line 1: not valid YAML"),
    ("algorithm: [sft", "not valid YAML"),
    ("a: &a [*b]", "not valid YAML"),
    ("? [a]\n: 1", "not valid YAML"),
    ("? {a: 1}\n: 1", "not valid YAML"),
    ("<<: 3", "not valid YAML"),
    ("3: 4\nalgorithm: sft", "is not text, so it is no name of a key"),
    ("a: " + DEEP, "lists or sections are nested too deep"),
    ("a: " + "{a: " * 1500, "lists or sections are nested too deep"),
    ("- " * 1500, "lists or sections are nested too deep"),
    (b"\xff\xfe", "it is no text in UTF-8"),
    ("\x00", "not valid YAML"),
    ("a: 1\n---\nb: 2", "not valid YAML"),
    ("algorithm: sft\n" + "x: &x [a, a]\n" + "y: &y [*x, *x, *x]\nz: [*y, *y, *y]", "x: unknown key"),
    ('{"algorithm": "sft", "algorithm": "sft"}', "key 'algorithm' twice"),
]
"""Texts of recipes."""


@pytest.mark.parametrize("command", ["train", "show", "plan", "profile"])
@pytest.mark.parametrize(("text", "words"), RECIPES, ids=[repr(text[:30]) for text, _ in RECIPES])
def test_a_wrong_recipe_is_one_error_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | bytes, words: str, command: str
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(capsys, [command, str(file)], words)


COMMANDS: list[tuple[str, str]] = [
    ("train gone.yaml", "gone.yaml does not exist"),
    ("train DIR/folder", "cannot be read"),
    ("train PPO/x", "cannot be read"),
    ("show gone.yaml", "gone.yaml does not exist"),
    ("show PPO --plan symetric", "did you mean symmetric?"),
    ("show PPO --plan gone.yaml", "gone.yaml does not exist"),
    ("config grpo", "'grpo' is not one of sft, reward, ppo"),
    ("config PPO", "is not one of sft, reward, ppo"),
    ("plan", "name a recipe"),
    ("plan gone.yaml", "gone.yaml does not exist"),
    ("plan PPO plan=gone.yaml", "gone.yaml does not exist"),
    ("plan PPO plan=foo", "plan: 'foo' is neither a preset"),
    ("plan PPO plan=DIR/folder/records.jsonl", "nor a .yaml file"),
    ("plan PPO plan=PPO", "unknown key"),
    ("plan PPO plan=gone.yaml --out DIR/other.yaml", "gone.yaml does not exist"),
    ("plan PPO --cluster h100", "write kind:nodes x devices per node"),
    ("plan PPO --cluster 1x2", "write kind:nodes x devices per node"),
    ("plan PPO --cluster h200:1x2+", "is not understood"),
    ("plan PPO --cluster h10:1x2", "did you mean h100?"),
    ("plan PPO --cluster h100:0x2", "both numbers must be at least 1"),
    ("plan PPO --cluster h100:100000x8", "has 800,000 devices; 4,096 can be planned"),
    ("plan PPO --cluster gone.yaml", "gone.yaml does not exist"),
    ("plan PPO --cluster h100:1x8+l40s:1x4", "all nodes must have the same number of devices"),
    ("plan PPO --nodes 0", "write numbers of nodes"),
    ("plan PPO --nodes 1,", "write numbers of nodes"),
    ("plan PPO --nodes 1,1", "--nodes: '1,1' names a number twice"),
    ("plan PPO --nodes 9999999999", "write numbers of nodes"),
    ("plan PPO --nodes 1-4", "write numbers of nodes"),
    ("plan PPO --objective speed", "is neither time nor cost"),
    ("plan PPO --seconds 0", "must be above 0 and at most 86400"),
    ("plan PPO --seconds -1", "must be above 0"),
    ("plan PPO --seconds nan", "must be above 0"),
    ("plan PPO --seconds inf", "at most 86400, which is a day"),
    ("plan PPO --out DIR/folder", "this is a directory; name a file in it"),
    ("plan PPO --out DIR/plan.txt", "the name of a plan file ends in .yaml"),
    ("plan PPO --out PPO", "name another one"),
    ("plan PPO --out /proc/x.yaml", "--out /proc/x.yaml cannot be written"),
    ("plan PPO --html /proc/x.html", "--html /proc/x.html cannot be written"),
    ("plan PPO --trace /proc/x.json", "--trace /proc/x.json cannot be written"),
    ("plan PPO --html DIR/x --trace DIR/x", "this file is that of --html"),
    ("plan PPO --html DIR/text.txt/x", "text.txt is a file"),
    ("plan PPO --lengths DIR/gone.json", "no such file"),
    ("plan PPO --lengths DIR/nothing", "lengths.json: no such file"),
    ("plan PPO --profile DIR/gone.json", "no such file"),
    ("plan PPO --profile DIR/folder", "cannot be read"),
    ("plan --calibrate DIR/nothing", "holds no costs.json"),
    ("plan --calibrate DIR/gone", "holds no costs.json"),
    ("plan --calibrate DIR/gone --profile /proc/x.json", "profile /proc/x.json cannot be written"),
    ("plan --calibrate DIR/gone --profile DIR/folder", "this is a directory; name a file in it"),
    ("profile", "give a recipe, or --shape NAME"),
    ("profile gone.yaml", "gone.yaml does not exist"),
    ("profile --shape lama-2-7b", "did you mean llama-2-7b?"),
    ("profile --shape qwen3-8b", "known models are"),
    ("profile --shape DIR/nothing", "config.json: no such file"),
    ("profile --shape llama-2-7b --dtype fp16", "'fp16' is neither float32 nor bfloat16"),
    ("profile PPO --cluster h100:1x2", "torch finds none here"),
    ("profile PPO --cluster cpu", "is not understood"),
    ("profile PPO --cluster h100:1x2+l40s:1x2", "has several kinds of devices; name one"),
    ("profile PPO --out /proc/x.json", "--out /proc/x.json cannot be written"),
    ("profile PPO --out DIR/folder", "this is a directory; name a file in it"),
    ("profile PPO --out DIR/text.txt/x.json", "text.txt is a file"),
    ("profile PPO --out DIR/text.txt", "not valid JSON"),
    ("tokenizer DIR/gone.jsonl --out DIR/t", "does not exist"),
    ("tokenizer DIR/empty.jsonl --out DIR/t", "holds no text, and a tokenizer needs some to learn from"),
    ("tokenizer DIR/blank.jsonl --out DIR/t", "holds no text"),
    ("tokenizer DIR/records.csv --out DIR/t", "is of no kind that is read"),
    ("tokenizer DIR/folder/records.jsonl --out /proc/x", "--out /proc/x cannot be written"),
    ("tokenizer DIR/folder/records.jsonl --out DIR/text.txt", "text.txt is a file"),
    ("tokenizer DIR/folder/records.jsonl --out DIR/text.txt/x", "text.txt is a file"),
    ("tokenizer DIR/folder/records.jsonl --out DIR/t --vocab-size 10", "vocab_size=10 is too small"),
    ("tokenizer DIR/folder/records.jsonl --out DIR/t --vocab-size -1", "vocab_size=-1 is too small"),
    ("report DIR/gone --out DIR/r", "holds no finished run: config.yaml is missing"),
    ("report DIR/text.txt --out DIR/r", "holds no finished run"),
    ("generate DIR/gone --prompt a", "no such model directory"),
    ("generate DIR/nothing --prompt a", "config.json: no such file"),
    ("generate DIR/text.txt --prompt a", "no such model directory"),
    ("generate DIR/qwen2 --prompt a", "model_type 'qwen2' is not supported; supported is: llama"),
    ("generate ACTOR", "give --prompt TEXT or --prompts FILE"),
    ("generate ACTOR --prompts DIR/gone.txt", "cannot be read"),
    ("generate ACTOR --prompts DIR/empty.txt", "there is nothing to continue"),
    ("generate ACTOR --prompts DIR/records.csv", "is of no kind that is read"),
    ("generate ACTOR --prompts DIR/folder", "give DIR/folder/*.jsonl for its files"),
    ("generate ACTOR --prompt a --temperature 0", "temperature: 0.0 must be at least 0.01"),
    ("generate ACTOR --prompt a --temperature 1e-30", "temperature: 1e-30 must be at least 0.01"),
    ("generate ACTOR --prompt a --temperature nan", "temperature: nan is not a finite number"),
    ("generate ACTOR --prompt a --top-p 0", "top_p: 0.0 must be above 0"),
    ("generate ACTOR --prompt a --top-p 1.1", "top_p: 1.1 must be at most 1"),
    ("generate ACTOR --prompt a --top-k -1", "top_k: -1 must be at least 0"),
    ("generate ACTOR --prompt a --top-k 100000", "top_k=100000 is more than the 320 tokens"),
    ("generate ACTOR --prompt a --max-new-tokens 0", "max_new_tokens: 0 must be above 0"),
    (
        "generate ACTOR --prompt a --max-new-tokens 2048",
        "--prompt 'a': the prompt has at least 2 tokens",
    ),
    ("generate ACTOR --prompt a --max-new-tokens 5 --min-new-tokens 6", "is above max_new_tokens=5"),
    ("generate ACTOR --prompt a --prompts DIR/huge.jsonl", "huge.jsonl:1: the prompt has at least"),
    ("generate ACTOR --prompt a --out /proc/x", "/proc/x cannot be written"),
    ("generate ACTOR --prompt a --out DIR/folder", "is a directory; name a file in it"),
    ("generate ACTOR --prompt a --out DIR/text.txt/x", "cannot be written"),
    ("generate REWARD --prompt a", "is a sequence classifier, not a language model"),
]
"""Command lines; PPO is a recipe, ACTOR and REWARD are models, DIR the directory of `place`."""


@pytest.mark.parametrize(("line", "words"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_a_wrong_command_line_is_one_error_message(
    world: World, place: Path, capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    (place / "empty.jsonl").write_text("\n")
    (place / "empty.txt").write_text("\n")
    (place / "blank.jsonl").write_text('{"prompt": "", "answer": ""}\n')
    (place / "huge.jsonl").write_text(json.dumps({"prompt": "the film " * 1_000_000}) + "\n")
    names = {"DIR": str(place), "ACTOR": world.actor, "REWARD": world.reward}
    if not line.startswith("config"):
        names["PPO"] = recipe_of(place, "ppo")
    for name, path in names.items():
        line, words = line.replace(name, path), words.replace(name, path)
    refused(capsys, line.split(" "), words)


BOXES = [
    "frobnicate",
    "train",
    "show",
    "config",
    "generate",
    "tokenizer",
    "tokenizer a.jsonl",
    "report",
    "report a",
    "report --out a",
    "train a.yaml --nonsense",
    "plan a.yaml --seconds many",
    "plan a.yaml --seed -1",
    "plan a.yaml --cluster",
    "generate a --n 0",
    "generate a --seed -1",
    "generate a --max-new-tokens many",
    "generate a --greedy yes b",
    "tokenizer a --out b --vocab-size many",
    "profile --quick=maybe",
    "config ppo sft",
    "--nonsense",
]
"""Command lines whose form typer refuses."""


@pytest.mark.parametrize("line", BOXES)
def test_a_command_line_of_a_wrong_form_gets_a_box(capsys: pytest.CaptureFixture[str], line: str) -> None:
    assert run_app(line.split(" ")) == 2
    captured = capsys.readouterr()
    assert "Error" in captured.err and "Traceback" not in captured.err


def fields(cls: type[Settings], prefix: str = "") -> Iterator[str]:
    """The dotted path of every field of a recipe."""
    for name, field in cls.model_fields.items():
        yield prefix + name
        inner = section_class(field)
        if inner is not None:
            yield from fields(inner, f"{prefix}{name}.")


FIELDS = [(name, path) for name in experiment_classes() for path in fields(experiment_class(name))]
WRONG = (
    *("null", "true", "-1", "0", "1", "-0.5", "1.5", "1e30", "1e300", "1e-300", ".nan", ".inf", "-.inf"),
    *("1000000000000000000", "9" * 400, "text", "''", "'3'", "[]", "[1]", "[a, b]", "{}", "{a: 1}", "{1: 2}"),
    *("[[[[1]]]]", "2024-01-01", "!!timestamp 2024-01-01", "0x2", "1:30", "~nobody/x", "/proc/x"),
    *("!!binary aGk=", "!!set {a}", "&a [*a]", '"\\0"', "'a\U0001f600'", "'" + "x" * 5000 + "'"),
)
"""YAML of every kind that there is."""


@pytest.mark.parametrize(("algorithm", "path"), FIELDS)
def test_a_field_with_a_value_of_any_kind_is_refused_in_one_message_or_valid(
    place: Path, algorithm: str, path: str
) -> None:
    recipe = read_yaml(recipe_of(place, algorithm))
    for value in WRONG:
        try:
            experiment = parse_experiment(apply_override(recipe, f"{path}={value}"))
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) <= SENTENCE
        else:
            assert parse_experiment(parse_yaml(dump_experiment(experiment), "dump")) == experiment


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.tuples(st.sampled_from(FIELDS), st.sampled_from(WRONG)), min_size=1, max_size=3))
def test_recipes_with_several_wrong_values_are_shown_or_refused_in_one_message(
    place: Path, capsys: pytest.CaptureFixture[str], changes: list[tuple[tuple[str, str], str]]
) -> None:
    algorithm = changes[0][0][0]
    overrides = [f"{path}={value}" for (of, path), value in changes if of == algorithm]
    status = run_app(["show", recipe_of(place, algorithm), *overrides])
    said = capsys.readouterr().err
    assert status in (0, 2) and "Traceback" not in said
    assert status == 0 or (said.startswith("realrl: ") and said.count("\n") == 1 and len(said) <= SENTENCE)
