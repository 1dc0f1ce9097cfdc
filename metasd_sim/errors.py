"""The one error that a user's input may raise: name, what was expected, what was found, the remedy."""


class InputError(ValueError):
    """Bad input; its message is one line, shown by the command line with exit code 2."""
