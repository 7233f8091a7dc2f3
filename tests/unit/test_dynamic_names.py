import ast

import pytest

from accel_nb.notebook.cells.dynamic_names import code_looks_up_names, looks_up_names

DYNAMIC = [
    "globals()[name]",
    "globals()[f'Skip{name}']",
    "globals().get(name)",
    "eval(name)",
    "eval(name + 'Net')(3)",
    "globals()",
    "getattr(sys.modules[__name__], name)",
    "sys.modules['__main__'].model",
    "importlib.import_module('__main__').model",
    "get_ipython().user_ns[name]",
    "get_ipython().user_ns['model']",
]
FIXED = [
    "globals()['model']",
    "'model' in globals()",
    "'model' not in globals()",
    "globals().get('model')",
    "globals().get('model', name)",
    "globals().setdefault('model', name)",
    "__name__ == '__main__'",
    "eval('model')",
    "model.eval()",
    "vars(model)[name]",
    "sys.modules['torch']",
]


@pytest.mark.parametrize(("text", "expected"), [(text, True) for text in DYNAMIC] + [(text, False) for text in FIXED])
def test_look_ups_by_computed_names_are_found_in_cells_and_functions(text, expected):
    assert looks_up_names(ast.parse(text)) is expected
    namespace = {}
    exec(f"def function(name, sys):\n    return {text}", namespace)
    assert code_looks_up_names(namespace["function"].__code__) is expected


@pytest.mark.parametrize("text", ["import __main__", "from __main__ import model", "globals()[name] = 1"])
def test_statements_that_reach_the_notebooks_namespace_are_found(text):
    assert looks_up_names(ast.parse(text))
    namespace = {}
    exec(f"def function(name):\n    {text}", namespace)
    assert code_looks_up_names(namespace["function"].__code__)
