"""Export of a notebook to a script: its cells in order, ``%%accelerate`` cells with explicit calls of an accelerator.

Static analysis finds the objects that a cell trains (`accel_nb.notebook.cells.training_analysis`); no cell is run. A
cell that cannot be analyzed is an error.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_nb.config import OPTIONS, Layer, Resolved, parse_flags, resolve
from accel_nb.config.files import to_yaml
from accel_nb.errors import ConfigError
from accel_nb.notebook.cells.cell_analysis import ACCELERATOR_NAMES, only_reads_accelerator
from accel_nb.notebook.cells.training_analysis import Role, TrainingAnalysis
from accel_nb.notebook.export.imports import hoist_imports
from accel_nb.notebook.export.rewriting import CellRewriter

MAGIC = "%%accelerate"
_NOT_IN_FILE = ("cpus", "gpus", "config")
"""Options that are not written: the script's launcher sets the number of ranks."""
_KEPT_MAGICS = ("%%time", "%%capture")
_MAGIC_LINE = re.compile(r"\s*(?:[%!]|[\w, ]+=\s*[%!]|[\w.]+\?{1,2}\s*$)")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_SEEDS = re.compile(r"\b(manual_seed|set_seed|seed_everything)\b")


@dataclass(frozen=True, slots=True)
class NotebookCell:
    """A cell of the notebook; ``number`` counts from 1."""

    number: int
    kind: str
    text: str
    tags: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ExportedScript:
    """The script, its options as YAML, and a line for each part of the notebook that was left out."""

    script: str
    options: str
    left_out: tuple[str, ...]


@dataclass(slots=True)
class _CodeCell:
    """A code cell without magics; ``resolved`` are the options of one that had ``%%accelerate``."""

    number: int
    text: str
    tree: ast.Module
    resolved: Resolved | None = None
    reads_accelerator_only: bool = False
    """Whether all cells of the notebook only read from the accelerator, so that objects are prepared automatically."""

    @property
    def has_magic(self) -> bool:
        """Whether it had ``%%accelerate``."""
        return self.resolved is not None

    @property
    def is_plain(self) -> bool:
        """Whether it is a plain cell: objects that it trains are prepared automatically."""
        names = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}
        is_explicit = bool(names & ACCELERATOR_NAMES) and not self.reads_accelerator_only
        return self.resolved is not None and self.resolved.config.prepare and not is_explicit


def executed_cells(inputs: Sequence[str]) -> list[NotebookCell]:
    """Return the distinct cells that a notebook has run, in the order of their last runs."""
    last = {text: number for number, text in enumerate(inputs) if text.strip()}
    return [NotebookCell(number, "code", text) for text, number in sorted(last.items(), key=lambda item: item[1])]


def export_notebook(
    sources: Sequence[NotebookCell], layers: Sequence[Layer], *, title: str, script: str
) -> ExportedScript:
    """Return the script of a notebook's cells; ``layers`` are options in addition to those of the cells' magics.

    Raise ConfigError, with all problems, for cells that cannot be combined into one script.
    """
    left_out: list[str] = []
    problems: list[str] = []
    parts: list[str | _CodeCell] = []
    for source in sources:
        if source.kind == "markdown":
            parts += _headings(source.text)
        elif source.kind == "code":
            cell = _read_cell(source, layers, left_out, problems)
            parts += [] if cell is None else [cell]
    next_parts = [*parts[1:], *([""] if parts else [])]
    parts = [
        part
        for part, after in zip(parts, next_parts, strict=True)
        if isinstance(part, _CodeCell) or isinstance(after, _CodeCell)
    ]
    cells = [part for part in parts if isinstance(part, _CodeCell)]
    only_reads = all("Accelerator" not in cell.text and only_reads_accelerator(cell.tree) for cell in cells)
    for cell in cells:
        cell.reads_accelerator_only = only_reads
    if not problems and not any(cell.has_magic for cell in cells):
        problems.append(f"{title}: no cell begins with {MAGIC}, so there is nothing to export")
    options = _run_options(cells, problems)
    if problems:
        raise ConfigError(problems)
    file = Path(script).with_suffix(".yaml").name
    return ExportedScript(
        _write_source(parts, cells, title, Path(script).name, file), to_yaml(options), tuple(left_out)
    )


def write_script(exported: ExportedScript, path: str, *, replaces: bool) -> str:
    """Write script and options, and return a summary. Raise ConfigError if a file exists or cannot be written."""
    script = Path(path).expanduser()
    if script.suffix != ".py":
        raise ConfigError(f"{path}: a script ends in .py; name it so")
    files = {script: exported.script, script.with_suffix(".yaml"): exported.options}
    if not replaces and (known := [str(file) for file in files if file.exists()]):
        raise ConfigError(f"{', '.join(known)}: already exists and was not changed; remove it, or choose another name")
    for file, text in files.items():
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{file}: cannot be written ({error.strerror}); choose another place") from None
    lines = [
        f"wrote {script} and {script.with_suffix('.yaml').name}",
        *(f"left out: {line}" for line in exported.left_out),
    ]
    return "\n".join(lines) + "\n"


def _read_cell(
    source: NotebookCell, layers: Sequence[Layer], left_out: list[str], problems: list[str]
) -> _CodeCell | None:
    where = f"cell {source.number}"
    text = source.text.strip("\n")
    first, _, rest = text.partition("\n")
    if "raises-exception" in source.tags:
        left_out.append(f"{where}, which is meant to raise")
        return None
    resolved = None
    if first.startswith("%%"):
        name, _, line = first.partition(" ")
        if name == MAGIC:
            resolved = _resolve(line, layers, where, problems)
        elif name not in _KEPT_MAGICS:
            left_out.append(f"{where}, which is {name}")
            return None
        text = rest
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        lines = text.split("\n")
        magics = [line.strip() for line in lines if _MAGIC_LINE.match(line)]
        left_out += [
            f"{where}: {line}" for line in magics if not line.startswith(("%load_ext accel_nb", "%accelerate"))
        ]
        text = "\n".join(line for line in lines if not _MAGIC_LINE.match(line))
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError) as error:
            problems.append(f"{where} is not Python without its magics ({error}); correct it")
            return None
    text = _without_last_value(text, tree).strip("\n")
    if not text.strip():
        return None
    return _CodeCell(source.number, text, ast.parse(text), resolved)


def _resolve(line: str, layers: Sequence[Layer], where: str, problems: list[str]) -> Resolved | None:
    try:
        resolved = resolve([*layers, parse_flags(line, f"{where}, {MAGIC}")])
    except ConfigError as error:
        problems += [f"{where}: {problem}" for problem in error.problems]
        return None
    if resolved.config.ranks is not None:
        problems.append(
            f"{where} runs on some ranks only (--ranks); test accelerator.process_index in the cell instead"
        )
    return resolved


def _run_options(cells: Sequence[_CodeCell], problems: list[str]) -> dict[str, Any]:
    """Return the options to write. Add a problem for each option that differs between training cells."""
    training = TrainingAnalysis([cell.tree for cell in cells])
    training_cells = [cell for cell in cells if training.trains(cell.tree) or _uses_accelerator_methods(cell.tree)]
    ran = [(cell, cell.resolved) for cell in training_cells or cells if cell.resolved is not None]
    given = {name for _, resolved in ran for name in resolved.given if OPTIONS[name].affects_training}
    options: dict[str, Any] = {}
    for name in sorted(given | {"cpus", "gpus", "batch"}):
        found: dict[Any, int] = {}
        for cell, resolved in ran:
            value = next(row.value for row in resolved.explain() if row.option == name)
            if name == "batch" and value is None:
                value = "global" if cell.is_plain else "per-worker"
            found.setdefault(value, cell.number)
        if name == "seed" and len(found) > 1:
            continue  # each cell sets its own
        if len(found) > 1:
            numbers = " and ".join(map(str, list(found.values())[:2]))
            problems.append(f"cells {numbers} train with different options ({name}): make them equal")
        if found and name not in _NOT_IN_FILE and next(iter(found)) is not None:
            options[name] = next(iter(found))
    return options


def _write_source(
    parts: Sequence[str | _CodeCell], cells: Sequence[_CodeCell], title: str, name: str, file: str
) -> str:
    first = next(cell.resolved for cell in cells if cell.resolved is not None)
    constructs_own = any(_binds(cell.tree, "accelerator") for cell in cells)
    config = f'Path(__file__).with_name("{file}")'
    needed = ["from pathlib import Path"]
    begin: list[str] = []
    bodies: list[str] = []
    # The lines to put before each body.
    before: list[list[str]] = []
    if not constructs_own:
        needed.append("from accel_nb import Accelerator")
        begin.append(f"accelerator = Accelerator(config={config})")
    if not any(_SEEDS.search(cell.text) for cell in cells) and first.config.seed is None:
        needed.append("from accel_nb import set_seed")
        begin.append("set_seed(0)  # every process must draw the same random numbers")
    training, prepared = TrainingAnalysis([cell.tree for cell in cells]), _PreparedNames(set())
    prints = not any(_binds(cell.tree, "print") for cell in cells)
    num_run = 0
    for part in parts:
        before.append([])
        if isinstance(part, str):
            bodies.append(part)
            continue
        if part.resolved is not None:
            num_run += 1
            if part.resolved.config.seed is not None:
                before[-1].append(f"set_seed({part.resolved.config.seed})")
                needed.append("from accel_nb import set_seed")
            elif num_run > 1:
                before[-1].append('synchronize_rng_states(["torch", "numpy", "python"])')
                needed.append("from accel_nb import synchronize_rng_states")
            if num_run > 1:
                before[-1].append("accelerator.note_equal_rng()")
        bodies.append(_rewrite_cell(part, training, prepared, config, prints=prints))
    imports, bodies = hoist_imports(bodies, needed)
    bodies = ["\n".join([*lines, body]) for lines, body in zip(before, bodies, strict=True)]
    return _join_parts([_docstring(title, name, file, first), imports, *begin, *bodies])


@dataclass(slots=True)
class _PreparedNames:
    """The names that earlier cells have prepared."""

    names: set[str]


def _rewrite_cell(
    cell: _CodeCell, training: TrainingAnalysis, prepared: _PreparedNames, config: str, *, prints: bool
) -> str:
    """Return a cell's source for the script. Raise ConfigError if the analysis does not find what it trains.

    ``prints`` states whether ``print`` is Python's own.
    """
    rewriting = CellRewriter(cell.text, cell.tree, training)
    where = f"cell {cell.number}"
    if cell.resolved is not None and not cell.is_plain:
        rewriting.add_config(config)
        return rewriting.rewritten_source()
    rewriting.rewrite_functions()
    rewriting.rewrite_calls(prints=prints)
    for node in cell.tree.body:
        if isinstance(node, ast.ClassDef) and training.trains(node):
            raise ConfigError(
                f"{where}: the class {node.name} trains, in which nothing can be prepared; train in a function, or use "
                "accelerator.prepare and accelerator.backward in the class"
            )
    statements = ast.Module([node for node in cell.tree.body if not isinstance(node, _DEFINITIONS)], [])
    if training.trains(statements):
        if not cell.has_magic:
            raise ConfigError(f"{where} trains in the notebook itself; add {MAGIC} as its first line, or remove it")
        roles = training.roles_in_cell(cell.tree)
        in_functions = {role for name in training.functions for role in training.names_to_prepare(name).own.values()}
        if not {Role.MODEL, Role.OPTIMIZER} <= {*roles.values(), *in_functions}:
            raise ConfigError(
                f"{where}: cannot detect what it trains; bind model, optimizer and loader to names, step the optimizer "
                "by its name, or use accelerator.prepare and accelerator.backward in the cell"
            )
        rewriting.rewrite_statements()
        new = {name: role for name, role in roles.items() if name not in prepared.names}
        rewriting.add_prepare(new)
        prepared.names |= new.keys()
    elif shared := sorted(training.names_only_iterated(cell.tree) & prepared.names):
        raise ConfigError(
            f"{where} iterates over {', '.join(shared)}, which another cell trains with: a script divides it among the "
            "processes. Create a second DataLoader for the evaluation"
        )
    if cell.has_magic is False:
        prepared.names -= {name for name in prepared.names if _binds(cell.tree, name)}
    return rewriting.rewritten_source()


def _docstring(title: str, name: str, file: str, resolved: Resolved) -> str:
    config = resolved.config
    if config.cpus is not None:
        flags, num = f"--cpus {config.cpus}", str(config.cpus)
    elif config.tpus is not None:
        flags, num = f"--tpus {config.tpus}", "1"
    else:
        flags, num = ("", "gpu") if config.gpus in (None, "all") else (f"--gpus {config.gpus}", str(config.gpus))
    launch = " ".join(part for part in ("accel-nb launch", flags, name) if part)
    return (
        f'"""Trains as {Path(title).name} does; made from it by accel-nb export. The options are in {file}.\n\n'
        f"    {launch}\n    torchrun --nproc-per-node {num} {name}\n"
        '"""'
    )


def _join_parts(bodies: Sequence[str]) -> str:
    """Join parts with one empty line between them, two around functions and classes."""
    text = ""
    previous = ""
    for body in bodies:
        body = body.strip("\n")
        if not body:
            continue
        gap = "\n\n\n" if _ends_in_definition(previous) or body.startswith(("def ", "class ", "@")) else "\n\n"
        if previous.startswith("# ") and "\n" not in previous:
            gap = "\n"
        text += (gap if text else "") + body
        previous = body
    return text + "\n"


def _ends_in_definition(text: str) -> bool:
    try:
        statements = ast.parse(text).body
    except SyntaxError:
        return False
    return bool(statements) and isinstance(statements[-1], ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)


def _headings(text: str) -> list[str]:
    """Return a markdown cell's first heading as a comment."""
    found = re.match(r"\s*#+\s+(.+)", text)
    return [f"# {found[1].strip()}"] if found else []


def _without_last_value(text: str, tree: ast.Module) -> str:
    """Return the source without a last expression that only displays a value."""
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr) or any(isinstance(node, ast.Call | ast.Await) for node in ast.walk(last)):
        return text
    lines = text.split("\n")
    is_alone = len(tree.body) == 1 or tree.body[-2].end_lineno != last.lineno
    return "\n".join([*lines[: last.lineno - 1], *lines[last.end_lineno :]]) if is_alone else text


def _uses_accelerator_methods(tree: ast.AST) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr in ("prepare", "backward") for node in ast.walk(tree))


def _binds(tree: ast.AST, name: str) -> bool:
    return any(
        (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store))
        or (isinstance(node, ast.alias) and (node.asname or node.name) == name)
        or (isinstance(node, ast.FunctionDef) and node.name == name)
        for node in ast.walk(tree)
    )
