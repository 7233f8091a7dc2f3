from __future__ import annotations

import locale
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from accel_nb.notebook.session.process_settings import apply_settings, find_changes, read_settings


@pytest.fixture
def before() -> Iterator[dict]:
    """The settings of this process, which are set again after the test."""
    found = read_settings({})
    yield found
    apply_settings(find_changes(read_settings(found), found))


def test_the_precision_of_float32_products_is_carried(before):
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = False
    changes = find_changes(before, read_settings(before))
    assert set(changes) == {"torch_fp32_precision"}
    apply_settings(before)
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("highest", True)
    apply_settings(changes)
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("high", False)


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch 2.9 and newer")
def test_the_precision_of_parts_of_torch_is_carried(before):
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # contradicts get_float32_matmul_precision, which raises now
    changes = find_changes(before, read_settings(before))
    assert set(changes) == {"torch_fp32_precision"}
    apply_settings(before)
    assert torch.backends.cuda.matmul.fp32_precision != "tf32"
    apply_settings(changes)
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert read_settings(before)["torch_fp32_precision"] == changes["torch_fp32_precision"]


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch 2.9 and newer")
def test_parts_inherit_the_precision_that_is_carried(before):
    backends: Any = torch.backends
    backends.fp32_precision = "ieee"
    changes = find_changes(before, read_settings(before))
    apply_settings(before)
    apply_settings(changes)
    backends.fp32_precision = "tf32"
    assert backends.mkldnn.conv.fp32_precision == "tf32"


def test_the_print_options_that_are_not_sent_stay(before):
    torch.set_printoptions(sci_mode=True)
    apply_settings({"torch_print": {"precision": 2}})
    assert str(torch.tensor([1.5])) == "tensor([1.50e+00])"


def test_filters_have_effect_once_the_process_has_the_category(before):
    category: Any = type("Late", (UserWarning,), {"__module__": "module_of_later", "__qualname__": "Kinds.Late"})
    entry = ["error", None, category.__module__, category.__qualname__, None, 0]
    apply_settings({"warnings": [entry, *before["warnings"]]})
    assert entry in read_settings({})["warnings"]
    with pytest.warns(UserWarning, match="of another category"):
        warnings.warn("of another category", UserWarning, stacklevel=1)
    apply_settings({"warnings": [entry, *before["warnings"]]})
    with pytest.raises(category):
        warnings.warn("of this one", category, stacklevel=1)


def test_the_folder_of_torch_follows_its_variable(before, monkeypatch, tmp_path):
    monkeypatch.delenv("TORCH_HOME", raising=False)
    apply_settings(before)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    assert torch.hub.get_dir() == str(tmp_path / "hub")


def test_a_locale_that_this_machine_lacks_is_told(before, caplog):
    apply_settings({"locale": "xx_XX.UTF-8"})
    assert locale.setlocale(locale.LC_ALL) == before["locale"]
    assert "The locale xx_XX.UTF-8 of the other process is not installed on" in caplog.text
