"""Probe the environment of a recipe without a model: is it deterministic, do turns fit, and what is learnt?

Turns of the model are made up. With `step`, they are short texts. With tools, they are calls that the chat template
writes, with arguments of the right types.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, zip_longest
from statistics import median_low
from typing import Any

from realrl.config.errors import UserError
from realrl.data.chat_template import Message
from realrl.data.items import DataItem
from realrl.data.rejects import BadRecordError
from realrl.data.tokenization import Row, tokenize
from realrl.data.tools import Arguments
from realrl.environments.pool import Answer, Failure
from realrl.environments.tool_calls import read_calls
from realrl.recipe.experiment import Experiment
from realrl.recipe.stop_strings import StopStrings
from realrl.runtime.prepare.environments import SEED, Environments
from realrl.testing.agent_probes import probe_agent
from realrl.testing.data_probes import ProbedData, SpecialIds, has_begin_inside
from realrl.testing.findings import Finding

MOST = 64
"""Maximum number of records for which `reset` is called."""
PLAYED, TURNS = 4, 3
"""Maximum number of made-up trajectories, and of turns in each."""
_TEXTS = ("It is so.", "7", "")
"""Made-up turns for `step`."""
_ASKED = "What is the question?"
_CALL_ID = "call00000"
_ARGUMENTS: Mapping[str, Any] = {
    "string": "seven", "integer": 7, "number": 7.5, "boolean": True, "array": [], "object": {}, "null": None,
}  # fmt: skip


@dataclass(frozen=True)
class ProbedEnvironment:
    """What the probes have found, and made-up trajectories to show: origin (FILE:LINE) and row of each."""

    findings: Sequence[Finding]
    shown: Sequence[tuple[str, Sequence[Row]]]


@dataclass
class _Start:
    """A trajectory after `reset`."""

    item: DataItem
    number: int
    answer: Answer

    @property
    def failure(self) -> Failure | None:
        return self.answer if isinstance(self.answer, Failure) else None

    @property
    def is_lost(self) -> bool:
        """Whether it failed only because another trajectory ended its process."""
        return _is_lost(self.failure)

    @property
    def observation(self) -> Any:
        assert not isinstance(self.answer, Failure), "it has not failed"
        return self.answer["observation"]


def _is_lost(failure: Failure | None) -> bool:
    return failure is not None and not (failure.own or failure.suspect)


@dataclass
class _Play:
    """A made-up trajectory."""

    start: _Start
    ids: list[int]
    answers: list[tuple[int, int]] = field(default_factory=list)
    """Position of each turn of the model, and of the token after it."""
    said: list[str] = field(default_factory=list)
    """What the model says or calls in each turn."""
    messages: list[Message] = field(default_factory=list)
    """The conversation, which begins with a made-up question in place of the prompt."""
    observed: list[tuple[int, bool]] = field(default_factory=list)
    """For each observation after a turn: its tokens with those of the chat template, and whether it was cut."""
    replies: list[Mapping[str, Any]] = field(default_factory=list)
    """What the environment answered, in order."""
    failure: Failure | None = None
    over: bool = False
    is_ended: bool = True
    """Whether the chat template ends the turns of the model with a token at which generation stops."""

    @property
    def row(self) -> Row:
        return Row(self.ids, tuple(self.answers))


class _Prober:
    """Plays made-up trajectories in an environment."""

    def __init__(self, experiment: Experiment, environments: Environments, tokenizer: Any) -> None:
        assert experiment.spec.generation is not None, "an environment needs an algorithm that generates"
        self.experiment, self.environments, self.tokenizer = experiment, environments, tokenizer
        self.sampling = experiment.spec.generation(experiment)
        self.stop = StopStrings.of(tokenizer, self.sampling)
        opening = environments.template.template
        self.template = None if opening is None else replace(opening, opens=False)
        """The chat template, with the tools among its arguments; None for plain text."""

    def start(self, items: Sequence[DataItem]) -> list[_Start]:
        """Start a trajectory for each item, which gets the same seed each time."""
        records = [
            self.environments.make_record(item.further, (self.experiment.seed, 0, item.record))
            for item in items
        ]
        found = self.environments.reset(records)
        return [_Start(item, number, answer) for item, (number, answer) in zip(items, found, strict=True)]

    def play(self, starts: Sequence[_Start], turns: Sequence["_Turn"], stops: Sequence[int]) -> list[_Play]:
        """Play trajectories to their end. The i-th one begins with the i-th of the turns."""
        plays = [self._open(start) for start in starts]
        last = min(TURNS, self.environments.config.max_turns or TURNS) - 1
        for turn in range(last + 1):
            now = [(i, play) for i, play in enumerate(plays) if not play.over]
            said = [turns[(i + turn) % len(turns)] for i, _ in now]
            for (_, play), one in zip(now, said, strict=True):
                play.answers.append((len(play.ids), len(play.ids) + len(one.ids)))
                play.ids += one.ids
                play.said.append(one.said)
                play.is_ended &= one.is_ended
                play.messages.append(one.message)
            answers = self.environments.ask(
                [
                    partial(
                        self.environments.pool.act,
                        play.start.number,
                        self.environments.template.read(one.ids, stops, self.stop),
                        turn == last,
                    )
                    for (_, play), one in zip(now, said, strict=True)
                ]
            )
            for (_, play), one, answer in zip(now, said, answers, strict=True):
                self._take(play, one, answer)
        return plays

    def _open(self, start: _Start) -> _Play:
        if start.failure is not None:
            return _Play(start, [], failure=start.failure, over=True)
        observation = start.observation
        ids = [*start.item.rows[0].ids, *self.environments.template.open(observation)]
        play = _Play(start, ids)
        if isinstance(observation, str):
            (first,) = self._shorten([{"role": "user", "content": observation}])
            play.messages.append({"role": "user", "content": _ASKED + first["content"]})
        else:
            play.messages += [{"role": "user", "content": _ASKED}, *self._shorten(observation or ())]
        return play

    def _take(self, play: _Play, said: "_Turn", answer: Answer) -> None:
        """Take the answer to a turn."""
        if isinstance(answer, Failure):
            play.failure, play.over = answer, True
            return
        play.replies.append({name: value for name, value in answer.items() if name not in ("id", "seconds")})
        play.over = answer["done"]
        if play.over:
            return
        observation = answer["observation"]
        if isinstance(observation, str):
            observation = [{"role": "user", "content": observation}]
        messages = self._shorten(observation or ())
        tokens = self.environments.template.observe(messages, said.ids[-1])
        play.observed.append((len(tokens), messages != list(observation or ())))
        play.ids += tokens
        numbered = ({**one, "tool_call_id": _CALL_ID} if one["role"] == "tool" else one for one in messages)
        play.messages += numbered

    def judge(self, check: str, problem: str, reason: str, notes: Sequence[str] = ()) -> Finding:
        """Make a finding about a failure. It is a note if a run leaves such trajectories out."""
        if self.environments.config.on_error == "skip":
            return Finding(check, notes=(problem, *notes))
        return Finding(check, problem, reason, tuple(notes))

    def is_cut(self, observation: Any) -> bool:
        """Return whether an observation loses its end."""
        if isinstance(observation, str):
            observation = [{"role": "user", "content": observation}]
        return self._shorten(observation or ()) != list(observation or ())

    def _shorten(self, messages: Sequence[Message]) -> list[Message]:
        return self.environments.template.shorten(messages)


@dataclass(frozen=True)
class _Turn:
    """A made-up turn of the model."""

    said: str
    """What it says or calls, for messages."""
    message: Message
    ids: list[int]
    """Tokens as the model would sample them, with the token that ends the turn."""
    is_ended: bool = False
    """Whether the chat template writes this last token."""


def probe_environment(
    experiment: Experiment, environments: Environments, data: ProbedData
) -> ProbedEnvironment:
    """Probe the environment of a recipe with some of its records, which were read for it."""
    if environments.runs:
        return ProbedEnvironment(*probe_agent(experiment, environments, data))
    tokenizer, stop_token_ids, items, fields = data.tokenizer, data.stop_token_ids, data.items, data.fields
    findings = [_check_description(environments, fields)]
    if findings[0].problem is not None:
        return ProbedEnvironment(findings, ())
    prober = _Prober(experiment, environments, tokenizer)
    starts = prober.start(items[:: -(-len(items) // MOST)])
    findings.append(_check_resets(prober, starts))
    turns = [_write_turn(prober, stop_token_ids, text) for text in _TEXTS]
    if environments.tools is not None:
        found, turns = _check_tools(prober, environments.tools, stop_token_ids)
        findings += found
    fine = [start for start in starts if start.failure is None]
    plays: list[_Play] = []
    if fine and turns:
        every = -(-len(fine) // PLAYED)
        plays = prober.play(fine[::every], turns, stop_token_ids)
        again = prober.start([start.item for start in fine])
        repeated = prober.play(again[::every], turns, stop_token_ids)
        findings += [
            _check_again(fine, again, plays, repeated),
            _check_turns(prober, plays),
            _check_learnt(prober, plays, stop_token_ids),
            _check_room(prober, fine, plays),
        ]
        starts += again
    for start in starts:
        environments.pool.drop(start.number, close=True)
    return ProbedEnvironment(
        findings, [(play.start.item.origin, [play.row]) for play in plays if play.replies]
    )


def _check_description(environments: Environments, fields: Collection[str]) -> Finding:
    """Check that the environment can be used with the columns of the records."""
    names = sorted(filter(environments.wants, fields))
    if environments.takes_seed and SEED not in names:
        names.append(SEED)
    tools = environments.tools
    acts = "step gets the turns" if tools is None else f"{len(tools)} tool{'' if len(tools) == 1 else 's'}"
    check = f"environment: {acts}, reset gets {', '.join(names) or 'no fields'}"
    try:
        environments.check_fields("data.train", fields)
    except UserError as error:
        return Finding(check, str(error))
    return Finding(check)


def _check_resets(prober: _Prober, starts: Sequence[_Start]) -> Finding:
    """Check that trajectories can start."""
    check = f"environment: reset with {len(starts):,} records"
    failed = [(start, start.failure) for start in starts if start.failure is not None and not start.is_lost]
    if not failed:
        return Finding(check)
    start, failure = failed[0]
    text = f"{len(failed):,} of {len(starts):,} fail, first {start.item.origin}: reset {failure.reason}"
    return prober.judge(check, text, "a run ends at such a record unless environment.on_error=skip")


def _write_turn(prober: _Prober, stop_token_ids: Sequence[int], text: str) -> _Turn:
    """Write a turn with a text."""
    message = {"role": "assistant", "content": text}
    try:
        return _make_turn(prober, stop_token_ids, repr(text), message)
    except BadRecordError:  # the template does not write it, but a model may
        ids = prober.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        return _Turn(repr(text), message, [*ids, stop_token_ids[0]])


def _make_turn(prober: _Prober, stop_token_ids: Sequence[int], said: str, message: Message) -> _Turn:
    """Make a turn with the text that the chat template writes for a message, and a token that ends it.

    Raises BadRecordError if the template does not write such a message.
    """
    text, end, is_ended = message.get("content", ""), stop_token_ids[0], False
    if prober.template is not None:
        (conversation,) = prober.template.write_conversation(
            [{"role": "user", "content": _ASKED}, message], "last"
        )
        turn = conversation.turns[0]
        text = conversation.text[turn.start : turn.stop]
        names = [str(prober.tokenizer.convert_ids_to_tokens(token)) for token in stop_token_ids]
        place, name = min(((text.find(name), name) for name in names if name in text), default=(-1, ""))
        is_ended = place >= 0
        if is_ended:
            text, end = text[:place], stop_token_ids[names.index(name)]
        elif turn.content > turn.start:
            text = conversation.text[turn.start : turn.content]
    ids: list[int] = prober.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
    return _Turn(said, message, [*ids, end], is_ended)


def _check_tools(
    prober: _Prober, tools: Sequence[Mapping[str, Any]], stop_token_ids: Sequence[int]
) -> tuple[list[Finding], list[_Turn]]:
    """Check that prompts show the tools, and that calls are read as the chat template writes them.

    Returns a call of each tool, too.
    """
    environments, template = prober.environments, prober.template
    assert template is not None, "tools need a chat template"
    names = [tool["function"]["name"] for tool in tools]
    shown = template.render([{"role": "user", "content": _ASKED}], prompt=True)
    hidden = [name for name in names if name not in shown]
    check = f"environment: prompts show {', '.join(names)}"
    findings = [Finding(check)]
    if hidden:
        text = f"the chat template does not write {', '.join(hidden)}, so the model does not know of it"
        findings = [Finding(check, text, "the template has no part for tools; see data.chat_template")]
    turns: list[_Turn] = []
    wrong: list[str] = []
    for tool in tools:
        name = tool["function"]["name"]
        values = _make_arguments(tool)
        function = {"name": name, "arguments": Arguments(values, json.dumps(values))}
        call = {"id": _CALL_ID, "type": "function", "function": function}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        said = f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"
        try:
            turn = _make_turn(prober, stop_token_ids, said, message)
        except BadRecordError as error:
            wrong.append(f"a call of {name} cannot be written: {error}")
            continue
        text = environments.template.read(turn.ids, stop_token_ids, prober.stop)
        calls = read_calls(text, environments.tool_format, tools)
        turns.append(turn)
        if [(one.name, dict(one.arguments), one.problem) for one in calls] != [(name, values, "")]:
            wrong.append(f"{text.strip()!r}, as the chat template writes {said}, is not read as this call")
    check = f"environment: calls in the format {environments.tool_format} are read"
    reason = "environment.tool_format does not fit the chat template, or the template does not write calls"
    findings.append(Finding(check, wrong[0], reason) if wrong else Finding(check))
    return findings, turns


def _make_arguments(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Make up the required arguments of a call."""
    parameters = tool["function"].get("parameters", {})
    properties = parameters.get("properties", {})
    return {name: _make_value(properties.get(name, {})) for name in parameters.get("required", ())}


def _make_value(schema: Mapping[str, Any]) -> Any:
    kind = schema.get("type", "string")
    if schema.get("enum"):
        return schema["enum"][0]
    return _ARGUMENTS.get(kind[0] if isinstance(kind, list) else kind, "seven")


def _check_again(
    starts: Sequence[_Start], again: Sequence[_Start], plays: Sequence[_Play], repeated: Sequence[_Play]
) -> Finding:
    """Check that the same record, seed and turns give the same answers."""
    check = f"environment: the same answers again ({len(starts):,} resets, {len(plays)} trajectories)"
    other = [
        one
        for one, two in zip(starts, again, strict=True)
        if not two.is_lost and (two.failure is not None or one.observation != two.observation)
    ]
    if other:
        text = (
            f"reset with the same record and seed gives another first observation for {len(other):,} of"
            f" {len(starts):,} records, first {other[0].item.origin}"
        )
        return Finding(check, text, _RANDOM)
    for one, two in zip(plays, repeated, strict=True):
        lost = _is_lost(one.failure) or _is_lost(two.failure)
        if not lost and (one.replies, one.failure) != (two.replies, two.failure):
            pairs = zip_longest(one.replies, two.replies)
            at = next((i for i, (first, second) in enumerate(pairs, 1) if first != second), len(one.answers))
            text = f"turn {at} of a trajectory from {one.start.item.origin} has another observation, reward or end"
            return Finding(check, text, _RANDOM)
    return Finding(check)


_RANDOM = (
    "it is not deterministic, so samples of a prompt get different tasks, and a resumed run differs: seed whatever"
    " is random with the argument `seed` of reset"
)


def _check_turns(prober: _Prober, plays: Sequence[_Play]) -> Finding:
    """Check that the environment answers made-up turns, and that it gives a reward."""
    said = sum(len(play.answers) for play in plays)
    check = f"environment: answers to {said} made-up turns"
    failed = [(play, play.failure) for play in plays if play.failure is not None]
    if failed:
        play, failure = next((pair for pair in failed if not _is_lost(pair[1])), failed[0])
        origin = play.start.item.origin
        text = (
            f"after the turn {play.said[-1]} of a trajectory from {origin}, the environment {failure.reason}"
        )
        return prober.judge(check, text, "the model may write anything; answer it with an observation")
    notes = []
    calls = sum(reply.get("failed_calls", 0) for play in plays for reply in play.replies)
    if calls:
        notes.append(f"{calls} calls with made-up arguments failed, which the model would see as an error")
    unrewarded = sum(play.replies[-1].get("total") is None for play in plays)
    if unrewarded:
        notes.append(f"{unrewarded} of {len(plays)} made-up trajectories get no reward from the environment")
    return Finding(check, notes=tuple(notes))


def _check_learnt(prober: _Prober, plays: Sequence[_Play], stop_token_ids: tuple[int, ...]) -> Finding:
    """Check that trajectories begin once, and compare them with fine-tuning on the same conversations."""
    tokenizer, special = prober.tokenizer, SpecialIds(prober.tokenizer, frozenset(stop_token_ids))
    whole = [play for play in plays if play.failure is None]
    learnt, total = sum(sum(play.row.loss_mask) for play in whole), sum(len(play.ids) for play in whole)
    check = f"environment: {learnt:,} of {total:,} tokens are in turns of the model"
    refuses = prober.environments.config.earlier_turns == "refuse"
    notes: list[str] = []
    for play in whole:
        origin = play.start.item.origin
        if special.begin not in special.stops and has_begin_inside(play.ids, special):
            text = f"a trajectory from {origin} has {special.name(special.begin)} inside a turn"
            return Finding(check, text, "the environment or the chat template writes it again")
        if prober.template is None:
            continue
        if not play.is_ended:
            notes.append("the chat template does not end turns with a token at which generation stops")
            continue
        try:
            written = prober.template.write_conversation(play.messages, "all")
        except BadRecordError as error:
            notes.append(f"a trajectory from {origin} cannot be compared with a whole conversation: {error}")
            continue
        if len(written) > 1:
            text = (
                f"within a whole conversation, the chat template writes earlier turns of a trajectory from {origin}"
                " differently"
            )
            if refuses:
                return Finding(check, text, "environment.earlier_turns=keep keeps turns as they were sampled")
            notes.append(text)
            continue
        ours = _list_runs(tokenizer, play.row, len(play.start.item.rows[0].ids))
        theirs = _list_runs(tokenizer, tokenize(written, tokenizer, stop_token_ids)[0], 0)
        theirs[0] = (theirs[0][0], theirs[0][1].partition(_ASKED)[2])
        if not theirs[-1][0]:
            theirs.pop()  # what follows the last turn
        for (is_learnt, text), (also_learnt, other) in zip_longest(ours, theirs, fillvalue=(False, "")):
            if text == other and is_learnt == also_learnt:
                continue
            differs = f"a trajectory from {origin} has {text!r}, where a whole conversation has {other!r}"
            notes.append(differs)
            # Many templates strip white space.
            if is_learnt != also_learnt or text.split() != other.split():
                if refuses:
                    return Finding(check, differs, _REWRITTEN)
                break
    # The same is usually true of all trajectories.
    return Finding(check, notes=tuple(notes[:1]))


_REWRITTEN = "the chat template writes a turn differently within a conversation than alone"


def _list_runs(tokenizer: Any, row: Row, start: int) -> list[tuple[bool, str]]:
    """List the texts of learnt and of other tokens, in turn, from the position `start`. The first is not learnt."""
    pairs = [*zip(row.ids, row.loss_mask, strict=True)][start:]
    runs = [
        (mask == 1, tokenizer.decode([token for token, _ in run], skip_special_tokens=False))
        for mask, run in groupby(pairs, key=lambda pair: pair[1])
    ]
    return runs if runs and not runs[0][0] else [(False, ""), *runs]


def _check_room(prober: _Prober, starts: Sequence[_Start], plays: Sequence[_Play]) -> Finding:
    """Check how much of the limit of a trajectory its observations take."""
    limit = prober.sampling.max_new_tokens
    first = [len(prober.environments.template.open(start.observation)) for start in starts]
    later = [tokens for play in plays for tokens, _ in play.observed]
    check = f"environment: of generation.max_new_tokens={limit}, reset takes {_describe(first)}"
    check += f", an observation after a made-up turn {_describe(later)}" if later else ""
    notes = [*_note_cuts(prober, starts, plays)]
    crowded = [s.item.origin for s, tokens in zip(starts, first, strict=True) if tokens >= limit]
    if crowded:
        text = f"{len(crowded):,} of {len(starts):,} records leave no token for a turn, first {crowded[0]}"
        reason = "raise generation.max_new_tokens, or lower environment.max_observation_tokens"
        return prober.judge(check, text, reason, notes)
    turn = prober.environments.config.max_turn_tokens or 0
    tight = [s.item.origin for s, tokens in zip(starts, first, strict=True) if tokens + turn > limit]
    if tight:
        notes.append(
            f"{len(tight):,} of {len(starts):,} records leave less than environment.max_turn_tokens={turn} for"
            f" the first turn, first {tight[0]}"
        )
    whole = [len(play.ids) - len(play.start.item.rows[0].ids) for play in plays]
    longer = [tokens for tokens in whole if tokens > limit]
    if longer:
        notes.append(
            f"{len(longer)} of {len(plays)} made-up trajectories, of at most {TURNS} turns, do not fit; the"
            f" longest takes {max(longer):,} tokens"
        )
    return Finding(check, notes=tuple(notes))


def _note_cuts(prober: _Prober, starts: Sequence[_Start], plays: Sequence[_Play]) -> Iterator[str]:
    """Note whether observations lose their end."""
    limit = prober.environments.config.max_observation_tokens
    first = [start.item.origin for start in starts if prober.is_cut(start.observation)]
    later = [is_cut for play in plays for _, is_cut in play.observed]
    for cut, count, when in (
        (len(first), len(starts), f"at reset, first {first[0]}" if first else ""),
        (sum(later), len(later), "after made-up turns"),
    ):
        if cut:
            yield f"{cut:,} of {count:,} observations {when}: cut at environment.max_observation_tokens={limit}"


def _describe(tokens: Sequence[int]) -> str:
    """Describe numbers of tokens."""
    least, most = min(tokens), max(tokens)
    return (
        f"{least:,} tokens"
        if least == most
        else f"{least:,} to {most:,} tokens (median {median_low(tokens):,})"
    )
