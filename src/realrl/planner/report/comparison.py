"""Measured and predicted costs of a run: the file `costs.json` of its directory."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, TypeAdapter, ValidationError

from realrl.config.base import Settings
from realrl.config.errors import UserError
from realrl.config.explain import brief, explain
from realrl.config.files import write_whole
from realrl.config.json_file import read_json, write_readable
from realrl.config.paths import local_path
from realrl.dataflow.call import Call
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.simulate.estimate import Interval
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel

COSTS, LENGTHS = "costs.json", "lengths.json"
"""Files of a run directory: a `Comparison`, and quantiles of prompt and answer lengths in tokens, with the expected
length of a step's longest answer and quantiles of the environment's times."""

VERSION: Literal[1] = 1
"""Version of the file format. Files of other versions are rejected."""


def _reading(cls: type[Any]) -> BeforeValidator:
    """Return a validator that reads a dataclass from its JSON form."""
    adapter = TypeAdapter[Any](cls)
    return BeforeValidator(lambda value: adapter.validate_python(value) if isinstance(value, dict) else value)


class Seconds(Settings):
    """Distribution of a time over the steps of a run."""

    median: PositiveFloat
    least: PositiveFloat
    most: PositiveFloat
    steps: PositiveInt
    """Number of steps measured."""

    @classmethod
    def of(cls, times: Sequence[float]) -> Self:
        """Summarise one or more times in seconds. Times below one nanosecond, the clock's resolution, count as one
        nanosecond."""
        times = [max(time, 1e-9) for time in times]
        return cls(median=median(times), least=min(times), most=max(times), steps=len(times))


def waiting_for(function: str) -> str:
    """Return the name of the measurement of how long ranks wait for a function."""
    return f"waiting for {function}"


class CallCosts(Settings):
    """Measured and predicted costs of one call of a run."""

    call: Annotated[Call, _reading(Call)]
    placement: str
    """Placement in its text form."""
    seconds: Seconds
    """Time from the last rank's start of the call to the last rank's end. For a function, this is its time on the
    slowest rank."""
    waited: Seconds | None = None
    """Longest time that a rank waited for a function. None for a call that has a model."""
    predicted_seconds: PositiveFloat | None
    terms: dict[str, float]
    """Predicted seconds by term."""
    bytes: PositiveInt | None
    """Peak bytes of tensors on a device of the mesh during the call and its reallocation. None if not measured."""
    predicted_bytes: PositiveInt | None
    """Predicted peak bytes, without the allowance for fragmentation."""


class MoveCosts(Settings):
    """Measured and predicted time of one reallocation of a run."""

    instruction: str
    """Instruction in its text form."""
    seconds: Seconds
    predicted_seconds: float | None


class Comparison(Settings):
    """Measured and predicted costs of a run's training steps. Predictions that were not possible are None."""

    format: Literal["realrl costs"] = "realrl costs"
    version: Literal[1] = 1
    cluster: str
    """Cluster as nodes x devices per node."""
    spec: Annotated[ClusterSpec | None, _reading(ClusterSpec)]
    """Devices of the cluster. None if the planner does not know their kind."""
    software: dict[str, str]
    """Versions by package."""
    models: dict[str, Annotated[StoredModel, _reading(StoredModel)]]
    """Models by role."""
    workload: Annotated[Workload, _reading(Workload)]
    """Workload with the measured lengths."""
    step: Seconds
    """Time between the ends of consecutive steps on the last rank. After a pause, such as an evaluation, a step
    counts from its own start."""
    predicted_step_seconds: PositiveFloat | None
    """Predicted steady-state seconds per step."""
    predicted_interval: Annotated[Interval | None, _reading(Interval)] = None
    """Interval that was predicted to contain the seconds per step with probability `LEVEL`. None if not predicted,
    and in older files."""
    calls: tuple[CallCosts, ...] = Field(strict=False)
    """Costs of calls, in the order of the graph."""
    reallocations: tuple[MoveCosts, ...] = Field(strict=False)
    reserved_bytes: PositiveInt | None
    """Peak bytes reserved by torch's caching allocator on a GPU, fragmentation included."""
    resident_bytes: PositiveInt | None = None
    """Largest resident memory of any process after the last measured step: tensors, libraries, and memory that the
    host's allocator keeps. None if the system does not report it."""
    peak_resident_bytes: PositiveInt | None = None
    """Largest resident memory of any process up to the end of the last measured step."""

    def save(self, directory: str | Path) -> None:
        """Write the files of a run directory atomically."""
        write_readable(Path(directory) / COSTS, self.model_dump(mode="json"))
        workload = self.workload
        measured: dict[str, Any] = {"prompts": workload.prompts, "answers": workload.answers}
        if workload.longest:
            measured["longest"] = workload.longest
        if workload.environment is not None:
            measured["environment"] = asdict(workload.environment.times)
        write_whole(Path(directory) / LENGTHS, json.dumps(measured) + "\n")

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        """Read the costs of a run from its directory. Raises UserError if there are none of this version."""
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
