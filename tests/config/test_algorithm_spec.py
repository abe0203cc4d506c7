"""What a description of an algorithm leaves out or contradicts is an error where it is registered."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from realrl.algorithms.ppo import ALGORITHM as PPO
from realrl.algorithms.reward_model import ALGORITHM as REWARD
from realrl.algorithms.sft import ALGORITHM as SFT
from realrl.algorithms.sft import SFTExperiment
from realrl.cli.app import run_app
from realrl.config import registered
from realrl.config.errors import UserCodeError, UserError
from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.families import registry as families
from realrl.recipe import registry
from realrl.recipe.algorithm import AlgorithmSpec, RoleSpec, SummaryMetric
from realrl.recipe.checks import complete
from realrl.recipe.experiment import Experiment, Models
from realrl.recipe.load import parse_experiment
from realrl.recipe.model import ModelConfig
from realrl.recipe.registry import find_algorithm, list_algorithms

REQUIRED = (
    *("name", "recipe", "roles", "form", "train_graph", "eval_graph", "generation", "methods", "headlines"),
    *("curves", "summary"),
)
PPO_RECIPE = {
    "algorithm": "ppo",
    "run_dir": "r",
    "data": {"train": "t", "eval": "e", "batch": 8},
    "models": {"actor": {"path": "a"}, "reward": {"path": "b"}},
}


class Undocumented(Experiment):
    models: Models


Undocumented.__doc__ = None


class Modelless(Experiment):
    """Fine-tuning without models."""


@pytest.mark.parametrize("field", REQUIRED)
def test_a_field_that_is_left_out_is_named(field: str) -> None:
    given = {f.name: getattr(SFT, f.name) for f in fields(SFT) if f.name != field}
    with pytest.raises(TypeError, match=f"AlgorithmSpec.*'{field}'"):
        AlgorithmSpec(**given)


def roles(**changes: RoleSpec) -> dict[str, RoleSpec]:
    return {**PPO.roles, **changes}


@pytest.mark.parametrize(
    ("spec", "field", "value", "message"),
    [
        (SFT, "name", "my algorithm", "'my algorithm' is not letters, digits"),
        (SFT, "name", 3, "3 is not letters"),
        (SFT, "recipe", dict, "<class 'dict'> is not a class derived from Experiment"),
        (SFT, "recipe", Undocumented, "Undocumented has no docstring"),
        (SFT, "recipe", Modelless, "Modelless.models is not a class derived from Models"),
        (SFT, "roles", {}, "a mapping from at least one role"),
        (SFT, "roles", {"actor": "lm"}, "actor has no RoleSpec"),
        (SFT, "roles", {"critic": RoleSpec("lm")}, "critic, but SFTModels has actor"),
        (SFT, "roles", {"actor": RoleSpec("value")}, "actor: head 'value' is not lm or scalar"),
        (SFT, "roles", {"actor": RoleSpec("lm", "actor")}, "actor: weights_from='actor' is not another role"),
        (PPO, "roles", roles(ref=RoleSpec("lm")), "ref: with this weights_from, PPOModels.ref needs no"),
        (
            PPO,
            "roles",
            roles(actor=RoleSpec("lm", "reward")),
            "actor: with this weights_from, PPOModels.actor needs a default",
        ),
        (
            PPO,
            "roles",
            roles(critic=RoleSpec("scalar", "reward")),
            "critic: weights_else goes with a weights_from that is optional",
        ),
        (
            PPO,
            "roles",
            roles(critic=RoleSpec("scalar", "reward", optional=True, weights_else="actor")),
            "critic: is optional, so PPOModels.critic needs a default, and may be None",
        ),
        (PPO, "optional_calls", "reward.function", "a tuple of names of calls is needed"),
        (
            PPO,
            "roles",
            roles(ref=RoleSpec("lm", "critic")),
            "ref: weights_from='critic' has no weights of its own",
        ),
        (PPO, "roles", roles(ref=RoleSpec("lm", "actor", "x")), "ref: dtype_from='x' is not another role"),
        (
            SFT,
            "form",
            "conversation",
            "'conversation' is not one of answer, pair, prompt, label, ranked, steps",
        ),
        (SFT, "train_graph", None, "None is not a function"),
        (SFT, "eval_graph", 3, "3 is not a function or None"),
        (SFT, "methods", "x", "'x' is not a function"),
        (SFT, "epochs", 2, "2 is not a function"),
        (SFT, "generation", lambda e: None, "SFTExperiment needs a section generation"),
        (PPO, "generation", None, "None, but PPOExperiment has a section generation"),
        (SFT, "samples_per_prompt", lambda e: 2, "an algorithm that does not generate"),
        (SFT, "experience_calls", ("actor.train",), "an algorithm that does not generate"),
        (PPO, "experience_calls", "actor.train", "a tuple of names of calls is needed"),
        (SFT, "headlines", "actor.train/loss", "a tuple of call/name is needed"),
        (PPO, "sample_keys", ["score"], "a tuple of keys is needed"),
        (PPO, "sample_keys", ("judge",), "judge is what samples show anyway"),
        (SFT, "curves", ("loss",), "a mapping from metrics to labels is needed"),
        (SFT, "summary", ("loss",), "a tuple of SummaryMetric is needed"),
        (SFT, "summary", (SummaryMetric("a", "b", "c"),) * 2, "two metrics have one key"),
    ],
)
def test_a_field_that_contradicts_others_is_named(
    spec: AlgorithmSpec, field: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        replace(spec, **{field: value})
    assert f": {field}: {message}" in str(caught.value)


KEYS = (Key("prompts", "int64"), Key("sequences", "int64"), Key("reply", "int64"))
GENERATE = Call("actor.generate", "actor", Kind.GENERATE, ("prompts",), ("sequences",), work=("prompts",))
INFER = Call("actor.inference", "actor", Kind.INFERENCE, ("sequences",), work=("sequences",))
TRAIN = Call("actor.train", "actor", Kind.TRAIN, ("sequences",), work=("sequences",))


def graph_of(*calls: Call) -> Callable[[Any], DataflowGraph]:
    return lambda experiment: DataflowGraph(calls, KEYS)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("train_graph", lambda e: None, "NoneType is not a DataflowGraph"),
        ("train_graph", graph_of(TRAIN, TRAIN), "two calls have the same name"),
        ("train_graph", graph_of(GENERATE, INFER), "no call trains"),
        ("train_graph", graph_of(GENERATE, TRAIN), "no call uses role critic"),
        ("train_graph", graph_of(TRAIN), "no call produces sequences, and records of form 'prompt'"),
        ("train_graph", graph_of(replace(GENERATE, outputs=("reply",)), TRAIN), "no call produces sequences"),
        (
            "train_graph",
            lambda e: DataflowGraph((GENERATE, TRAIN), (*KEYS, Key("routed_experts", "int16"))),
            "key routed_experts has a name that is kept for router replay",
        ),
        (
            "train_graph",
            graph_of(replace(GENERATE, outputs=("sequences", "reply")), TRAIN),
            "actor.generate cannot produce reply; a generate call has sequences, logprobs,",
        ),
        ("train_graph", graph_of(replace(GENERATE, role="poet"), TRAIN), "role poet is not one of"),
        (
            "train_graph",
            graph_of(replace(GENERATE, role="critic"), TRAIN),
            "actor.generate needs a language-model head for critic",
        ),
        (
            "eval_graph",
            graph_of(replace(TRAIN, inputs=("prompts",), work=("prompts",))),
            "actor.train trains",
        ),
        ("eval_graph", graph_of(GENERATE), "actor.generate must produce prompt_length too"),
        ("sample_keys", ("values",), "eval_graph: no call produces values, one number per item"),
        ("sample_keys", ("sequences",), "eval_graph: no call produces sequences, one number per item"),
        ("eval_graph", None, "data.eval: ppo has no evaluation; set data.eval=null"),
        ("samples_per_prompt", lambda e: 0, "0 is not a whole number above 0"),
        ("epochs", lambda e: 0, "0 is not a whole number above 0"),
        ("epochs", lambda e: None, "None is not a whole number above 0"),
        ("generation", lambda e: None, "NoneType is not a GenerationConfig"),
        ("experience_calls", ("actor.generate",), "actor.generate: train_graph has no such train call"),
        ("headlines", ("actor.trian/loss",), "actor.trian/loss: no graph has a call"),
    ],
)
def test_what_contradicts_a_recipe_is_named_when_it_is_read(field: str, value: Any, message: str) -> None:
    spec = replace(PPO, **{field: value})
    with pytest.raises(UserError) as caught:
        complete(spec.recipe.model_validate(PPO_RECIPE), spec)
    assert message in str(caught.value)


def test_roles_are_trained_exactly_if_they_have_an_optimizer() -> None:
    class Frozen(Models):
        """One model."""

        actor: ModelConfig

    class FrozenExperiment(Experiment):
        """Training of a frozen model."""

        models: Frozen

    recipe = {**PPO_RECIPE, "models": {"actor": {"path": "a"}}, "algorithm": "sft"}
    spec = replace(SFT, recipe=FrozenExperiment)
    with pytest.raises(UserError, match=r"train_graph: models\.actor must be a TrainedModelConfig"):
        complete(FrozenExperiment.model_validate(recipe), spec)


def test_algorithms_have_the_names_under_which_they_are_registered() -> None:
    names = list_algorithms()
    assert names == sorted(names) and {"grpo", "ppo", "reward", "sft"} <= {*names}
    assert [find_algorithm(name)[0].name for name in names] == names
    assert [find_algorithm(name)[0] for name in ("ppo", "reward", "sft")] == [PPO, REWARD, SFT]
    assert SFT.about == "Supervised fine-tuning on `{prompt, answer}` records or conversations"
    about = find_algorithm("dr_grpo")[0].about
    assert about.startswith("Dr. GRPO: GRPO without") and about.endswith(
        "(Liu et al. 2025, arXiv 2503.20783)"
    )


class Point:
    """An entry point of another package."""

    def __init__(self, name: str, value: Any, package: str = "theirs") -> None:
        self.name = name
        self.value = "theirs.module:ALGORITHM"
        self.dist = type("Distribution", (), {"name": package})
        self._value = value

    def load(self) -> Any:
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes entry points the only ones of other packages."""

    def install(*points: Point) -> None:
        monkeypatch.setattr(registered, "entry_points", lambda group: points)
        registry._installed.cache_clear()

    yield install
    registry._installed.cache_clear()


def test_an_installed_algorithm_that_cannot_be_used_names_its_package(install: Callable[..., None]) -> None:
    install(Point("mine", ImportError("no module named jax")), Point("other", SFT))
    with pytest.raises(
        UserError, match="algorithm mine of package theirs cannot be imported: ImportError: no mod"
    ):
        find_algorithm("mine")
    with pytest.raises(
        UserError, match=r"algorithm other of package theirs: .* is not an AlgorithmSpec of that name"
    ):
        find_algorithm("other")


def test_one_name_in_two_packages_names_both(install: Callable[..., None]) -> None:
    install(Point("mine", SFT, "a"), Point("mine", SFT, "b"))
    with pytest.raises(UserError, match="algorithm mine is in two packages, a and b; uninstall one"):
        find_algorithm("mine")


def test_a_package_may_not_replace_a_built_in_algorithm(install: Callable[..., None]) -> None:
    install(Point("sft", SFT, "a"))
    message = r"algorithm sft of package a \(theirs.module:ALGORITHM\) .* built-in realrl\.algorithms\.sft:"
    with pytest.raises(UserError, match=message):
        find_algorithm("ppo")


def test_entry_points_of_an_older_installation_are_ignored(install: Callable[..., None]) -> None:
    install(Point("sft", SFT, "realrl"), Point("gone", SFT, "realrl"))
    assert find_algorithm("sft")[0] is SFT and "gone" not in list_algorithms()


def test_a_package_may_not_replace_a_built_in_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "entry_points", lambda group: [Point("llama", None, "a")])
    with pytest.raises(UserError, match=r"family llama of package a .* built-in realrl\.families\."):
        registered.find_registered("family", families.GROUP, families.BUILT_IN)


def test_a_checkout_works_without_installation() -> None:
    root = Path(__file__).parents[2]
    code = (
        "from importlib import metadata; metadata.distributions = lambda **_: []\n"
        "from realrl.families.registry import find_family; find_family('qwen2')\n"
        "from realrl.recipe.registry import find_algorithm; print(find_algorithm('grpo')[0].name)"
    )
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "grpo", done.stderr


SFT_COPY = "from dataclasses import replace\nfrom realrl.algorithms.sft import ALGORITHM as SFT\n"


def test_a_file_may_build_on_another_description(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SFT_COPY + "ALGORITHM = replace(SFT, name='my_sft')")
    spec, reference = find_algorithm(str(file))
    assert (spec.name, spec.recipe, reference) == ("my_sft", SFT.recipe, str(file))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1", "it has no ALGORITHM"),
        ("ALGORITHM = 'sft'", "its ALGORITHM is no AlgorithmSpec"),
        (
            SFT_COPY + "ALGORITHM = [SFT]",
            "its ALGORITHM is no AlgorithmSpec; there is SFT, which may be renamed",
        ),
        (
            SFT_COPY + "MINE = replace(SFT)",
            "it has no ALGORITHM; there are SFT and MINE, which may be renamed",
        ),
    ],
)
def test_a_file_without_a_description_of_that_name_is_refused(
    text: str, problem: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        find_algorithm(str(file))
    message = f"algorithm={file}: {file} must hold an AlgorithmSpec named ALGORITHM, and {problem}"
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "ALGORITHM = replace(SFT, form='x')",
            "algorithm sft: form: 'x' is not one of answer, pair, prompt, label, ranked, steps",
        ),
        (
            "from realrl.dataflow.call import Call, Kind; Call('a', 'a', Kind.TRAIN, ())",
            "call a: work=() must name some of its inputs ()",
        ),
    ],
)
def test_a_contradiction_in_a_file_is_one_message_with_its_line(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(SFT_COPY + line)
    assert run_app(["config", str(file)]) == 2
    assert capsys.readouterr().err == f"realrl: {file}:3: {message}\n"


@pytest.mark.parametrize("field", ["train_graph", "eval_graph", "epochs"])
def test_an_error_in_a_function_of_a_users_description_names_its_line(tmp_path: Path, field: str) -> None:
    lines = [
        "from dataclasses import replace",
        "from realrl.algorithms.sft import ALGORITHM as SFT",
        "def broken(experiment):",
        "    return {}['absent']",
        f"ALGORITHM = replace(SFT, {field}=broken)",
    ]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    recipe = {**PPO_RECIPE, "algorithm": str(tmp_path / "mine.py"), "models": {"actor": {"path": "a"}}}
    with pytest.raises(UserCodeError) as caught:
        parse_experiment(recipe)
    place = f"({tmp_path / 'mine.py'}:4)"
    assert str(caught.value).endswith(f"mine.py raised in {field}: KeyError: 'absent' {place}")
    assert "return {}['absent']" in caught.value.trace


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nowhere.py", "algorithm=nowhere.py: there is no file /"),
        ("nowhere.module", "algorithm=nowhere.module: there is no module nowhere.module; write FILE.py or"),
        ("./nowhere", "'./nowhere' is not one of "),
        ("realrl.config.errors", "errors.py must hold an AlgorithmSpec named ALGORITHM"),
        ("a.py:ALGORITHM", "'a.py:ALGORITHM' is not one of "),
        ("sfd", "describes one; did you mean sft?"),
        (["sft"], "['sft'] is not one of"),
    ],
)
def test_a_reference_to_nothing_gets_one_message(reference: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_experiment({**PPO_RECIPE, "algorithm": reference})
    assert message in str(caught.value)


def test_an_importable_module_is_a_reference() -> None:
    recipe = {**PPO_RECIPE, "algorithm": "realrl.algorithms.sft", "models": {"actor": {"path": "a"}}}
    experiment = parse_experiment(recipe)
    assert isinstance(experiment, SFTExperiment) and experiment.spec.recipe is SFTExperiment
    assert experiment.algorithm == "realrl.algorithms.sft"


def test_recipes_of_version_0_1_still_name_sampling() -> None:
    assert find_algorithm("realrl.algorithms.sampling.spec")[1] == "realrl.algorithms.sampling"
