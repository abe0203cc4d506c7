"""`realrl export`."""

from typing import Annotated

import typer


def export(
    run: Annotated[
        str, typer.Argument(metavar="RUN_DIR", help="Directory of a run, or one of its checkpoints.")
    ],
    out: Annotated[
        str, typer.Option(metavar="DIR", help="Directory to write to; each role goes to DIR/ROLE.")
    ],
    role: Annotated[
        list[str] | None,
        typer.Option(help="Trained role to write; default: all. May be repeated."),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint; default: the last one.")] = None,
    max_shard_size: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Maximum size of a weight file, unless a single tensor is larger."),
    ] = "5GB",
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge LoRA adapters into their model; see docs/lora.md.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace models that DIR already has.")
    ] = False,
) -> None:
    """Write the models of a checkpoint as Hugging Face directories."""
    from realrl.checkpoint.saved import find_run_of, list_checkpoints
    from realrl.config.errors import UserError, join
    from realrl.config.files import check_directory
    from realrl.config.paths import local_path
    from realrl.config.values import parse_bytes
    from realrl.runtime.output.algorithm_record import AlgorithmRecord

    try:
        shard_bytes = parse_bytes(max_shard_size)
    except UserError as error:
        raise UserError(f"--max-shard-size: {error}") from None
    run_dir, given = find_run_of(local_path(run))
    checkpoints = list_checkpoints(run_dir)
    if given is not None and step is not None:
        raise UserError(f"{run} is already a checkpoint; leave out --step")
    step = given if given is not None else step
    if not checkpoints:
        raise UserError(f"{run_dir} holds no checkpoint")
    if step is not None and step not in checkpoints:
        raise UserError(
            f"{run_dir} has no checkpoint of step {step}; it has {join([*map(str, checkpoints)])}"
        )
    trained = AlgorithmRecord.load(run_dir).trained
    unknown = next((name for name in role or () if name not in trained), None)
    if unknown is not None:
        raise UserError(f"--role {unknown}: the run trains {join(trained)}")
    folder = local_path(out)
    check_directory(f"--out {out}", folder)
    for name in role or trained:
        if (folder / name).exists() and not overwrite:
            raise UserError(
                f"--out {out}: {folder / name} exists already; choose another directory or give --overwrite"
            )
    from realrl.runtime.export import export_models

    checkpoint = checkpoints[step if step is not None else next(iter(checkpoints))]
    roles = tuple(role or trained)
    for path in export_models(run_dir, checkpoint, roles, folder, shard_bytes, merge=merge):
        typer.echo(f"wrote {path}")
