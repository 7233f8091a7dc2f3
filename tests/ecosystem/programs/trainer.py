"""Train by transformers' Trainer: plain, with LoRA, sharded, and resumed; print every figure."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

from tests.ecosystem.programs.common import Tokens, choose_package, show_history, show_weights, small_model

if __name__ == "__main__":
    choose_package()
    kind = sys.argv[2]
    from transformers import Trainer, TrainingArguments

    class Sequential(Trainer):
        """A trainer that reads its samples in order, so that figures do not depend on a package's random numbers."""

        def _get_train_sampler(self, *args: Any) -> None:
            return None

    def build(folder: str, **changes: Any) -> Sequential:
        options: dict[str, Any] = {
            "output_dir": folder,
            "per_device_train_batch_size": int(os.environ.get("BATCH", "4")),
            "per_device_eval_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "num_train_epochs": 2,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "eval_strategy": "epoch",
            "save_strategy": "steps",
            "save_steps": 3,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
        }
        model = small_model()
        if kind == "lora":
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
        if kind == "fsdp":
            options |= {"fsdp": "full_shard", "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
        if kind == "uneven":
            options["accelerator_config"] = {"even_batches": False}
        if kind == "deepspeed":
            options["deepspeed"] = {
                "zero_optimization": {"stage": int(os.environ.get("STAGE", "2")), "reduce_bucket_size": "auto"},
                "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
                "gradient_clipping": "auto",
            }
        arguments = TrainingArguments(**(options | changes))
        samples = Tokens(29 if kind == "uneven" else 32)
        evaluated = Tokens(int(os.environ.get("EVALUATED", "10")))
        return Sequential(model, arguments, train_dataset=samples, eval_dataset=evaluated)

    folder = os.environ.get("FOLDER") or tempfile.mkdtemp()
    trainer = build(folder)
    trainer.train()
    if trainer.is_world_process_zero():
        show_history(trainer)
    if kind != "fsdp" and trainer.is_world_process_zero():
        show_weights(trainer.model)
    if kind in ("resume", "deepspeed"):
        again = build(folder)
        again.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-3"))
        if again.is_world_process_zero():
            show_history(again)
            show_weights(again.model, "resumed")
