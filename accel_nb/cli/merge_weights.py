"""``accel-nb merge-weights``: merges a model's sharded weights into one file, with the arguments of accelerate.

The same functions are ``accelerate.commands.merge`` where accel_nb is imported under the name ``accelerate``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel_nb.cli.parser import CommandParser

_DESCRIPTION = (
    "Merge the weights that FSDP or torch.distributed.checkpoint has saved in shards into model.safetensors. Needs no "
    "GPU, and memory for the whole model."
)


def run(words: Sequence[str]) -> str:
    """Merge, and return what was written. Raise `ConfigError` for wrong arguments, `CheckpointError` for damage."""
    return _merge(merge_command_parser().parse_args(words))


def merge_command_parser(subparsers: Any = None) -> CommandParser:
    """Return the parser of `merge_command`, which is added to ``subparsers`` if they are given."""
    if subparsers is None:
        parser = CommandParser(prog="accel-nb merge-weights", description=_DESCRIPTION)
    else:
        parser = subparsers.add_parser("merge-weights", description=_DESCRIPTION)
        parser.set_defaults(func=merge_command)
    parser.add_argument(
        "checkpoint_directory",
        metavar="CHECKPOINT_DIRECTORY",
        help="the folder of shards, such as pytorch_model_fsdp_0",
    )
    parser.add_argument("output_path", metavar="OUTPUT_PATH", help="the folder to write to")
    parser.add_argument(
        "--unsafe-serialization",
        "--unsafe_serialization",
        action="store_true",
        help="write pytorch_model.bin, a file of torch.save, instead of model.safetensors",
    )
    parser.add_argument(
        "--remove-checkpoint-dir",
        "--remove_checkpoint_dir",
        action="store_true",
        help="remove the files of the shards afterwards, and the folder if it is then empty",
    )
    return parser


def merge_command(args: argparse.Namespace) -> None:
    """Merge the weights that parsed arguments name, and print what was written."""
    print(_merge(args), end="")


def _merge(options: argparse.Namespace) -> str:
    from accel_nb.checkpoint.convert import PICKLED_WEIGHTS, merge

    merged = merge(
        options.checkpoint_directory,
        options.output_path,
        as_safetensors=not options.unsafe_serialization,
        removes_shards=options.remove_checkpoint_dir,
    )
    file = Path(options.output_path) / (PICKLED_WEIGHTS if options.unsafe_serialization else "model.safetensors")
    lines = [f"wrote {merged.num_tensors:,} tensors to {file}"]
    if merged.left_out:
        lines.append(f"left out, since they are not weights of the model: {', '.join(merged.left_out)[:500]}")
    return "\n".join(lines) + "\n"
