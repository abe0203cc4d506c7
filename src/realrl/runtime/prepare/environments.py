"""The environment of a recipe on one rank: the pool of its objects, and the texts of its turns."""

import itertools
import queue
import sys
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from realrl.config.errors import UserError
from realrl.data.turn_template import TurnTemplate
from realrl.dataflow.call import Kind
from realrl.environments.objects import CONNECTION, PROMPT
from realrl.environments.pool import Answer, EnvironmentPool
from realrl.environments.tool_calls import find_format
from realrl.planner.workload.environment import EnvironmentTimes
from realrl.planner.workload.workload import quantiles
from realrl.recipe.environment import EnvironmentConfig
from realrl.recipe.experiment import Experiment
from realrl.runtime.prepare.agents import AgentEngine, AgentModel
from realrl.runtime.prepare.job import Job

SEED = "seed"
"""Argument of `reset` that gets a number made from the run's seed, the step and the prompt, unless the records have
this column."""


_KEPT = 1 << 13


class Measures:
    """What a rank measures of its environment; the latest values of each kind."""

    def __init__(self) -> None:
        self.seconds = deque[float](maxlen=_KEPT)
        """Seconds of each answer of an object."""
        self.turns, self.given = deque[int](maxlen=_KEPT), deque[int](maxlen=_KEPT)
        """Turns of each trajectory, and tokens that the environment and the template gave to it."""

    def clear(self) -> None:
        for values in (self.seconds, self.turns, self.given):
            values.clear()

    def add(self, other: "Measures") -> None:
        self.seconds += other.seconds
        self.turns += other.turns
        self.given += other.given

    def times(self, *, agents: bool) -> EnvironmentTimes | None:
        """Return samples of the distributions; None if nothing has been measured. `agents`: whether they are of
        agents."""
        if not self.seconds or not self.turns:
            return None
        return EnvironmentTimes(
            quantiles(self.seconds), quantiles(self.turns), quantiles(self.given), agents=agents
        )


class Environments:
    """The environment of a recipe on one rank."""

    def __init__(self, experiment: Experiment, tokenizer: Any, stop_token_ids: Sequence[int]) -> None:
        """Start the environment of a recipe, which must have one. Raises UserError if it cannot be used."""
        assert experiment.environment_config is not None, "the recipe has an environment"
        self.config: EnvironmentConfig = experiment.environment_config
        form: str = self.config.tool_format
        if form == "auto":
            form = find_format(tokenizer.chat_template or "") or "auto"
        self.tool_format = form
        """How the model writes calls of tools; `auto` if it has none."""
        self.pool = EnvironmentPool(self.config, form)
        self._agent_model: AgentModel | None = None
        try:
            self._description = self.pool.describe()
            tools = self._description["tools"]
            if tools is not None and form == "auto":
                raise UserError(
                    f"{self.label}: the chat template of {tokenizer.name_or_path} has no known format of tool"
                    " calls; set environment.tool_format"
                )
            self.template = TurnTemplate(
                tokenizer,
                experiment.data.chat_template_kwargs,
                tools=tools,
                stop_token_ids=stop_token_ids,
                longest=self.config.max_observation_tokens,
                earlier_turns=self.config.earlier_turns,
                takes_prompt=PROMPT in self._description["named"],
            )
            if self.runs:
                default = EnvironmentConfig.model_fields["max_observation_tokens"].default
                if self.config.max_observation_tokens != default:
                    raise UserError(
                        f"{self.label}: environment.max_observation_tokens is not for an agent, which writes its"
                        " prompts itself"
                    )
                known = None if form == "auto" else form
                self._agent_model = AgentModel(experiment, tokenizer, stop_token_ids, known)
        except UserError:
            self.close()
            raise
        self.leads = True
        """Whether this rank has objects."""
        self.measures = Measures()
        self._numbers = itertools.count()
        self._noted = set[str]()

    def close(self) -> None:
        """End the processes that hold objects, and the server for agents."""
        self.pool.close()
        if self._agent_model is not None:
            self._agent_model.close()

    @property
    def label(self) -> str:
        return self.pool.label

    def wants(self, name: str) -> bool:
        """Return whether objects on this rank take the column `name` of the records in `reset` or `run`."""
        return self.leads and self._takes(name) and not (self.runs and name in CONNECTION)

    def _takes(self, name: str) -> bool:
        return bool(self._description["takes_all"]) or name in self._description["named"]

    def check_fields(self, source: str, fields: Collection[str]) -> None:
        """Check that the records of a source have the columns that `reset` or `run` needs. Raises UserError if
        not."""
        missing = [name for name in self._description["required"] if name not in (*fields, SEED, PROMPT)]
        if missing:
            method = "run" if self.runs else "reset"
            raise UserError(
                f"{self.label}: {method} needs {missing[0]!r}, which no record of {source} has;"
                f" data.columns={{FIELD: {missing[0]}}} renames a field"
            )

    @property
    def runs(self) -> bool:
        """Whether the objects are agents, which talk to the model themselves."""
        runs: bool = self._description["runs"]
        return runs

    @property
    def agent_model(self) -> AgentModel:
        """What agents talk to; there must be agents."""
        assert self._agent_model is not None, "only agents talk to a model"
        return self._agent_model

    @property
    def tools(self) -> Sequence[Mapping[str, Any]] | None:
        """Schemas of the tools that the prompt shows; None if the objects have `step`."""
        tools: Sequence[Mapping[str, Any]] | None = self._description["tools"]
        return tools

    @property
    def takes_seed(self) -> bool:
        """Whether `reset` names the argument `seed`."""
        return SEED in self._description["named"]

    def make_record(self, fields: Mapping[str, Any], place: Sequence[int]) -> dict[str, Any]:
        """Select the fields of a record for `reset`, with a seed if `reset` names it.

        `place`: the run's seed, the step and the prompt, from which the seed is made.
        """
        record = {name: value for name, value in fields.items() if self.wants(name)}
        if self.takes_seed:
            record.setdefault(SEED, zlib.crc32(" ".join(map(str, place)).encode()))
        return record

    def ask(self, requests: Sequence[Callable[[Callable[[Answer], None]], None]]) -> list[Answer]:
        """Send requests to objects, each a function of what takes its answer, and wait for all answers."""
        found: queue.SimpleQueue[tuple[int, Answer]] = queue.SimpleQueue()
        for number, request in enumerate(requests):
            request(partial(_put, found, number))
        answers = dict(found.get() for _ in requests)
        return [answers[number] for number in range(len(requests))]

    def reset(self, records: Sequence[Mapping[str, Any]]) -> list[tuple[int, Answer]]:
        """Make an object for each record, see `make_record`. Returns its number and its answer to `reset`."""
        numbers = [self.new_number() for _ in records]
        resets = [
            partial(self.pool.reset, number, record, alone=False)
            for number, record in zip(numbers, records, strict=True)
        ]
        return [*zip(numbers, self.ask(resets), strict=True)]

    def run_agent(
        self,
        number: int,
        record: Mapping[str, Any],
        conversation: AgentEngine,
        answer: Callable[[Answer], None],
        *,
        alone: bool,
    ) -> None:
        """Start an agent for a record, see `make_record`, which talks to `conversation`.

        `number`: see `new_number`. `answer` gets its end. `alone` as for `EnvironmentPool.run`.
        """
        connection = self.agent_model.open(number, conversation)
        taken = {name: value for name, value in connection.items() if self._takes(name)}
        self.pool.run(number, record, taken, answer, alone=alone)

    def new_number(self) -> int:
        """Return a number for a new object."""
        return next(self._numbers)

    def note_failure(self, message: str) -> None:
        """Print a note about the first trajectory that is given up."""
        self._note(message, "on_error=skip; later ones are only counted")

    def note_retry(self, message: str) -> None:
        """Print a note about the first trajectory that starts again."""
        self._note(message, "it starts again, environment.retries; later ones are not printed")

    def _note(self, message: str, further: str) -> None:
        if further not in self._noted:
            self._noted.add(further)
            print(f"note: {message} ({further})", file=sys.stderr, flush=True)


def _put(answers: "queue.SimpleQueue[tuple[int, Answer]]", number: int, answer: Answer) -> None:
    answers.put((number, answer))


def open_environments(
    job: Job, rank: int, tokenizer: Any, stop_token_ids: Sequence[int]
) -> Environments | None:
    """Start the environment of a recipe on a rank; None if the recipe has none. Raises UserError if it cannot be
    used.

    Every rank asks processes of its own how to write prompts, because no rank may wait for another one that has
    failed. Only a rank that leads a replica of a generate call keeps these processes.
    """
    if job.experiment.environment_config is None:
        return None
    environments = Environments(job.experiment, tokenizer, stop_token_ids)
    environments.leads = any(
        rank in phase.plan[call.name].output_ranks
        for phase in job.phases.values()
        for call in phase.graph.calls
        if call.kind is Kind.GENERATE
    )
    if not environments.leads:
        environments.close()
    return environments
