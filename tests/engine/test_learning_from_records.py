"""From records to gradients: conversations as transformers learns them, and pairs that weigh 1/n."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from realrl.algorithms.reward_model_loss import PairMethod
from realrl.algorithms.sft_loss import SFTMethod
from realrl.data.batch import Batch, Ragged
from realrl.data.dataset import Dataset
from realrl.engine.model import Model, make_unsharded_model
from realrl.engine.training.trainer import Trainer, TrainOptions
from realrl.families.shape import Head
from realrl.huggingface import model_files
from realrl.recipe.data import DataConfig
from realrl.recipe.optimizer import OptimizerConfig
from tests.conftest import World, write_jsonl

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MESSAGES = [
    {"role": "system", "content": "the cast"},
    {"role": "user", "content": "the film is great"},
    {"role": "assistant", "content": "the plot is lovely"},
    {"role": "user", "content": "and the music"},
    {"role": "assistant", "content": "dull"},
]
OPTIMIZER = OptimizerConfig(lr=1e-2, grad_clip=None)


def opened(path: str, head: Head) -> Model:
    shape = model_files.read_shape(path)
    model = make_unsharded_model(shape, head, dtype=torch.float32, device=torch.device("cpu"))
    model_files.load(path, shape, model.layout.specs, model.parameters)
    return model


def test_the_loss_of_a_conversation_is_that_of_transformers_on_its_answers(
    world: World, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(world.actor)
    tokenizer.chat_template = TEMPLATE
    source = write_jsonl(tmp_path / "data.jsonl", [{"messages": MESSAGES}])
    data = Dataset.load(
        source,
        "answer",
        ("tokens", "loss_mask"),
        tokenizer,
        DataConfig(train=source),
        1,
        (tokenizer.eos_token_id,),
    )

    labels: list[int] = []
    for message in MESSAGES:
        learnt = message["role"] == "assistant"
        for text, counts in (
            (f"<|{message['role']}|>", False),
            (message["content"] + "</s>", learnt),
            ("\n", False),
        ):
            ids = tokenizer(text, add_special_tokens=False).input_ids
            labels += ids if counts else [-100] * len(ids)
    ids = tokenizer.apply_chat_template(MESSAGES, tokenize=True, return_dict=False)
    reference = LlamaForCausalLM.from_pretrained(world.actor, dtype=torch.float32)
    loss = reference(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in reference.parameters() if p.grad is not None]).norm()

    trainer = Trainer(opened(world.actor, "lm"), OPTIMIZER)
    metrics = trainer.train(
        data.batch([0]), SFTMethod(), [[0]], TrainOptions(max_tokens=1024), lr=0.0
    ).result()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def pair_batch(pairs: list[int], rows: list[int]) -> Batch:
    """One pair for each of `rows`, which are the same for the same number."""
    generator = torch.Generator().manual_seed(4)
    drawn = [torch.randint(3, 260, (5 + i,), generator=generator) for i in range(2 * (max(rows) + 1))]
    chosen, rejected = (Ragged.of([drawn[2 * i + side] for i in rows]) for side in (0, 1))
    fields = {"chosen": chosen, "rejected": rejected, "pairs_of_prompt": Ragged.scalars(torch.tensor(pairs))}
    return Batch(tuple(range(len(rows))), fields)


def learn_pairs(world: World, batch: Batch, budget: int) -> tuple[dict[str, float], torch.Tensor]:
    model = opened(world.reward, "scalar")
    everything = [list(range(len(batch)))]
    metrics = Trainer(model, OPTIMIZER).train(
        batch, PairMethod(), everything, TrainOptions(max_tokens=budget), lr=1e-2
    )
    return metrics.result(), model.sets["base"].buffer.data


def test_micro_batches_do_not_change_what_weighted_pairs_teach(world: World) -> None:
    batch = pair_batch([4, 4, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5])
    whole, parameters = learn_pairs(world, batch, 1024)
    parts, again = learn_pairs(world, batch, 30)
    assert parts == pytest.approx(whole, rel=1e-5)
    torch.testing.assert_close(again, parameters, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("pairs", "rows"),
    [([4], [0]), ([4, 4], [0, 0]), ([2, 2, 1], [0, 0, 1])],
    ids=["one", "copies", "among others"],
)
def test_n_copies_of_a_pair_that_weigh_one_in_n_teach_what_the_pair_does(
    world: World, pairs: list[int], rows: list[int]
) -> None:
    """Also where all weights together are less than 1, as in a small last batch."""
    distinct = sorted(set(rows))
    expected, _ = learn_pairs(world, pair_batch([1] * len(distinct), distinct), 1024)
    metrics, _ = learn_pairs(world, pair_batch(pairs, rows), 1024)
    assert metrics == pytest.approx(expected, rel=1e-5)
