import pytest

from realrl.algorithms.reward_model import PAIR, PAIR_KEYS, list_pair_inputs, make_reward_graph
from realrl.config.errors import UserError
from realrl.data.balance import even_micro_batches
from realrl.dataflow.call import Call, Kind
from realrl.layout.kv_blocks import CPU_PREFILL_TOKENS, GPU_PREFILL_TOKENS, CacheSize
from realrl.plan.placement import Strategy
from realrl.planner.workload.batching import split_work
from realrl.planner.workload.generation import split_generation
from realrl.planner.workload.workload import (
    QUANTILES,
    CallWork,
    Sampling,
    Workload,
    expect_longest,
    quantiles,
)
from realrl.recipe.load import load_experiment
from tests.planner.problems import GRAPH, STEP, call


def test_quantiles_keep_the_mean_and_the_spread() -> None:
    lengths = [round(100 * 1.001**i) for i in range(4000)]
    sample = quantiles(lengths)
    assert len(sample) == QUANTILES and list(sample) == sorted(sample)
    assert sum(sample) / QUANTILES == pytest.approx(sum(lengths) / 4000, rel=1e-3)
    assert quantiles(lengths[::-1]) == sample
    times = [0.1] * 90 + [7.0]
    assert sum(quantiles(times)) / QUANTILES == pytest.approx(sum(times) / 91)


def test_the_longest_of_several_draws_is_expected() -> None:
    """Of two draws from 10 and 20, three in four have a 20 among them."""
    assert expect_longest([20, 10], 2) == round(0.25 * 10 + 0.75 * 20)
    assert expect_longest([10, 20], 1) == 15 and expect_longest([7], 100) == 7
    rare = [100] * 999 + [9000]
    assert max(quantiles(rare)) < 1000 and 9000 > expect_longest(rare, 4000) > 8500


def test_prompts_and_answers_are_paired_without_correlation_or_loss() -> None:
    work = Workload(8, tuple(range(1, 65)), tuple(range(100, 164)), 200)
    prompts, answers = zip(*work.pairs, strict=True)
    assert sorted(answers) == list(work.answers) and prompts == work.prompts
    covariance = sum((p - 32.5) * (a - 131.5) for p, a in work.pairs) / 64
    assert abs(covariance) < 0.1 * (64**2 / 12)


def test_calls_see_prompts_or_whole_sequences() -> None:
    generate, infer, train = (STEP.work(call(n)) for n in ("actor.generate", "ref.inference", "actor.train"))
    assert (generate.tokens, generate.answers, generate.room) == (256 * 128, (384,), 384)
    assert (infer.tokens, infer.minibatches, train.minibatches) == (256 * 512, 1, 4)
    assert STEP.tokens(GRAPH) == 256 * 512


@pytest.mark.parametrize(
    ("work", "lengths"),
    [
        (("prompts",), (10, 20)),
        (("sequences",), (15, 25)),
        (("sequences", "chosen"), (15, 25)),
        (("prompts", "sequences"), (10, 15, 20, 25)),
    ],
)
def test_a_call_of_prompts_sees_no_answers(work: tuple[str, ...], lengths: tuple[int, ...]) -> None:
    step = Workload(32, (10, 20), answers=(5,))
    for kind in (Kind.INFERENCE, Kind.TRAIN):
        found = step.work(Call("actor.look", "actor", kind, work, work=work))
        assert (found.lengths, found.per_item) == (lengths, len(work))


def test_a_preference_pair_is_two_sequences() -> None:
    graph = make_reward_graph(PAIR_KEYS, list_pair_inputs(False), PAIR)
    work = Workload(32, (100,)).work(graph.calls[0])
    assert (work.items, work.sequences) == (32, 64)
    assert Workload(32, (100,)).tokens(graph) == 64 * 100


def test_data_parallel_ranks_split_pairs_and_not_their_sequences() -> None:
    work = Workload(10, (100,)).work(make_reward_graph(PAIR_KEYS, list_pair_inputs(False), PAIR).calls[0])
    chunks = split_work(work, Strategy(dp=4, micro_batch_tokens=100))
    assert (chunks.count, chunks.tokens, chunks.peak.sequences) == (3, 200, 2)
    assert split_work(work, Strategy(dp=4, micro_batch_tokens=500)).count == 2
    with pytest.raises(UserError, match="10 records cannot be split over dp=16"):
        split_work(work, Strategy(dp=16))


def test_unmeasured_lengths_are_the_longest_of_the_recipe() -> None:
    experiment = load_experiment(
        "recipes/reference/ppo.yaml", ["data.max_tokens=328", "generation.max_new_tokens=200", "ppo.epochs=2"]
    )
    sampling = Sampling(minimum=True)  # the recipe has answers of full length
    assert Workload.of(experiment) == Workload(
        512,
        (128,),
        (200,),
        200,
        2,
        longest=200,
        experience_calls=("actor.train", "critic.train"),
        sampling=sampling,
    )
    measured = Workload.of(experiment, prompts=[5, 7], answers=[3])
    assert (measured.prompts, measured.answers, measured.max_new_tokens) == ((5, 7), (3,), 200)


def even(sequences: int, length: int, room: int = 0) -> CallWork:
    return CallWork(
        items=sequences,
        lengths=(length,),
        answers=(room,) if room else (),
        room=room,
        minibatches=1,
        passes=1,
    )


@pytest.mark.parametrize(
    ("sequences", "strategy", "count", "tokens"),
    [
        (64, Strategy(micro_batch_tokens=1024), 16, 1024),
        (64, Strategy(dp=4, micro_batch_tokens=1024), 4, 1024),
        (64, Strategy(micro_batch_tokens=1000), 22, 64 * 256 / 22),
        (64, Strategy(micro_batch_tokens=10), 64, 256),
        (64, Strategy(pp=4, micro_batch_tokens=1 << 20), 8, 2048),
        (66, Strategy(pp=2, micro_batch_tokens=1 << 20), 4, 66 * 256 / 4),
        (64, Strategy(pp=4, micro_batch_tokens=1024), 16, 1024),
        (36, Strategy(pp=4, micro_batch_tokens=1024), 12, 768),
        (3, Strategy(pp=4, micro_batch_tokens=1 << 20), 3, 256),
        (12, Strategy(pp=4, micro_batch_tokens=1 << 20), 6, 512),
        (9, Strategy(pp=4, micro_batch_tokens=1 << 20), 5, 9 * 256 / 5),
    ],
)
def test_micro_batch_counts_match_the_engine(
    sequences: int, strategy: Strategy, count: int, tokens: float
) -> None:
    chunks = split_work(even(sequences, 256), strategy)
    assert (chunks.count, chunks.tokens) == (count, tokens)
    assert chunks.squares == pytest.approx(tokens * 256)


@pytest.mark.parametrize("budget", [1 << 20, 4096])
@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize(
    "lengths", [(256,) * 33, (256,) * 20, (2048, *[50] * 31), tuple(range(50, 900, 13)), (64,) * 200]
)
def test_pipeline_micro_batch_counts_match_the_engine(
    lengths: tuple[int, ...], stages: int, budget: int
) -> None:
    ordered = tuple(sorted(lengths))
    work = CallWork(items=len(lengths), lengths=ordered, answers=(), room=0, minibatches=1, passes=1)
    found = split_work(work, Strategy(pp=stages, micro_batch_tokens=budget))
    made = even_micro_batches(lengths, budget, stages=stages, per_stage=2)
    assert abs(found.count - len(made)) <= max(1, len(made) // 8)
    if len(set(lengths)) == 1:
        assert found.count == len(made)


def test_rows_at_a_time_fill_the_cache_with_half_of_their_longest_continuations() -> None:
    work = even(64, 128, 384)
    found = split_generation(work, Strategy(dp=2, micro_batch_tokens=8192), cpu=False)
    # 512 blocks, of which a prompt takes 8 and half a continuation 12.
    assert (found.rows, found.cache) == (32, CacheSize(512, 25))
    assert (found.passes.count, found.passes.tokens) == (4, 32 * 127 / 4)
    everything = split_generation(work, Strategy(dp=2, micro_batch_tokens=1 << 20), cpu=False)
    assert everything.cache == CacheSize(32 * (8 + 24), 32)
    assert (everything.passes.count, everything.passes.tokens) == (1, 32 * 127)
    least = split_generation(work, Strategy(dp=2, pp=2, micro_batch_tokens=1), cpu=False)
    assert (least.cache.blocks, least.batches, least.rows_per_batch) == (8 + 24, 1, 1)


def test_prompts_are_prefilled_in_passes_of_as_many_tokens_as_suit_the_device() -> None:
    counts = [
        split_generation(even(64, 1001, 16), Strategy(micro_batch_tokens=1 << 20), cpu=cpu).passes.count
        for cpu in (True, False)
    ]
    assert counts == [64_000 // CPU_PREFILL_TOKENS + 1, 64_000 // GPU_PREFILL_TOKENS + 1]
