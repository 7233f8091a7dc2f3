"""Trainers of other packages, unchanged, on the workers."""

from __future__ import annotations

import pytest

from tests.notebook.test_state import setup

TRANSFORMERS = """
import tempfile, torch
from accel_nb import notebook_launcher

def train(folder):
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(vocab_size=32, max_position_embeddings=16, **sizes))
    data = [{"input_ids": torch.randint(0, 32, (8,)), "labels": torch.tensor(i % 2)} for i in range(32)]
    options = {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(folder, per_device_train_batch_size=4, num_train_epochs=2, **options)
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    steps = trainer.train().global_step
    return steps, arguments.world_size, round(sum(p.detach().sum().item() for p in model.parameters()), 3)
"""


def test_the_trainer_of_transformers_trains_on_every_worker(kernel):
    pytest.importorskip("transformers")
    setup(kernel, TRANSFORMERS)
    setup(kernel, "results = notebook_launcher(train, (tempfile.mkdtemp(),), 2)")
    first, second = kernel.value("results")
    assert first == second, "the replicas are equal"
    assert first[:2] == (8, 2), "32 samples, 2 epochs, 4 at a time on each of 2 workers"
