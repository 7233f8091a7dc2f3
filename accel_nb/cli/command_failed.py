"""The base exception of commands that fail."""


class CommandFailed(Exception):
    """A command failed; its message is the output, and ``code`` the exit status."""

    code = 1
    is_error_output = False
    """Whether the message is printed to standard error; else it is a result, such as a report, for standard output."""
