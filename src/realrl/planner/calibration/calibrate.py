"""Folding what a run has measured into a profile, so that the next prediction is nearer."""

from realrl.config.errors import UserError
from realrl.plan.placement import Placement
from realrl.planner.calibration.comparison import Comparison
from realrl.planner.cost.model import CostModel
from realrl.planner.profile.corrections import Correction
from realrl.planner.profile.profile import Profile


def calibrate_profile(profile: Profile | None, run: Comparison) -> Profile:
    """The profile with which each call of the run is predicted to take what it took, in the median of its steps.

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
    for of in run.calls:
        model, placement = run.models[of.call.role], Placement.parse(of.placement)
        if run.spec.group(placement.mesh).device.name == profile.device:
            expected = cost.call(of.call, model, placement, run.workload).seconds
            ratio, steps = of.seconds.median / expected, of.seconds.steps
            new = Correction.of(of.call, model, placement.strategy, ratio, steps)
            found[new.about] = new
    return profile.model_copy(update={"corrections": tuple(found.values())})
