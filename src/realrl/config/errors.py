"""The one exception that means: the user, not the program, has to change something."""


class UserError(ValueError):
    """A mistake in what the user gave us. Its text is one sentence for them; commands exit with status 2."""
