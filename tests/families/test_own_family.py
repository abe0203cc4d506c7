"""A family that no file of the package knows: the one in CONTRIBUTING.md, named in a recipe."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from realrl.cli.app import run_app
from realrl.engine.model import make_unsharded_model
from realrl.huggingface import model_files
from realrl.huggingface.tokenizers import load_tokenizer
from realrl.model.packing import Packing
from realrl.testing.ranks import run_on_ranks
from tests.conftest import World, read_metrics

ROOT = Path(__file__).parents[2]
SIZES = {
    "vocab_size": 320,
    "hidden_size": 24,
    "intermediate_size": 33,
    "layers": 2,
    "heads": 3,
    "kv_heads": 1,
    "head_dim": 8,
    "norm_eps": 1e-3,
    "init_std": 0.2,
}
"""Two tensor-parallel ranks share the key/value head, and have one and two query heads."""
PLANS = {
    "tensor": "dp: 1, tp: 2, pp: 1",
    "sequence": "dp: 1, tp: 2, pp: 1, sequence_parallel: true",
    "pipeline": "dp: 1, tp: 1, pp: 2",
}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file that CONTRIBUTING.md shows."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Add a model family")[1]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code is not None
    file = tmp_path_factory.mktemp("family") / "my_family.py"
    file.write_text(code[1])
    return str(file)


@pytest.fixture(scope="module")
def recipes(world: World, family: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same run in one process, and under every plan of two, all of them finished."""

    def write(name: str, **changes: Any) -> Path:
        directory = tmp_path_factory.mktemp(name)
        model = {"family": family, "shape": SIZES, "tokenizer": world.tokenizer, "optimizer": {"lr": 3e-3}}
        return world.recipe("sft", directory, models__actor=model, training__steps=3, **changes)

    found = {"alone": write("alone")}
    for name, strategy in PLANS.items():
        found[name] = write(name, cluster="1x2")
        plan = found[name].parent / "plan.yaml"
        calls = f"{{actor.train: {{mesh: 0-1, {strategy}, micro_batch_tokens: 64}}}}"
        plan.write_text(f"cluster: 1x2\ncalls: {calls}\n")
        found[name].write_text(found[name].read_text() + f"plan: {plan}\n")
    run_on_ranks(1, [found["alone"]])
    run_on_ranks(2, [found[name] for name in PLANS])
    return found


def finished(recipe: Path) -> Path:
    return recipe.parent / "run" / "final"


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_learns_what_one_process_learns(recipes: dict[str, Path], name: str) -> None:
    alone, divided = (read_metrics(recipes[plan].parent / "run") for plan in ("alone", name))
    assert len(alone) == 3
    for expected, step in zip(alone, divided, strict=True):
        for figure in ("actor.train/loss", "actor.train/grad_norm"):
            assert step[figure] == pytest.approx(expected[figure], rel=1e-4)
    weights, others = (load_file(finished(recipes[plan]) / "model.safetensors") for plan in ("alone", name))
    assert weights.keys() == others.keys()
    for tensor, values in weights.items():
        torch.testing.assert_close(others[tensor], values, rtol=1e-3, atol=1e-4, msg=tensor)
    biases = [values for tensor, values in weights.items() if tensor.endswith(".bias")]
    assert len(biases) == 2 * 9 + 2 and all(values.abs().max() > 0 for values in biases)


def test_plan_shows_it_on_machines_that_are_not_there(
    recipes: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(["plan", str(recipes["alone"]), "--cluster", "a100-40g:1x2", "--effort", "30000"]) == 0
    assert "actor.train" in capsys.readouterr().out


def test_saved_weights_compute_what_the_definition_says(recipes: dict[str, Path], family: str) -> None:
    path = finished(recipes["tensor"])
    config = json.loads((path / "config.json").read_text())
    assert config["model_type"] == "biased_llama" and config["architectures"] == ["BiasedLlamaForCausalLM"]
    assert config["layer_norm_eps"] == 1e-3 and "rms_norm_eps" not in config
    shape = model_files.read_shape(path, family)
    model = make_unsharded_model(shape, "lm", dtype=torch.float32, device=torch.device("cpu"))
    assert model_files.load(path, shape, model.layout.specs, model.parameters) == []
    tokens = torch.tensor([5, 9, 300, 12, 7, 5, 44])
    with torch.no_grad():
        hidden = model.transformer(tokens, Packing.of([len(tokens)], "cpu"))
        logits = model.transformer.compute_logits(hidden)
    torch.testing.assert_close(logits, defined_logits(path, tokens), rtol=0, atol=1e-4)


def test_generate_samples_what_the_definition_says_without_warnings(
    recipes: dict[str, Path],
    family: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    recwarn: pytest.WarningsRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Its messages go past pytest otherwise.
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    path, out = finished(recipes["tensor"]), recipes["tensor"].parent / "texts.jsonl"
    options = ["--greedy", "--max-new-tokens", "6", "--min-new-tokens", "6", "--out", str(out)]
    assert run_app(["generate", str(path), "--prompt", "the film", *options, "--family", family]) == 0
    assert capsys.readouterr().err == "" and not caplog.records and not recwarn.list
    tokenizer = load_tokenizer(str(path))
    tokens = torch.tensor(tokenizer("the film")["input_ids"])
    start = len(tokens)
    for _ in range(6):
        logits = defined_logits(path, tokens)[-1]
        logits[tokenizer.eos_token_id] = -torch.inf
        tokens = torch.cat((tokens, logits.argmax()[None]))
    assert json.loads(out.read_text())["tokens"] == tokens[start:].tolist()
    assert run_app(["generate", str(path), "--prompt", "the film"]) == 2
    error = capsys.readouterr().err
    assert "model_type 'biased_llama' is not supported" in error and "or with --family" in error


def test_a_saved_model_is_opened_again_by_a_recipe(
    recipes: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [f"models.actor.path={finished(recipes['tensor'])}", "models.actor.shape=null"]
    assert run_app(["train", str(recipes["alone"]), *changes, "training.steps=1", "overwrite=true"]) == 0


BROKEN = {
    "tensors=lambda shape, head, options: decoder_tensors(shape, head, options)[1:]": (
        ": parameter embedding has no tensor"
    ),
    "tensors=lambda shape, head, options: 2 * decoder_tensors(shape, head, options)": (
        ": tensor model.embed_tokens.weight is listed twice"
    ),
    "read_config=lambda config: {'layers': {}['depth']}": " raised KeyError: 'depth'",
}


@pytest.mark.parametrize("change", BROKEN)
def test_a_mistake_in_a_family_is_one_error_message(
    recipes: dict[str, Path], family: str, change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.py"
    more = "from dataclasses import replace\nfrom realrl.families.decoder_tensors import decoder_tensors\n"
    broken.write_text(f"{Path(family).read_text()}\n{more}\nFAMILY = replace(FAMILY, {change})\n")
    model = (f"models.actor.path={finished(recipes['tensor'])}", "models.actor.shape=null")
    assert run_app(["show", str(recipes["alone"]), *model, f"models.actor.family={broken}"]) == 2
    assert f"family={broken}{BROKEN[change]}" in capsys.readouterr().err


def defined_logits(path: Path, tokens: Tensor) -> Tensor:
    """The family's definition in plain torch. tokens: [T] -> [T, V]"""
    weights = load_file(path / "model.safetensors")

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (24,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-3)

    angles = torch.arange(len(tokens))[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    cos, sin = (torch.cat((part, part), -1)[:, None] for part in (angles.cos(), angles.sin()))

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    x = weights["model.embed_tokens.weight"][tokens]
    for i in range(2):
        layer = f"model.layers.{i}"
        entering = norm(x, f"{layer}.input_layernorm")
        q, k, v = (linear(entering, f"{layer}.self_attn.{c}_proj").unflatten(1, (-1, 8)) for c in "qkv")
        scores = torch.einsum("thd,sd->hts", rotated(q), rotated(k)[:, 0]) / 8**0.5
        later = torch.ones(len(tokens), len(tokens)).triu(1).bool()
        seen = scores.masked_fill(later, -torch.inf).softmax(-1)
        x = x + linear(torch.einsum("hts,sd->thd", seen, v[:, 0]).flatten(1), f"{layer}.self_attn.o_proj")
        entering = norm(x, f"{layer}.post_attention_layernorm")
        inner = F.silu(linear(entering, f"{layer}.mlp.gate_proj")) * linear(entering, f"{layer}.mlp.up_proj")
        x = x + linear(inner, f"{layer}.mlp.down_proj")
    return linear(norm(x, "model.norm"), "lm_head")
