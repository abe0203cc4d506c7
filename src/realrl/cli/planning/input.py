"""Options of `realrl plan`, and functions that read and check them."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from realrl.config.errors import UserError
from realrl.config.explain import brief
from realrl.config.files import check_file
from realrl.config.json_file import read_json
from realrl.config.paths import local_path
from realrl.config.values import parse_bytes

if TYPE_CHECKING:
    from realrl.planner.cluster.cluster_spec import ClusterSpec
    from realrl.planner.cluster.failures import Failures
    from realrl.planner.report.report import Objective, Wanted
    from realrl.planner.simulate.scenario import Scenario
    from realrl.planner.workload.environment import EnvironmentTimes
    from realrl.recipe.experiment import Experiment
    from realrl.recipe.training import AsynchronyConfig
    from realrl.runtime.prepare.fit.changes import Draft
    from realrl.runtime.prepare.scenarios import Measured

FailuresPerDay = Annotated[
    str | None,
    typer.Option(
        metavar="N|N/1000",
        help="Failures per day that end a run: 3 for the whole cluster, or 0.47/1000 per 1,000 devices (the rate of"
        " Llama 3 on 16,384 H100). Plans are then compared by the expected time of a step with checkpoints and"
        " restarts; see docs/planning.md.",
    ),
]
RestartSeconds = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Time from a failure until training continues, if you know it; default: predicted.",
    ),
]
_MOST_EFFORT = 1e12
"""Maximum effort of a search, which would take more than a day."""


def parse_failures(
    per_day: str | None, restart_seconds: float | None, devices: int, experiment: "Experiment"
) -> "Failures | None":
    """Parse the failure rate of a cluster with this number of devices; None without a rate. Raises UserError."""
    from realrl.planner.cluster.failures import Failures

    if per_day is None:
        if restart_seconds is not None:
            raise UserError("--restart-seconds needs a failure rate: give --failures-per-day too")
        return None
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d*)?|\.\d+)\s*(/\s*1000)?\s*", per_day)
    if match is None or not float(match[1]):
        raise UserError(
            f"--failures-per-day: {brief(per_day)} is not a number above 0; write 3 for the whole cluster, or"
            " 0.47/1000 per 1,000 devices"
        )
    if restart_seconds is not None and not 0 <= restart_seconds < math.inf:
        raise UserError(f"--restart-seconds: {restart_seconds:g} must be at least 0")
    return Failures(
        per_device_day=float(match[1]) / (1000 if match[2] else devices),
        restart_seconds=restart_seconds,
        notice_seconds=experiment.launch.freeze_seconds,
        asynchronous=experiment.checkpoint.asynchronous,
    )


Lengths = tuple[int, ...] | None
"""Measured lengths in tokens; None if there are none."""


def read_lengths(path: str) -> "Measured":
    """Read the lengths of prompts and answers, and the times of an environment, from a JSON file, or from the
    `lengths.json` of a run's directory.

    The form is `{"prompts": [..], "answers": [..], "longest": .., "environment": {..}}`, and each part may be
    missing. `longest` is the mean length of the longest answer of a step. It tells more than `answers` if these are
    only quantiles. The fields of `environment` are those of `EnvironmentTimes`. Raises UserError for anything else.
    """
    from realrl.runtime.prepare.scenarios import Measured

    file = local_path(path)
    file = file / "lengths.json" if file.is_dir() else file
    try:
        content = read_json(file)
    except UserError as error:
        raise UserError(f"--lengths: {error}") from None
    if not content.keys() <= {"prompts", "answers", "longest", "environment"}:
        raise UserError(
            f'--lengths: {file} must hold {{"prompts": [..], "answers": [..]}}, with an environment also'
            ' "environment": {"seconds": [..], "turns": [..], "given": [..]}'
        )
    prompts, answers = (_check_numbers(content.get(key), f"{file}: {key}") for key in ("prompts", "answers"))
    longest = content.get("longest", 0)
    if type(longest) is not int or longest < 0 or (longest and answers is None):
        raise UserError(f"--lengths: {file}: longest must be a number of tokens beside answers")
    environment = _read_environment(content.get("environment"), f"{file}: environment")
    if prompts is None and answers is None and environment is None:
        raise UserError(f"--lengths: {file} has no lengths")
    return Measured(prompts=prompts, answers=answers, longest=longest, environment=environment)


def _read_environment(value: Any, where: str) -> "EnvironmentTimes | None":
    from realrl.planner.workload.environment import EnvironmentTimes

    if value is None:
        return None
    fields = {"seconds", "turns", "given"}
    if not isinstance(value, dict) or value.keys() - {"agents"} != fields:
        raise UserError(f"--lengths: {where} must have seconds, turns and given")
    agents = value.get("agents", False)
    if not isinstance(agents, bool):
        raise UserError(f"--lengths: {where}.agents must be true or false")
    seconds = value["seconds"]
    fine = isinstance(seconds, list) and all(
        type(one) in (int, float) and 0 <= one < math.inf for one in seconds
    )
    if not fine or not seconds:
        raise UserError(f"--lengths: {where}.seconds must be a list of numbers of at least 0")
    turns = _check_numbers(value["turns"], f"{where}.turns", "turns")
    given = _check_numbers(value["given"], f"{where}.given")
    if turns is None or given is None or 0 in turns:
        raise UserError(f"--lengths: {where}: turns and given must not be empty, and turns are at least 1")
    return EnvironmentTimes(tuple(map(float, seconds)), turns, given, agents)


def _check_numbers(value: object, where: str, of: str = "tokens") -> Lengths:
    """Check a list of numbers of tokens, or `of` something else; None for an empty or a missing one."""
    if value is None or value == []:
        return None
    if not isinstance(value, list) or any(type(n) is not int or n < 0 for n in value):
        raise UserError(f"--lengths: {where} must be a list of numbers of {of}")
    return tuple(value)


def _check_lengths(measured: "Measured", experiment: "Experiment") -> None:
    """Check that records of the recipe can have these lengths. Raises UserError.

    Answers may be longer, because generation cuts them off.
    """
    generates = experiment.spec.generation is not None
    name = "max_prompt_tokens" if generates else "max_tokens"
    most = getattr(experiment.data, name)
    for tokens in measured.prompts or ():
        if not 0 < tokens <= most:
            raise UserError(f"--lengths: prompts: {tokens} is not between 1 and data.{name}={most}")
    if generates and 0 in (measured.answers or ()):
        raise UserError("--lengths: answers: every answer must have at least 1 token")


def parse_nodes(text: str | None) -> tuple[int, ...]:
    """Parse `1,2,4,8` as numbers; empty for None. Raises UserError."""
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


PORTIONS = 8
"""Number of portions that `--staleness` tries."""


def list_asynchrony(staleness: int, *, partial: bool, portions: bool) -> "list[AsynchronyConfig]":
    """List the settings of asynchrony that `--staleness` compares: the synchronous ones first.

    `partial`: whether answers may be spread over several steps. `portions`: whether they may be handed on in
    portions.
    """
    from realrl.recipe.training import AsynchronyConfig

    found = [AsynchronyConfig(), *([AsynchronyConfig(portions=PORTIONS)] if portions else [])]
    for steps in range(1, staleness + 1):
        found.append(AsynchronyConfig(staleness=steps))
        if partial:
            if steps > 1:
                found.append(AsynchronyConfig(staleness=steps, partial=True))
            found.append(AsynchronyConfig(staleness=steps, partial=True, overlap=False))
    return found


def replays_routers(experiment: "Experiment") -> bool:
    """Whether a mixture of experts replays the experts of its samples, which partial answers and portions do not
    allow."""
    from realrl.runtime.prepare.job import open_models

    synchronous = experiment.model_copy(update={"asynchrony": type(experiment.asynchrony)()})
    graph = open_models(synchronous, download=True).graph
    return any(call.records_experts for call in graph.calls)


def list_device_overrides(cluster: str | None) -> list[str]:
    """List the overrides that `--cluster` implies: the device type, which decides what `auto` means for dtypes."""
    from realrl.planner.cluster.cluster_spec import ClusterSpec

    if cluster is None:
        return []
    cpu = any(group.device.cpu for group in ClusterSpec.parse(cluster).groups)
    return [f"device={'cpu' if cpu else 'cuda'}"]


def choose_devices(
    cluster: str | None, experiment: "Experiment", measured: "Measured"
) -> tuple["ClusterSpec", str]:
    """Choose the devices to plan for, and explain the choice in a note.

    `--cluster` comes first, then the recipe's `cluster`. If neither names a kind of device, the plan is for CPU
    processes, one per device of the recipe; for `cluster: auto`, the planner chooses their number.
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
    return spec, f"without --cluster, this plan is for CPU processes of this machine, {spec.name}{each}"


def read_scenario(
    experiment: "Experiment", cluster: str | None, profile: str | None, lengths: str | None
) -> tuple["Draft", "Scenario", str]:
    """Return a draft of the recipe, the scenario to plan for, and a note on the origin of its predicted times.

    If no plan fits, the search for remedies changes the draft.
    """
    from realrl.planner.profile.profile import Profile
    from realrl.planner.report.calibrate import describe_times
    from realrl.runtime.prepare.fit.changes import Draft
    from realrl.runtime.prepare.scenarios import Measured
    from realrl.runtime.prepare.trained_parts import list_trained_parts

    measured = read_lengths(lengths) if lengths else Measured()
    _check_lengths(measured, experiment)
    if measured.environment is not None and experiment.environment_config is None:
        raise UserError(f"--lengths: {lengths} has times of an environment, but the recipe has none")
    unknown = ""
    if experiment.environment_config is not None and measured.environment is None:
        unknown = (
            "the environment counts as 0 s, and its tokens as sampled, because no --lengths have its times"
        )
    path = profile or experiment.profile
    times = Profile.load(path) if path else None
    measured = replace(measured, profile=times)
    spec, remark = choose_devices(cluster, experiment, measured)
    draft = Draft(experiment, spec, measured=measured)
    scenario = draft.scenario()
    functions = [call.function for call in scenario.graph.functions if call.function is not None]
    source = describe_times(times, path or "", spec, scenario.models, functions)
    remarks = (*source, unknown, remark, *list_trained_parts(scenario.models))
    return draft, scenario, "; ".join(filter(None, remarks))


def parse_objective(text: str) -> "Objective":
    """Parse `time` or `cost`. Raises UserError."""
    if text not in ("time", "cost"):
        raise UserError(f"--objective: {text!r} is neither time nor cost")
    return "time" if text == "time" else "cost"


def parse_wanted(target_step: str | None, budget: float | None, *, others: bool) -> "Wanted | None":
    """Parse the target for choosing a cluster: a step time (`60`, `60s`, `2min`) or a price per hour.

    Returns None if there is no target. `others`: whether another option chooses a number of nodes. Raises UserError
    for a malformed target, or if more than one option chooses the cluster.
    """
    from realrl.planner.report.report import Wanted

    if target_step is None and budget is None:
        return None
    if (target_step is not None and budget is not None) or others:
        raise UserError(
            "--target-step, --budget, and --nodes or --objective all choose a cluster: give only one of them"
        )
    if budget is not None:
        if not 0 < budget < math.inf:
            raise UserError(f"--budget: {budget:g} must be a price per hour above 0")
        return Wanted(price_per_hour=budget)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|min)?\s*", target_step or "")
    if match is None or not float(match[1]):
        raise UserError(
            f"--target-step: {brief(target_step)} is not a time above 0; write seconds, 60s or 2min"
        )
    return Wanted(step_seconds=float(match[1]) * (60 if match[2] == "min" else 1))


def check_effort(effort: float | None) -> None:
    """Check the effort of a search. Raises UserError."""
    if effort is not None and not 0 < effort <= _MOST_EFFORT:
        raise UserError(f"--effort: {effort:g} must be above 0 and at most {_MOST_EFFORT:g}")


def files_to_write(*sources: str | None, **paths: str | None) -> dict[str, Path]:
    """Map each given option to the file that it names.

    Raises UserError if a file cannot be written, is named twice, or is one of the `sources` that are read.
    """
    taken = {local_path(source).resolve(): source for source in sources if source is not None}
    files = {}
    for option, path in paths.items():
        if path is None:
            continue
        files[option] = file = local_path(path)
        check_file(f"--{option} {path}", file)
        if file.resolve() in taken:
            raise UserError(f"--{option} {path}: this is {taken[file.resolve()]}; name another file")
        taken[file.resolve()] = f"the file of --{option}"
    if "out" in files and files["out"].suffix not in (".yaml", ".yml"):
        raise UserError(f"--out {files['out']}: the name of a plan file ends in .yaml")
    return files
