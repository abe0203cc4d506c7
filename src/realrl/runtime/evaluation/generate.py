"""`realrl generate`: answer prompts or records with a saved model, and score the answers with a reward."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch

from realrl.config.errors import UserError
from realrl.config.explain import shorten
from realrl.config.json_file import to_json
from realrl.data.chat_template import ChatTemplate, Conversation, Message
from realrl.data.record_forms import Reader, Steps, Text
from realrl.data.records import Record, read_records
from realrl.data.rejects import BadRecordError, Rejects
from realrl.data.tokenization import EMPTY_PROMPT, tokenize
from realrl.data.variants import rewrite
from realrl.engine.finite import NotFiniteError
from realrl.families.shape import ModelShape
from realrl.huggingface import model_files
from realrl.huggingface.directory import check_directories
from realrl.huggingface.tokenizers import load_tokenizer
from realrl.recipe.experiment import Experiment
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.load import parse_experiment
from realrl.recipe.sources import list_sources
from realrl.runtime.evaluation.answers import Answer
from realrl.runtime.evaluation.run import evaluate_recipe
from realrl.runtime.prepare.inputs import (
    check_length,
    check_stop_token_ids,
    check_top_k,
    read_stop_token_ids,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ALGORITHM = "realrl.algorithms.sampling"
CACHE_TOKENS = 65536
"""Maximum tokens in the KV cache of a device at any time."""
STEP_PROMPTS = 512
"""Number of prompts that are answered in one step."""

_PROMPT_FIELDS = ("prompt", "messages")
_GIVEN = "the prompts given"
"""Name of the source if prompts do not come from a data set."""
_CHARACTERS = 64
"""Assumed maximum number of characters per token in ordinary text."""


@dataclass(frozen=True, kw_only=True)
class SamplingJob:
    """Arguments of `realrl generate`."""

    model_dir: str
    prompts: Sequence[Record]
    """Records from the command line, with the field `prompt` or `messages`."""
    source: Any
    """Data set whose records follow `prompts`, written like `data.eval` of a recipe; None without a data set."""
    sampling: GenerationConfig
    seed: int
    n: int
    """Number of answers to each prompt."""
    chat: bool
    """Whether a prompt of plain text becomes one user turn in the tokenizer's chat template."""
    family: str | None
    """Family of the model, see `huggingface.directory.read_shape`."""
    reward: Any
    """Reward that scores answers, written like `reward` of a recipe. None without a reward, or if only
    `reward_model` scores."""
    reward_model: str | None
    """Directory of a reward model."""
    cluster: str
    plan: str


def make_sampling_recipe(job: SamplingJob) -> Experiment:
    """Create the recipe that runs a job. Raises UserError for a missing model or an invalid option."""
    shape = model_files.read_shape(job.model_dir, job.family)
    check_top_k("top_k", job.sampling.top_k, shape.vocab_size)
    check_stop_token_ids("stop_token_ids", job.sampling.stop_token_ids or (), shape.vocab_size)
    new = job.sampling.max_new_tokens
    check_length(f"a prompt with max_new_tokens={new}", new + 1, shape, "the model")
    positions = _find_positions(shape, new)
    # On a CPU, bfloat16 is not faster, and float32 reproduces what training computed.
    dtype = model_files.read_dtype(job.model_dir) if torch.cuda.is_available() else torch.float32
    dtypes = {"dtype": str(dtype).removeprefix("torch.")}
    sources = [_GIVEN] if job.prompts else []
    sources += [source.path for source in list_sources(job.source)] if job.source is not None else []
    models: dict[str, Any] = {"actor": {"path": job.model_dir, "family": job.family, **dtypes}}
    if job.reward_model is not None:
        models["reward"] = {"path": job.reward_model, **dtypes}
    recipe = parse_experiment(
        {
            "algorithm": ALGORITHM,
            "run_dir": ".",
            "seed": job.seed,
            "cluster": job.cluster,
            "plan": job.plan,
            "micro_batch_tokens": CACHE_TOKENS,
            "models": models,
            "reward": job.reward,
            "generation": job.sampling.model_dump(),
            # All greedy answers are the same, so one is enough.
            "evaluation": {"samples": 1 if job.sampling.greedy else job.n},
            "data": {
                "train": sources,
                "eval": sources,
                "batch": STEP_PROMPTS,
                "apply_chat_template": job.chat,
                "max_tokens": positions,
                "max_prompt_tokens": positions - new,
            },
        }
    )
    check_directories(recipe)
    return recipe


def _find_positions(shape: ModelShape, new: int) -> int:
    """Find the maximum sequence length of a job with `new` new tokens: usually the model's maximum.

    A model with LongRoPE uses other frequencies for long sequences, and one step must use the same frequencies for
    all sequences. Most sequences are short, so the limit is the model's original length, unless answers may be
    longer.
    """
    scaling = shape.rope_scaling
    original = scaling.original_max_position_embeddings if scaling and scaling.kind == "longrope" else None
    return original if original is not None and new < original else shape.max_positions


def generate_answers(
    job: SamplingJob, recipe: Experiment, *, best: bool, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Answer prompts as one rank of the recipe's cluster. Yields rows on the rank that writes, and none elsewhere.

    There is one row per answer, in the order of prompts. A row has prompt, completion, tokens and finished, `score`
    if there is a reward, and all other fields of the record. The prompt of a conversation is a list of messages.
    With `best`, there is only the answer with the highest score to each prompt. `say` is called with notes.
    Raises UserError if a record has no prompt, a prompt is too long for the model, or the model cannot be used.
    """
    prompts = _Prompts(job)
    try:
        # Notes of evaluations name recipe settings, but users of this command give options.
        report = evaluate_recipe(
            recipe, lambda note: say(note.replace("data.apply_chat_template=true", "--chat")), prompts.read
        )
    except NotFiniteError as error:
        reason = str(error).removeprefix("actor.generate: ")
        raise UserError(f"{job.model_dir} cannot generate: {reason}") from None
    if report is None:
        return
    answers, samples = report.result.answers, recipe.evaluation.samples
    for i, origin in enumerate(report.origins):
        mine = answers[i * samples : (i + 1) * samples]
        mine = mine * (job.n // samples)
        for answer in [choose_best(mine)] if best else mine:
            yield _write_row(prompts.given[origin], answer, prompts.others[origin])


def choose_best(answers: Sequence[Answer]) -> Answer:
    """Choose the answer with the highest score.

    Of equal scores, the first one wins; answers without a score come last.
    """
    return max(answers, key=lambda answer: _rank(answer.values["score"]))


def _rank(score: float) -> tuple[bool, float]:
    return (isfinite(score), score if isfinite(score) else 0.0)


def _write_row(prompt: str | list[Message], answer: Answer, others: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "prompt": prompt,
        "completion": answer.completion,
        "tokens": answer.tokens,
        "finished": answer.finished,
    }
    if "score" in answer.values:
        row["score"] = answer.values["score"]
    return row | {name: value for name, value in others.items() if name not in row}


class _Prompts:
    """Reads the prompts of a job as training would, and remembers the original prompts."""

    def __init__(self, job: SamplingJob) -> None:
        self._job = job
        self._tokenizer: PreTrainedTokenizerFast = load_tokenizer(job.model_dir)
        self._reader = Reader(ChatTemplate(self._tokenizer), apply_chat_template=job.chat)
        self._shape = model_files.read_shape(job.model_dir, job.family)
        self._stop_token_ids = read_stop_token_ids(self._tokenizer, job.model_dir, self._shape.vocab_size)
        self.given: dict[str, str | list[Message]] = {}
        """Original prompts, which are texts or lists of messages, by the origin of their records."""
        self.others: dict[str, dict[str, Any]] = {}
        """All fields except the prompt, by the origin of their records."""

    def read(self, source: str, rejects: Rejects) -> Iterator[Record]:
        """Yield the records of a source. Raises UserError for a prompt that cannot be answered."""
        records: Iterable[Record] = self._job.prompts if source == _GIVEN else read_records(source, rejects)
        for origin, record in records:
            try:
                written = rewrite("prompt", record)
                self.given[origin] = self._reader.prompt(written)
                others = {name: value for name, value in written.items() if name not in _PROMPT_FIELDS}
                self.others[origin] = to_json(others)
                (item,) = self._reader.read("prompt", written)
            except BadRecordError as error:
                raise UserError(f"{origin}: {error}") from None
            (text,) = item
            self._check(origin, text)
            yield origin, record

    def _check(self, origin: str, text: Text | Conversation | Steps) -> None:
        """Check that a prompt is not empty and leaves room for an answer."""
        # Tokenize only the start of a text of megabytes. The start alone is too long already, and the whole text
        # would take seconds.
        long = _CHARACTERS * self._shape.max_positions
        start = text if len(text.prompt) <= long else Text(text.prompt[:long], None)
        (row,) = tokenize([start], self._tokenizer, self._stop_token_ids)
        if not row.ids:
            raise UserError(f"{origin}: {EMPTY_PROMPT}")
        new = self._job.sampling.max_new_tokens
        what = f"{shorten(origin)}: the prompt has at least {len(row.ids)} tokens, which with max_new_tokens={new}"
        check_length(what, len(row.ids) + new, self._shape, "the model")
        if len(row.ids) + new > (positions := _find_positions(self._shape, new)):
            raise UserError(
                f"{what} is more than {positions} tokens, up to which the model's rotary frequencies are for short"
                f" sequences; max_new_tokens >= {positions} uses the frequencies of long sequences for all prompts"
            )
