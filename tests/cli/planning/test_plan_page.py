"""The page that explains a plan, and its picture."""

import re
import tomllib
import xml.etree.ElementTree as ET
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from realrl.algorithms.ppo import train_graph
from realrl.cli.page.bands import find_areas, find_bands
from realrl.cli.page.bars import TERMS, make_memory_cards, make_time_bars
from realrl.cli.page.plan_page import draw_timeline_svg, write_page, write_verdict
from realrl.cli.page.text import format_count, format_seconds, format_share
from realrl.cli.page.timeline import WIDTH, draw_timeline
from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.families.sizes import SHAPES
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.memory.call_memory import MemoryModel
from realrl.planner.report.make import compare_contenders
from realrl.planner.report.report import CHOSEN, Alternative, PlanReport, Preset, SizeReport
from realrl.planner.simulate.estimate import Estimate
from realrl.planner.simulate.estimator import estimate_plan
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.uncertainty.ranking import StepSampler
from realrl.planner.workload.workload import Workload
from realrl.program.instructions import Run
from realrl.program.memory import StoredModel

ROOT = Path(__file__).parents[3]
PPO = train_graph(minibatches=2)
VOID = {"meta"}
"""Elements that HTML does not close."""


def place(first: int, dp: int, tp: int = 1, pp: int = 1) -> Placement:
    strategy = Strategy(dp=dp, tp=tp, pp=pp, micro_batch_tokens=2048, sequence_parallel=tp > 1)
    return Placement(Mesh(first, strategy.size), strategy)


def make_scenario(cluster: str, graph: DataflowGraph = PPO, shape: str = "llama-2-7b") -> Scenario:
    spec = ClusterSpec.parse(cluster)
    models = {
        role: StoredModel(
            SHAPES[shape],
            "scalar" if role in ("critic", "reward") else "lm",
            "bfloat16",
            trained=graph.trained(role),
        )
        for role in graph.roles
    }
    return Scenario(
        graph=graph,
        models=models,
        spec=spec,
        workload=Workload(256, (256,), (256,), 256),
        cost=CostModel(spec),
        memory=MemoryModel(spec),
    )


def make_report(scenario: Scenario, chosen: Estimate, **presets: Preset) -> PlanReport:
    other = Alternative(
        call=scenario.graph.calls[0].name,
        placement=place(0, 1),
        offload=("optimizer",),
        step_seconds=99.0,
        fits=False,
        reason="is too large",
    )
    options = {call.name: 7 for call in scenario.graph.calls}
    bound = 0.9 * chosen.step_seconds
    fitting = {name: p.estimate for name, p in presets.items() if p.estimate and p.estimate.fits}
    return PlanReport(
        scenario=scenario,
        chosen=chosen,
        lower_bound_seconds=bound,
        gap=0.1,
        search_seconds=1.5,
        evaluations=123_456,
        candidates=options,
        presets=presets,
        contenders=compare_contenders(scenario, {CHOSEN: chosen} | fitting, StepSampler(scenario)),
        alternatives=(other,),
    )


@cache
def ppo_report() -> PlanReport:
    """Six calls on meshes of four kinds on 16 devices; parameters move, and are offloaded."""
    scenario = make_scenario("h100:2x8")
    placements = {
        "actor.generate": place(0, 4, 4),
        "reward.inference": place(0, 4),
        "ref.inference": place(8, 2, 4),
        "critic.inference": place(4, 4),
        "actor.train": place(0, 2, 4),
        "critic.train": place(8, 8),
    }
    chosen = estimate_plan(scenario, Plan(scenario.spec.cluster, placements, offload=("reward",)))
    whole = Plan(scenario.spec.cluster, {call.name: place(0, 1, 8, 2) for call in PPO.calls})
    heuristic = replace(estimate_plan(scenario, whole), step_seconds=2.5 * chosen.step_seconds)
    single = estimate_plan(
        make_scenario("l40s:2x8"), Plan(whole.cluster, {c.name: place(0, 16) for c in PPO.calls})
    )
    assert chosen.fits and heuristic.fits and not single.fits
    presets = {
        "heuristic": Preset(heuristic, None),
        "symmetric": Preset(single, None),
        "disjoint": Preset(None, "needs 99 devices"),
    }
    return make_report(scenario, chosen, **presets)


@cache
def single_report(role: str = "model", shape: str = "qwen2.5-0.5b") -> PlanReport:
    """One call on one device, and no presets."""
    call = Call(f"{role}.train", role, Kind.TRAIN, ("text",), work=("text",))
    scenario = make_scenario("h100:1x1", DataflowGraph([call], [Key("text", "int64")]), shape)
    return make_report(
        scenario, estimate_plan(scenario, Plan(scenario.spec.cluster, {call.name: place(0, 1)}))
    )


@cache
def large_report() -> PlanReport:
    """1,024 devices."""
    scenario = make_scenario("h100:128x8")
    placements = {call.name: place(0, 64, 8, 2) for call in PPO.calls}
    placements |= {"critic.inference": place(8, 1), "reward.inference": place(1016, 8)}
    return make_report(scenario, estimate_plan(scenario, Plan(scenario.spec.cluster, placements)))


REPORTS = {
    "ppo": ppo_report,
    "single": single_report,
    "large": large_report,
    "too large": lambda: single_report(shape="llama-2-70b"),
    "sizes": lambda: replace(
        ppo_report(),
        objective="cost",
        sizes=(
            SizeReport(
                cluster="l40s:1x8",
                kind="l40s",
                nodes=1,
                devices=8,
                estimate=None,
                gap=None,
                refused="is too small",
                price_per_hour=None,
            ),
            SizeReport(
                cluster="l40s:2x8",
                kind="l40s",
                nodes=2,
                devices=16,
                estimate=ppo_report().chosen,
                gap=0.1,
                refused=None,
                price_per_hour=None,
            ),
        ),
    ),
}


def page(report: PlanReport, folder: Path, title: str = "A plan", **others: str) -> str:
    write_page(report, folder / "plan.html", title, **others)
    return (folder / "plan.html").read_text(encoding="utf-8")


class Elements(HTMLParser):
    """All elements and texts of a page. Fails if they are not nested properly."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"{tag} has an attribute twice"
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def values(self, attribute: str) -> list[str]:
        """Of all elements that have the attribute."""
        return [attrs[attribute] or "" for _, attrs in self.found if attribute in attrs]


@pytest.mark.parametrize("name", REPORTS)
def test_pages_are_well_formed_and_load_nothing(name: str, tmp_path: Path) -> None:
    text = page(REPORTS[name](), tmp_path, source="a guess", command="realrl plan")
    elements = Elements(text)
    assert not {"src", "href", "srcset", "action"} & {key for _, attrs in elements.found for key in attrs}
    assert not {tag for tag, _ in elements.found} & {"link", "img", "iframe", "object", "embed"}
    assert "http" not in text and "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    assert "{{" not in text and "{%" not in text


@pytest.mark.parametrize("name", REPORTS)
def test_pictures_are_well_formed_and_load_nothing(name: str) -> None:
    text = draw_timeline_svg(REPORTS[name](), "A <plan>")
    root = ET.fromstring(text)
    assert root.findtext("{*}title") == "A <plan>"
    assert re.findall(r"http[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    shown = {element.get("data-call") for element in root.iter() if element.get("data-call")}
    assert shown == set(REPORTS[name]().chosen.calls)


@pytest.mark.parametrize("name", REPORTS)
def test_pages_have_bounded_sizes(name: str, tmp_path: Path) -> None:
    assert len(page(REPORTS[name](), tmp_path)) < 150_000
    assert len(draw_timeline_svg(REPORTS[name](), "A plan")) < 30_000


def test_every_call_is_in_the_picture_the_bars_and_the_tables(tmp_path: Path) -> None:
    report = ppo_report()
    elements = Elements(page(report, tmp_path))
    for tag in ("svg", "div", "tr"):
        assert {a["data-call"] for t, a in elements.found if t == tag and a.get("data-call")} >= set(
            report.chosen.calls
        )


@pytest.mark.parametrize("name", REPORTS)
def test_every_device_is_in_one_band_and_one_card(name: str) -> None:
    report = REPORTS[name]()
    size = report.scenario.spec.size
    bands = find_bands(report.chosen, report.scenario.spec)
    assert [rank for band in bands for rank in band.ranks] == list(range(size))
    titles = [card.title.partition(" ")[2] for card in make_memory_cards(report)]
    runs = [[int(n) for n in run.split("–")] for title in titles for run in title.split(", ")]
    assert sorted(rank for run in runs for rank in range(run[0], run[-1] + 1)) == list(range(size))


def test_devices_that_do_the_same_are_one_band() -> None:
    report = ppo_report()
    bands = find_bands(report.chosen, report.scenario.spec)
    assert [(band.ranks.start, band.ranks.stop) for band in bands] == [(0, 4), (4, 8), (8, 16)]


def test_a_call_is_one_box_wherever_its_devices_are_neighbours() -> None:
    report = ppo_report()
    bands = find_bands(report.chosen, report.scenario.spec)
    areas = find_areas(bands, report.chosen.step_seconds)
    runs = {a.block.instruction.call: a for a in areas if isinstance(a.block.instruction, Run)}
    assert sorted(runs) == sorted(report.chosen.calls)
    for name, area in runs.items():
        ranks = [rank for number in area.bands for rank in bands[number].ranks]
        assert tuple(ranks) == report.chosen.calls[name].placement.ranks
        assert area.block.start == pytest.approx(report.chosen.calls[name].start)


def test_blocks_of_a_band_follow_each_other_and_say_what_they_wait_for() -> None:
    report = ppo_report()
    for band in find_bands(report.chosen, report.scenario.spec):
        for before, after in pairwise(band.blocks):
            assert before.end <= after.start + 1e-9
        assert all(bool(block.reason) == (block.instruction is None) for block in band.blocks)
        assert band.blocks[-1].end <= report.chosen.step_seconds + 1e-9


@pytest.mark.parametrize("name", REPORTS)
def test_boxes_lie_inside_the_picture_and_labels_inside_boxes(name: str) -> None:
    timeline = draw_timeline(REPORTS[name]())
    for box in timeline.boxes:
        assert box.x >= 0 and box.x + box.width <= 100 + 1e-6
        assert box.y >= 0 and box.y + box.height <= timeline.height + 1e-6
        if box.chosen:
            width, height = box.chosen.size
            assert height <= box.height and width <= box.width / 100 * WIDTH
    assert all(0 <= tick.x <= 100 for tick in timeline.ticks)
    assert 3 <= sum(tick.level == 0 for tick in timeline.ticks) <= 11


def test_heights_are_proportional_to_numbers_of_devices() -> None:
    rows = draw_timeline(ppo_report()).rows
    assert [row.height / rows[0].height for row in rows] == [1, 1, 2]


def test_bars_of_device_time_add_up() -> None:
    whole, *parts = make_time_bars(ppo_report())
    assert sum(segment.percent for segment in whole.segments) == pytest.approx(100)
    lengths = [sum(segment.percent for segment in bar.segments) for bar in parts]
    assert max(lengths) == pytest.approx(100)
    assert [bar.name for bar in parts] == [
        *ppo_report().chosen.calls,
        "reallocation",
        "offload",
        "idle",
    ]
    assert all(term in TERMS for term in ppo_report().chosen.terms)


def test_only_the_bar_of_the_whole_step_has_labels() -> None:
    whole, *parts = make_time_bars(single_report())
    assert any(segment.label for segment in whole.segments)
    assert not any(segment.label for bar in parts for segment in bar.segments)


def test_texts_of_users_are_escaped(tmp_path: Path) -> None:
    report = single_report(role="<blink>&\"'")
    text = page(report, tmp_path, title="</title><blink>", source="<blink>", command="<blink>")
    assert "<blink>" not in text
    elements = Elements(text)
    assert {"<blink>&\"'.train"} == set(elements.values("data-call"))
    assert "<blink>" not in draw_timeline_svg(report, "<blink>")


def test_a_page_names_what_does_not_fit(tmp_path: Path) -> None:
    report = single_report(shape="llama-2-70b")
    assert write_verdict(report).startswith("This plan does not fit: device 0 needs ")
    assert re.search(r"during \w+\.\w+, [\d.]+ [GT]iB of it \w", write_verdict(report))
    assert not make_memory_cards(report)[0].fits
    assert "unfit-plan" in page(report, tmp_path)


def test_presets_are_compared_and_those_that_cannot_be_are_explained(tmp_path: Path) -> None:
    text = page(ppo_report(), tmp_path)
    assert "needs 99 devices" in text
    assert re.search(r"device \d+ needs [\d,.]+ GiB of [\d.]+ GiB during", text)
    assert "2.50 ×" in text


def test_a_plan_without_moves_and_presets_says_so(tmp_path: Path) -> None:
    text = page(single_report(), tmp_path)
    assert "Nothing moves" in text and "Made by" not in text


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (2.13, "2.1 × as fast as heuristic, the best preset that fits"),
        (1.25, "25 % faster than heuristic, the best preset that fits"),
        (1.0, "As fast as heuristic, the best preset"),
    ],
)
def test_the_verdict_compares_with_the_best_preset_that_fits(factor: float, expected: str) -> None:
    report = ppo_report()
    seconds = factor * report.chosen.step_seconds
    best = Preset(replace(report.chosen, step_seconds=seconds), None)
    presets = {**report.presets, "heuristic": best}
    assert write_verdict(replace(report, presets=presets)).startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_seconds(27.36), "27.4 s"),
        (format_seconds(0.9999), "1.00 s"),
        (format_seconds(0.0421), "42.1 ms"),
        (format_seconds(0), "0 s"),
        (format_seconds(1234.5), "1,234 s"),
        (format_share(0.0281), "2.8 %"),
        (format_share(0.5), "50 %"),
        (format_count(9_999), "9,999"),
        (format_count(1_843_200), "1.84 M"),
        (format_count(70.55e9), "70.5 G"),
    ],
)
def test_numbers_are_formatted_with_three_digits(text: str, expected: str) -> None:
    assert text == expected


def test_the_wheel_contains_all_files_that_are_not_python() -> None:
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for path in (ROOT / "src" / "realrl").rglob("*.*"):
        if path.is_file() and path.suffix not in (".py", ".pyc", ".nbi", ".nbc"):
            package = ".".join(path.parent.relative_to(ROOT / "src").parts)
            assert any(fnmatch(path.name, glob) for glob in globs.get(package, ())), path
