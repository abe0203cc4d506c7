"""Mistakes in plan files, cluster files, and what else a plan is made from: each is one error message."""

from pathlib import Path

import pytest

from tests.cli.mistakes import DEEP, DEEPER, recipe_of, refused

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
PLACEMENTS: list[tuple[str, str]] = [
    ("{dp: 1}", "reward.inference: mesh: missing"),
    ("{mesh: 0}", "reward.inference: dp: missing"),
    ("{mesh: [0], dp: 1}", "mesh: [0] is not understood; write FIRST-LAST"),
    ("{mesh: 0.5, dp: 1}", "mesh: 0.5 is not understood"),
    ("{mesh: null, dp: 1}", "mesh: null is not text"),
    ("{mesh: -1, dp: 1}", "mesh '-1' is not understood"),
    ("{mesh: 1-0, dp: 1}", "mesh '1-0' is not understood"),
    ("{mesh: all, dp: 1}", "mesh 'all' is not understood"),
    ("{mesh: 2, dp: 1}", "lies outside the 2 devices"),
    ("{mesh: 0, dp: 0}", "dp: 0 must be above 0"),
    ("{mesh: 0, dp: '1'}", "dp: '1' is not a whole number"),
    ("{mesh: 0, dp: 2}", "needs 2 devices, but mesh 0 has 1"),
    ("{mesh: 0, dp: 1, vp: 2}", "vp: unknown key; did you mean vpp?"),
    ("{mesh: 0, dp: 1, sharding: 2}", "sharding: unknown key; known keys are mesh, "),
    ("{mesh: 0, dp: 1, vpp: 2}", "vpp=2 divides the layers of a pipeline stage, but pp=1 has no pipeline"),
    ("{mesh: 0-1, dp: 1, pp: 2, zero_bubble: true}", "zero_bubble is for calls that train"),
    (
        "{mesh: 0, dp: 1, ep: 2}",
        "ep=2: the ranks of one stage divide its experts, so ep must divide dp x cp x tp (1)",
    ),
    ("{mesh: 0-1, dp: 2, ep: 2}", "ep=2: the model has no experts"),
    ("{mesh: 0, dp: 1, dtype: fp8}", "'fp8' is not 'float32', 'mixed' or 'bfloat16'"),
    ("{mesh: 0, dp: 1, recompute: true}", "recompute is for calls that train"),
    ("{mesh: 0, dp: 1, zero: 3}", "zero=3 shards over data-parallel and context-parallel ranks, but"),
    ("{mesh: 0-1, dp: 2, zero: 2}", "zero=2 shards gradients, which only calls that train have"),
    ("{mesh: 0-1, dp: 2, zero: 0}", "reward.inference: zero: 0 is not 1, 2 or 3"),
    ("{mesh: 0, dp: 1, recompute: 1}", "recompute: 1 is not true or false"),
]
"""What stands in place of the placement of reward.inference."""
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
    ("cluster: 1x2\ncalls: {1: {mesh: 0, dp: 1}}", "so it cannot be a key"),
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
    (CALLS + "keep: [critc]\n", "keep: critc is not one of actor, reward, ref, critic"),
    (CALLS + "offload_optimizer: [ref]\n", "ref is not one of actor, critic"),
    (CALLS + "offload: null\n", "offload: null is not a list"),
    (
        CALLS.replace("critic.train", "critic.tarin"),
        "there is no call critic.tarin; did you mean critic.train?",
    ),
    (
        CALLS.replace("actor.generate: {mesh: 0-1, dp: 2}", "actor.generate: {mesh: 0-1, dp: 2, zero: 3}"),
        "actor.generate: zero=3 would gather all parameters for every token that is generated",
    ),
    (
        CALLS.replace("actor.train: {mesh: 0-1, dp: 2}", "actor.train: {mesh: 0-1, dp: 2, dtype: bfloat16}"),
        "dtype is for calls that do not train",
    ),
]
"""Plan files for a PPO recipe on 1x2."""
WRONG_PLANS = PLANS + [(CALLS.replace("{mesh: 0, dp: 1}", text), words) for text, words in PLACEMENTS]


@pytest.mark.parametrize(("text", "words"), WRONG_PLANS, ids=[text[-40:] for text, _ in WRONG_PLANS])
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
    (GROUP.replace("h100", "{like: h100, memory: 80G}") % "", "memory: '80G' is not a size"),
    (GROUP.replace("h100", "{like: h100, memroy: 80GiB}") % "", "memroy: unknown key; did you mean memory?"),
    (GROUP.replace("h100", "{like: h100, bf16_tflops: 0}") % "", "bf16_tflops: 0 must be above 0"),
    (GROUP.replace("nodes: 1", "nodes: 0") % "", "group 1: nodes: 0 must be above 0"),
    (GROUP.replace("nodes: 1", "nodes: x") % "", "group 1: nodes: 'x' is not a whole number"),
    (GROUP.replace("nodes: 1", "nodes: 1.0") % "", "group 1: nodes: 1.0 is not a whole number"),
    (GROUP.replace("nodes: 1", "nodes: 100000") % "", "has 200,000 devices; 16,384 can be planned"),
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
    ("--profile", '{"format": "realrl profile", "version": 9}', "has version 9, not 5, which"),
    ("--profile", '{"format": "realrl profile", "version": 5}', "device: missing"),
    (
        "--profile",
        '{"format": "realrl profile", "version": 5, "device": "cpu", "software": {}, "layers": 3}',
        "layers: 3 is not a list",
    ),
    ("--profile", "\xff", "not valid JSON"),
]
"""Files that `realrl plan` reads in addition to a recipe."""


@pytest.mark.parametrize(("option", "text", "words"), FILES)
def test_a_wrong_file_beside_a_recipe_is_one_error_message(
    place: Path, capsys: pytest.CaptureFixture[str], option: str, text: str, words: str
) -> None:
    file = place / "file.json"
    file.write_text(text, encoding="latin-1")
    command = ["plan", recipe_of(place, "ppo"), "--cluster", "cpu:1x2", option, str(file)]
    refused(capsys, command, words)
