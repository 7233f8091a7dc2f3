"""The base exception of commands that fail."""


class Failed(Exception):
    """A command failed; its message is the output, and ``code`` the exit status."""

    code = 1
    is_complaint = False
    """Whether the message is printed to standard error; else it is a result, such as a report."""
