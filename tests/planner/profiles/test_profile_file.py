from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.config.errors import UserError
from realrl.families.shape import Mixture
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.profile.profile import (
    CollectiveTime,
    Curve,
    LayerTimes,
    Measurement,
    Profile,
    ShapeKey,
    Surface,
)
from tests.planner.problems import GRAPH, SMALL, STEP, call, place, stored

MEASURED = [(256, 512, 1e-3), (256, 4096, 6e-3), (1024, 512, 2e-3), (1024, 4096, 9e-3)]


def profile(kinds: tuple[str, ...] = ("forward",)) -> Profile:
    times = [
        Measurement(kind=kind, tokens=size, sequences=size, context=context, seconds=seconds)
        for kind in kinds
        for context, size, seconds in MEASURED
    ]
    layers = LayerTimes(shape=ShapeKey.of(SMALL), dtype="bfloat16", measurements=tuple(times))
    sent = CollectiveTime(kind="host", ranks=1, bytes=1 << 20, seconds=1e-3)
    return Profile(device="a100-80g", software={"torch": "2.13"}, layers=(layers,), collectives=(sent,))


@pytest.mark.parametrize(("context", "size", "seconds"), MEASURED)
def test_interpolation_is_exact_at_measured_points(context: int, size: int, seconds: float) -> None:
    assert profile().seconds("forward", SMALL, "bfloat16", 1, size, context) == seconds


def test_interpolated_times_lie_between_measured_ones() -> None:
    found = profile().seconds("forward", SMALL, "bfloat16", 1, 1024, 512)
    assert found is not None and 1e-3 < found < 9e-3


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-6, 10)), min_size=1, max_size=8),
    st.floats(0.5, 1e7),
    st.floats(1, 10),
)
def test_curves_of_increasing_times_increase(
    points: list[tuple[int, float]], size: float, factor: float
) -> None:
    sizes, seconds = sorted({s for s, _ in points}), sorted(t for _, t in points)
    curve = Curve.of(list(zip(sizes, seconds, strict=False)))
    assert curve(size * factor) >= curve(size) * (1 - 1e-9)


def test_large_sizes_cost_in_proportion_and_small_ones_the_overhead() -> None:
    curve = Curve.of([(100, 1.0), (200, 2.0)])
    assert curve(2000) == pytest.approx(20) and curve(10) == 1.0


def test_extrapolation_to_long_contexts_is_linear() -> None:
    surface = Surface.of([(100, 1, 1.0), (200, 1, 2.0)])
    assert [surface(c, 1) for c in (100, 150, 200, 300)] == pytest.approx([1, 1.5, 2, 3])


def test_unmeasured_times_are_none() -> None:
    found = profile()
    assert found.seconds("forward", SMALL, "bfloat16", 2, 512, 256) is None
    assert found.seconds("forward", SMALL, "float32", 1, 512, 256) is None
    assert found.seconds("decode", SMALL, "bfloat16", 1, 512, 256) is None
    assert found.collective("all_reduce", 8, 1, 100) is None


def test_profile_files_round_trip(tmp_path: Path) -> None:
    profile().save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "this is no file that `realrl profile` has written"),
        ('{"format": "realrl profile"}', "has version null, not 5"),
        ('{"format": "realrl profile", "version": 1}', "has version 1, not 5, which"),
        ("no", "not valid JSON"),
        ("[" * 100000, "nested too deep"),
        ('{"version": 1, "version": 1}', "key 'version' twice"),
        ('{"format": "realrl profile", "version": 5}', "device"),
    ],
)
def test_invalid_profile_files_are_rejected_by_name(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        Profile.load(tmp_path / "p.json")
    assert "p.json" in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"seconds"', '"second"', r"layers.0.measurements.0.second: unknown key; did you mean .*seconds\?"),
        ('"hidden_size"', '"hidden"', r"layers.0.shape.hidden: unknown key"),
        ('"kind": "forward"', '"kind": "foward"', "did you mean forward"),
        ('"family": "llama", ', "", r"layers.0.shape.family: missing"),
    ],
)
def test_mistakes_inside_lists_of_a_profile_are_named(tmp_path: Path, old: str, new: str, words: str) -> None:
    profile().save(tmp_path / "p.json")
    text = (tmp_path / "p.json").read_text()
    assert old in text
    (tmp_path / "p.json").write_text(text.replace(old, new, 1))
    with pytest.raises(UserError, match=words):
        Profile.load(tmp_path / "p.json")


def test_newer_measurements_of_a_shape_replace_older_ones() -> None:
    slower = Measurement(kind="forward", tokens=512, context=256, seconds=5.0)
    layers = LayerTimes(shape=ShapeKey.of(SMALL), dtype="bfloat16", measurements=(slower,))
    merged = profile().merged([layers])
    assert len(merged.layers) == 1 and merged.collectives == profile().collectives
    assert merged.seconds("forward", SMALL, "bfloat16", 1, 512, 256) == 5.0


def test_a_mixture_has_times_of_its_own_also_in_a_file(tmp_path: Path) -> None:
    mixture = SMALL.model_copy(update={"mixture": Mixture(experts=4, per_token=2)})
    measured = Measurement(kind="forward", tokens=512, context=256, seconds=5.0)
    layers = LayerTimes(shape=ShapeKey.of(mixture), dtype="bfloat16", measurements=(measured,))
    profile().merged([layers]).save(tmp_path / "p.json")
    loaded = Profile.load(tmp_path / "p.json")
    assert loaded.seconds("forward", mixture, "bfloat16", 1, 512, 256) == 5.0
    before = profile().seconds("forward", SMALL, "bfloat16", 1, 512, 256)
    assert loaded.seconds("forward", SMALL, "bfloat16", 1, 512, 256) == before
    assert loaded.degrees(mixture, "bfloat16") == loaded.degrees(SMALL, "bfloat16") == {1}


def test_products_of_rounded_operands_have_times_of_their_own() -> None:
    slow, fast = (
        LayerTimes(
            shape=ShapeKey.of(SMALL),
            dtype=dtype,
            measurements=(Measurement(kind="forward", tokens=512, context=256, seconds=seconds),),
        )
        for dtype, seconds in (("float32", 4.0), ("mixed", 1.0))
    )
    merged = profile().merged([slow, fast])
    assert merged.seconds("forward", SMALL, "float32", 1, 512, 256) == 4.0
    assert merged.seconds("forward", SMALL, "mixed", 1, 512, 256) == 1.0


def test_measurements_replace_the_roofline_on_their_device() -> None:
    arguments = (call("ref.inference"), stored(SMALL), place(1, tokens=4096), STEP)
    with_times = CostModel(ClusterSpec.parse("a100-80g:1x8"), profile()).call(*arguments)
    elsewhere = CostModel(ClusterSpec.parse("h100:1x8"), profile()).call(*arguments)
    without = CostModel(ClusterSpec.parse("h100:1x8")).call(*arguments)
    micro_batches = STEP.tokens(GRAPH) / 4096
    assert with_times.terms["compute"] > micro_batches * SMALL.layers * 6e-3
    assert elsewhere == without


def test_offloading_takes_the_measured_time() -> None:
    assert CostModel(ClusterSpec.parse("a100-80g:1x8"), profile()).offload(1 << 20) == 1e-3
