"""The exceptions whose text is all that a person gets to see; anything else that ends a command is our bug."""


class UserError(ValueError):
    """A mistake in what the user gave us. Its text is one sentence for them; commands exit with status 2."""


class UserCodeError(UserError):
    """A mistake in code of the user's that we call. `trace` is its traceback, which they see above the sentence."""

    def __init__(self, sentence: str, trace: str = "") -> None:
        super().__init__(sentence, trace)
        self.trace = trace

    def __str__(self) -> str:
        return str(self.args[0])


class RunError(RuntimeError):
    """Something that stopped a run and is neither a mistake in its input nor a bug: a full disk, learning that has
    gone wrong. Its text is one sentence; commands exit with status 1."""
