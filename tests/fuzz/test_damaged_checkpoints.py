"""Checkpoints, damaged at random: never loaded, never changed, and the one before is used."""

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

from realrl.checkpoint.contents import TensorPieces
from realrl.checkpoint.manifest import FORMAT, MANIFEST, CheckpointError, read_manifest
from realrl.checkpoint.saved import list_checkpoints
from realrl.checkpoint.storage import DTYPES
from realrl.cli.app import run_app
from realrl.config.errors import UserError
from realrl.runtime.processes.process import Process
from realrl.runtime.resume import restore
from tests.conftest import World
from tests.fuzz.commands import ends_soon, fuzz

LONE = Process(0, 1, torch.device("cpu"))


class Contents:
    """All tensors of a checkpoint, whole, as a rank that has everything would read them."""

    def __init__(self, directory: Path) -> None:
        self.state = {
            name: TensorPieces(
                stored.shape,
                DTYPES[stored.dtype],
                {(0,) * len(stored.shape): torch.zeros(stored.shape, dtype=DTYPES[stored.dtype])},
            )
            for name, stored in read_manifest(directory).tensors.items()
        }

    def list_loaded(self) -> dict[str, TensorPieces]:
        """The tensors that are filled."""
        return self.state

    def spread(self) -> None:
        """There is nobody to tell."""

    @property
    def checksum(self) -> int:
        """Checksum of all that has been read."""
        checksum = 0
        for of in self.state.values():
            for piece in of.pieces.values():
                checksum = zlib.crc32(piece.flatten().view(torch.uint8).numpy().tobytes(), checksum)
        return checksum


class Run(NamedTuple):
    """A run with checkpoints: their directories, the latest first, and checksums of their values."""

    directory: Path
    checkpoints: list[Path]
    checksums: list[int]


def read(paths: list[Path], undamaged: Path) -> tuple[Path, int]:
    """The checkpoint that is restored, and the checksum of what is read of it."""
    contents: Any = Contents(undamaged)
    restored = restore(paths, contents, LONE, None)
    return restored.path, contents.checksum


@pytest.fixture(scope="module")
def run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run of three steps with a checkpoint after each."""
    directory = tmp_path_factory.mktemp("damaged")
    recipe = world.recipe("sft", directory, training__steps=3, checkpoint__every=1, checkpoint__keep=5)
    assert run_app(["train", str(recipe)]) == 0
    paths = [*list_checkpoints(directory / "run").values()]
    return Run(directory / "run", paths, [read([path], path)[1] for path in paths])


def list_nodes(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, inner in items for place in [(tree, key), *list_nodes(inner)]]


odd = st.sampled_from(
    [None, True, -1, 0, 1, 2**40, 2**70, -0.5, 1e300, "", "x", "../run", "/etc/passwd", [], {}, [[]]]
)


def edit_manifest(draw: Callable[..., Any], file: Path, *, sign: bool) -> None:
    """Change a value of the manifest, and its checksum with it if it is to be signed anew."""
    document = json.loads(file.read_text())
    container, key = draw(st.sampled_from(list_nodes(document["contents"] if sign else document)))
    value = draw(odd | st.integers() | st.just("delete"))
    if value == "delete":
        del container[key]
    else:
        container[key] = value
    if sign:
        text = json.dumps(document["contents"], separators=(",", ":"))
        document["checksum"] = xxh3_64_hexdigest(text.encode())
    file.write_text(json.dumps(document))


def damage(draw: Callable[..., Any], directory: Path, other: Path) -> str:
    """Damage a checkpoint in one way; `other` is an older one. Returns the way."""
    way: str = draw(
        st.sampled_from(["flip", "cut", "delete", "swap", "older", "edit", "forge", "grow", "text", "empty"])
    )
    file = draw(st.sampled_from(sorted(path for path in directory.iterdir() if path.is_file())))
    content = file.read_bytes()
    at = draw(st.integers(0, max(0, len(content) - 1)))
    match way:
        case "flip":
            file.write_bytes(
                content[:at] + bytes([content[at] ^ draw(st.integers(1, 255))]) + content[at + 1 :]
            )
        case "cut":
            file.write_bytes(content[:at])
        case "delete":
            file.unlink()
        case "swap":
            first, *_, last = sorted(path for path in directory.iterdir() if path.is_file())
            one, two = first.read_bytes(), last.read_bytes()
            first.write_bytes(two)
            last.write_bytes(one)
        case "older":
            shutil.copyfile(other / file.name, file)
        case "edit" | "forge":
            edit_manifest(draw, directory / MANIFEST, sign=way == "forge")
        case "grow":
            file.write_bytes(content + draw(st.binary(min_size=1, max_size=20)))
        case "text":
            (directory / MANIFEST).write_text(
                draw(st.sampled_from(["{}", "[]", "[" * 100_000, "NaN", "{", "\0"]))
            )
        case "empty":
            file.write_bytes(b"")
    return way


def list_bytes(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


@fuzz(100)
@given(st.data())
def test_a_damaged_checkpoint_is_not_loaded_nor_changed_and_the_one_before_is_used(
    run: Run, tmp_path: Path, data: st.DataObject
) -> None:
    latest, before = run.checkpoints[0], run.checkpoints[1]
    damaged = tmp_path / latest.name
    shutil.rmtree(damaged, ignore_errors=True)
    shutil.copytree(latest, damaged)
    way = damage(data.draw, damaged, before)
    left = list_bytes(damaged)
    with ends_soon():
        path, checksum = read([damaged, before], before)
    assert list_bytes(damaged) == left
    if path == before:
        assert checksum == run.checksums[1]
    elif way != "forge":  # whoever writes a manifest with its checksum says what the checkpoint is
        assert checksum == run.checksums[0]


def test_a_run_whose_latest_checkpoint_is_damaged_goes_on_from_the_one_before(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run.directory, copy)
    (copy / "summary.json").unlink()
    shutil.rmtree(copy / "final")
    latest = next(iter(list_checkpoints(copy).values()))
    tensors = next(latest.glob("rank-*.bin"))
    content = bytearray(tensors.read_bytes())
    content[len(content) // 2] ^= 1
    tensors.write_bytes(content)
    recipe = run.directory.parent / "recipe.yaml"
    assert run_app(["train", str(recipe), f"run_dir={copy}"]) == 0
    said = capsys.readouterr().err
    assert "checksum" in said and "Traceback" not in said
    assert (copy / "final" / "model.safetensors").read_bytes() == (
        run.directory / "final" / "model.safetensors"
    ).read_bytes()


def test_where_all_checkpoints_are_damaged_none_is_loaded(run: Run, tmp_path: Path) -> None:
    paths = [shutil.copytree(path, tmp_path / path.name) for path in run.checkpoints]
    for path in paths:
        for file in path.glob("rank-*.bin"):
            file.write_bytes(bytes(file.stat().st_size))
    left = list_bytes(tmp_path)
    with pytest.raises(UserError, match="no checkpoint of this run can be read"):
        read(paths, run.checkpoints[0])
    assert list_bytes(tmp_path) == left


def test_a_manifest_may_not_name_files_elsewhere_or_boxes_beyond_them(run: Run, tmp_path: Path) -> None:
    path = shutil.copytree(run.checkpoints[0], tmp_path / "forged")
    original = json.loads((path / MANIFEST).read_text())["contents"]
    name = next(iter(original["tensors"]))
    for key, value in (("file", "../x"), ("file", "/etc/passwd"), ("start", -4), ("start", 2**60)):
        contents = json.loads(json.dumps(original))
        contents["tensors"][name]["chunks"][0][key] = value
        text = json.dumps(contents, separators=(",", ":"))
        forged = {"format": FORMAT, "checksum": xxh3_64_hexdigest(text.encode()), "contents": contents}
        (path / MANIFEST).write_text(json.dumps(forged))
        with pytest.raises(CheckpointError, match="damaged"):
            read_manifest(path)
