"""Calibration of a profile from the measured call times of a run."""

from realrl.config.errors import UserError
from realrl.plan.placement import Placement
from realrl.planner.calibration.comparison import Comparison
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.profile.corrections import Correction
from realrl.planner.profile.profile import FunctionTime, Profile
from realrl.planner.workload.batching import records_per_rank


def calibrate_profile(profile: Profile | None, run: Comparison) -> Profile:
    """Return the profile under which each call of the run is predicted to take its measured median time.

    Of a function, per item of the rank that had most.

    Without a `profile`, the roofline of the first device kind of the run is corrected. Ratios are relative to
    predictions without corrections, so that repeated calibration changes nothing, and a newer run replaces an older
    one of the same calls. UserError for a run without predictions, or on other devices than the profile's.
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
