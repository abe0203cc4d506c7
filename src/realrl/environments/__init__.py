"""Environments in which a model acts, turn by turn.

An environment is a class of a file, which needs nothing from here: see docs/environments.md. Its `step` may return
a `Reply` in place of a tuple:

    from realrl.environments import Reply

    class Echo:
        def reset(self, **record):
            return "Say something."

        def step(self, text):
            return Reply(f"You said {text!r}.", reward=float(len(text) > 3), done=True)
"""

from typing import TYPE_CHECKING

from realrl.config.lazy import reexport

if TYPE_CHECKING:
    from realrl.environments.reply import Reply as Reply

__getattr__, __dir__ = reexport(__name__)
