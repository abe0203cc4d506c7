"""What Triton needs of a machine to build the launchers of its kernels. No torch."""

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path


def find_missing_build_tool(
    environment: Mapping[str, str] = os.environ, include: str | None = None
) -> str | None:
    """Say what of a C compiler and Python's headers is missing, and how to get it; None if both are there.

    Triton compiles a C module for each signature of a kernel, with CC, gcc or clang. include: the directory of
    Python.h, by default this interpreter's.
    """
    # The Triton packages of other systems bring a compiler.
    if sys.platform != "linux" or environment.get("TRITON_INTERPRET") == "1":
        return None
    compilers = [environment["CC"]] if "CC" in environment else ["gcc", "clang"]
    if not any(shutil.which(name, path=environment.get("PATH")) for name in compilers):
        named = (
            f"CC={environment['CC']} is not a program" if "CC" in environment else "there is no gcc or clang"
        )
        return (
            f"Triton needs a C compiler to launch kernels, and {named}; install gcc, or set CC to a compiler"
        )
    directory = Path(include or sysconfig.get_paths()["include"])
    if not (directory / "Python.h").is_file():
        return (
            f"Triton needs Python's headers to launch kernels, and {directory}/Python.h does not exist; install"
            " python3-dev, or use a Python that has them"
        )
    return None
