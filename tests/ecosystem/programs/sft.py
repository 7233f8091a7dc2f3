"""Fine-tune by TRL's SFTTrainer with LoRA on texts; print every figure."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from tests.ecosystem.programs.common import choose_package, show_history, show_weights, small_model

if __name__ == "__main__":
    choose_package()
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = [f"w{index}" for index in range(60)]
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    texts = [" ".join(words[(at * 7 + step * 3) % 60] for step in range(6 + at % 5)) for at in range(24)]

    class Sequential(SFTTrainer):
        """A trainer that reads its samples in order."""

        def _get_train_sampler(self, *args: Any) -> None:
            return None

    trainer = Sequential(
        small_model(),
        args=SFTConfig(
            output_dir=os.environ.get("FOLDER") or tempfile.mkdtemp(),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            max_length=16,
            dataloader_pin_memory=False,
        ),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        show_history(trainer)
        show_weights(trainer.model)
