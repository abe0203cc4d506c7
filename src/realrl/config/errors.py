"""The two exceptions whose text is all that a person gets to see; anything else that ends a command is our bug."""


class UserError(ValueError):
    """A mistake in what the user gave us. Its text is one sentence for them; commands exit with status 2."""


class RunError(RuntimeError):
    """Something that stopped a run and is neither a mistake in its input nor a bug: a full disk, learning that has
    gone wrong. Its text is one sentence; commands exit with status 1."""
