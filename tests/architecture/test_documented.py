"""Everything that users can name says what it is; the migration guide names what exists."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import accel_nb
from accel_nb.compat.names.table import MODULES
from accel_nb.telemetry.metrics import METRICS
from accel_nb.telemetry.trackers import BUILT_IN

PUBLIC = [name for name in accel_nb.__all__ if name != "__version__"]
MEMBERS = [name for name in dir(accel_nb.Accelerator) if not name.startswith("_")]


def _words(text: str | None, name: str) -> list[str]:
    """Return the words of a docstring that are more than the name itself."""
    own = set(re.split(r"[_\W]+", name.lower()))
    return [word for word in re.findall(r"\w+", text or "") if word.lower() not in own]


def _own_doc(item: Any) -> str | None:
    return item.fget.__doc__ if isinstance(item, property) and item.fget else item.__doc__


@pytest.mark.parametrize("name", PUBLIC)
def test_each_public_name_is_documented(name: str) -> None:
    item = getattr(accel_nb, name)
    assert len(_words(item.__doc__, name)) >= 3, f"accel_nb.{name} has no docstring that says more than its name"
    assert not (item.__doc__ or "").startswith(f"{name}("), f"accel_nb.{name} has a docstring made by a dataclass"


@pytest.mark.parametrize("name", MEMBERS)
def test_each_member_of_the_accelerator_is_documented(name: str) -> None:
    doc = _own_doc(inspect.getattr_static(accel_nb.Accelerator, name))
    assert len(_words(doc, name)) >= 2, f"Accelerator.{name} has no docstring that says more than its name"
    first_line = (doc or "").strip().partition("\n")[0]
    assert first_line.endswith((".", ":")), f"Accelerator.{name}: the first line is no sentence"


@pytest.mark.parametrize("name", [name for name in PUBLIC if inspect.isclass(getattr(accel_nb, name))])
def test_methods_and_properties_of_public_classes_are_documented(name: str) -> None:
    for member, item in vars(getattr(accel_nb, name)).items():
        if member.startswith("_") or not (inspect.isfunction(item) or isinstance(item, property)):
            continue
        assert _words(_own_doc(item), member), f"{name}.{member} has no docstring"


def test_arguments_of_the_accelerator_are_described() -> None:
    doc = accel_nb.Accelerator.__doc__ or ""
    for name in inspect.signature(accel_nb.Accelerator).parameters:
        assert re.search(rf"^\s+{name}: \S", doc, re.MULTILINE), f"Accelerator({name}=...) is not described"


def test_the_migration_guide_names_every_name_that_is_served(project: Path) -> None:
    text = (project / "docs" / "migration.md").read_text(encoding="utf-8")
    for name in MODULES["accelerate"]:
        if name in accel_nb.__all__:
            assert f"`{name}" in text, f"docs/migration.md does not mention {name}"


def test_the_api_reference_has_every_public_name_once(project: Path) -> None:
    shown = re.findall(
        r"^::: accel_nb\.(\w+)$", (project / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(shown) == sorted(PUBLIC)


def test_each_tracker_and_metric_is_in_the_documentation(project: Path) -> None:
    trackers = (project / "docs/howto/trackers.md").read_text(encoding="utf-8")
    assert [name for name in BUILT_IN if f"| `{name}` |" not in trackers] == []
    metrics = (project / "docs/howto/metrics.md").read_text(encoding="utf-8")
    for name in METRICS:
        short = name.removeprefix("accel_nb_checkpoint")
        assert f"`{name}" in metrics or f"`...{short}`" in metrics, f"docs/howto/metrics.md does not mention {name}"


def test_modules_that_the_architecture_names_exist(project: Path) -> None:
    text = (project / "docs/architecture.md").read_text(encoding="utf-8")
    package = project / "accel_nb"
    names = {
        name for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", text) if (package / name.partition(".")[0]).is_dir()
    }
    paths = set(re.findall(r"`((?:accel_nb|labextension|tests|docs)/[\w./]+)`", text))
    assert names
    assert [name for name in sorted(names) if not _is_module(package / name.replace(".", "/"))] == []
    assert [path for path in sorted(paths) if not (project / path).exists()] == []


def test_the_package_of_model_division_lists_its_modules(project: Path) -> None:
    folder = project / "accel_nb" / "accelerator" / "model_division"
    listed = re.findall(r"`(\w+)`", (folder / "__init__.py").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")


def _is_module(path: Path) -> bool:
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_the_index_of_decisions_lists_each_page_once_and_nothing_else() -> None:
    folder = Path(__file__).parents[2] / "docs" / "decisions"
    _, _, sections = (folder / "index.md").read_text().partition("\n## ")
    lines = [line for line in sections.splitlines()[1:] if line and not line.startswith("## ")]
    listed = [re.fullmatch(r"- (\d{4}) \[.+\]\((\1-[a-z0-9-]+\.md)\)", line) for line in lines]
    assert [line for line, match in zip(lines, listed, strict=True) if match is None] == []
    pages = [match[2] for match in listed if match is not None]
    assert sorted(pages) == sorted(path.name for path in folder.glob("[0-9]*.md"))
