import math
from dataclasses import replace
from pathlib import Path

import pytest

from realrl.cli.app import run_app
from realrl.config.errors import UserError
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh
from realrl.planner.cluster.cluster_spec import ClusterSpec, Site
from realrl.planner.cluster.devices import DEVICES, find_gpu_kind
from realrl.planner.memory.call_memory import PROCESS_BYTES, MemoryModel
from realrl.planner.space.build import list_meshes
from tests.plan.meshes import list_tidy

ROOT = Path(__file__).parents[3]
MIXED = ClusterSpec.parse("h100:2x8+l40s:3x4")


@pytest.mark.parametrize("name", DEVICES)
def test_built_in_devices_are_found_by_name_with_plausible_figures(name: str) -> None:
    (group,) = ClusterSpec.parse(f"{name}:2x8").groups
    kind = group.device
    assert (group.nodes, group.devices_per_node, kind.name) == (2, 8, name)
    assert kind.bf16_flops > kind.fp32_flops > kind.memory_bytes_per_s > kind.host_bytes_per_s / 2
    assert kind.flops("bfloat16") == kind.flops("mixed") == kind.bf16_flops
    assert kind.flops("float32") == kind.fp32_flops


def test_a_homogeneous_spec_is_a_cluster() -> None:
    assert ClusterSpec.parse("a100-80g:16x8").cluster == Cluster(16, 8)


def test_ranks_are_numbered_group_by_group_and_node_by_node() -> None:
    assert MIXED.size == 28 and MIXED.cluster == Cluster.parse("2x8+3x4")
    node = MIXED.cluster.node
    assert [node(rank) for rank in (0, 7, 8, 15, 16, 19, 20, 27)] == [0, 0, 1, 1, 2, 2, 3, 4]
    assert MIXED.device(15).name == "h100" and MIXED.device(16).name == "l40s"


def test_a_part_without_a_kind_is_of_the_kind_before_it() -> None:
    spec = ClusterSpec.parse("h100:2x8+1x4+l40s:1x4+2x2")
    assert [str(group) for group in spec.groups] == ["h100:2x8", "h100:1x4", "l40s:1x4", "l40s:2x2"]
    assert spec.cluster == Cluster.parse("2x8+2x4+2x2")
    assert spec.uniform_parts == [range(3), range(3, 6)]


def test_a_mesh_has_devices_of_one_kind_and_the_slowest_network_of_its_nodes() -> None:
    with pytest.raises(
        UserError, match=r"mesh 8-19 of cluster .* has devices of several kinds \(h100 and l40s\)"
    ):
        MIXED.site(Mesh(8, 12))
    fast, few = ClusterSpec.parse("h100:2x8+1x4").groups
    spec = ClusterSpec("ours", (fast, replace(few, node_bytes_per_s=1e9)))
    assert spec.site(Mesh(6, 4)) == Site(fast.device, Cluster(2, 2), fast.node_bytes_per_s)
    assert spec.site(Mesh(0, 20)) == Site(fast.device, spec.cluster, 1e9)
    assert spec.site(Mesh(3, 5)) == spec.site(Mesh(9, 5)) != spec.site(Mesh(16, 4))


@pytest.mark.parametrize("spec", ["a100-40g:2x8", "cpu:1x6", "h100:1x5+2x3", "h100:2x4+l40s:1x4+1x3"])
def test_a_search_on_few_devices_considers_all_of_one_node_and_whole_nodes(spec: str) -> None:
    parsed = ClusterSpec.parse(spec)
    found = list_meshes(parsed)
    assert len(found) == len(set(found))
    expected = []
    for mesh in list_tidy(parsed.cluster):
        if len({parsed.device(rank).name for rank in mesh.ranks}) == 1:
            expected.append(mesh)
    assert set(found) == set(expected)


@pytest.mark.parametrize(
    ("text", "words"),
    [("a100:2x8", "a100-"), ("2x8", "kind:nodes"), ("h100:0x8", "at least 1"), ("nowhere.yaml", "not exist")],
)
def test_mistakes_in_a_cluster_text_are_explained(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        ClusterSpec.parse(text)


def test_a_cluster_file_describes_custom_devices_and_prices(tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text(
        "groups:\n"
        "- {device: {like: h100, name: h100-pcie, memory: 90GiB, link_gb_per_s: 32}, nodes: 2,"
        " devices_per_node: 4, node_gbit_per_s: 100, price_per_device_hour: 2.5}\n"
        "- {device: l40s, nodes: 1, devices_per_node: 8, price_per_device_hour: 1}\n"
    )
    spec = ClusterSpec.parse(str(file))
    first, second = spec.groups
    assert spec.name == "ours" and second.device == DEVICES["l40s"]
    assert first.node_bytes_per_s == 12.5e9
    assert first.device == replace(
        DEVICES["h100"], name="h100-pcie", memory_bytes=90 << 30, link_bytes_per_s=32e9, measured=None
    )
    assert spec.with_nodes(2).price_per_hour == 20 and spec.price_per_hour == 28


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("groups: []", "groups"),
        ("groups: [{device: h100, nodes: 1}]", "devices_per_node"),
        ("groups: [{device: h101, nodes: 1, devices_per_node: 8}]", "h100"),
        ("groups: [{device: h100, nodes: 1, devices_per_node: 8, gbit: 3}]", "gbit"),
        (
            "groups: [{device: h100, nodes: 1, devices_per_node: 8, price_per_device_hour: 2},"
            " {device: l40s, nodes: 1, devices_per_node: 8}]",
            "group 2: price_per_device_hour is missing; give it for all groups, or for none",
        ),
    ],
)
def test_mistakes_in_a_cluster_file_name_the_file(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        ClusterSpec.parse(str(file))
    assert str(file) in str(caught.value)


def test_the_number_of_nodes_of_a_cluster_can_be_varied() -> None:
    assert str(ClusterSpec.parse("h200:2x8").with_nodes(4).groups[0]) == "h200:4x8"


@pytest.mark.parametrize(("nodes", "name"), [(1, "h100:1x8"), (2, "h100:2x8"), (4, "h100:2x8+l40s:2x4")])
def test_fewer_nodes_of_a_heterogeneous_cluster_are_its_first_ones(nodes: int, name: str) -> None:
    assert MIXED.with_nodes(nodes).name == name


@pytest.mark.parametrize("nodes", [0, 6])
def test_impossible_numbers_of_nodes_are_rejected(nodes: int) -> None:
    with pytest.raises(UserError):
        MIXED.with_nodes(nodes)


def test_a_misspelt_device_is_recognised() -> None:
    with pytest.raises(UserError, match=r"did you mean a100-80g\?"):
        ClusterSpec.parse("a100-80gb:2x8")


def test_the_device_kind_of_the_contributing_guide_can_be_planned_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Add a device kind")[1]
    file = tmp_path / "mi300x.yaml"
    file.write_text(section.split("```yaml\n")[1].split("```")[0])
    (group,) = ClusterSpec.parse(str(file)).groups
    assert (group.device.name, group.device.memory_bytes) == ("mi300x", 191 << 30)
    recipe = ROOT / "recipes" / "reference" / "ppo.yaml"
    assert run_app(["plan", str(recipe), "--cluster", str(file), "--effort", "30000"]) == 0
    assert "2 × 8 mi300x" in capsys.readouterr().out


def test_a_kind_added_to_the_table_is_known_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = replace(DEVICES["h100"], name="mi300x", memory_bytes=191 << 30)
    monkeypatch.setattr("realrl.planner.cluster.devices.DEVICES", {**DEVICES, kind.name: kind})
    assert ClusterSpec.parse("mi300x:2x8").groups[0].device == kind
    assert find_gpu_kind("AMD Instinct MI300X OAM") == kind
    with pytest.raises(UserError, match=r"known are .*mi300x"):
        ClusterSpec.parse("mi400:2x8")


def test_host_memory_is_that_of_the_file_or_what_is_usual_and_without_limit_for_cpus(tmp_path: Path) -> None:
    file = tmp_path / "hosts.yaml"
    file.write_text(
        "groups:\n"
        "- {device: h100, nodes: 1, devices_per_node: 4}\n"
        "- {device: h100, nodes: 2, devices_per_node: 4, host_memory: 500GB}\n"
    )
    spec = ClusterSpec.parse(str(file))
    assert [group.host_memory for group in spec.groups] == [4 * 256 * 10**9, 500 * 10**9]
    model, processes = MemoryModel(spec), 4 * PROCESS_BYTES
    usable = [4 * 256 * 10**9 - processes, 500 * 10**9 - processes, 500 * 10**9 - processes]
    assert [model.host_capacity(node) for node in range(3)] == usable
    assert MemoryModel(ClusterSpec.parse("cpu:1x2")).host_capacity(0) == math.inf
    file.write_text("groups: [{device: h100, nodes: 1, devices_per_node: 4, host_memory: 12}]")
    with pytest.raises(UserError, match=r"group 1: host_memory: 12 has no unit"):
        ClusterSpec.parse(str(file))
