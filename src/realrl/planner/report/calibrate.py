"""Calibration of a profile from the measured call times of a run."""

from collections.abc import Iterable, Mapping

from realrl.config.errors import UserError, join
from realrl.config.user_code import name_function
from realrl.plan.placement import Placement
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.operators.tables import TABULATED
from realrl.planner.profile.corrections import Correction
from realrl.planner.profile.profile import FunctionTime, Profile, read_versions
from realrl.planner.report.comparison import Comparison
from realrl.planner.workload.batching import records_per_rank
from realrl.program.memory import StoredModel

_SHEETS = "times from data sheets (roofline)"


def describe_times(
    profile: Profile | None,
    path: str,
    spec: ClusterSpec,
    models: Mapping[str, StoredModel],
    functions: Iterable[str] = (),
) -> tuple[str, ...]:
    """Describe the sources of predicted times of models on a cluster, and the caveats of measured times.

    Also names the `functions` (by reference) that count no time, because no run has measured them.
    """
    return *_model_times(profile, path, spec, models), *_unmeasured(profile, spec, functions)


def _unmeasured(profile: Profile | None, spec: ClusterSpec, functions: Iterable[str]) -> list[str]:
    """Describe the functions that no run has measured on devices of this kind."""
    used = profile is not None and profile.device in {group.device.name for group in spec.groups}
    unknown = [
        name_function(name)
        for name in dict.fromkeys(functions)
        if not used or profile is None or profile.function_seconds(name) is None
    ]
    if not unknown:
        return []
    return [
        f"{join(unknown)} not measured, so counted as 0 s; realrl plan --calibrate RUN takes it from a run"
    ]


def _model_times(
    profile: Profile | None, path: str, spec: ClusterSpec, models: Mapping[str, StoredModel]
) -> tuple[str, ...]:
    """Describe the sources of predicted times, and the caveats of measured times."""
    modelled = _describe_models(spec, models)
    if profile is None:
        rough = any(group.device.cpu for group in spec.groups)
        return (
            *modelled[:-1],
            modelled[-1] + ", which are rough for a CPU; realrl profile measures it" * rough,
        )
    kinds = {group.device.name for group in spec.groups}
    if profile.device not in kinds:
        return *modelled, f"the profile {path} is of {profile.device}, so it was not used"
    missing = _missing(profile, models)
    if len(missing) == len(models):
        corrected = (
            f", corrected by runs ({path})" if profile.corrections else f"; {path} has none of these models"
        )
        return *modelled[:-1], modelled[-1] + corrected, *_doubts(profile, spec)
    sheets = [*missing]
    if len(kinds) > 1:
        sheets.append("the other devices")
    degrees = _degrees(profile, spec, {role: model for role, model in models.items() if role not in missing})
    if degrees:
        sheets.append("tp=" + ", ".join(map(str, degrees)))
    lacking = {role: models[role] for role in missing} or models
    sources = "tables and data sheets" if _find_tables(spec, lacking) else "data sheets"
    rest = f", but for {join(sheets)} from {sources}" if sheets else ""
    return f"times of {profile.device} measured ({path}){rest}", *_doubts(profile, spec)


def _find_tables(spec: ClusterSpec, models: Mapping[str, StoredModel]) -> list[str]:
    """List the device kinds whose tables of measured operators are used."""
    if all(model.dtype != TABULATED for model in models.values()):
        return []
    return list(dict.fromkeys(group.device.name for group in spec.groups if group.device.measured))


def _describe_models(spec: ClusterSpec, models: Mapping[str, StoredModel]) -> tuple[str, ...]:
    """Describe the sources of a call's terms without a profile."""
    tables = _find_tables(spec, models)
    if not tables:
        return (_SHEETS,)
    others = [role for role, model in models.items() if model.dtype != TABULATED]
    besides = [*(f"{role} in {models[role].dtype}" for role in others)]
    besides += dict.fromkeys(group.device.name for group in spec.groups if not group.device.measured)
    return (
        f"compute, decode, tensor, data from tables of operators measured on {join(tables)}",
        "launch from constants of the engine",
        f"the rest{', and all of ' + join(besides) if besides else ''} from data sheets",
    )


def _missing(profile: Profile, models: Mapping[str, StoredModel]) -> list[str]:
    """List the roles whose models the profile has not measured."""
    return [role for role, model in models.items() if not profile.degrees(model.shape, model.dtype)]


def _degrees(profile: Profile, spec: ClusterSpec, models: Mapping[str, StoredModel]) -> list[int]:
    """List the TP degrees that a plan may have, but that were not measured for some model."""
    lacking: set[int] = set()
    for group in spec.groups:
        if group.device.name == profile.device:
            per = group.devices_per_node
            for model in models.values():
                possible = {n for n in range(1, min(per, model.shape.heads) + 1) if per % n == 0}
                lacking |= possible - profile.degrees(model.shape, model.dtype)
    return sorted(lacking)


def _doubts(profile: Profile, spec: ClusterSpec) -> list[str]:
    """List differences between the conditions of the measurements and those of the cluster to plan for.

    The number of processes per node matters only on a CPU, because they share its cores.
    """
    doubts = []
    group = next(group for group in spec.groups if group.device.name == profile.device)
    if group.device.cpu and profile.layers and profile.processes != group.devices_per_node:
        doubts.append(f"measured by {profile.processes} processes on a node, not {group.devices_per_node}")
    if group.device.cpu and profile.layers and profile.threads not in (None, group.device.threads):
        doubts.append(
            f"measured with {profile.threads} threads in a process, and scaled to {group.device.threads}"
        )
    here = read_versions()
    for name in ("realrl", "torch"):
        then = profile.software.get(name)
        if then is not None and then.partition("+")[0] != here[name].partition("+")[0]:
            doubts.append(f"measured with {name} {then}; this is {here[name]}")
    return doubts


def calibrate_profile(profile: Profile | None, run: Comparison) -> Profile:
    """Return the profile under which each call of the run is predicted to take its measured median time.

    For a function, the profile gets the median seconds per item on the rank with the most items.

    Without a `profile`, the roofline of the first device kind of the run is corrected. Ratios are relative to
    predictions without corrections, so calibrating again with the same run changes nothing. A newer run of the same
    calls replaces an older one. Raises UserError for a run on devices that are unknown to the planner, or that are
    not of the profile's kind.
    """
    if run.spec is None:
        raise UserError(
            "the run cannot correct predictions: the planner does not know the kind of its devices"
        )
    kinds = [group.device.name for group in run.spec.groups]
    if profile is None:
        first = run.spec.groups[0]
        profile = Profile(
            device=kinds[0],
            processes=first.devices_per_node,
            threads=first.device.threads if first.device.cpu else None,
            software=run.software,
        )
    if profile.device not in kinds:
        raise UserError(f"the profile is of {profile.device}, but the run was on {', '.join(kinds)}")
    cost = CostModel(run.spec, profile.model_copy(update={"corrections": ()}))
    corrections = {old.about: old for old in profile.corrections}
    functions = {old.function: old for old in profile.functions}
    for of in run.calls:
        placement = Placement.parse(of.placement)
        steps = of.seconds.steps
        if run.spec.site(placement.mesh).device.name != profile.device:
            continue
        if of.call.function is not None:
            records = records_per_rank(run.workload.work(of.call), placement.strategy)
            name = of.call.function
            seconds = of.seconds.median / records
            functions[name] = FunctionTime(function=name, seconds=seconds, steps=steps)
            continue
        model = run.models[of.call.model_role]
        expected = cost.call(of.call, model, placement, run.workload).seconds
        new = Correction.of(of.call, model, placement.strategy, of.seconds.median / expected, steps)
        corrections[new.about] = new
    learnt = {"corrections": tuple(corrections.values()), "functions": tuple(functions.values())}
    return profile.model_copy(update=learnt)
