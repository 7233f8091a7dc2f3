"""Memory views in a pickle stream: a view of a whole object stays one of it, where cloudpickle would copy its bytes."""

from __future__ import annotations

from typing import Any


def is_whole_view(view: memoryview) -> bool:
    """Return whether a view is one of all the memory of its object, in that order."""
    try:
        whole = memoryview(view.obj)
    except ValueError:  # the view is released
        return False
    return view.nbytes == whole.nbytes and view.c_contiguous and whole.c_contiguous


def reduce_memory_view(view: memoryview) -> Any:
    """Reduce a view of a whole object to one of that object's copy, and a part that is not written to, to its bytes.

    Raise TypeError for a part of an object that could be changed through it, and ValueError for a released view.
    """
    if is_whole_view(view):
        source = view.obj
    elif view.readonly:
        source = view.tobytes()
    else:
        raise TypeError("it is a view of a part of an object, and which part cannot be copied")
    return _view, (source, view.format, view.shape, view.readonly)


def _view(source: Any, form: Any, shape: Any, is_readonly: bool) -> memoryview:
    view = memoryview(source)
    if (view.format, view.shape) != (form, shape):
        view = view.cast("B").cast(form, shape)
    return view.toreadonly() if is_readonly else view
