"""``accel-nb checkpoint``: inspect, verify, convert and reshard checkpoints.

`inspect` and `verify` import no torch.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from accel_nb.checkpoint.discovery import find_checkpoints, load_manifest
from accel_nb.checkpoint.layout import MANIFEST
from accel_nb.checkpoint.manifest import Manifest
from accel_nb.checkpoint.store import Store
from accel_nb.checkpoint.verify import map_files, verify_files
from accel_nb.cli.parser import CommandParser
from accel_nb.config.byte_sizes import size_text
from accel_nb.errors import CheckpointError, ConfigError
from accel_nb.runtime.safetensors_header import read_header

_NUM_SHOWN = 10


def run(words: Sequence[str]) -> str:
    """Run one of the commands and return its output.

    Raise `ConfigError` for wrong arguments and `CheckpointError` for checkpoints that are damaged or do not exist.
    """
    options = _parse_arguments(words)
    try:
        facts = options.function(options)
    except OSError as error:
        raise CheckpointError(f"{options.path}: {error}") from error
    if options.json:
        return json.dumps(facts, indent=2) + "\n"
    return "\n".join(_lines(facts)) + "\n"


def _parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(prog="accel-nb checkpoint", description="Inspect, verify and convert checkpoints.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=CommandParser)
    for function, text in ((_inspect, "show the contents"), (_verify, "check every size and checksum")):
        _command(commands, function, text)
    merge = _command(commands, _merge, "write a model's weights as safetensors for other libraries")
    merge.add_argument("--out", metavar="DIR", required=True, help="the folder to write to")
    merge.add_argument("--model", metavar="N", type=int, default=0, help="the model's index, from 0 (default: 0)")
    merge.add_argument("--max-shard-size", metavar="SIZE", default="5GB", help="maximum file size (default: 5GB)")
    reshard = _command(commands, _reshard, "write a copy, sharded as if N ranks had saved it")
    reshard.add_argument("--out", metavar="PATH", required=True, help="the folder or URL of the new checkpoint")
    reshard.add_argument("--ranks", metavar="N", type=int, required=True, help="the number of shards, from 1 to 1024")
    return parser.parse_args(words)


def _command(commands: Any, function: Any, text: str) -> CommandParser:
    parser: CommandParser = commands.add_parser(function.__name__.removeprefix("_"), help=text, description=text)
    parser.add_argument(
        "path", metavar="PATH", help="a checkpoint, or a folder of checkpoints, of which the newest is used"
    )
    parser.add_json_flag()
    parser.set_defaults(function=function)
    return parser


def _open(options: argparse.Namespace) -> tuple[Store, str, Manifest]:
    store, names = find_checkpoints(options.path)
    return store, names[0], load_manifest(store, names[0])


def _inspect(options: argparse.Namespace) -> dict[str, Any]:
    store, name, manifest = _open(options)
    return {**_facts(store, name, manifest), "tensors": _tensors(manifest), "config": dict(manifest.origin.config)}


def _verify(options: argparse.Namespace) -> dict[str, Any]:
    store, name, manifest = _open(options)
    url = f"{store.url}/{name}"
    files = map_files(store, name, manifest)
    verify_files(files, manifest, url)
    for file, content in files.items():
        if file != manifest.state:
            read_header(content, f"{url}/{file}")
    extra = sorted(set(store.files(name)) - set(files) - {MANIFEST})
    return {**_facts(store, name, manifest), "verified": "all files are whole", "not listed": extra}


def _merge(options: argparse.Namespace) -> dict[str, Any]:
    from accel_nb.checkpoint.convert import merge

    merged = merge(options.path, options.out, options.model, options.max_shard_size)
    return {"wrote": options.out, "num_tensors": merged.num_tensors, "left out": list(merged.left_out)}


def _reshard(options: argparse.Namespace) -> dict[str, Any]:
    from accel_nb.checkpoint.convert import reshard

    if not 1 <= options.ranks <= 1024:
        raise ConfigError(f"accel-nb checkpoint reshard: --ranks {options.ranks} is not from 1 to 1024")
    return {"wrote": reshard(options.path, options.out, options.ranks), "ranks": options.ranks}


def _facts(store: Store, name: str, manifest: Manifest) -> dict[str, Any]:
    facts = manifest.origin
    return {
        "checkpoint": f"{store.url}/{name}",
        "step": facts.step,
        "run": facts.run,
        "created": facts.created,
        "world_size": facts.world_size,
        "strategy": facts.strategy,
        "versions": dict(facts.versions),
        "num_files": len(manifest.files),
        "num_bytes": manifest.num_bytes,
        "num_tensors": len(manifest.tensors),
        "bytes_by_dtype": dict(_by_dtype(manifest)),
    }


def _by_dtype(manifest: Manifest) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for record in manifest.tensors.values():
        sizes[record.dtype] += record.num_bytes
    return sizes


def _tensors(manifest: Manifest) -> list[dict[str, Any]]:
    ordered = sorted(manifest.tensors.items(), key=lambda item: -item[1].num_bytes)
    return [
        {
            "path": path,
            "dtype": record.dtype,
            "shape": list(record.shape),
            "num_bytes": record.num_bytes,
            "num_pieces": len(record.pieces),
        }
        for path, record in ordered
    ]


def _lines(facts: dict[str, Any]) -> list[str]:
    """Return one line for each fact, and the largest tensors at the end."""
    lines: list[str] = []
    for name, value in facts.items():
        if name in ("tensors", "config") or value in ([], {}):
            continue
        if name == "num_bytes":
            name, value = "size", size_text(value)
        elif name == "bytes_by_dtype":
            name, value = "dtypes", ", ".join(f"{dtype} {size_text(size)}" for dtype, size in value.items())
        elif isinstance(value, dict):
            value = ", ".join(f"{key} {_printable(item)}" for key, item in value.items())
        elif isinstance(value, list):
            value = ", ".join(map(_printable, value))
        lines.append(f"{name.removeprefix('num_').replace('_', ' '):<11} {_printable(value)}")
    tensors = facts.get("tensors", [])
    if tensors:
        lines.append("largest:")
        lines += [
            f"  {size_text(found['num_bytes']):>9}  {found['dtype']:<5} {found['shape']}  {_printable(found['path'])}"
            for found in tensors[:_NUM_SHOWN]
        ]
    if len(tensors) > _NUM_SHOWN:
        lines.append(f"  and {len(tensors) - _NUM_SHOWN} more; --json lists all")
    return lines


def _printable(value: Any) -> str:
    text = str(value)
    return text if text.isprintable() else ascii(text)
