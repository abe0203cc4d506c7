from pathlib import Path

import pytest
import yaml

from realrl.algorithms.ppo import ALGORITHM as PPO_SPEC
from realrl.algorithms.ppo import PPOExperiment
from realrl.config.errors import UserError
from realrl.config.yaml_file import parse_yaml
from realrl.recipe.load import dump_experiment, load_experiment, parse_experiment
from realrl.recipe.registry import list_algorithms

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
PPO = """
algorithm: ppo
run_dir: runs/x
data: {train: a.jsonl}
models: {actor: {path: a}, reward: {path: b}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "ppo.yaml"
    path.write_text(PPO)
    return str(path)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT / "recipes")))
def test_every_shipped_recipe_is_valid_and_survives_a_round_trip(path: Path) -> None:
    experiment = load_experiment(str(path))
    assert parse_experiment(yaml.safe_load(dump_experiment(experiment))) == experiment


def test_there_are_shipped_recipes_for_every_algorithm() -> None:
    assert {load_experiment(str(path)).algorithm for path in RECIPES} == set(list_algorithms())


def test_overrides_set_fields_and_create_sections(recipe: str) -> None:
    experiment = load_experiment(
        recipe,
        [
            "data.batch=8",
            "ppo.kl.coef=1e-3",
            "ppo.clip=0.3",
            "data.eval=null",
            "models.actor.optimizer.lr=2e-5",
        ],
    )
    assert isinstance(experiment, PPOExperiment)
    assert experiment.data.batch == 8
    assert experiment.ppo.kl.coef == 1e-3 and experiment.ppo.clip == 0.3
    assert experiment.data.eval is None
    assert experiment.models.actor.optimizer.lr == 2e-5


def test_a_later_override_wins_and_a_value_may_hold_equals_signs(recipe: str) -> None:
    assert load_experiment(recipe, ["run_dir=a", "run_dir=b=c"]).run_dir == "b=c"


def test_critic_and_reference_default_to_reward_and_actor(recipe: str) -> None:
    models = load_experiment(recipe).models
    assert (models.critic.path, models.ref.path) == ("b", "a")


@pytest.mark.parametrize(
    ("overrides", "critic", "ref"),
    [
        ([], "bfloat16", "bfloat16"),
        (["models.ref.dtype=float32"], "bfloat16", "float32"),
        (["models.critic.path=c", "models.critic.dtype=float32"], "float32", "bfloat16"),
        (["models.critic.path=c"], "bfloat16", "bfloat16"),
    ],
)
def test_critic_and_reference_have_the_actors_type_unless_told_otherwise(
    recipe: str, overrides: list[str], critic: str, ref: str
) -> None:
    experiment = load_experiment(recipe, ["models.actor.dtype=bfloat16", *overrides])
    models = experiment.models
    assert (models.critic.dtype, models.ref.dtype, models.reward.dtype) == (critic, ref, "float32")
    assert parse_experiment(yaml.safe_load(dump_experiment(experiment))) == experiment


@pytest.mark.parametrize(
    "text",
    ["1e5", "-1E+5", "1_0.0", ".5", "5", "010", "2024-01-01", "1:30", "yes", "~", "<<", "-.inf", "1e-5x"],
)
def test_text_that_looks_like_a_number_survives_a_round_trip(recipe: str, text: str) -> None:
    experiment = load_experiment(recipe, [f"run_dir='{text}'"])
    dumped = dump_experiment(experiment)
    assert parse_experiment(parse_yaml(dumped, "dump")) == experiment
    assert parse_experiment(yaml.safe_load(dumped)) == experiment  # another reader of YAML 1.1


def test_evaluation_may_let_answers_end_earlier_than_training(recipe: str) -> None:
    experiment = load_experiment(recipe, ["generation.min_new_tokens=9", "evaluation.min_new_tokens=0"])
    assert experiment.generation.min_new_tokens == 9
    assert PPO_SPEC.eval_generation(experiment) == experiment.generation.model_copy(
        update={"min_new_tokens": 0}
    )
    same = load_experiment(recipe, ["generation.min_new_tokens=9"])
    assert PPO_SPEC.eval_generation(same) == same.generation


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("data.btach=3", "data.btach: unknown key; did you mean data.batch?"),
        ("batch=3", "batch: unknown key; did you mean data.batch?"),
        (
            "models.ref.optimizer.lr=1",
            "models.ref.optimizer: unknown key; did you mean models.actor.optimizer?",
        ),
        ("models.actor.optimizer.weight_deacy=0", "did you mean models.actor.optimizer.weight_decay?"),
        ("zzz=3", "zzz: unknown key; known keys are algorithm, run_dir"),
        ("data.batch=many", "data.batch: 'many' is not a whole number"),
        ("data.batch=2.5", "data.batch: 2.5 is not a whole number"),
        ("data.batch=0", "data.batch: 0 must be above 0"),
        ("generation.top_p=1.5", "generation.top_p: 1.5 must be at most 1"),
        ("data.shuffle=maybe", "data.shuffle: 'maybe' is not true or false"),
        ("run_dir=5", "run_dir: 5 is not text"),
        ("data=null", "data: null is not a section of keys"),
        ("data=null; data={}", "data.train: missing (A .jsonl"),
        ("models.actor.optimizer.betas=[0.9]", "models.actor.optimizer.betas.1: missing"),
        ("models.actor.optimizer.schedule=cosin", "did you mean cosine?"),
        ("ppo.minibatches=3", "data.batch=64 is not divisible by the 3 mini-batches of actor.train"),
        ("generation.min_new_tokens=300", "generation: min_new_tokens=300 is above max_new_tokens=128"),
        (
            "evaluation.min_new_tokens=500",
            "evaluation.min_new_tokens=500 is above generation.max_new_tokens=128",
        ),
        (
            "ppo.ref_ema=0.1; models.ref.dtype=bfloat16",
            "models.ref.dtype=bfloat16: ref follows actor by a moving average, which needs float32",
        ),
        (
            "data.max_tokens=600",
            "data.max_prompt_tokens=512 and generation.max_new_tokens=128 together are above data.max_tokens=600",
        ),
        (
            "evaluation.judge=os:listdir",
            "evaluation.judge is about evaluations; give data.eval or set evaluation.judge=null",
        ),
        ("training.epochs=0", "training.epochs: 0 must be above 0"),
        ("models.actor.optimizer.betas=[0.9, 1.5]", "models.actor.optimizer.betas.1: 1.5 must be below 1"),
        ("models.actor.optimizer.betas=['0.9', 0.5]", "betas.0: '0.9' is not a number"),
        ("seed=9223372036854775808", "seed: 9223372036854775808 must be at most"),
        ("models.reward.path=null", "models: reward needs a path (weights to load) or a shape"),
        ("algorithm=pppo", "algorithm: 'pppo' is not one of "),
        ("algorithm=null", "algorithm: missing; give one of "),
        ("data.batch", "override 'data.batch' is not understood; write key=value"),
        ("data..batch=1", "override 'data..batch=1' is not understood; write key=value"),
        ("run_dir.x=1", "run_dir.x: run_dir is 'runs/x', which has no keys inside"),
        ("data.train=[a", "override data.train=[a: not valid YAML"),
    ],
)
def test_a_mistake_is_one_error_message_with_the_path_of_the_field(
    recipe: str, override: str, sentence: str
) -> None:
    with pytest.raises(UserError) as caught:
        load_experiment(recipe, override.split("; "))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_misspelt_required_key_is_not_said_to_be_missing_as_well(recipe: str) -> None:
    for key in ("trian", "trains"):
        with pytest.raises(UserError) as caught:
            load_experiment(recipe, ["data=null", f"data={{{key}: a}}"])
        assert str(caught.value) == f"data.{key}: unknown key; did you mean data.train?"


def test_mistakes_of_the_recipe_as_a_whole_are_listed_too(recipe: str) -> None:
    overrides = ["data.max_tokens=600", "evaluation.judge=os:listdir", "data.pair_weight=prompt"]
    with pytest.raises(UserError) as caught:
        load_experiment(recipe, overrides)
    first, *others = str(caught.value).splitlines()
    assert first.startswith("data.pair_weight=prompt is about records of the form pair")
    assert [line.split()[0] for line in others] == ["evaluation.judge", "data.max_prompt_tokens=512"]


def test_up_to_five_mistakes_are_listed_those_of_spelling_first(recipe: str) -> None:
    overrides = ["seed=x", "data={batch: 0, shuffle: 3, btach: 1}", "ppo.clip=x"]
    with pytest.raises(UserError) as caught:
        load_experiment(recipe, overrides)
    assert str(caught.value).splitlines() == [
        "data.btach: unknown key; did you mean data.batch?",
        "  seed: 'x' is not a whole number",
        "  data.batch: 0 must be above 0",
        "  data.shuffle: 3 is not true or false",
        "  ppo.clip: 'x' is not a number",
    ]
    with pytest.raises(UserError) as caught:
        load_experiment(recipe, [*overrides, "ppo.gamma=x", "ppo.lam=x"])
    assert str(caught.value).splitlines()[5:] == ["  (and 2 more mistakes)"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: 1\nb: [1\nc: 2", "bad.yaml, line 3: not valid YAML"),
        ("seed: 1\nseed: 2", "bad.yaml, line 2: not valid YAML (key 'seed' twice)"),
        ("? [a]\n: 1", "bad.yaml, line 1: not valid YAML"),
        ("- 1", "bad.yaml holds no recipe"),
        ("", "bad.yaml holds no recipe"),
    ],
)
def test_a_malformed_file_is_named_with_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"bad\.yaml") as caught:
        load_experiment(str(path))
    assert sentence in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.yaml does not exist"):
        load_experiment(str(tmp_path / "nowhere.yaml"))


def test_bytes_that_are_not_text_are_an_error_about_the_file(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UserError, match=r"x\.yaml cannot be read"):
        load_experiment(str(tmp_path / "x.yaml"))


@pytest.mark.parametrize("algorithm", ["sft", "reward"])
def test_what_generates_no_text_takes_no_judge(algorithm: str) -> None:
    role = {"sft": "actor", "reward": "reward"}[algorithm]
    settings = {
        "algorithm": algorithm,
        "run_dir": "x",
        "data": {"train": "a", "eval": "b"},
        "models": {role: {"path": "a"}},
        "evaluation": {"judge": "os:listdir"},
    }
    with pytest.raises(
        UserError, match=f"evaluation.judge is about generated text, and {algorithm} generates none"
    ):
        parse_experiment(settings)
    settings["evaluation"] = {"min_new_tokens": 0, "samples": 2}
    words = f"evaluation.samples and evaluation.min_new_tokens are about .* {algorithm} generates none"
    with pytest.raises(UserError, match=words):
        parse_experiment(settings)


@pytest.mark.parametrize(
    ("key", "shown"), [("\n", r"'\n'"), ("", "''"), ("a\u202eb", r"'a\u202eb'"), ("x" * 3000, "...")]
)
def test_keys_that_nobody_could_read_are_quoted(key: str, shown: str) -> None:
    with pytest.raises(UserError) as error:
        parse_experiment({"algorithm": "sft", key: 1})
    first = str(error.value).splitlines()[0]
    assert shown in first and first.isprintable() and len(first) < 700
