"""What there is of a run that has not come to its end."""

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from realrl.checkpoint.saved import find_saved, remove_partial
from realrl.config.errors import RunError, UserError
from realrl.config.files import check_directory, check_file, whole_file
from realrl.data.batch import Batch, Ragged
from realrl.plan.cluster import Cluster
from realrl.recipe.load import load_experiment
from realrl.runtime.output.rundir import RunDirectory
from realrl.runtime.prepare.job import make_job
from realrl.runtime.training_run import write_minibatch

DEMO = str(Path(__file__).parents[3] / "recipes" / "demo" / "sft.yaml")


def unfinished(path: Path, steps: int, checkpoints: Sequence[str]) -> Path:
    """A run's directory with metrics of `steps` steps."""
    directory = RunDirectory(str(path))
    path.mkdir()
    for step in range(steps):
        directory.log(step + 1, "train", 0.1, {"loss": 1.0})
    for name in checkpoints:
        (path / "checkpoints" / name).mkdir(parents=True)
        if not name.endswith("unfinished"):
            (path / "checkpoints" / name / "manifest.json").touch()
    return path


@pytest.mark.parametrize(
    ("checkpoints", "complete"),
    [
        ([], None),
        (["step-000002"], "step-000002"),
        (["step-000002", "step-000010", "step-1000000"], "step-1000000"),
        (
            ["step-000002", ".step-000004.partial", "damaged-step-000006", "step-000008-unfinished"],
            "step-000002",
        ),
    ],
)
def test_a_checkpoint_counts_if_its_manifest_is_there(
    tmp_path: Path, checkpoints: list[str], complete: str | None
) -> None:
    path = unfinished(tmp_path / "run", 12, checkpoints)
    saved = find_saved(path, ["actor", "critic"])
    assert saved.checkpoint == (None if complete is None else path / "checkpoints" / complete)
    assert (f"saved: {saved.checkpoint};" in saved.describe(20)) == (complete is not None)
    assert saved.describe(20).startswith("after step 12 of 20; ")
    # As after a power cut.
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(bytes(100) + b"\xff\n\xff")
    assert find_saved(path, ["actor", "critic"]).describe(None) == saved.describe(None)


def test_a_run_without_a_step_has_saved_nothing(tmp_path: Path) -> None:
    path = unfinished(tmp_path / "run", 0, [])
    assert "nothing was saved" in find_saved(path, ["actor"]).describe(5)


def test_partial_files_are_removed(tmp_path: Path) -> None:
    path = unfinished(tmp_path / "run", 1, ["step-000002", ".step-000004.partial"])
    (path / ".summary.json.partial").touch()
    remove_partial(path)
    assert not list(path.rglob(".*")) and (path / "checkpoints" / "step-000002").is_dir()


def test_lines_of_metrics_are_written_atomically(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    path = unfinished(tmp_path / "run", 2, ["step-000002"])
    before = (path / "metrics.jsonl").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
    try:
        with pytest.raises(RunError) as raised:
            RunDirectory(str(path), ["actor"]).log(3, "train", 0.1, {"loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    message = f"{path / 'metrics.jsonl'} cannot be written: File too large; the last complete checkpoint is "
    assert str(raised.value) == message + str(path / "checkpoints" / "step-000002")
    assert (path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("write", ["write_samples", "write_state", "finish"])
def test_files_that_cannot_be_written_are_named(tmp_path: Path, write: str) -> None:
    path = unfinished(tmp_path / "run", 1, [])
    for name in ("samples", "checkpoints", ".summary.json.partial"):
        (path / name).symlink_to("/dev/full")
    directory = RunDirectory(str(path))
    arguments = {
        "write_samples": (1, [{"a": 1}]),
        "write_state": (1, "ppo", {"a": 1.0}),
        "finish": ({"steps": 1},),
    }
    with pytest.raises(RunError, match=r"cannot be written: .*; there is no complete checkpoint"):
        getattr(directory, write)(*arguments[write])
    assert not (path / "summary.json").exists()


def test_files_are_written_atomically(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    with pytest.raises(RuntimeError), whole_file(file) as partial:
        partial.write_text("new, but only half")
        raise RuntimeError
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
    with whole_file(file) as partial:
        partial.write_text("new")
    assert file.read_text() == "new" and list(tmp_path.iterdir()) == [file]


def test_kept_mini_batches_are_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tear(tensors: dict[str, torch.Tensor], file: Path) -> None:
        file.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("realrl.runtime.training_run.save_file", tear)
    minibatch = Batch((0,), {"tokens": Ragged(torch.tensor([1, 2]), (2,))})
    with pytest.raises(OSError, match="No space"):
        write_minibatch(tmp_path / "minibatches" / "step-000001.safetensors", minibatch)
    assert not list((tmp_path / "minibatches").iterdir())


def test_files_before_the_first_step_are_written_atomically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write_text = Path.write_text

    def listen(path: Path, *arguments: Any, **options: Any) -> int:
        written.append(path.name)
        return write_text(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", listen)
    experiment = load_experiment(DEMO, [f"run_dir={tmp_path / 'run'}", "cluster=1x2"])
    job = make_job(experiment, Cluster(1, 2))
    RunDirectory(experiment.run_dir).start(experiment, job.train.plan, job.programs)
    assert ".config.yaml.partial" in written and ".train-rank1.txt.partial" in written
    assert all(name.startswith(".") for name in written) and not list((tmp_path / "run").rglob(".*"))


def test_an_output_that_is_a_device_file_is_not_replaced() -> None:
    check_file("--out", Path("/dev/null"))
    with whole_file(Path("/dev/null")) as partial:
        assert partial == Path("/dev/null")


def test_an_unwritable_directory_is_refused_before_the_run(tmp_path: Path) -> None:
    check_directory("run_dir", tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "a", Path("/proc/nowhere")):
        with pytest.raises(UserError, match="run_dir cannot be written: "):
            check_directory("run_dir", path)
