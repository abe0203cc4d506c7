"""A loop of your own: sample, infer, forward_backward and step, with models placed by a plan."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realrl.api.arguments import read_model
from realrl.api.batch import Batch
from realrl.api.errors import plain_errors
from realrl.api.sampling import Sampling
from realrl.config.errors import UserError
from realrl.config.paths import local_path
from realrl.plan.cluster import Cluster
from realrl.runtime.launcher.launch import check_local
from realrl.runtime.session.recipe import SessionModels

if TYPE_CHECKING:
    from torch import Tensor

    from realrl.runtime.session.losses import Aggregate
    from realrl.runtime.session.rank import SessionRank
    from realrl.runtime.session.remote import RemoteRanks

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, tokens, or the messages of a conversation."""


class _Closed:
    """Stands for the models of a session that is closed."""

    def __getattr__(self, name: str) -> Any:
        raise UserError("the session is closed")

    def close(self) -> None:
        """Do nothing."""


class Session:
    """Models with roles, for a training loop that you write. docs/python.md has an example.

    The engine places the models by a plan, moves parameters between calls, packs sequences and divides them over
    devices. On several devices of this machine, the session starts a process for each of them. Under torchrun and
    srun, all processes run the loop together and see the same results; the columns of the first process count.
    """

    @plain_errors
    def __init__(
        self,
        models: Mapping[str, Any],
        *,
        train: str | Sequence[str] = (),
        scalar: str | Sequence[str] = (),
        plan: str | Mapping[str, str] = "symmetric",
        temperature: float = 1.0,
        **settings: Any,
    ) -> None:
        """Load the models.

        models: role -> path, hub name, `transformers` model, or section as in recipes, such as
        dict(path=..., optimizer=dict(lr=1e-6)). train: roles that `forward_backward` trains. scalar: roles with a
        scalar head, such as critics and reward models. plan: a preset, a plan file, or {call: placement} for some
        of the calls ROLE.generate, ROLE.inference and ROLE.train, such as {"actor.generate": "d1 t2 p1 @0-1
        mb=8192"}. temperature: of sampling, and of all log-probabilities. settings: settings at the top level of
        recipes, such as cluster, device, seed and micro_batch_tokens. Raises UserError for a mistake.
        """
        from realrl.runtime.processes.environment import set_library_defaults
        from realrl.runtime.processes.slurm import join_slurm_step
        from realrl.runtime.start import find_cluster

        set_library_defaults()
        join_slurm_step()
        preset, placements = (plan, {}) if isinstance(plan, str) else ("symmetric", dict(plan))
        given = SessionModels(
            {role: read_model(model) for role, model in models.items()},
            train=_list(train),
            scalar=_list(scalar),
            placements=placements,
            settings={"generation": {"temperature": temperature}, "plan": preset, **settings},
        )
        self._experiment = given.make_recipe()
        self._rank: SessionRank | RemoteRanks | _Closed = _open(given, find_cluster(self._experiment))
        self._temperature = temperature

    @plain_errors
    def sample(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | None = None,
        *,
        role: str | None = None,
        **settings: Any,
    ) -> Batch:
        """Sample answers. Sequences i * n to i * n + n - 1 of the batch answer the i-th prompt.

        prompts: texts, lists of tokens, or conversations, which go through the chat template. sampling or settings:
        see `Sampling`; the temperature is the session's by default. role: the model; by default the first trained
        language model, or else the first one. Raises UserError for a mistake.

        The batch has the columns sequences, prompt_length, logprobs and finished.
        """
        if sampling is not None and settings:
            raise UserError("give either a Sampling object or its settings")
        chosen = sampling or Sampling(**{"temperature": self._temperature, **settings})
        from realrl.recipe.stop_strings import StopStrings

        rank = self._rank
        rows = [self._tokenize(prompt, f"prompt {i}") for i, prompt in enumerate(prompts)]
        if not rows:
            raise UserError("prompts: there are none")
        columns = rank.sample(role or self._find_sampler(), rows, chosen.config, chosen.n)
        return Batch(columns, rank.tokenizer, StopStrings.of(rank.tokenizer, chosen.config))

    @plain_errors
    def tokenize(self, texts: Sequence[Prompt]) -> list[list[int]]:
        """Tokenize prompts as `sample` does. Raises UserError if one has no tokens."""
        return [self._tokenize(text, f"text {i}") for i, text in enumerate(texts)]

    @plain_errors
    def batch(self, prompts: Sequence[Prompt], completions: Sequence[str | Sequence[int]]) -> Batch:
        """Make a batch of given answers, such as demonstrations. An answer of text gets an end-of-sequence token.

        Raises UserError if the numbers of prompts and answers differ, or if one is empty.
        """
        import torch

        from realrl.data.batch import Ragged

        if len(prompts) != len(completions):
            raise UserError(f"there are {len(prompts)} prompts and {len(completions)} completions")
        rows = []
        for i, (prompt, answer) in enumerate(zip(prompts, completions, strict=True)):
            if isinstance(answer, str):
                record = {
                    "prompt": prompt if isinstance(prompt, str) else [*prompt],
                    "completion": answer,
                    "label": True,
                }
                rows.append(self._read("label", record, f"prompt {i} and its completion"))
            else:
                before = self._tokenize(prompt, f"prompt {i}")
                rows.append(([*before, *map(int, answer)], len(before)))
        columns = {
            "sequences": Ragged.of([ids for ids, _ in rows], dtype=torch.int64),
            "prompt_length": Ragged.scalars(torch.tensor([cut for _, cut in rows])),
        }
        return Batch(columns, self._rank.tokenizer)

    @plain_errors
    def infer(self, role: str, batch: Batch) -> "list[Tensor]":
        """Run a model on the sequences of a batch. Returns a tensor for each sequence: a number for each token.

        A language model returns log p(token | tokens before), and 0 for the first token. A scalar head returns its
        output at each token; the output at the last token is the score of a reward model.
        """
        return self._rank.infer(role, batch._columns).rows()

    @plain_errors
    def forward_backward(
        self,
        role: str,
        batch: Batch,
        loss: Callable[..., Any],
        *,
        aggregate: "Aggregate" = "token_mean",
        group: int = 1,
        entropy: bool = False,
    ) -> dict[str, float]:
        """Add the gradient of a loss on a batch. `step` applies the sum of the gradients since the last step.

        loss: a function (model, batch) -> losses, or (losses, {name: values}), of tensors on the device. It sees
        some of the sequences at a time. model.logprobs (or model.values, with a scalar head) and batch.COLUMN have
        one number for each of their answer tokens, [A]; prompts are left out. It returns one number for each of
        them, and never their mean.

        aggregate: how losses of the whole batch become one: "token_mean"; "sequence_mean", the mean of each answer,
        then of all answers; "sequence_sum"; "per_sequence" or "per_group" for a function that returns one number
        for each sequence [N] or each group. group: number of consecutive sequences that the function sees together,
        such as 2 for pairs. entropy: whether model.entropy is computed.

        Returns `loss`, and the means of the named values. Raises UserError if the function returns something else.
        If it fails, the gradients since the last step are dropped.
        """
        return self._rank.forward_backward(
            role, batch._columns, loss, aggregate, group=group, entropy=entropy
        )

    @plain_errors
    def step(self, role: str, lr: float | None = None) -> dict[str, float]:
        """Make an optimizer step with the accumulated gradients. lr: by default `optimizer.lr` of the model.

        Returns grad_norm, learning_rate and skipped_steps: a step whose loss or gradient is not finite is
        skipped.
        """
        return self._rank.step(role, lr)

    @plain_errors
    def save_model(self, role: str, directory: str | Path) -> None:
        """Write a model and the tokenizer as a Hugging Face directory. Raises UserError for an unknown role."""
        self._rank.save_model(role, local_path(str(directory)))

    @plain_errors
    def save(self, directory: str | Path) -> None:
        """Write the trained models, their optimizers, and the count of samples. `load` continues from there.

        Raises UserError if gradients wait for a step, and RunError if the directory cannot be written.
        """
        self._rank.save(local_path(str(directory)))

    @plain_errors
    def load(self, directory: str | Path) -> None:
        """Load what `save` has written, on any number of processes and under any plan.

        Raises UserError if it is damaged, or of other models.
        """
        self._rank.load(local_path(str(directory)))

    def close(self) -> None:
        """Free the models and leave the process group. The end of the script does so, too."""
        self._rank.close()
        self._rank = _Closed()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find_sampler(self) -> str:
        graph, heads = self._experiment.graph, self._experiment.spec.heads
        roles = [role for role in heads if heads[role] == "lm"]
        if not roles:
            raise UserError("no model of the session can sample, because all have a scalar head")
        return next((role for role in roles if graph.trained(role)), roles[0])

    def _tokenize(self, prompt: Prompt, name: str) -> list[int]:
        """Tokenize a prompt as recipes do. Raises UserError if it has no tokens."""
        if isinstance(prompt, str):
            ids, _ = self._read("prompt", {"prompt": prompt}, name)
        elif prompt and isinstance(prompt[0], Mapping):
            ids, _ = self._read("prompt", {"prompt": [*prompt]}, name)
        else:
            ids = [int(token) for token in prompt]  # type: ignore[arg-type]
        if not ids:
            raise UserError(f"{name} has no tokens")
        return ids

    def _read(self, form: str, record: dict[str, Any], name: str) -> tuple[list[int], int]:
        """Tokenize a record. Returns the tokens, and the number of prompt tokens."""
        from realrl.data.chat_template import ChatTemplate
        from realrl.data.record_forms import Reader
        from realrl.data.rejects import BadRecordError
        from realrl.data.tokenization import tokenize

        tokenizer = self._rank.tokenizer
        try:
            ((text,),) = Reader(ChatTemplate(tokenizer)).read(form, record)
        except BadRecordError as error:
            raise UserError(f"{name}: {error}") from None
        (row,) = tokenize([text], tokenizer, self._rank.stop_token_ids)
        return row.ids, row.prompt_length


def _open(models: SessionModels, cluster: Cluster) -> "SessionRank | RemoteRanks":
    """Load the models in this process, or in a process for each device of this machine."""
    from realrl.runtime.processes.environment import under_launcher

    if cluster.size == 1 or under_launcher():
        from realrl.runtime.session.rank import SessionRank

        return SessionRank(models)
    from realrl.runtime.session.remote import RemoteRanks

    check_local(cluster)
    return RemoteRanks(models, cluster)


def _list(roles: str | Sequence[str]) -> list[str]:
    return [roles] if isinstance(roles, str) else [*roles]
