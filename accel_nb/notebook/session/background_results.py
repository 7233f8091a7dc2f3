"""The results of a background run, applied to the notebook's namespace after the run has ended."""

from __future__ import annotations

from accel_nb.notebook.session.background import BackgroundRun
from accel_nb.notebook.session.namespace_session import NamespaceSession


def apply_results(background: BackgroundRun, session: NamespaceSession) -> list[str]:
    """Apply the results, and return lines that say which names have changed.

    The namespace is then as if the cell had ended now: a name that was rebound in the notebook during the run has
    the run's value if the run returned one.
    """
    namespace, at_start = session.namespace, background.values_at_start
    deleted = {name for name in at_start if name not in namespace}
    rebound = {
        name: namespace[name]
        for name, value in at_start.items()
        if name not in deleted and namespace[name] is not value
    }
    namespace.update({name: at_start[name] for name in (*deleted, *rebound)})
    names: set[str] = set()
    try:
        lines = session.apply_answers(background.answers, names)
    finally:
        namespace.update({name: value for name, value in rebound.items() if name not in names})
        for name in deleted - names:
            del namespace[name]
    title = background.running.title
    replaced = sorted(names & rebound.keys())
    if replaced:
        lines = [f"{', '.join(replaced)}: rebound while {title!r} ran, and now replaced by the run's values", *lines]
    if shown := sorted(names & session.user_names.keys()):
        lines = [f"back from {title!r}: {', '.join(shown)}", *lines]
    return lines
