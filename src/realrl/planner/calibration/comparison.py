"""What a run was predicted to cost and what it did, as it stands in `costs.json` of its directory."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, TypeAdapter, ValidationError

from realrl.config.base import Settings
from realrl.config.errors import UserError
from realrl.config.explain import brief, explain
from realrl.config.files import write_whole
from realrl.config.json_file import read_json
from realrl.config.paths import local_path
from realrl.dataflow.call import Call
from realrl.planner.cluster.spec import ClusterSpec
from realrl.planner.workload.workload import Workload
from realrl.program.memory import Stored

COSTS, LENGTHS = "costs.json", "lengths.json"
"""Files of a run directory: a `Comparison`, and quantiles of the lengths of prompts and answers, in tokens."""

VERSION: Literal[1] = 1
"""Of the file format; a file of another version is refused."""


def _reading(cls: type[Any]) -> BeforeValidator:
    """Reads a dataclass from what it was written as."""
    adapter = TypeAdapter[Any](cls)
    return BeforeValidator(lambda value: adapter.validate_python(value) if isinstance(value, dict) else value)


class Seconds(Settings):
    """Times of one thing over the steps of a run."""

    median: PositiveFloat
    least: PositiveFloat
    most: PositiveFloat
    steps: PositiveInt
    """Steps that were counted."""

    @classmethod
    def of(cls, times: Sequence[float]) -> Self:
        """Of at least one time; no time is shorter than the nanosecond that clocks tell apart."""
        times = [max(time, 1e-9) for time in times]
        return cls(median=median(times), least=min(times), most=max(times), steps=len(times))


def waiting_for(function: str) -> str:
    """Name under which it is measured how long ranks wait for a function."""
    return f"waiting for {function}"


class CallCosts(Settings):
    """One call of a run."""

    call: Annotated[Call, _reading(Call)]
    placement: str
    """In its text form."""
    seconds: Seconds
    """From when the last rank of the mesh has begun with it until the last one has ended it; of a function, what it
    took on the rank where it took longest."""
    waited: Seconds | None = None
    """Of a function, how long its ranks at most did nothing but wait for it; None of a call that has a model."""
    predicted_seconds: PositiveFloat | None
    terms: dict[str, float]
    """What `predicted_seconds` are made of."""
    bytes: PositiveInt | None
    """Most that tensors took on a device of the mesh during the call, or while parameters were moved for it;
    None where it was not measured."""
    predicted_bytes: PositiveInt | None
    """The same as predicted: without the allowance for fragmentation."""


class MoveCosts(Settings):
    """One reallocation of a run."""

    instruction: str
    """In its text form."""
    seconds: Seconds
    predicted_seconds: float | None


class Comparison(Settings):
    """A run's training steps. What could not be predicted is None."""

    format: Literal["realrl costs"] = "realrl costs"
    version: Literal[1] = 1
    cluster: str
    """Nodes x devices per node."""
    spec: Annotated[ClusterSpec | None, _reading(ClusterSpec)]
    """Its devices; None where the planner does not know their kind, and predicts nothing."""
    software: dict[str, str]
    """Package -> version."""
    models: dict[str, Annotated[Stored, _reading(Stored)]]
    """By role."""
    workload: Annotated[Workload, _reading(Workload)]
    """With the lengths that really occurred."""
    step: Seconds
    """From when the last rank has ended the step before until it has ended this one; steps that follow
    something else, such as an evaluation, count from their own start."""
    predicted_step_seconds: PositiveFloat | None
    """Of a step among many."""
    calls: tuple[CallCosts, ...] = Field(strict=False)
    """In the order of the graph."""
    reallocations: tuple[MoveCosts, ...] = Field(strict=False)
    reserved_bytes: PositiveInt | None
    """Most that torch's allocator held on a GPU, what it could not use included."""

    def save(self, directory: str | Path) -> None:
        """Write the files of a run directory; a reader sees the old ones or the new ones."""
        text = json.dumps(self.model_dump(mode="json"), indent=1)
        # What has nothing inside it stands on one line.
        text = re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda found: re.sub(r"\s*\n\s*", " ", found[0]), text)
        write_whole(Path(directory) / COSTS, text + "\n")
        lengths = {"prompts": self.workload.prompts, "answers": self.workload.answers}
        write_whole(Path(directory) / LENGTHS, json.dumps(lengths) + "\n")

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        """Read what a run has left in its directory; UserError where there is nothing of this version."""
        path = local_path(str(directory)) / COSTS
        if not path.is_file():
            raise UserError(
                f"{directory} holds no {COSTS}; name the run_dir of a run that has come to its first"
                " evaluation, checkpoint or end"
            )
        content = read_json(path)
        if content.get("version") != VERSION:
            found = brief(content.get("version"))
            raise UserError(f"{path} has version {found}, not {VERSION}; run again")
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise UserError(f"{path}: {explain(error, cls)}") from None
