"""Needs of a recipe: libraries, files, memory, and bytes of a checkpoint. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from realrl.config.errors import UserError
from realrl.config.paths import is_local
from realrl.huggingface.directory import check_directories
from realrl.plan.cluster import Cluster
from realrl.plan.presets import SEARCH
from realrl.recipe.experiment import Experiment
from realrl.recipe.sources import list_sources
from realrl.runtime.doctor.finding import Finding, ok, problem
from realrl.runtime.output.trackers import check_trackers
from realrl.runtime.prepare.compile import Compiled, compile_recipe, models
from realrl.runtime.prepare.devices import check_kind
from realrl.runtime.prepare.fit.check import check_fit
from realrl.runtime.prepare.gpu import Here, try_kernels

_FLOAT32 = 4


@dataclass(frozen=True)
class RecipeNeeds:
    """A recipe's plan, as far as it is known without asking anybody."""

    compiled: Compiled | None
    error: str = ""

    @property
    def checkpoint_bytes(self) -> int | None:
        """Bytes of a checkpoint with all that a resumed run needs; None where a model's sizes are not known."""
        if self.compiled is None or self.compiled.unknown:
            return None
        total = 0
        for stored in self.compiled.memory.stored.values():
            for parameters in stored.sets.values():
                if not parameters.trainable:
                    continue
                number = sum(tensor.numel for tensor in parameters.tensors)
                # Two moments, and a master copy of parameters of lower precision.
                states = 2 + (stored.element_bytes < _FLOAT32)
                total += number * (stored.element_bytes + _FLOAT32 * states)
        return total


def find_needs(experiment: Experiment, cluster: Cluster) -> RecipeNeeds:
    """Compile a recipe for a cluster; what is wrong with it is kept for `check_recipe`."""
    if experiment.plan == SEARCH:
        return RecipeNeeds(None)
    try:
        return RecipeNeeds(compile_recipe(experiment, cluster))
    except UserError as error:
        return RecipeNeeds(None, str(error))


def check_recipe(
    experiment: Experiment, cluster: Cluster, needs: RecipeNeeds, here: Here | None
) -> Iterator[Finding]:
    """Check what `realrl train` would before it loads anything; `here`: the device, where it is known."""
    if needs.error:
        yield problem("recipe", needs.error)
    failed = bool(needs.error)
    for check in (check_directories, check_trackers):
        try:
            check(experiment)
        except UserError as error:
            failed = True
            yield problem("recipe", str(error))
    try:
        if here is not None:
            check_kind(experiment, cluster, here)
            if here != "cpu":
                try_kernels(experiment.kernels)
        if needs.compiled is not None and not needs.compiled.unknown:
            check_fit(experiment, needs.compiled, here)
    except UserError as error:
        failed = True
        yield problem("recipe", str(error))
    if not failed:
        later = "; its plan is searched for when it starts" if experiment.plan == SEARCH else ""
        unknown = needs.compiled is not None and needs.compiled.unknown
        sizes = f"; the sizes of {', '.join(unknown)} are asked of the hub when it starts" if unknown else ""
        yield ok("recipe", f"{experiment.algorithm} on cluster {cluster} is expected to fit{later}{sizes}")


def try_functions(experiment: Experiment) -> Iterator[Finding]:
    """Load the functions of a recipe, and try its verifiers, as a run would before it starts."""
    # It needs torch, which must not keep the other checks from a machine without it.
    from realrl.runtime.prepare.functions import check_functions

    try:
        names = check_functions(experiment)
    except UserError as error:
        yield problem("functions", str(error))
        return
    if names:
        yield ok("functions", f"{', '.join(names)} {'work' if len(names) > 1 else 'works'}")


def list_hub_names(experiment: Experiment) -> list[str]:
    """List the models and data sets that a recipe takes from the hub."""
    named = [source for config in models(experiment).values() for source in (config.path, config.tokenizer)]
    data = [given for given in (experiment.data.train, experiment.data.eval) if given is not None]
    # `name:split`, see data.train.
    sets = {source.path for given in data for source in list_sources(given) if ":" in Path(source.path).name}
    return sorted({source for source in named if source is not None and not is_local(source)} | sets)
