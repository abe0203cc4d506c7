"""Folding what a run has measured into a profile, so that the next prediction is nearer."""

from realrl.config.errors import UserError
from realrl.plan.placement import Placement
from realrl.planner.calibration.comparison import Comparison
from realrl.planner.cost.model import CostModel
from realrl.planner.profile.corrections import Correction
from realrl.planner.profile.profile import FunctionTime, Profile
from realrl.planner.workload.batching import records_per_rank


def calibrate_profile(profile: Profile | None, run: Comparison) -> Profile:
    """The profile with which each call of the run is predicted to take what it took, in the median of its steps; of
    a function, what it took per item of the rank that had most.

    None for `profile` corrects the roofline, for the first kind of the run's devices. Ratios are taken to what the
    profile's own measurements predict, so that calibrating again changes nothing, and a newer run takes the
    place of an older one of the same calls. UserError for a run that no prediction was possible for, or on other
    devices than the profile's.
    """
    if run.spec is None:
        raise UserError(
            "the run cannot correct predictions: the planner does not know the kind of its devices"
        )
    kinds = [group.device.name for group in run.spec.groups]
    if profile is None:
        per_node = run.spec.groups[0].devices_per_node
        profile = Profile(device=kinds[0], processes=per_node, software=run.software)
    if profile.device not in kinds:
        raise UserError(f"the profile is of {profile.device}, but the run was on {', '.join(kinds)}")
    cost = CostModel(run.spec, profile.model_copy(update={"corrections": ()}))
    found = {old.about: old for old in profile.corrections}
    functions = {old.function: old for old in profile.functions}
    for of in run.calls:
        placement, steps = Placement.parse(of.placement), of.seconds.steps
        if run.spec.group(placement.mesh).device.name != profile.device:
            continue
        if of.call.function is not None:
            records = records_per_rank(run.workload.work(of.call), placement.strategy)
            seconds, name = of.seconds.median / records, of.call.function
            functions[name] = FunctionTime(function=name, seconds=seconds, steps=steps)
            continue
        model = run.models[of.call.model_role]
        expected = cost.call(of.call, model, placement, run.workload).seconds
        new = Correction.of(of.call, model, placement.strategy, of.seconds.median / expected, steps)
        found[new.about] = new
    learnt = {"corrections": tuple(found.values()), "functions": tuple(functions.values())}
    return profile.model_copy(update=learnt)
