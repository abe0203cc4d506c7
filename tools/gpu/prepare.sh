#!/bin/bash
# Downloads wheels for a GPU machine without a network into .gpu/wheels, which git ignores:
#
#   bash tools/gpu/prepare.sh [REQUIREMENT...]
#
# It downloads packages that images with torch and transformers often lack, and each REQUIREMENT. It does not follow
# dependencies, so name each package that the machine lacks. Settings from the environment:
#   PYTHON           interpreter with pip (python3)
#   PYTHON_VERSION   Python version of the GPU machine (3.12)
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
wheels=.gpu/wheels
download() {
    # pip compares platforms by name, so that each version of glibc must be named.
    local platforms=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64) glibc
    for glibc in 2_17 2_24 2_27 2_28; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
    "$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
        --python-version "${PYTHON_VERSION:-3.12}" "${platforms[@]}" -d "$wheels" "$@"
}
# require PACKAGE DEPENDENCY: prints the requirement that the downloaded wheel of a package has for a dependency.
require() {
    "$python" - "$wheels" "$@" <<'PYTHON'
import re
import sys
import zipfile
from pathlib import Path

folder, package, dependency = sys.argv[1:]
with zipfile.ZipFile(next(Path(folder).glob(f"{package}-[0-9]*.whl"))) as wheel:
    metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    text = wheel.read(metadata).decode()
print(re.search(rf"^Requires-Dist: ({dependency}\b[^;\n]*)", text, re.M)[1].replace(" ", ""))
PYTHON
}
rm -rf .gpu/wheels .gpu/site
download pydantic annotated-types typing-inspection typing-extensions typer datasets trl==1.16.0
download "$(require pydantic pydantic-core)" "$(require datasets dill)" "$(require datasets multiprocess)"
# The bench stage compares our log-probabilities with these packages.
download liger-kernel cut-cross-entropy
[ $# -eq 0 ] || download "$@"
du -sh "$wheels"
echo 'ready: copy the checkout with .gpu/ to the GPU machine, and run `bash tools/gpu/run.sh` there'
