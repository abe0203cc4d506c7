"""Input of `realrl plan` besides a recipe: cluster, measured lengths, profile, and files to write."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from realrl.config.errors import UserError
from realrl.config.explain import brief
from realrl.config.files import check_file
from realrl.config.json_file import read_json
from realrl.config.paths import local_path
from realrl.config.values import parse_bytes

if TYPE_CHECKING:
    from realrl.planner.cluster.cluster_spec import ClusterSpec
    from realrl.planner.report.report import Objective, Wanted
    from realrl.planner.simulate.scenario import Scenario
    from realrl.recipe.experiment import Experiment
    from realrl.runtime.prepare.fit.changes import Draft
    from realrl.runtime.prepare.scenarios import Measured

_MOST_EFFORT = 1e12
"""Effort of more than a day."""


@dataclass(frozen=True)
class Lengths:
    """Measured tokens of prompts and of answers; None where nothing was measured."""

    prompts: tuple[int, ...] | None = None
    answers: tuple[int, ...] | None = None


def read_lengths(path: str) -> Lengths:
    """Read lengths from a JSON file, or from the `lengths.json` of a run's directory.

    The form is `{"prompts": [..], "answers": [..]}`; UserError for anything else.
    """
    file = local_path(path)
    file = file / "lengths.json" if file.is_dir() else file
    try:
        content = read_json(file)
    except UserError as error:
        raise UserError(f"--lengths: {error}") from None
    if not content.keys() <= {"prompts", "answers"}:
        raise UserError(f'--lengths: {file} must hold {{"prompts": [..], "answers": [..]}}')
    lengths = Lengths(*(_numbers(content.get(key), f"{file}: {key}") for key in ("prompts", "answers")))
    if lengths == Lengths():
        raise UserError(f"--lengths: {file} has no lengths")
    return lengths


def _check_lengths(lengths: Lengths, experiment: "Experiment") -> None:
    """Check that records of the recipe can have these lengths; else UserError.

    Answers may be longer: generation cuts them off.
    """
    generates = experiment.spec.generation is not None
    name = "max_prompt_tokens" if generates else "max_tokens"
    most = getattr(experiment.data, name)
    for tokens in lengths.prompts or ():
        if not 0 < tokens <= most:
            raise UserError(f"--lengths: prompts: {tokens} is not between 1 and data.{name}={most}")
    if generates and 0 in (lengths.answers or ()):
        raise UserError("--lengths: answers: every answer must have at least 1 token")


def _numbers(value: object, where: str) -> tuple[int, ...] | None:
    """Check a list of lengths; None where nothing is given."""
    if value is None or value == []:
        return None
    if not isinstance(value, list) or any(type(n) is not int or n < 0 for n in value):
        raise UserError(f"--lengths: {where} must be a list of numbers of tokens")
    return tuple(value)


def parse_nodes(text: str | None) -> tuple[int, ...]:
    """Parse `1,2,4,8` as numbers; nothing for None. UserError for anything else."""
    if text is None:
        return ()
    if not re.fullmatch(r"\s*[1-9]\d{0,8}\s*(,\s*[1-9]\d{0,8}\s*)*", text):
        raise UserError(
            f"--nodes: {brief(text)} is not understood; write numbers of nodes, for example 1,2,4,8"
        )
    numbers = tuple(int(number) for number in text.split(","))
    if len(set(numbers)) < len(numbers):
        raise UserError(f"--nodes: {brief(text)} names a number twice")
    return numbers


def list_device_overrides(cluster: str | None) -> list[str]:
    """List what devices that are named on the command line say of a recipe: what `auto` means for its types."""
    from realrl.planner.cluster.cluster_spec import ClusterSpec

    if cluster is None:
        return []
    cpu = any(group.device.cpu for group in ClusterSpec.parse(cluster).groups)
    return [f"device={'cpu' if cpu else 'cuda'}"]


def choose_devices(
    cluster: str | None, experiment: "Experiment", measured: "Measured"
) -> tuple["ClusterSpec", str]:
    """Choose the devices to plan for, and write a note on how they were chosen.

    Those that are named, or that the recipe's `cluster` names, else as many CPU processes as it has devices; for
    `auto` as many as the planner chooses by what was `measured`.
    """
    from realrl.plan.presets import PRESETS, SEARCH
    from realrl.planner.cluster.cluster_spec import ClusterSpec
    from realrl.runtime.prepare.cluster import named_cluster, written_cluster
    from realrl.runtime.prepare.devices import spec_of, with_host_memory, with_memory
    from realrl.runtime.prepare.processes import choose_processes

    if cluster is not None:
        named = with_host_memory(ClusterSpec.parse(cluster), experiment)
        memory = experiment.device_memory
        return named if memory is None else with_memory(named, parse_bytes(memory)), ""
    on_cpus = experiment.model_copy(update={"device": "cpu"})
    counted, chosen = written_cluster(experiment.cluster), ""
    if counted is None:
        plan = SEARCH if experiment.plan in PRESETS else experiment.plan
        choice = choose_processes(on_cpus.model_copy(update={"plan": plan}), measured)
        counted, chosen = choice.chosen.cluster, f"; cluster=auto chose {choice}"
    spec = spec_of(on_cpus, counted)
    assert spec is not None, "CPUs are a kind"
    if named_cluster(experiment.cluster) is not None:
        return spec, ""
    threads = spec.groups[0].device.threads
    each = chosen or f", with {threads} thread{'s' * (threads > 1)} each"
    return spec, f"no --cluster was named, so this is for CPU processes of this machine, {spec.name}{each}"


def read_scenario(
    experiment: "Experiment", cluster: str | None, profile: str | None, lengths: str | None
) -> tuple["Draft", "Scenario", str]:
    """Read what is to be planned, as it is written and as it is predicted; also the source of its times, and
    remarks."""
    from realrl.planner.profile.profile import Profile
    from realrl.planner.report.calibrate import describe_times
    from realrl.runtime.prepare.fit.changes import Draft
    from realrl.runtime.prepare.scenarios import Measured
    from realrl.runtime.prepare.trained_parts import list_trained_parts

    known = read_lengths(lengths) if lengths else Lengths()
    _check_lengths(known, experiment)
    path = profile or experiment.profile
    times = Profile.load(path) if path else None
    measured = Measured(times, known.prompts, known.answers)
    spec, remark = choose_devices(cluster, experiment, measured)
    draft = Draft(experiment, spec, measured=measured)
    scenario = draft.scenario()
    functions = [call.function for call in scenario.graph.functions if call.function is not None]
    source = describe_times(times, path or "", spec, scenario.models, functions)
    remarks = (*source, remark, *list_trained_parts(scenario.models))
    return draft, scenario, "; ".join(filter(None, remarks))


def parse_objective(text: str) -> "Objective":
    """Parse `time` or `cost`; UserError for anything else."""
    if text not in ("time", "cost"):
        raise UserError(f"--objective: {text!r} is neither time nor cost")
    return "time" if text == "time" else "cost"


def parse_wanted(target_step: str | None, budget: float | None, *, others: bool) -> "Wanted | None":
    """Parse what a cluster is chosen by: `60`, `60s` or `2min`, or a price per hour; None for neither.

    UserError for anything else, and for both, or one beside options that choose a number of nodes (`others`).
    """
    from realrl.planner.report.report import Wanted

    if target_step is None and budget is None:
        return None
    if (target_step is not None and budget is not None) or others:
        raise UserError(
            "--target-step, --budget, and --nodes or --objective choose a cluster: give one of them"
        )
    if budget is not None:
        if not 0 < budget < math.inf:
            raise UserError(f"--budget: {budget:g} must be a price per hour above 0")
        return Wanted(price_per_hour=budget)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|min)?\s*", target_step or "")
    if match is None or not float(match[1]):
        raise UserError(f"--target-step: {brief(target_step)} is no time above 0; write seconds, 60s or 2min")
    return Wanted(step_seconds=float(match[1]) * (60 if match[2] == "min" else 1))


def check_effort(effort: float | None) -> None:
    """Check that the effort of a search is above 0 and finite; else UserError."""
    if effort is not None and not 0 < effort <= _MOST_EFFORT:
        raise UserError(f"--effort: {effort:g} must be above 0 and at most {_MOST_EFFORT:g}")


def files_to_write(*sources: str | None, **paths: str | None) -> dict[str, Path]:
    """Map options to the files that they name, for those that are given.

    UserError for one that cannot be written, or is one of the `sources` that are read, or named twice.
    """
    taken = {local_path(source).resolve(): source for source in sources if source is not None}
    files = {}
    for option, path in paths.items():
        if path is None:
            continue
        files[option] = file = local_path(path)
        check_file(f"--{option} {path}", file)
        if file.resolve() in taken:
            raise UserError(f"--{option} {path}: this file is {taken[file.resolve()]}; name another one")
        taken[file.resolve()] = f"that of --{option}"
    if "out" in files and files["out"].suffix not in (".yaml", ".yml"):
        raise UserError(f"--out {files['out']}: the name of a plan file ends in .yaml")
    return files
