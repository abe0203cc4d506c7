"""The hidden command of processes that a `realrl.Session` starts."""

import os
from pathlib import Path

COMMAND = "session-rank"


def session_rank() -> None:
    """Serve as one rank of a session."""
    from realrl.runtime.processes.environment import set_library_defaults
    from realrl.runtime.session.remote import serve
    from realrl.runtime.supervision.orphans import SCRATCH_VARIABLE

    set_library_defaults()
    serve(Path(os.environ[SCRATCH_VARIABLE]), int(os.environ["RANK"]))
