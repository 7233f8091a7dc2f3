"""What is never called, and the few places that may: each with its reason. A new place needs one too."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.sources import FILES, PACKAGE, dotted, nodes_of

ROOT = PACKAGE.parent
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in FILES}
SCRIPTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "labextension" / "src").rglob("*.ts*")
}
LOOPBACK = ("127.0.0.1", "localhost", "::1")

Nodes = Sequence[ast.AST]
Find = Callable[[Nodes], Iterator[ast.AST]]


@functools.cache
def nodes() -> dict[str, Nodes]:
    """Return the nodes of each file of the package that a rule may find."""
    kinds = (ast.Call, ast.Constant, ast.Import, ast.ImportFrom, ast.keyword)
    return {
        path.relative_to(PACKAGE).as_posix(): [node for node in nodes_of(path) if isinstance(node, kinds)]
        for path in FILES
    }


def calls(*names: str) -> Find:
    """Find calls by the name that is written there."""
    return lambda nodes: (node for node in nodes if isinstance(node, ast.Call) and dotted(node.func) in names)


def methods(*names: str) -> Find:
    """Find calls of anything's method."""
    return lambda nodes: (
        node
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names
    )


def arguments(**wrong: object) -> Find:
    """Find calls that give an argument a value that it must not have, or one that is not written there."""
    return lambda nodes: (
        node
        for node in nodes
        if isinstance(node, ast.keyword)
        and node.arg in wrong
        and not (isinstance(node.value, ast.Constant) and node.value.value is not wrong[node.arg])
    )


def imports(*names: str) -> Find:
    """Find imports of modules or of anything below them."""

    def find(nodes: Nodes) -> Iterator[ast.AST]:
        for node in nodes:
            known = [item.name for item in node.names] if isinstance(node, ast.Import) else []
            known += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any((module + ".").startswith(name + ".") for module in known for name in names):
                yield node

    return find


def texts(pattern: str) -> Find:
    """Find texts; of docstrings only what is alone in one."""
    return lambda nodes: (
        node
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(pattern, node.value)
    )


def binds_elsewhere(nodes: Nodes) -> Iterator[ast.AST]:
    """Find sockets that are bound to, or wait at, another address than loopback, or one that is not written there."""
    for node in methods("bind", "listen", "create_server")(nodes):
        assert isinstance(node, ast.Call)
        receiver = ast.unparse(node.func)
        if receiver.startswith(("inspect.", "signature.", "self._gradient_state.")):
            continue  # arguments are bound to parameters, a state to its window
        first = node.args[0] if node.args else None
        host = first.elts[0] if isinstance(first, ast.Tuple) and first.elts else None
        if not (isinstance(host, ast.Constant) and host.value in LOOPBACK):
            yield node


def imports_by_value(nodes: Nodes) -> Iterator[ast.AST]:
    """Find imports of a module whose name is not written there."""
    for node in calls("importlib.import_module", "import_module", "__import__")(nodes):
        assert isinstance(node, ast.Call)
        if not (node.args and isinstance(node.args[0], ast.Constant)):
            yield node


SHIPS = "values of the user's own session, over channels and anonymous files that no other process can open"
ALIAS = "files that accelerate's functions of these names read, with weights_only"
TABLE = "a module that a table in our own code names"

RULES: dict[str, tuple[Find, str, dict[str, str]]] = {
    "unpickling": (
        imports("pickle", "cloudpickle", "_pickle", "dill", "marshal", "shelve", "joblib"),
        "import pickle",
        {
            "pool/sync/reductions/function_reduction.py": SHIPS,
            "pool/sync/reductions/memory_blocks.py": SHIPS,
            "pool/sync/stream/pickler.py": SHIPS,
            "pool/sync/stream/pickling.py": SHIPS,
            "pool/sync/stream/sections.py": SHIPS,
            "checkpoint/dcp_format.py": "metadata of DCP: only names of a table, which become plain records",
        },
    ),
    "torch.load": (
        calls("torch.load", "torch.jit.load", "torch.package.PackageImporter"),
        "torch.load(path)",
        {
            "checkpoint/accelerate_format.py": "folders of accelerate by explicit wish, weights_only and torch >= 2.10",
            "checkpoint/dcp_format.py": "chunks of DCP by explicit wish, weights_only and torch >= 2.10",
            "compat/models/big_models.py": ALIAS,
            "compat/models/model_parts.py": ALIAS,
            "compat/models/offloaded_files.py": ALIAS,
            "compat/models/sharded_files.py": ALIAS,
        },
    ),
    "torch's pickled objects": (
        methods("all_gather_object", "scatter_object_list", "gather_object_list", "send_object_list"),
        "dist.all_gather_object(found, value)",
        {},
    ),
    "arguments that switch protection off": (
        arguments(weights_only=False, allow_pickle=True, trust_remote_code=True, shell=True),
        "run(line, shell=True)",
        {},
    ),
    "text that is run": (
        calls("eval", "exec", "runpy.run_path", "runpy.run_module", "code.interact"),
        "exec(text)",
        {
            "compat/program.py": "the script or module that a program launches, as python does",
            "launch/rank.py": "the script or module that the user launches, as python does",
        },
    ),
    "compiled code": (
        calls("compile", "builtins.compile"),
        "compile(text, '', 'exec')",
        {
            "notebook/cells/cell_analysis.py": "parses the user's cell for its names and does not run it",
            "notebook/magics.py": "looks for errors in the user's cell and does not run it",
        },
    ),
    "a shell": (
        calls("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "commands.getoutput"),
        "os.system(line)",
        {},
    ),
    "processes ended by name": (texts(r"^(pkill|killall)\b"), "run(['pkill', name])", {}),
    "signals": (
        calls("os.kill", "os.killpg"),
        "os.kill(pid, 9)",
        {
            "pool/local/zygote.py": "to the processes that it has forked, by the ids that fork gave",
            "pool/local/worker.py": "to its own group, when the kernel is gone",
            "launch/local_job.py": "to the ranks that it has started, by the ids that it got, before they are reaped",
        },
    ),
    "YAML that makes objects": (
        calls("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all"),
        "yaml.load(text)",
        {},
    ),
    "listeners beyond loopback": (binds_elsewhere, "server.bind((host, 0))", {}),
    "addresses of all interfaces": (texts(r"^(0\.0\.0\.0|\[::\]|tcp://\*.*)$"), "serve('0.0.0.0')", {}),
    "torch's store with a port": (calls("TCPStore", "dist.TCPStore"), "TCPStore(host, 1)", {}),
    "memory with a name": (
        imports("multiprocessing.shared_memory", "multiprocessing.managers", "torch.multiprocessing"),
        "from multiprocessing.shared_memory import SharedMemory",
        {},
    ),
    "names of files that another process may take first": (calls("tempfile.mktemp", "mktemp"), "tempfile.mktemp()", {}),
    "archives that unpack where they like": (methods("extractall"), "archive.extractall(folder)", {}),
    "modules named by a value": (
        imports_by_value,
        "importlib.import_module(name)",
        {
            "compat/trackers.py": TABLE,
            "__init__.py": TABLE,
            "compat/names/finder.py": TABLE,
            "config/__init__.py": TABLE,
            "runtime/devices/registry.py": TABLE,
            "telemetry/trackers/selection.py": TABLE,
            "cli/main.py": TABLE,
            "pool/sync/imported_attributes.py": "modules that the kernel's own process has imported",
            "notebook/session/module_sync.py": "modules that the kernel's own process has imported",
            "pool/sync/reductions/patched_classes.py": "modules of classes, as pickle does, and of their functions",
            "pool/local/worker.py": "the program that the kernel names when it starts the pool",
            "pool/local/zygote.py": "what the kernel has it load, from its command line",
            "forecast/model_building.py": "the path that the user gives on the command line, as python -m does",
        },
    ),
    "waits by the clock": (
        calls("time.sleep", "sleep"),
        "time.sleep(1)",
        {
            "runtime/distributed/process_group.py": "gloo reports no event when its threads release their buffers",
            "accelerator/plain_cells/files/shared_commands.py": "a collective that waits for a command would time out",
            "accelerator/plain_cells/files/file_writes.py": "a rank enters a folder that another one makes, unasked",
            "accelerator/plain_cells/files/path_view.py": "rank 0 makes the files that this rank lists, unasked",
        },
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_what_is_dangerous_is_only_where_there_is_a_reason(name: str) -> None:
    find, example, allowed = RULES[name]
    assert list(find(list(ast.walk(ast.parse(example))))), "the rule finds what it is for"
    found = {path for path, found_in in nodes().items() if any(find(found_in))}
    assert found - set(allowed) == set(), f"{name}: give a reason in {Path(__file__).name}, or do without"
    assert set(allowed) - found == set(), f"{name}: no longer there, take the reason away"


@pytest.mark.parametrize("module", ["checkpoint/accelerate_format.py", "checkpoint/dcp_format.py"])
def test_foreign_files_are_loaded_as_weights_only(module: str) -> None:
    (call,) = calls("torch.load")(nodes()[module])
    assert isinstance(call, ast.Call)
    assert "weights_only=True" in [ast.unparse(item) for item in call.keywords]


BROWSER = {
    "markup from text": (
        r"\b(inner|outer)HTML\b|insertAdjacentHTML|dangerouslySetInnerHTML|\bsrcdoc\b",
        "a.innerHTML = b",
    ),
    "markup written into the page": (r"document\.write|\bDOMParser\b|createContextualFragment", "document.write(b)"),
    "text that is run": (r"\beval\(|new Function\(|set(Timeout|Interval)\(\s*['\"`]|javascript:", "eval(b)"),
    "the network": (
        r"\bfetch\(|XMLHttpRequest|new WebSocket|sendBeacon|EventSource|import\(\s*['\"`]https?:",
        "fetch(b)",
    ),
    "addresses": (r"(?<!xmlns=\")https?://(?!json-schema\.org|127\.0\.0\.1)", "link('https://host')"),
    "what other pages may say": (r"addEventListener\(\s*['\"]message['\"]", "addEventListener('message', f)"),
    "what stays in the browser": (r"\blocalStorage\b|\bsessionStorage\b|document\.cookie", "localStorage.x = 1"),
}
"""What the front end never does: text goes in by ``textContent``, data come from the kernel alone."""


@pytest.mark.parametrize("name", BROWSER)
def test_what_the_front_end_never_does(name: str) -> None:
    pattern, example = BROWSER[name]
    assert re.search(pattern, example), "the rule finds what it is for"
    assert SCRIPTS, "the sources are where they were"
    assert [path for path, text in SCRIPTS.items() if re.search(pattern, text)] == []


def test_what_we_show_as_markup_is_escaped() -> None:
    """Markup is made in these modules only, and each puts text in through ``html.escape``."""
    makers = {path for path, text in SOURCES.items() if "text/html" in text or "widgets.HTML" in text}
    assert makers
    assert {path for path in makers if "escape(" not in SOURCES[path]} == set()
