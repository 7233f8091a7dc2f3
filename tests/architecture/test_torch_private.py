"""Each private name of torch that the package uses stands in the table of `accel_nb.runtime.torch_private`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_nb.runtime import torch_private
from accel_nb.runtime.torch_private import PRIVATE_USES, is_checked
from tests.support.sources import FILES, PACKAGE, nodes_of

TABLE = "runtime/torch_private.py"
_PRIVATE = re.compile(r"_[A-Za-z][A-Za-z0-9_]*")

OTHERS = {
    # The standard library.
    "_NormalAccessor", "_STYLES", "_StringGlobber", "_asdict", "_builtin_open", "_current_frames", "_exit", "_fields",
    "_fmt", "_gauss", "_getframe", "_handlerList", "_hooks", "_inheriting", "_inst", "_style", "_lru_cache_wrapper",
    "_make", "_reconstructor", "_warnings_showwarning",
    # transformers and accelerate.
    "_available", "_hf_hook", "_is_accelerate_prepared", "_is_overflow", "_no_split_modules", "_old_forward",
    "_get_proper_dtype", "_is_package_available", "_original_forward", "_patched", "_warned",
    # cloudpickle, NumPy, IPython, ipykernel, comm, ClearML.
    "_FileOpeners", "_core", "_function_setstate", "_msg_callback", "_rand", "_reconstruct", "_render_traceback_",
    "_reply_subshell_for", "_report_subprocess_enabled", "_supports_kernel_subshells",
    # torchao's float8 tensor.
    "_data", "_scale",
    # DeepSpeed.
    "_WORLD_GROUP", "_backward_hook_state", "_convert_to_deepspeed_param", "_get_norm_groups",
    "_offload_accumulated_param_ids", "_original_parameters", "_release_process_group_references",
    "_update_model_bit16_weights", "_zero_padding",
}  # fmt: skip
"""Private names of other libraries."""

SHARED = {"_device", "_world"}
"""Names that torch and objects of the package both have."""

PARTS = {
    "_ACCEL_NB_SAVED_", "_ACCEL_NB_STORE", "_ACCEL_NB_WORKER_DEVICE", "_always_called", "_bytes",
    "_foreach_", "_makes_plain_objects", "_nvme_path", "_optimizer_", "_seconds", "_with_kwargs",
}  # fmt: skip
"""Names of our own that are written as text only, and parts that names are put together from."""


def own_names() -> set[str]:
    """Return the private names that the package defines itself."""
    found: set[str] = set()
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    found.add(node.attr)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def listed_names(path: str | None = None) -> set[str]:
    """Return the private parts of the names in the table, of all modules or of one."""
    uses = [use for use in PRIVATE_USES if path is None or path in use.modules]
    return {part for use in uses for name in use.names for part in name.split(".") if part.startswith("_")}


def names_in(path: Path, own: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line and name of each private name in a module, but not those that its own objects define."""
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for name in ((node.module or "").split("."), [alias.name for alias in node.names]):
                yield from ((node.lineno, part) for part in name)
        elif isinstance(node, ast.Attribute):
            is_of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not (is_of_self and node.attr in own):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            parts = node.value.split(".")
            if _PRIVATE.fullmatch(node.value) or parts[0] == "torch":
                yield from ((node.lineno, part) for part in parts)


def test_each_private_name_of_torch_is_in_the_table() -> None:
    own, missing = own_names(), []
    others = (own - listed_names()) | SHARED | OTHERS | PARTS
    for path in FILES:
        where = path.relative_to(PACKAGE).as_posix()
        if where == TABLE:
            continue
        listed = listed_names(where)
        missing += [
            f"{where}:{line}: {name}"
            for line, name in names_in(path, own)
            if _PRIVATE.fullmatch(name)
            and not name.startswith("_accel_nb")
            and name not in others
            and name not in listed
        ]
    assert missing == [], f"add them to {TABLE}"


def test_the_table_lists_nothing_that_is_not_used() -> None:
    features = [use.feature for use in PRIVATE_USES]
    assert sorted(set(features)) == sorted(features)
    for use in PRIVATE_USES:
        texts = [(PACKAGE / module).read_text() for module in use.modules]
        for name in use.names:
            assert any(name.rpartition(".")[2] in text for text in texts), (use.feature, name)
        for module, text in zip(use.modules, texts, strict=True):
            assert any(name.rpartition(".")[2] in text for name in use.names), (use.feature, module)


@pytest.mark.parametrize(("installed", "checked"), [("2.13", True), ("2.9", True), ("2.8", False), (None, False)])
def test_fallbacks_are_those_of_unchecked_versions(
    monkeypatch: pytest.MonkeyPatch, installed: str | None, checked: bool
) -> None:
    monkeypatch.setattr(torch_private, "torch_version", lambda: installed)
    assert is_checked("ddp.forward") is checked
    assert (torch_private.fallbacks() == []) is checked
