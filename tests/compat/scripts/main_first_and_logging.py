"""Prepare data on the main process first, print once, log with ranks, divide a list of prompts."""

import logging
import tempfile
from pathlib import Path

from accelerate import Accelerator, PartialState
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, gather_object

logger = get_logger(__name__, log_level="INFO")


def main() -> None:
    state = PartialState()
    accelerator = Accelerator()
    folder = broadcast_object_list([tempfile.mkdtemp() if accelerator.is_main_process else None])[0]
    cache = Path(folder) / "tokens.txt"
    with accelerator.main_process_first():
        if not cache.exists():
            cache.write_text(f"written by {accelerator.process_index}")
    accelerator.print(f"cache={cache.read_text()}")

    @accelerator.on_main_process
    def announce() -> str:
        return "main"

    said = gather_object([announce()])
    accelerator.print(f"said={[value for value in said if value]}")

    prompts = ["a", "b", "c", "d", "e"]
    with state.split_between_processes(prompts) as mine:
        answers = [prompt.upper() for prompt in mine]
    accelerator.print(f"answers={gather_object(answers)}")

    logging.basicConfig(level=logging.INFO)
    logger.info("once for all", main_process_only=True)
    logger.info("in order", main_process_only=False, in_order=True)
    accelerator.wait_for_everyone()
    accelerator.print(f"type={accelerator.distributed_type.value} processes={accelerator.num_processes}")


if __name__ == "__main__":
    main()
