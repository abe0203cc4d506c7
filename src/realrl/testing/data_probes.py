"""Probe the records of a recipe: special tokens, learnt tokens, truncation, and records that teach nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from realrl.config.errors import UserError
from realrl.data.chat_template import ChatTemplate
from realrl.data.items import DataItem, ItemReader
from realrl.data.record_files import Record
from realrl.data.records import read_records
from realrl.data.rejects import Rejects
from realrl.data.tokenization import SAME_ANSWERS, Row
from realrl.recipe.experiment import Experiment
from realrl.recipe.sources import list_sources
from realrl.runtime.prepare.environments import Environments
from realrl.runtime.prepare.inputs import load_shared_tokenizer, load_stop_token_ids
from realrl.testing.findings import Finding

MOST = 1000
"""Maximum number of records that are probed."""
SHOWN = 3
"""Number of items that are shown."""
SOURCE = "data.train"


@dataclass(frozen=True)
class ProbedData:
    """What the probes have found, and the first items to show: the origin (FILE:LINE) and the rows of each."""

    findings: Sequence[Finding]
    shown: Sequence[tuple[str, Sequence[Row]]]
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    items: Sequence[DataItem]
    """All items, with the fields that the environment takes."""
    fields: frozenset[str]
    """Columns of the records that no key is made from."""


def open_environment(experiment: Experiment) -> Environments | None:
    """Start the environment of a recipe; None if it has none. Raises UserError if it cannot be used."""
    if experiment.environment_config is None:
        return None
    tokenizer = load_shared_tokenizer(experiment)
    return Environments(experiment, tokenizer, load_stop_token_ids(experiment, tokenizer))


def probe_data(
    experiment: Experiment, records: Sequence[Record], environments: Environments | None = None
) -> ProbedData:
    """Probe records of `data.train`, read and tokenised as a run would do.

    `records`: at most `MOST` records with their origins, FILE:LINE. Fewer records are all records of `data.train`.
    `environments`: the environment of the recipe, if it has one. Raises UserError for a mistake in the recipe.
    """
    tokenizer = load_shared_tokenizer(experiment)
    stop_token_ids = load_stop_token_ids(experiment, tokenizer)
    rejects = _KeptRejects()
    fields: set[str] = set()

    def keep(name: str) -> bool:
        fields.add(name)
        return environments is not None and environments.wants(name)

    reader = ItemReader(
        experiment.spec.form,
        experiment.graph.sources,
        tokenizer,
        experiment.data.model_copy(update={"on_error": "skip"}),
        experiment.seed,
        stop_token_ids,
        keep,
        lambda _, __: iter(records),
        None if environments is None else environments.template,
    )
    items = [*reader.read(SOURCE, rejects)]
    if not items:
        raise UserError(
            f"none of the first {len(records)} records of data.train can be used: {rejects.first()}"
        )
    special = SpecialIds(tokenizer, frozenset(stop_token_ids))
    templated = experiment.data.apply_chat_template or not all(item.plain for item in items)
    if environments is not None:
        templated = environments.template.template is not None
    findings = [
        _check_reading(experiment, items, rejects, reader.notes(SOURCE)),
        _check_ends(experiment, items, special, templated=templated),
        *_check_learnt(experiment, items, special),
        *_check_teaching(experiment, items, rejects, whole=len(records) < MOST),
    ]
    shown = [(item.origin, item.rows) for item in items[:SHOWN]]
    return ProbedData(findings, shown, tokenizer, stop_token_ids, items, frozenset(fields))


class _KeptRejects(Rejects):
    """Rejects that keeps every reason."""

    def __init__(self) -> None:
        super().__init__("skip")
        self.malformed: list[tuple[str, str]] = []
        """Origin of each malformed record, and the reason."""
        self.long: list[tuple[str, str]] = []
        """Origin of each record that is too long, and the reason."""

    def __call__(self, origin: str, reason: str, *, too_long: bool = False) -> None:
        super().__call__(origin, reason, too_long=too_long)
        (self.long if too_long else self.malformed).append((origin, reason))

    def first(self) -> str:
        """Describe the first record that cannot be used."""
        return ": ".join((*self.malformed, *self.long)[0]) if self.count else "there are none"


@dataclass
class _Traps:
    """Counts traps, with the first record of each."""

    items: Sequence[DataItem]
    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def see(self, trap: str, origin: str) -> None:
        self.counts[trap] = self.counts.get(trap, 0) + 1
        self.first.setdefault(trap, origin)

    def describe(self, trap: str) -> str:
        """Describe a trap that was seen. Its text follows "N of M items"."""
        count, total = self.counts[trap], len(self.items)
        return f"{count:,} of {total:,} items {trap}, first {self.first[trap]}"

    def describe_all(self) -> tuple[str, ...]:
        return tuple(self.describe(trap) for trap in self.counts)


@dataclass(frozen=True)
class SpecialIds:
    """The special tokens of a tokenizer, and the ids at which generation stops."""

    tokenizer: Any
    stops: frozenset[int]

    @property
    def begin(self) -> int | None:
        found: int | None = self.tokenizer.bos_token_id
        return found

    @property
    def padding(self) -> int | None:
        """The padding token, unless it also has another meaning."""
        found: int | None = self.tokenizer.pad_token_id
        return None if found in (*self.stops, self.begin, self.tokenizer.unk_token_id) else found

    @property
    def unknown(self) -> int | None:
        """The token for text that the tokenizer cannot write, unless it also has another meaning."""
        found: int | None = self.tokenizer.unk_token_id
        return None if found in (*self.stops, self.begin) else found

    def name(self, token: int | None) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(token))

    def is_blank(self, token: int) -> bool:
        return token not in self.stops and not self.tokenizer.decode([token]).strip()


def _check_reading(
    experiment: Experiment, items: Sequence[DataItem], rejects: _KeptRejects, notes: Sequence[str]
) -> Finding:
    """Check that a run can read the records. Skipped records, and other ways to read them, are notes."""
    data, found = experiment.data, [*notes]
    problems: list[str] = []
    for setting, refused, what in (
        (data.on_error, rejects.malformed, "malformed"),
        (data.on_too_long or data.on_error, rejects.long, "too long"),
    ):
        if refused:
            text = f"{len(refused):,} are {what}, first {': '.join(refused[0])}"
            (problems if setting == "fail" else found).append(text)
    skipped = "" if rejects.count == 0 else f" of {len(items) + rejects.count:,}"
    check = f"{SOURCE}: {len(items):,}{skipped} items can be used"
    if problems:
        return Finding(check, "; ".join(problems), "a run ends at such a record", tuple(found))
    return Finding(check, notes=tuple(found))


def _check_ends(
    experiment: Experiment, items: Sequence[DataItem], special: SpecialIds, *, templated: bool
) -> Finding:
    """Check the tokens that begin, end and pad sequences."""
    form = experiment.spec.form
    problems, notes = _Traps(items), _Traps(items)
    for item in items:
        for problem in dict.fromkeys(
            trap for row in item.rows for trap in _find_traps(row, item, form, special)
        ):
            problems.see(problem, item.origin)
        rows = [row.ids for row in item.rows]
        if special.begin not in special.stops and any(has_begin_inside(ids, special) for ids in rows):
            notes.see(f"have {special.name(special.begin)} inside", item.origin)
        if special.unknown is not None and any(special.unknown in ids for ids in rows):
            notes.see(f"have text that the tokenizer writes as {special.name(special.unknown)}", item.origin)
    check, found = f"{SOURCE}: tokens that begin and end sequences", notes.describe_all()
    if problems.counts:
        return Finding(
            check, problems.describe_all()[0], _END_REASONS, (*problems.describe_all()[1:], *found)
        )
    missed = _find_missed_end(experiment, special) if templated else None
    return Finding(check, missed, None if missed is None else _MISSED_REASON, found)


_END_REASONS = (
    "records hold special tokens as text, or the chat template was applied twice or has no generation prompt"
)
_MISSED_REASON = "generation.stop_token_ids replaces the model's own list, and lacks this token"


def _find_traps(row: Row, item: DataItem, form: str, special: SpecialIds) -> Iterator[str]:
    ids, begin = row.ids, special.begin
    if begin is not None and (begin, begin) in pairwise(ids):
        yield f"have {special.name(begin)} twice in a row"
    if special.padding in ids:
        yield f"have the padding token {special.name(special.padding)} in their text"
    starts = [first for first, _ in row.answers] or [len(ids)]
    asked = [ids[start - 1] for start in starts if start > 1]
    ended = next((token for token in asked if token in special.stops and token != begin), None)
    if ended is not None and form != "steps":
        yield f"end the prompt with {special.name(ended)}, which ends a sequence"
    # The sides of a conversation's pair may have several turns, which end one after the other.
    if form == "answer" or (form != "steps" and item.plain):
        for first, stop in row.answers:
            early = next((token for token in ids[first : stop - 1] if token in special.stops), None)
            if early is not None:
                yield f"continue after {special.name(early)}, at which generation stops"


def has_begin_inside(ids: Sequence[int], special: SpecialIds) -> bool:
    """Check for a beginning of sequence that neither begins the row nor follows the end of an earlier turn."""
    for i, token in enumerate(ids):
        if token == special.begin and i:
            before = next(
                (other for other in reversed(ids[:i]) if not special.is_blank(other)), special.begin
            )
            if before not in special.stops and before != special.begin:
                return True
    return False


def _find_missed_end(experiment: Experiment, special: SpecialIds) -> str | None:
    """Find the end of a turn in the chat template at which generation does not stop."""
    spec, data = experiment.spec, experiment.data
    if spec.generation is None:
        return None
    end, sampling = (
        ChatTemplate(special.tokenizer, data.chat_template_kwargs).find_turn_end(),
        spec.generation(experiment),
    )
    if end is None or end in special.stops or sampling.ignore_eos or special.name(end) in sampling.stop:
        return None
    return f"the chat template ends a turn with {special.name(end)} (id {end}), at which generation does not stop"


def _check_learnt(
    experiment: Experiment, items: Sequence[DataItem], special: SpecialIds
) -> Iterator[Finding]:
    """Check which tokens of answers are learnt, if records have answers."""
    form = experiment.spec.form
    if form in ("prompt", "steps"):
        return
    rows = [(item.origin, row) for item in items for row in item.rows]
    traps, endless, learnt = _Traps(items), 0, 0
    for origin, row in rows:
        learnt += sum(row.loss_mask)
        (first, stop), earlier = row.answers[-1], row.answers[:-1]
        if row.ids[stop - 1] not in special.stops:
            endless += 1
            traps.see("have an answer that is cut off before its end token", origin)
        elif stop - first == 1:
            traps.see("have an answer of nothing but its end token", origin)
        if any(row.ids[end - 1] not in special.stops for _, end in earlier):
            traps.see("have an earlier answer that ends without a token at which generation stops", origin)
    total = sum(len(row.ids) for _, row in rows)
    graph, heads = experiment.graph, experiment.spec.heads
    writes = any(heads[role] == "lm" and graph.trained(role) for role in graph.roles)
    check = f"{SOURCE}: {learnt:,} of {total:,} tokens are in answers"
    if writes and endless == len(rows):
        yield Finding(
            check,
            "no answer has its end token, so the model never learns to stop",
            f"data.on_too_long={experiment.data.on_too_long} cuts it away: raise data.max_tokens",
        )
    else:
        yield Finding(check, notes=traps.describe_all())


def _check_teaching(
    experiment: Experiment, items: Sequence[DataItem], rejects: _KeptRejects, *, whole: bool
) -> Iterator[Finding]:
    """Check that pairs and ranked answers differ, and that both labels occur.

    `whole`: whether the items are all items of the data set.
    """
    form = experiment.spec.form
    if form in ("pair", "ranked"):
        yield Finding(f"{SOURCE}: answers to a prompt differ", notes=_list_equal(form, items, rejects))
    labels = [
        label for item in items for key in ("label", "step_labels") for label in item.numbers.get(key, ())
    ]
    if labels:
        check, counts = f"{SOURCE}: labels", {label: labels.count(label) for label in (1, 0)}
        check += f" ({counts[1]:,} good, {counts[0]:,} bad)"
        only = f"all {len(labels):,} labels are {'good' if counts[1] else 'bad'}"
        if 0 not in counts.values():
            yield Finding(check)
        elif whole:
            yield Finding(check, only, "a model cannot learn a difference that the records do not show")
        else:
            yield Finding(check, notes=(f"{only}; only the first {len(items):,} items were read",))


def _list_equal(form: str, items: Sequence[DataItem], rejects: _KeptRejects) -> tuple[str, ...]:
    if form == "pair":
        notes = []
        for refused, what in ((rejects.malformed, ""), (rejects.long, " once they are cut")):
            equal = [origin for origin, reason in refused if reason == SAME_ANSWERS]
            if equal:
                notes.append(f"{len(equal):,} pairs have equal answers{what}, first {equal[0]}")
        return tuple(notes)
    traps = _Traps(items)
    for item in items:
        if len({tuple(row.ids) for row in item.rows}) < len(item.rows):
            traps.see("rank two equal answers", item.origin)
    return traps.describe_all()


def take_records(experiment: Experiment, count: int = MOST) -> list[Record]:
    """Take the first records of `data.train`, from each of its sources in turn.

    Raises UserError if there are none, or if one is malformed and `data.on_error` is fail.
    """
    rejects = Rejects(experiment.data.on_error)
    readers = [read_records(source.path, rejects) for source in list_sources(experiment.data.train)]
    found: list[Record] = []
    while readers and len(found) < count:
        for reader in [*readers]:
            record = next(reader, None)
            if record is None:
                readers.remove(reader)
            else:
                found.append(record)
    if not found:
        raise UserError("data.train has no records to check with")
    return found[:count]
