"""Peak arithmetic and memory bandwidth of a device, as far as they are known."""

from realrl.plan.placement import Dtype
from realrl.planner.cluster.devices import DeviceKind, compute_thread_speedup
from realrl.planner.profile.profile import Profile


def find_peak_flops(device: DeviceKind, dtype: Dtype, profile: Profile | None = None) -> float | None:
    """Find the peak FLOP/s of matmuls of models in a data type.

    It is that of the data sheet or the cluster file; else, as for a CPU, the largest that a profile of such devices
    has measured; else None.
    """
    if ("fp32_flops" if dtype == "float32" else "bf16_flops") not in device.guessed:
        return device.flops(dtype)
    return _scale(device, profile, None if profile is None else profile.peak_flops(dtype))


def find_peak_bandwidth(device: DeviceKind, profile: Profile | None = None) -> float | None:
    """Find the bytes per second of device memory, from the same sources as `find_peak_flops`."""
    if "memory_bytes_per_s" not in device.guessed:
        return device.memory_bytes_per_s
    return _scale(device, profile, None if profile is None else profile.memory_bytes_per_s())


def _scale(device: DeviceKind, profile: Profile | None, measured: float | None) -> float | None:
    """Scale a rate that a profile has measured to a device's number of threads; None for one of other devices."""
    if profile is None or measured is None or profile.device != device.name:
        return None
    if profile.threads is None or not device.cpu:
        return measured
    return measured * compute_thread_speedup(device.threads) / compute_thread_speedup(profile.threads)
