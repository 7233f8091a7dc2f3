"""How a command says that it ran and failed."""


class Failed(Exception):
    """A command ran and failed; its message is what it has to say, and ``code`` the exit status."""

    code = 1
    is_complaint = False
    """Whether the message goes to the standard error; else it is a result, such as a report."""
