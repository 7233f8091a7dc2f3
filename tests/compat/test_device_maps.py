"""Models of transformers that are loaded with a device map under the alias: our hooks, and the same outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accel_nb import compat
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks

LAYERS = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
MAPS: dict[str, dict[str, Any]] = {
    "automatic": {"device_map": "auto"},
    "limited": {"device_map": "auto", "max_memory": {"cpu": 60_000}},
    "limited by a text": {"device_map": "auto", "max_memory": {"cpu": "60KB"}},
    "on disk": {"device_map": LAYERS | {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"}},
}


def load(world: World, folder: Path, options: dict[str, Any]) -> tuple[list[bool], set[str], int]:
    """Save a model and load it; return whether outputs are equal, the devices of its map, and how much is absent."""
    compat.install()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2}
    whole = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, **sizes)).eval()
    whole.save_pretrained(folder / "saved")
    loaded = LlamaForCausalLM.from_pretrained(folder / "saved", offload_folder=folder / "offloaded", **options)
    tokens = torch.arange(1, 11)[None]
    generate: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    same = [
        torch.equal(loaded(tokens).logits, whole(tokens).logits),
        torch.equal(loaded.generate(tokens, **generate), whole.generate(tokens, **generate)),
    ]
    absent = sum(parameter.is_meta for parameter in loaded.parameters())
    return same, {str(device) for device in getattr(loaded, "hf_device_map", {"": "cpu"}).values()}, absent


def load_by_each(world: World, folder: Path) -> dict[str, Any]:
    return {name: load(world, folder / name, options) for name, options in MAPS.items()}


def test_a_model_that_is_placed_by_a_map_computes_the_same(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    [loaded] = run_ranks(load_by_each, 1, tmp_path)  # one process, which imports transformers once
    assert loaded.keys() == MAPS.keys()
    for name, (same, devices, absent) in loaded.items():
        assert same == [True, True], name
        assert devices == ({"cpu"} if name == "automatic" else {"cpu", "disk"}), name
        assert (absent > 0) is (name != "automatic"), name
