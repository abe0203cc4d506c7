"""The exceptions that are told to the user as one sentence, without a traceback."""


class UserError(ValueError):
    """A mistake in what the user gave us. Its text is one sentence for them; commands exit with status 2."""


class RunError(RuntimeError):
    """A run that cannot go on, through no mistake in its input and no fault of the code: numbers that are not
    finite, a full disk. Its text is one sentence for the user; commands exit with status 1."""
