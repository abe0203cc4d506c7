"""Environment variables that hurt. No torch."""

from collections.abc import Iterator, Mapping

from realrl.runtime.doctor.finding import Finding, ok, problem, warning

_SLOW = {
    "CUDA_LAUNCH_BLOCKING": ("1", "makes the host wait for every kernel"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "checks every collective"),
    "NCCL_P2P_DISABLE": ("1", "keeps GPUs from exchanging data directly"),
    "NCCL_SHM_DISABLE": ("1", "keeps GPUs of a machine from exchanging data in memory"),
    "NCCL_IB_DISABLE": ("1", "makes nodes exchange data by TCP instead of InfiniBand"),
    "NCCL_DEBUG": ("TRACE", "writes a line for every operation"),
    "TOKENIZERS_PARALLELISM": ("false", "has one thread tokenize the records"),
    "PYTHONMALLOC": ("debug", "checks every allocation of Python"),
    "CUDA_DEVICE_ORDER": ("FASTEST_FIRST", "numbers GPUs otherwise than nvidia-smi does"),
}
_FORCED = (
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NTHREADS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_BUFFSIZE",
)
"""Variables that overrule what NCCL would choose, and are often left over from an experiment."""


def check_variables(
    environment: Mapping[str, str], *, ranks: int, cores: int, gpus: int, launched: bool
) -> Iterator[Finding]:
    """Look for variables that slow a run down or break it.

    ranks, cores: of this machine; gpus: that its driver lists; launched: whether a launcher started this process.
    """
    before = 0
    for finding in (*_find_slow(environment), *_find_wrong(environment, ranks, cores, gpus, launched)):
        before += 1
        yield finding
    if not before:
        yield ok("environment", "no variable that slows a run down or breaks it")


def _find_slow(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name, (value, effect) in _SLOW.items():
        if environment.get(name, "").lower() == value.lower():
            yield warning("environment", f"{name}={value} {effect}; unset it unless you look for a fault")
    forced = [name for name in _FORCED if name in environment]
    if forced:
        yield warning(
            "environment", f"{', '.join(forced)} overrule NCCL's own choice; unset what is left over"
        )


def _find_wrong(
    environment: Mapping[str, str], ranks: int, cores: int, gpus: int, launched: bool
) -> Iterator[Finding]:
    threads = environment.get("OMP_NUM_THREADS")
    if threads is not None and not threads.split(",")[0].isdigit():
        yield problem("environment", f"OMP_NUM_THREADS={threads} is no number; unset it")
    elif threads is not None and int(threads.split(",")[0]) > max(1, cores // ranks):
        yield warning(
            "environment",
            f"OMP_NUM_THREADS={threads} in each of {ranks} processes is more than the {cores} cores;"
            f" set it to {max(1, cores // ranks)}, or unset it",
        )
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and gpus:
        yield from _check_visible(visible, ranks, gpus)
    if {"RANK", "WORLD_SIZE"} <= environment.keys() and not launched:
        yield problem(
            "environment",
            "RANK and WORLD_SIZE are set, but MASTER_ADDR and MASTER_PORT are not: every command takes itself for a"
            " rank that waits for others; unset them, or start it with torchrun",
        )


def _check_visible(visible: str, ranks: int, gpus: int) -> Iterator[Finding]:
    listed = [part.strip() for part in visible.split(",") if part.strip()]
    if not listed or listed == ["-1"]:
        yield warning(
            "environment", f"CUDA_VISIBLE_DEVICES={visible!r} hides all {gpus} GPUs; unset it to use them"
        )
    elif len(set(listed)) < len(listed):
        yield problem(
            "environment", f"CUDA_VISIBLE_DEVICES={visible} lists a GPU twice; torch then finds none"
        )
    elif any(part.lstrip("-").isdigit() and not 0 <= int(part) < gpus for part in listed):
        yield problem(
            "environment",
            f"CUDA_VISIBLE_DEVICES={visible} names a GPU that is not there: they are 0 to {gpus - 1}",
        )
    elif len(listed) < ranks:
        yield problem(
            "environment",
            f"CUDA_VISIBLE_DEVICES={visible} leaves {len(listed)} of {gpus} GPUs to {ranks} processes",
        )
