import ast
import functools
import types

import pytest

from accel_nb.notebook.cells.cell_analysis import analyze_cell, names_in_code

HELPERS: dict = {"__name__": "__main__"}
exec(
    compile(
        """
scale = 2
unused = 3
def helper(a):
    return a * scale
def outer(b):
    return helper(b)
class Net:
    def forward(self, x):
        return helper(x)
def train():
    from accel_nb import Accelerator
    accelerator = Accelerator()
def device_of_torch():
    return torch.accelerator.current_accelerator()
def total():
    return accelerator.reduce(scale)
def prepared():
    return accelerator.prepare(Net())
""",
        "<cell>",
        "exec",
    ),
    HELPERS,
)


def needed(text: str, **names: object) -> set[str]:
    return set(analyze_cell(ast.parse(text), {**HELPERS, **names}).needed) - {"__builtins__", "__name__"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\nprint(x)", set()),
        ("print(x)", {"x"}),
        ("x += 1", {"x"}),
        ("for x in loader:\n    total = x", {"loader"}),
        ("if flag:\n    x = 1\nprint(x)", {"flag", "x"}),
        ("[x for x in loader]\nprint(y)", {"loader", "y"}),
        ("with open('f') as x:\n    y = x.read()", set()),
        ("def f():\n    return x\n", {"x"}),
        ("x = 1\ndef f():\n    return x\n", set()),
        ("f = lambda x: x + y", {"y"}),
        ("outer(1)", {"outer", "helper", "scale"}),
        ("net = Net()", {"Net", "helper", "scale"}),
        ("a.unused()", set()),
        ("try:\n    y = 1\nexcept ValueError:\n    pass\nprint(y)", {"y"}),
        ("def f(a=x):\n    b: int = y\n    return b", {"x", "y"}),
        ("while x:\n    x = y", {"x", "y"}),
        ("class A(B):\n    c = d", {"B", "d"}),
        ("import x.y\nprint(x)", set()),
        ("print(f'{x}')", {"x"}),
        ("x: int = y", {"y"}),
    ],
)
def test_needed_names(text, expected):
    assert needed(text, x=1, y=2, flag=3, loader=4, B=5, d=6) == expected


@pytest.mark.parametrize(
    ("text", "expected", "spare"),
    [
        ("for i in (x := y):\n    x.update()\nx.close()", {"y"}, set()),
        ("for i in y:\n    x = i\n    x.update()", {"y"}, set()),
        ("while y:\n    with y as x:\n        print(x)", {"y"}, set()),
        ("for i in y:\n    x = i\nx.close()", {"y", "x"}, {"x"}),
        ("for i in y:\n    print(x)\n    x = i", {"y", "x"}, set()),
        ("if flag:\n    x = 1\nelse:\n    x = 2\nprint(x)", {"flag"}, set()),
        ("if flag:\n    print(x)", {"flag", "x"}, {"x"}),
        ("if flag:\n    print(x)\nprint(x)", {"flag", "x"}, set()),
        ("print(x)\nif flag:\n    print(x)", {"flag", "x"}, set()),
        ("try:\n    x = 1\nexcept ValueError:\n    x = 2\nprint(x)", set(), set()),
        ("try:\n    x = 1\nfinally:\n    print(x)", {"x"}, {"x"}),
        ("try:\n    pass\nexcept ValueError:\n    print(x)", {"x"}, {"x"}),
        ("flag and x", {"flag", "x"}, {"x"}),
        ("x if flag else y", {"flag", "x", "y"}, {"x", "y"}),
        ("match flag:\n    case 1:\n        x = 1\nprint(x)", {"flag", "x"}, {"x"}),
        ("if flag:\n    outer(1)", {"flag", "outer", "helper", "scale"}, {"outer", "helper", "scale"}),
        ("for i in y:\n    def f():\n        return x\n    x = 1", {"y", "x"}, set()),
    ],
)
def test_names_that_a_cell_can_start_without(text, expected, spare):
    cell = analyze_cell(ast.parse(text), {**HELPERS, **dict.fromkeys(["x", "y", "flag"], 1)})
    assert set(cell.needed) - {"__builtins__", "__name__"} == expected
    assert cell.optional - {"__builtins__", "__name__"} == spare


def test_functions_are_found_in_any_container_object():
    helper = HELPERS["helper"]

    class Holder:
        pass

    def holder(**attributes):
        made = Holder()
        made.__dict__.update(attributes)
        return made

    Holder.__module__ = "elsewhere"
    for value in (
        functools.partial(print, helper),
        functools.partial(print, key=functools.partial(helper)),
        holder(collate_fn=helper),
        holder(collate_fn=print, worker_init_fn=helper),
        holder(collate_fn=print, dataset=holder(transform=helper)),
        types.FunctionType(HELPERS["outer"].__code__, HELPERS, "f", (helper,)),
    ):
        assert "scale" in needed("value", value=value), value


@pytest.mark.parametrize(
    ("text", "explicit"),
    [
        ("loss.backward()", False),
        ("accelerator.backward(loss)", True),
        ("from accel_nb import Accelerator", True),
        ("import accel_nb\na = accel_nb.Accelerator()", True),
        ("train()", True),
        ("def f():\n    accelerator.print(1)", True),
        ("outer(2)", False),
        ("device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else 'cpu'", False),
        ("def f():\n    return torch.accelerator.is_available()", False),
        ("class T:\n    def f(self):\n        self.accelerator.print(torch.accelerator.is_available())", True),
        ("device_of_torch()", False),
    ],
)
def test_cells_that_use_an_accelerator_are_explicit(text, explicit):
    assert analyze_cell(ast.parse(text), HELPERS).is_explicit is explicit


@pytest.mark.parametrize(
    ("text", "observes"),
    [
        ("accelerator.log({'loss': 1})\ntotal = accelerator.reduce(total)", True),
        ("def f():\n    if accelerator.is_main_process: print(1)", True),
        ("accelerator.backward(loss)", False),
        ("train(accelerator)", False),
        ("self.accelerator.print(1)", False),
        ("from accel_nb import Accelerator", False),
        ("train()", False),
        ("total()", True),
        ("prepared()", False),
    ],
)
def test_cells_that_only_read_from_the_accelerator_are_detected(text, observes):
    assert analyze_cell(ast.parse(text), HELPERS).only_reads_accelerator is observes


def test_bound_names_and_emptiness():
    cell = analyze_cell(ast.parse("a = 1\nfor b, (c, d) in e: pass\ndef f(): g = 1\nimport h.i as j"), {})
    assert set(cell.bound) == {"a", "b", "c", "d", "f", "j"}
    cell = analyze_cell(ast.parse("match e:\n    case [a, *b] | {0: a, **b}: c\n    case K(f) as d: d"), {})
    assert (set(cell.bound), set(cell.used)) == ({"a", "b", "d", "f"}, {"c", "e", "K"})
    assert not cell.is_empty
    assert analyze_cell(ast.parse("# nothing"), {}).is_empty


@pytest.mark.parametrize(
    "source",
    [
        "def f(x: A, *more: B, y: C = None) -> D: pass",
        "async def f(x: A) -> 'B[C]': z: D = 1\nprint(C, D)",
        "class K:\n    a: A\n    b: 'B' = 1\n    def m(self, c: 'list[C]') -> D: pass",
        "x: A = 1\ny: 'B | C'\ndef f(z: 'D'): pass",
        "f = lambda: eval('A + B')\ndef g(): return table.query('c > @C and d < @D')",
        "print(globals()['A'], vars()['B'], eval('C * D'))",
        "def f(): return globals()['A'], globals()['B']\nexec('C.x = D')",
        "a = 'A' in globals() or 'B' not in vars()\nglobals().get('C', 0)\nglobals()['D'] += 1",
        "def f():\n    globals()['A'] += 1\n    return 'B' in globals() and globals().get('C', globals()['D'])",
    ],
)
def test_names_in_annotations_and_texts_that_are_run_are_needed(source):
    namespace = dict.fromkeys("ABCDE", 1)
    assert set(analyze_cell(ast.parse(source), namespace).needed) == set("ABCD")


@pytest.mark.parametrize(
    "body",
    [
        "return globals()['A'] + globals().get('B', 0)",
        "return 'A' in globals(), 'B' not in globals()",
        "return eval('A + B')",
        "exec('A = B')",
        "return table.query('c > @A and d < @B')",
        "get_ipython().system('echo $A {B}')",
        "globals()['A'] += 1; del globals()['B']; globals()['C'] = 1",
    ],
)
def test_names_in_constant_texts_in_functions_of_earlier_cells_are_needed(body):
    names: dict = {"__name__": "__main__", **dict.fromkeys("ABCDE", 1)}
    exec(f"def f(): {body}", names)
    assert {"f", "A", "B"} <= set(analyze_cell(ast.parse("f()"), names).needed) <= {"f", "A", "B", "C"}


def test_a_name_that_a_text_binds_only_is_not_needed():
    assert analyze_cell(ast.parse("globals()['A'] = 1\ndef f(): globals()['A'] = 2"), {"A": 1}).needed == ()


def test_names_in_annotations_that_are_texts_are_needed_if_they_can_be_sent():
    names: dict = {"__name__": "__main__", "A": 1, "B": 2, "C": 3}
    exec("def f(x: 'A') -> int: pass\nclass K:\n    b: 'B'\n    def m(self, c: 'C', d: 'no name'): pass", names)
    found = analyze_cell(ast.parse("f, K\ndef g(a: 'A'): pass"), names)
    assert set(found.needed) == {"f", "K", "A", "B", "C"}
    assert found.optional == {"A", "B", "C"}


def test_names_that_functions_bind_are_bound():
    names: dict = {"__name__": "__main__"}
    exec("def far():\n    global a\n    a = 1", names)
    source = "def near():\n    global b\n    b = 2\n    def inner():\n        global c\n        c = 1\n    far()"
    assert set(analyze_cell(ast.parse(source), names).bound) == {"near", "a", "b", "c"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("os.environ['RANK']", True),
        ("far()", True),
        ("def near(): return far", True),
        ("def near(): return [os.environ.get(name) for name in ('LOCAL_RANK', 'WORLD_SIZE')]", True),
        ("torch.distributed.get_rank()", True),
        ("print('RANKS')", False),
        ("torch.accelerator.current_accelerator()", False),
    ],
)
def test_code_that_reads_its_rank_is_found_in_functions_too(source, expected):
    names: dict = {"__name__": "__main__", "os": None, "torch": None}
    exec("def far():\n    return name()\ndef name():\n    return f'{os.environ[\"RANK\"]}.csv'", names)
    assert analyze_cell(ast.parse(source), names).may_depend_on_rank is expected


def test_code_in_attributes_and_hooks_is_followed():
    text = """
import torch
losses, outputs = [], []
class Line(torch.nn.Linear):
    pass
class Fitting:
    pass
model = torch.nn.Sequential(Line(1, 1))
model[0].register_forward_hook(lambda *args: outputs.append(1))
fitting = Fitting()
fitting.model = model
fitting.report = lambda loss: losses.append(loss)
"""
    namespace = {"__name__": "__main__"}
    exec(text, namespace)
    names = analyze_cell(ast.parse("fitting.model(1)"), namespace)
    assert {"fitting", "Fitting", "Line", "losses", "outputs"} <= set(names.needed)
    assert "outputs" in names.optional


def test_a_computed_text_may_be_any_name_of_the_user():
    ours = {"a": 1, "_b": 2, "__c": 3, "_10x": 4}
    of_shell = dict.fromkeys(("_", "__", "___", "_1", "_i", "_iii", "_i12", "_oh", "_dh", "_exit_code", "__doc__"), 0)
    found = analyze_cell(ast.parse("eval(text)"), {**ours, **of_shell, "text": "a"})
    assert set(found.needed) == {*ours, "text"}


def test_a_value_that_raises_refers_to_no_names() -> None:
    class Unbound:
        def __getattribute__(self, name: str) -> None:
            raise RuntimeError("no object is bound")

    assert names_in_code("proxy", {"proxy": Unbound(), "other": 1}) == []


def test_names_of_values_on_the_workers_are_those_of_the_cell() -> None:
    def step() -> None:
        history.append(model)  # type: ignore[name-defined]  # noqa: F821

    namespace = {"history": [], "model": 1, "trainer": types.SimpleNamespace(step=step), "other": 2}
    step.__module__ = "__main__"
    references = {"trainer": names_in_code("trainer", namespace)}
    assert references == {"trainer": ["history", "model"]}
    del namespace["trainer"]
    names = analyze_cell(ast.parse("trainer.run(other)"), namespace, references)
    assert set(names.needed) == {"history", "model", "other"}
    assert names.optional == {"history", "model"}
