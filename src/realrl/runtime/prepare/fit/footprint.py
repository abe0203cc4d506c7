"""Peak memory of devices under a recipe's plan, in steps of every kind. No torch."""

from dataclasses import dataclass

from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.simulate.estimate import DeviceMemory, NodeMemory, find_full_host
from realrl.planner.simulate.footprints import compute_footprints, compute_host_memory
from realrl.recipe.experiment import Experiment
from realrl.runtime.prepare.compile import Compiled
from realrl.runtime.prepare.devices import host_is_device
from realrl.runtime.prepare.scenarios import phase_scenarios


@dataclass(frozen=True)
class PeakDevice:
    """Device with the least free memory, or the largest shortfall."""

    phase: str
    """Name of the kind of step, in `Compiled.phases`."""
    device: DeviceMemory

    @property
    def shortfall(self) -> int:
        """Bytes by which it is too small; negative where it is not."""
        return self.device.peak.bytes - self.device.capacity


def compute_device_memory(
    experiment: Experiment, compiled: Compiled, spec: ClusterSpec
) -> dict[str, tuple[DeviceMemory, ...]]:
    """Compute the memory of every device through each kind of step, by the names of `Compiled.phases`.

    UserError where a call has fewer records than data-parallel ranks.
    """
    scenarios, memory = phase_scenarios(experiment, compiled, spec), compiled.memory
    if host_is_device(experiment, spec):
        memory = memory.in_host_memory()
    return {
        name: compute_footprints(scenarios[name], memory, phase.programs)
        for name, phase in compiled.phases.items()
    }


def find_short_host(experiment: Experiment, compiled: Compiled, spec: ClusterSpec) -> NodeMemory | None:
    """Find the host whose memory what is offloaded exceeds most; None where all suffice."""
    scenario = next(iter(phase_scenarios(experiment, compiled, spec).values()))
    return find_full_host(compute_host_memory(scenario, compiled.memory))


def find_peak_device(experiment: Experiment, compiled: Compiled, spec: ClusterSpec) -> PeakDevice:
    """Find the device with least memory to spare, of all devices in steps of every kind."""
    found = compute_device_memory(experiment, compiled, spec)
    devices = (PeakDevice(phase, device) for phase, devices in found.items() for device in devices)
    return max(devices, key=lambda one: one.shortfall)
