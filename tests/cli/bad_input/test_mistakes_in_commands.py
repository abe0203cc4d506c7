"""Mistakes in records, in a `config.json` and in command lines: each is one error message."""

import json
from pathlib import Path
from typing import Any

import pytest

from realrl.cli.app import run_app
from tests.cli.mistakes import CONFIG_JSON, DEEPER, recipe_of, refused
from tests.conftest import World

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
    ("sft", '{"question": "a"}', "a record must be {prompt, answer} or {messages}"),
    ("sft", '{"text": 3}', "field 'answer' must be text"),
    ("sft", '{"prompt": 3, "answer": "a"}', "field 'prompt' must be text"),
    ("sft", '{"prompt": "a", "answer": ["b"]}', "field 'answer' must be a list of {role, content} messages"),
    ("sft", '{"prompt": "a", "answer": {"b": 1}}', "field 'answer' must be text"),
    ("sft", '{"instruction": "a", "output": 3}', "field 'answer' must be text"),
    ("sft", '{"conversations": [{"from": "human", "value": "a"}]}', "must have several turns"),
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
    ("reward", '{"chosen": "b", "rejected": 3}', "no field 'prompt'"),
    ("reward", '{"prompt": "a", "answer": "b"}', "a record must be"),
    ("reward", '{"prompt": "a", "pos_answers": "b", "neg_answers": "c"}', "pos_answers"),
    ("reward", '{"prompt": "a", "pos_answers": [], "neg_answers": []}', ":1: "),
    ("ppo", '{"text": "a"}', "no field 'prompt'"),
    ("ppo", '{"prompt": null}', "no field 'prompt'"),
    ("ppo", '{"prompt": 3}', "field 'prompt' must be"),
    ("ppo", '{"prompt": "%s"}' % ("b " * 600), "more than data.max_prompt_tokens=512"),
]
"""Algorithm, the first line of a data file, and words of the message."""


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


CONFIGS: list[tuple[dict[str, Any] | str, str]] = [
    ("", "not valid JSON"),
    ("[]", "a JSON object is expected"),
    ("{", "not valid JSON"),
    (DEEPER, "nested too deep"),
    ('{"model_type": "llama", "model_type": "llama"}', "key 'model_type' twice"),
    ({"model_type": None}, "model_type null is not supported"),
    (
        {"model_type": "phimoe"},
        "'phimoe' is not supported; supported are: gemma, gemma2, gemma3_text, glm4, glm4_moe, gpt2, gpt_neox, ",
    ),
    ({"model_type": ["llama"]}, "model_type ['llama'] is not supported"),
    ({"vocab_size": None}, "vocab_size is missing"),
    ({"vocab_size": "320"}, "vocab_size='320' is not a whole number above 0"),
    ({"hidden_size": 0}, "hidden_size=0 is not a whole number above 0"),
    ({"hidden_size": -32}, "hidden_size=-32 is not a whole number above 0"),
    ({"intermediate_size": 1.5}, "intermediate_size=1.5 is not a whole number above 0"),
    ({"num_hidden_layers": True}, "num_hidden_layers=true is not a whole number above 0"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 must be at most 10000"),
    ({"num_attention_heads": 3, "head_dim": 8}, "heads=3 is not a multiple of kv_heads=2"),
    ({"num_key_value_heads": 3}, "heads=4 is not a multiple of kv_heads=3"),
    ({"num_key_value_heads": "2"}, "num_key_value_heads='2' is not a whole number above 0"),
    ({"head_dim": 7}, "head_dim=7 is odd; rotary embeddings need an even one"),
    ({"head_dim": 8.0}, "head_dim=8.0 is not a whole number above 0"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5' is not a finite number"),
    ({"rms_norm_eps": 0}, "norm_eps: 0.0 must be above 0"),
    ({"initializer_range": -1}, "init_std: -1.0 must be above 0"),
    ({"max_position_embeddings": 0}, "max_position_embeddings=0 is not a whole number above 0"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes' is not true or false"),
    ({"hidden_act": "relu"}, "hidden_act='relu' is not supported; it must be silu, swish, gelu,"),
    ({"attention_bias": 1}, "attention_bias=1 is not true or false"),
    ({"rope_scaling": "linear"}, "rope_scaling='linear' is not a section of keys"),
    ({"rope_scaling": {"rope_type": "spiral"}}, "rope_type='spiral' is not supported; it must be default,"),
    ({"rope_scaling": {"rope_type": "llama3"}}, "factor is missing from the llama3 rotary settings"),
    ({"rope_theta": "high"}, "rope_theta='high' is not a finite number"),
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
        "rope_scaling: low_freq_factor=4 must be at most high_freq_factor=1",
    ),
]
"""Changes to a `config.json`, or its whole text, and words of the message."""


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
    refused(capsys, [command, model, *more], words)


COMMANDS: list[tuple[str, str]] = [
    ("train gone.yaml", "gone.yaml does not exist"),
    ("train DIR/folder", "is a directory without a run; give a recipe or the directory of a run"),
    ("train PPO/x", "cannot be read"),
    ("show gone.yaml", "gone.yaml does not exist"),
    ("show PPO --plan symetric", "did you mean symmetric?"),
    ("show PPO --plan gone.yaml", "gone.yaml does not exist"),
    ("config gpro", "'gpro' is not one of "),
    ("config PPO", "is not one of "),
    ("plan", "name a recipe"),
    ("plan gone.yaml", "gone.yaml does not exist"),
    ("plan PPO plan=gone.yaml", "gone.yaml does not exist"),
    # The critic takes the reward model's path, which has the mistake.
    ("plan PPO models.reward.path=DIR/folder --cluster h100:1x8", "models.reward: planning needs the size"),
    ("train PPO models.reward.path=DIR/folder", "models.reward: "),
    ("plan PPO --cluster 1x2", "or cpu:1x2 for processes on CPUs"),
    ("plan PPO plan=foo", "plan: 'foo' is neither a preset"),
    (
        "plan PPO search_dtypes=[bfloat16] exact=true",
        "exact=true needs one data type for all calls of a role",
    ),
    ("plan PPO search_dtypes=[mixed] --cluster h100:1x2", "search_dtypes=[mixed]: mixed is for CPUs"),
    ("plan PPO search_dtypes=[int4]", "search_dtypes"),
    ("plan PPO device=cpu kernels=[fa4]", "kernels=[fa4] is for GPUs, and this recipe computes on CPUs"),
    ("plan PPO kernels=[fa3]", "kernels"),
    ("plan PPO plan=DIR/folder/records.jsonl", "nor a .yaml file"),
    ("plan PPO plan=PPO", "unknown key"),
    ("plan PPO plan=gone.yaml --out DIR/other.yaml", "gone.yaml does not exist"),
    ("plan PPO --cluster h100", "write kind:nodes x devices per node"),
    ("plan PPO --cluster 1x2", "write kind:nodes x devices per node"),
    ("plan PPO --cluster h200:1x2+", "is not understood"),
    ("plan PPO --cluster h10:1x2", "did you mean h100?"),
    ("plan PPO --cluster h100:0x2", "both numbers must be at least 1"),
    ("plan PPO --cluster h100:100000x8", "has 800,000 devices; 16,384 can be planned"),
    ("plan PPO --cluster gone.yaml", "gone.yaml does not exist"),
    ("plan PPO --nodes 0", "write numbers of nodes"),
    ("plan PPO --nodes 1,", "write numbers of nodes"),
    ("plan PPO --nodes 1,1", "--nodes: '1,1' names a number twice"),
    ("plan PPO --nodes 9999999999", "write numbers of nodes"),
    ("plan PPO --nodes 1-4", "write numbers of nodes"),
    ("plan PPO --objective speed", "is neither time nor cost"),
    ("plan PPO --effort 0", "must be above 0 and at most 1e+12"),
    ("plan PPO --effort -1", "must be above 0"),
    ("plan PPO --effort nan", "must be above 0"),
    ("plan PPO --effort inf", "at most 1e+12"),
    ("plan PPO --out DIR/folder", "this is a directory; name a file in it"),
    ("plan PPO --out DIR/plan.txt", "the name of a plan file ends in .yaml"),
    ("plan PPO --out PPO", "name another file"),
    ("plan PPO --out /proc/x.yaml", "--out /proc/x.yaml cannot be written"),
    ("plan PPO --html /proc/x.html", "--html /proc/x.html cannot be written"),
    ("plan PPO --trace /proc/x.json", "--trace /proc/x.json cannot be written"),
    ("plan PPO --html DIR/x --trace DIR/x", "this is the file of --html"),
    ("plan PPO --html DIR/text.txt/x", "text.txt is a file"),
    ("plan PPO --lengths DIR/gone.json", "no such file"),
    ("plan PPO --lengths DIR/nothing", "lengths.json: no such file"),
    ("plan PPO --profile DIR/gone.json", "no such file"),
    ("plan PPO --profile DIR/folder", "cannot be read"),
    ("plan --calibrate DIR/nothing", "holds no costs.json"),
    ("plan --calibrate DIR/gone --profile /proc/x.json", "profile /proc/x.json cannot be written"),
    ("plan --calibrate DIR/gone --profile DIR/folder", "this is a directory; name a file in it"),
    ("plan --calibrate DIR/gone", "holds no costs.json"),
    ("profile", "give a recipe, or --shape NAME"),
    ("profile gone.yaml", "gone.yaml does not exist"),
    ("profile --shape lama-2-7b", "did you mean llama-2-7b?"),
    ("profile --shape qwen9-8b", "known models are"),
    ("profile --shape DIR/nothing", "config.json: no such file"),
    ("profile --shape llama-2-7b --dtype fp16", "'fp16' is none of float32, mixed, bfloat16"),
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
    ("tokenizer DIR/records.tsv --out DIR/t", "has an unsupported format"),
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
    ("generate DIR/qwen9 --prompt a", "model_type 'qwen9' is not supported; supported are: gemma, gemma2,"),
    ("generate ACTOR", "give --prompt TEXT or --prompts FILE"),
    ("generate ACTOR --prompts DIR/gone.txt", "cannot be read"),
    ("generate ACTOR --prompts DIR/empty.txt", "there is no prompt"),
    ("generate ACTOR --prompts DIR/records.tsv", "has an unsupported format"),
    (
        "generate ACTOR --prompts DIR/folder",
        "end with .json and .jsonl; give those with records, as in DIR/folder/*.json",
    ),
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
        "a prompt with max_new_tokens=2048 is more than",
    ),
    ("generate ACTOR --prompt a --max-new-tokens 5 --min-new-tokens 6", "is above max_new_tokens=5"),
    ("generate ACTOR --prompt a --prompts DIR/huge.jsonl", "huge.jsonl:1: the prompt has at least"),
    ("generate ACTOR --prompt a --out /proc/x", "/proc/x cannot be written"),
    ("generate ACTOR --prompt a --out DIR/folder", "is a directory; name a file in it"),
    ("generate ACTOR --prompt a --out DIR/text.txt/x", "cannot be written"),
    ("generate ACTOR --prompt a --best", "--best needs scores; give --reward or --reward-model"),
    ("generate ACTOR --prompt a --reward length", "write FILE.py:FUNCTION or package.module:FUNCTION"),
    ("generate ACTOR --prompt a --reward {verifier:{kind:numbers}}", "reward"),
    (
        'generate ACTOR --prompt a --reward {verifier:{"kind":"numeric"}}',
        "reward (verifier numeric) needs 'answer'",
    ),
    ("generate ACTOR --prompt a --reward-model ACTOR", "is not a sequence classifier"),
    ("generate ACTOR --prompt a --reward-model DIR/gone", "models.reward.path=DIR/gone: no such directory"),
    ("generate ACTOR --prompt a --cluster 2x1", "has 2 nodes"),
    ("generate ACTOR --prompt a --plan symetric", "did you mean symmetric?"),
    ("generate ACTOR --data DIR/gone.jsonl", "does not exist"),
    ("eval gone.yaml", "gone.yaml does not exist"),
    ("eval PPO", "data.eval: missing; give the records to evaluate on"),
    ("eval PPO data.eval=DIR/folder/records.jsonl models.reward.path=DIR/gone", "no such directory"),
    ("eval PPO data.eval=DIR/folder/records.jsonl models.reward.path=ACTOR", "is not a sequence classifier"),
    ("eval PPO data.eval=DIR/folder/records.jsonl --out DIR/text.txt", "text.txt is a file"),
    ("eval PPO data.eval=DIR/folder/records.jsonl evaluation.against=DIR/gone", "no such directory"),
    (
        "eval PPO data.eval=DIR/folder/records.jsonl evaluation.against=REWARD",
        "evaluation.against=REWARD: REWARD is a sequence classifier",
    ),
    ("train PPO algorithm=realrl.algorithms.sampling", "unknown key"),
    ("generate REWARD --prompt a", "is a sequence classifier, not a language model"),
]
"""Command lines and words of the message. PPO is a recipe, ACTOR and REWARD are models, DIR is `place`."""


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
    "generate",
    "tokenizer",
    "tokenizer a.jsonl",
    "report",
    "report a",
    "report --out a",
    "train a.yaml --nonsense",
    "plan a.yaml --effort many",
    "plan a.yaml --seed -1",
    "plan a.yaml --cluster",
    "generate a --n 0",
    "generate a --seed -1",
    "generate a --max-new-tokens many",
    "generate a --greedy yes b",
    "tokenizer a --out b --vocab-size many",
    "profile --quick=maybe",
    "config ppo policy sft",
    "--nonsense",
]
"""Command lines that typer refuses."""


@pytest.mark.parametrize("line", BOXES)
def test_a_command_line_of_a_wrong_form_gets_a_box(capsys: pytest.CaptureFixture[str], line: str) -> None:
    assert run_app(line.split(" ")) == 2
    captured = capsys.readouterr()
    assert "Error" in captured.err and "Traceback" not in captured.err
