"""Cells that run in a notebook's kernel."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient


class _Client(NotebookClient):
    """Client that counts how often a cell has updated an output."""

    updates: list[int]

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        if msg["msg_type"] == "update_display_data":
            self.updates.append(cell_index)
        return super().process_message(msg, cell, cell_index)


def run_cells(cells: Sequence[str], directory: Path, *, errors: bool = False) -> list[dict[str, Any]]:
    """Run cells in a new kernel. Returns the `outputs` of each cell, and the number of `updates`.

    Without `errors`, an error in a cell is an error of the test.
    """
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = _Client(
        notebook, timeout=600, allow_errors=errors, resources={"metadata": {"path": str(directory)}}
    )
    client.updates = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        # Under pytest, a kernel would not show what its child processes print.
        patch.delenv("PYTEST_CURRENT_TEST", raising=False)
        client.execute()
    return [
        {"outputs": cell.outputs, "updates": client.updates.count(number)}
        for number, cell in enumerate(notebook.cells)
    ]


def list_text(cell: dict[str, Any], kind: str) -> list[str]:
    """List the texts of a cell's outputs of one kind: `stream`, `display_data`, `execute_result` or `error`."""
    found = [output for output in cell["outputs"] if output["output_type"] == kind]
    if kind == "stream":
        return [output["text"] for output in found]
    if kind == "error":
        return ["\n".join(output["traceback"]) for output in found]
    return [output["data"]["text/plain"] for output in found]
