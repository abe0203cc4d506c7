"""Probe the agent of a recipe without a model: it talks to a server whose answers are made up."""

import queue
from collections.abc import Sequence
from dataclasses import dataclass, field

from realrl.config.errors import UserError
from realrl.data.items import DataItem
from realrl.data.tokenization import Row
from realrl.environments.pool import Answer, Failure
from realrl.recipe.experiment import Experiment
from realrl.recipe.stop_strings import StopStrings
from realrl.runtime.prepare.environments import SEED, Environments
from realrl.runtime.worker.agents import AgentRequest, AgentRun
from realrl.runtime.worker.leading import TurnSettings
from realrl.serving.engine import Piece
from realrl.testing.data_probes import ProbedData
from realrl.testing.findings import Finding

PLAYED, TURNS = 4, 8
"""Maximum number of trajectories, and of turns in each."""
_TEXTS = ("It is so.", "7", "Yes.")
"""Made-up turns of the model."""


@dataclass(eq=False)
class _Play:
    """A trajectory with made-up turns."""

    item: DataItem
    run: AgentRun
    ids: list[int] = field(default_factory=list)
    answers: list[tuple[int, int]] = field(default_factory=list)
    """Position of each turn of the model, and of the token after it."""
    reward: float | None = None
    failure: Failure | None = None


class AgentProber:
    """Runs an agent against made-up answers."""

    def __init__(self, experiment: Experiment, environments: Environments, data: ProbedData) -> None:
        assert experiment.spec.generation is not None, "an agent needs an algorithm that generates"
        self._seed, self._environments = experiment.seed, environments
        sampling = experiment.spec.generation(experiment)
        stop = StopStrings.of(data.tokenizer, sampling)
        self._settings = TurnSettings(sampling, data.stop_token_ids, stop)
        self._turns = [
            [*data.tokenizer(text, add_special_tokens=False)["input_ids"], data.stop_token_ids[0]]
            for text in _TEXTS
        ]

    def play(self, items: Sequence[DataItem]) -> list[_Play]:
        """Play a trajectory for each item, with the same turns and seeds each time."""
        arrived: queue.SimpleQueue[tuple[int, Answer | None]] = queue.SimpleQueue()
        most = min(self._environments.config.max_turns or TURNS, TURNS)
        plays: dict[int, _Play] = {}
        for item in items:
            record = self._environments.make_record(item.further, (self._seed, 0, item.record))
            run = AgentRun(
                self._environments,
                record,
                self._settings,
                lambda number, answer: arrived.put((number, answer)),
                max_turns=most,
            )
            plays[run.number] = _Play(item, run)
        left = len(plays)
        while left:
            number, answer = arrived.get()
            play = plays[number]
            following = play.run.receive(answer)
            if isinstance(following, AgentRequest):
                self._answer(play, following)
            elif following is not None:
                left -= 1
                if isinstance(following, Failure):
                    play.failure = following
                else:
                    play.reward = following.reward
        return [*plays.values()]

    def _answer(self, play: _Play, request: AgentRequest) -> None:
        turn = self._turns[len(play.answers) % len(self._turns)][: request.options.max_tokens]
        play.ids = [*request.prompt, *turn]
        play.answers.append((len(request.prompt), len(play.ids)))
        piece = Piece(
            tokens=tuple(turn),
            logprobs=(0.0,) * len(turn),
            finish="stop" if turn[-1] in self._settings.stop_token_ids else "length",
        )
        play.run.conversation.answer(request, piece)


def probe_agent(
    experiment: Experiment, environments: Environments, data: ProbedData
) -> tuple[list[Finding], list[tuple[str, Sequence[Row]]]]:
    """Probe the agent of a recipe. Returns the findings, and trajectories to show with their origins."""
    findings = [_check_description(environments, data)]
    if findings[0].problem is not None:
        return findings, []
    prober = AgentProber(experiment, environments, data)
    items = data.items[:: -(-len(data.items) // PLAYED)]
    plays = prober.play(items)
    findings.append(_check_plays(environments, plays))
    fine = [play for play in plays if play.failure is None]
    if fine:
        findings += [
            _check_again(fine, prober.play([play.item for play in fine])),
            _check_room(experiment, environments, fine),
        ]
    return findings, [(play.item.origin, [Row(play.ids, tuple(play.answers))]) for play in plays if play.ids]


def _check_description(environments: Environments, data: ProbedData) -> Finding:
    """Check that the agent can run with the columns of the records."""
    names = sorted(filter(environments.wants, data.fields))
    if environments.takes_seed and SEED not in names:
        names.append(SEED)
    check = f"environment: an agent, run gets {', '.join(names) or 'no fields'}"
    try:
        environments.check_fields("data.train", data.fields)
    except UserError as error:
        return Finding(check, str(error))
    return Finding(check)


def _check_plays(environments: Environments, plays: Sequence[_Play]) -> Finding:
    """Check that the agent ends after made-up answers, and that it gives a reward."""
    turns = sum(len(play.answers) for play in plays)
    check = f"environment: {len(plays)} runs of the agent, with {turns} made-up answers"
    failed = [(play, play.failure) for play in plays if play.failure is not None]
    if failed:
        play, failure = next((pair for pair in failed if pair[1].own or pair[1].suspect), failed[0])
        text = f"the agent {failure.reason}, for {play.item.origin} after {len(play.answers)} answers"
        if environments.config.on_error == "skip":
            return Finding(check, notes=(text,))
        return Finding(check, text, "the model may write anything, and a run ends if the agent fails")
    notes = []
    unrewarded = sum(play.reward is None for play in plays)
    if unrewarded:
        notes.append(f"{unrewarded} of {len(plays)} runs give no reward")
    return Finding(check, notes=tuple(notes))


def _check_again(plays: Sequence[_Play], again: Sequence[_Play]) -> Finding:
    """Check that the same record, seed and answers give the same conversation and reward."""
    check = f"environment: the same conversations again ({len(plays)} runs)"
    for one, two in zip(plays, again, strict=True):
        if (one.ids, one.reward) != (two.ids, two.reward):
            text = f"a run for {one.item.origin} has another prompt or reward"
            return Finding(
                check,
                text,
                "it is not deterministic, so a resumed run differs: seed whatever is random with the argument"
                " `seed` of run",
            )
    return Finding(check)


def _check_room(experiment: Experiment, environments: Environments, plays: Sequence[_Play]) -> Finding:
    """Check how much of the limit of a trajectory the prompts take."""
    assert experiment.spec.generation is not None
    limit = experiment.spec.generation(experiment).max_new_tokens
    # The first token of a conversation is a prompt.
    first = max(play.answers[0][0] for play in plays) - 1
    longest = max(len(play.ids) for play in plays) - 1
    check = (
        f"environment: of generation.max_new_tokens={limit}, first prompts take up to {first:,} tokens, whole"
        f" conversations with made-up answers up to {longest:,}"
    )
    full = [play for play in plays if play.run.is_full]
    if full:
        return Finding(check, notes=(f"{len(full)} of {len(plays)} runs end at this limit",))
    return Finding(check)
