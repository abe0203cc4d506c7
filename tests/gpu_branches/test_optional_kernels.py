"""Kernels of other packages, without the packages and without a GPU: what switches them on, and what is refused."""

import importlib.metadata
import inspect
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import _fa4

from realrl.cli.app import run_app
from realrl.config.errors import UserError
from realrl.engine import optional_kernels
from realrl.engine.generation.sampler import Sampler
from realrl.engine.optional_kernels import REQUIREMENTS, check_heads, use_kernels
from realrl.families.sizes import SHAPES
from realrl.recipe import checks
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.load import load_experiment
from realrl.runtime.output.notes import list_kernel_notes
from realrl.runtime.prepare.gpu import try_kernels
from tests.conftest import World

GPU = torch.device("cuda", 0)
adapted = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 does not train with FlashAttention 4"
)
NEEDED = {
    "flash-attn-4": "4.0.0b36",
    "nvidia-cutlass-dsl": "4.8.1",
    "quack-kernels": "0.6.5",
    "flashinfer-python": "0.7.2.post1",
}
FLASH, ADAPTED = "flash_attn.cute.interface", "realrl.model.gpu.flash_attention_4"


@pytest.fixture(autouse=True)
def no_package() -> Iterator[None]:
    """What a test has imported in the place of FlashAttention 4 is forgotten."""
    yield
    sys.modules.pop(ADAPTED, None)
    _fa4._fa4_import_module.cache_clear()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A GPU that has all kernels, of which none can run, and versions of packages."""
    versions = dict(NEEDED)

    def find(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(optional_kernels, "version", find)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    return versions


def install(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    """A module that can be imported, and the packages that it is in."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    vars(sys.modules[name]).update(functions)


def refuse(names: list[str], words: str, device: torch.device = GPU) -> None:
    with pytest.raises(UserError, match=words), use_kernels(names, device):
        raise AssertionError("accepted")
    assert attention.current_flash_attention_impl() is None


def test_extras_install_the_versions_that_are_checked() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert {name: project["optional-dependencies"][name] for name in REQUIREMENTS} == {
        name: list(requirements) for name, requirements in REQUIREMENTS.items()
    }


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_a_cpu_has_none_of_these_kernels(name: str) -> None:
    refuse([name], rf"kernels=\[{name}\]: it computes on GPUs", torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "package", "found"),
    [
        ("fa4", "flash-attn-4", None),
        ("fa4", "flash-attn-4", "4.0.0b18"),
        ("fa4", "flash-attn-4", "4.0.0"),
        ("fa4", "nvidia-cutlass-dsl", "4.9.0"),
        ("fa4", "quack-kernels", None),
        ("flashinfer", "flashinfer-python", None),
        ("flashinfer", "flashinfer-python", "0.7.0.post1"),
    ],
)
def test_a_package_that_is_missing_or_of_another_version_is_named_with_its_command(
    hopper: dict[str, str], name: str, package: str, found: str | None
) -> None:
    hopper.pop(package)
    if found is not None:
        hopper[package] = found
    state = "is not installed" if found is None else f"{found} is installed"
    refuse([name], rf"{package} {state}; run pip install 'realrl\[{name}\]'; leave {name} out")


@pytest.mark.usefixtures("hopper")
def test_flash_attention_4_needs_its_gpus_and_a_torch_that_trains_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    refuse(["fa4"], "compute capability 9.x or 10.x, and this GPU has 8.0")
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    refuse(["fa4"], r"needs torch 2.12 or later, and torch 2.11.0\+cu130 is installed")


@adapted
@pytest.mark.usefixtures("hopper")
def test_a_package_that_does_not_load_is_one_error_message(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FLASH)
    refuse(["fa4"], "does not load .*has no attribute '_flash_attn_bwd'")

    def compile_sources() -> None:
        raise RuntimeError("no\nnvcc")

    install(monkeypatch, "flashinfer.sampling", get_sampling_module=compile_sources)
    refuse(["flashinfer"], r"does not load \(RuntimeError: no nvcc\)")


def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor | None, ...]:
    """As many results as version 4.0.0b36 has."""
    return q + 1, torch.full((q.shape[1], len(q)), 3.0), None, None, None


@adapted
@pytest.mark.usefixtures("hopper")
def test_flash_attention_4_is_active_as_long_as_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FLASH, _flash_attn_fwd=forward, _flash_attn_bwd=lambda *_, **__: (1, 2, 3))
    x, starts = torch.zeros(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    for _ in range(2):
        with use_kernels(["fa4", "fa4"], GPU):
            assert attention.current_flash_attention_impl() == "realrl-fa4"
            assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::_flash_attention_forward", "CUDA")
            out, sums = _fa4._fa4_run_forward(x, x, x, starts, starts, 4, 4, None, True, -1, 0, None)
            assert out.eq(1).all() and sums.eq(3).all()
            assert _fa4._fa4_run_backward(x, x, x, x, x, x, starts, starts, None, True, -1, 0) == (1, 2, 3)
        assert attention.current_flash_attention_impl() is None


@adapted
@pytest.mark.usefixtures("hopper")
def test_heads_that_flash_attention_4_does_not_take_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FLASH, _flash_attn_fwd=forward, _flash_attn_bwd=forward)
    check_heads({"actor": 20}, GPU)  # it is off
    with use_kernels(["fa4"], GPU):
        check_heads({"actor": 20}, torch.device("cpu"))
        check_heads({"actor": 64, "reward": 256}, GPU)
        with pytest.raises(UserError, match=r"models.reward has heads of 20 dims"):
            check_heads({"actor": 64, "reward": 20}, GPU)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
        check_heads({"actor": 128}, GPU)
        with pytest.raises(UserError, match=r"compute capability 10.0 it takes multiples of 8 up to 128"):
            check_heads({"actor": 256}, GPU)


@contextmanager
def flashinfer_on_a_cpu(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> Iterator[None]:
    """FlashInfer by the rule of its documentation, in the place of the built-in kernels of CPUs."""

    def top_k_renorm_probs(probs: Tensor, top_k: int, is_deterministic: bool = False) -> Tensor:
        assert probs.is_contiguous() and probs.dtype == torch.float32 and is_deterministic
        calls.append("top_k")
        least = probs.sort(dim=-1, descending=True).values[:, top_k - 1 : top_k]
        kept = torch.where(probs >= least, probs, 0.0)
        return kept / kept.sum(-1, keepdim=True)

    def top_p_renorm_probs(probs: Tensor, top_p: float, is_deterministic: bool = False) -> Tensor:
        assert probs.is_contiguous() and probs.dtype == torch.float32 and is_deterministic
        calls.append("top_p")
        ordered = probs.sort(dim=-1, descending=True).values
        enough = (ordered.cumsum(-1) < top_p).sum(-1, keepdim=True)
        kept = torch.where(probs >= ordered.gather(-1, enough), probs, 0.0)
        return kept / kept.sum(-1, keepdim=True)

    install(
        monkeypatch,
        "flashinfer.sampling",
        get_sampling_module=lambda: calls.append("compile"),
        top_k_renorm_probs=top_k_renorm_probs,
        top_p_renorm_probs=top_p_renorm_probs,
    )
    with optional_kernels._use_flashinfer(torch.device("cpu")):
        yield


def test_flashinfer_restricts_tokens_and_leaves_their_log_probabilities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens follow from logits and noise as before, and log-probabilities are those over the whole vocabulary."""
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(64, 500, generator=generator)
    noise = torch.rand(64, dtype=torch.float64, generator=generator)
    config = GenerationConfig(top_k=20, top_p=0.8)
    sampler = Sampler(config, temperature=1.0, stop_token_ids=(), device=torch.device("cpu"))
    positions, calls = torch.zeros(64, dtype=torch.int64), list[str]()
    expected = sampler.sample(logits, positions, noise)
    with flashinfer_on_a_cpu(monkeypatch, calls):
        tokens, logprobs = sampler.sample(logits, positions, noise)
    assert calls == ["compile", "top_k", "top_p"]
    assert torch.equal(tokens, expected[0]) and torch.equal(logprobs, expected[1])
    again = sampler.sample(logits, positions, noise)
    assert calls == ["compile", "top_k", "top_p"] and torch.equal(again[0], tokens)


@adapted
@pytest.mark.usefixtures("hopper")
def test_flash_attention_4_takes_what_torch_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    interface = pytest.importorskip(FLASH, reason="the extra fa4 is not installed")
    taken = []

    def record(name: str, results: int) -> None:
        signature = inspect.signature(getattr(interface, name))

        def call(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
            signature.bind(*arguments, **options)
            taken.append(name)
            return tuple(arguments[0].float() for _ in range(results))

        monkeypatch.setattr(interface, name, call)

    record("_flash_attn_fwd", 5)
    record("_flash_attn_bwd", 3)
    x, starts = torch.zeros(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    with use_kernels(["fa4"], GPU):
        _fa4._fa4_run_forward(x, x, x, starts, starts, 4, 4, None, True, -1, 0, None)
        _fa4._fa4_run_backward(x, x, x, x, x, x, starts, starts, None, True, -1, 0)
    assert taken == ["_flash_attn_fwd", "_flash_attn_bwd"]


def test_flashinfer_takes_what_it_is_passed() -> None:
    sampling = pytest.importorskip("flashinfer.sampling", reason="the extra flashinfer is not installed")
    inspect.signature(sampling.get_sampling_module).bind()
    for name in ("top_k_renorm_probs", "top_p_renorm_probs"):
        inspect.signature(getattr(sampling, name)).bind(torch.zeros(1, 2), 1, is_deterministic=True)


def test_another_process_tries_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    try_kernels([])
    results = iter(
        [(0, ""), (1, "a warning\nREFUSED kernels=[fa4]: no\n"), (-9, ""), (1, "Traceback\nKeyError: 3\n")]
    )

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[0] == sys.executable and command[3:] == ["fa4", "flashinfer"]
        compile(command[2], "question", "exec")
        status, said = next(results)
        return subprocess.CompletedProcess(command, status, "", said)

    monkeypatch.setattr(subprocess, "run", run)
    try_kernels(["fa4", "flashinfer"])
    for words in (r"^kernels=\[fa4\]: no$", "exit status -9$", "cannot be used here: KeyError: 3$"):
        with pytest.raises(UserError, match=words):
            try_kernels(["fa4", "flashinfer"])


@pytest.mark.parametrize("cluster", ["1x1", "1x2"])
@pytest.mark.parametrize("command", ["train", "eval"])
def test_ranks_and_their_launcher_refuse_kernels_that_cannot_run(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    cluster: str,
) -> None:
    """A machine that has a GPU's driver, and a torch that finds no GPU."""
    monkeypatch.setattr(checks, "computes_on_gpus", lambda *_: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    recipe = str(world.recipe("ppo", tmp_path, device="auto", cluster=cluster, kernels=["fa4"]))
    assert run_app([command, recipe, f"data.eval={world.root / 'ppo.jsonl'}"]) == 2
    assert "kernels=[fa4]: it computes on GPUs, and this run computes on CPUs" in capsys.readouterr().err
    assert not (tmp_path / "run" / "logs").exists()


REFUSED = {
    "kernels=[fa4] device=cpu": r"kernels=\[fa4\] is for GPUs, and this recipe computes on CPUs",
    "kernels=[fa3]": "kernels",
    "kernels=[fa4] models.actor.dtype=float32 models.reward.dtype=float32 models.critic.dtype=float32"
    " models.ref.dtype=float32": "fa4 computes in bfloat16, and all models of this recipe in float32",
    "kernels=[flashinfer]": "flashinfer computes top_k and top_p, and this recipe sets neither",
    "kernels=[flashinfer] generation.top_p=0.9 generation.greedy=true": "sets neither",
    "kernels=[flashinfer] generation.top_p=0.9 exact=true": "leave one of them out",
}


@pytest.mark.parametrize("settings", REFUSED)
def test_recipes_that_ask_for_kernels_without_effect_are_refused(
    world: World, tmp_path: Path, settings: str
) -> None:
    recipe = world.recipe("ppo", tmp_path, device="auto", cluster="h100:1x1")
    load_experiment(recipe, ["kernels=[fa4,flashinfer]", "evaluation.top_p=0.9"])
    with pytest.raises(UserError, match=REFUSED[settings]):
        load_experiment(recipe, settings.split(" "))


def test_models_whose_attention_keeps_the_built_in_kernels_are_noted(world: World, tmp_path: Path) -> None:
    recipe = world.recipe("ppo", tmp_path, device="auto", cluster="h100:1x1")
    experiment = load_experiment(recipe, ["kernels=[fa4]", "models.reward.dtype=float32"])
    shapes = {"actor": SHAPES["gemma-2-2b"], "reward": SHAPES["qwen3-0.6b"], "ref": SHAPES["qwen3-0.6b"]}
    kept = "kernels=[fa4]: attention of models.{} keeps built-in kernels: fa4 does not support {}"
    assert list(list_kernel_notes(experiment, shapes)) == [
        kept.format("actor", "caps or sinks of attention scores"),
        kept.format("reward", "computation in float32"),
    ]
    assert not list(list_kernel_notes(experiment.model_copy(update={"kernels": []}), shapes))
