"""Libraries that only some verifiers need."""

from importlib.util import find_spec

from realrl.config.errors import UserError


def require(module: str, verifier: str) -> None:
    """Check that a library of the extra `verifiers` is installed; else UserError."""
    if find_spec(module) is None:
        raise UserError(
            f"verifier {verifier} needs {module.replace('_', '-')}, which is not installed; run"
            " pip install 'realrl[verifiers]'"
        )
