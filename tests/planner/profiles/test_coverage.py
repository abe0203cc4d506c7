"""Description of profile coverage: which times of a plan are measured."""

from dataclasses import replace

from realrl.families.shape import ModelShape
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.profile.corrections import Correction
from realrl.planner.profile.profile import LayerTimes, Measurement, Profile, ShapeKey, read_versions
from realrl.planner.report.calibrate import describe_times
from tests.planner.problems import SMALL, call, place, stored

OTHER = SMALL.model_copy(update={"hidden_size": 2 * SMALL.hidden_size, "head_dim": 2 * SMALL.head_dim})


def measured(*degrees: int, device: str = "h100", processes: int = 1, torch: str = "") -> Profile:
    """Layers of the small model in bfloat16, by TP degree."""
    times = tuple(Measurement(kind="forward", tp=tp, tokens=8, context=8, seconds=1.0) for tp in degrees)
    layers = LayerTimes(shape=ShapeKey.of(SMALL), dtype="bfloat16", measurements=times)
    software = read_versions() | ({"torch": torch} if torch else {})
    return Profile(device=device, processes=processes, software=software, layers=(layers,) if times else ())


def said(profile: Profile | None, cluster: str, **shapes: ModelShape) -> str:
    models = {role: stored(shape) for role, shape in (shapes or {"actor": SMALL}).items()}
    return "; ".join(describe_times(profile, "p.json", ClusterSpec.parse(cluster), models))


def test_a_complete_profile_is_named_alone() -> None:
    assert said(measured(1, 2), "h100:2x2") == "times of h100 measured (p.json)"
    assert said(None, "rtx-4090:2x2") == "times from data sheets (roofline)"
    assert "which are rough for a CPU; realrl profile measures it" in said(None, "cpu:1x2")


def test_unmeasured_times_are_named_as_from_data_sheets() -> None:
    assert said(measured(1), "h100:2x8").endswith(", but for tp=2, 4, 8 from tables and data sheets")
    assert said(measured(1), "h100:1x1", actor=SMALL, ref=OTHER, reward=OTHER).endswith(
        "(p.json), but for ref and reward from tables and data sheets"
    )
    assert said(measured(1), "h100:1x1+l40s:1x1").endswith(
        "but for the other devices from tables and data sheets"
    )
    assert "p.json has none of these models" in said(measured(1), "h100:1x1", actor=OTHER)
    assert "is of h100, so it was not used" in said(measured(1), "l40s:1x1")


def test_a_profile_of_runs_alone_corrects_data_sheets() -> None:
    strategy = place(1).strategy
    one = Correction.of(call("actor.train"), stored(SMALL), strategy, 1.5, 3)
    profile = measured(device="rtx-4090").model_copy(update={"corrections": (one,)})
    assert said(profile, "rtx-4090:1x1") == "times from data sheets (roofline), corrected by runs (p.json)"


def test_corrections_tell_zero_bubbles_and_virtual_stages_apart() -> None:
    plain = place(2, pp=2).strategy
    for other in (replace(plain, zero_bubble=True), plain.with_degrees(vpp=2)):
        one = Correction.of(call("actor.train"), stored(SMALL), other, 1.5, 3)
        assert Correction.model_validate(one.model_dump()) == one
        assert one.distance(call("actor.train"), stored(SMALL), other) == 0
        assert one.distance(call("actor.train"), stored(SMALL), plain) > 0


def test_each_term_is_said_to_come_from_tables_data_sheets_or_constants() -> None:
    text = said(None, "h100:2x8")
    assert text.startswith("compute, decode, tensor, data from tables of operators measured on h100; launch")
    assert text.endswith("; the rest from data sheets")
    spec = ClusterSpec.parse("h100:1x8+rtx-4090:1x8")
    models = {"actor": stored(SMALL), "critic": stored(SMALL, "scalar", "float32")}
    assert describe_times(None, "", spec, models)[-1].endswith(
        "the rest, and all of critic in float32 and rtx-4090 from data sheets"
    )
    assert describe_times(None, "", spec, {"critic": models["critic"]}) == (
        "times from data sheets (roofline)",
    )


def test_other_measuring_conditions_are_named() -> None:
    assert said(measured(1, 2, device="cpu", processes=2), "cpu:1x2") == "times of cpu measured (p.json)"
    assert "measured by 2 processes on a node, not 1" in said(
        measured(1, 2, device="cpu", processes=2), "cpu:1x1"
    )
    assert "measured with torch 1.0; this is" in said(measured(1, torch="1.0"), "h100:1x1")
