"""Train an unconditional diffusion model in the way of diffusers' example: accumulation, averaged weights, checkpoints.

Checkpoints are written by hooks, and a second run resumes from one.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
from torch import nn

from tests.ecosystem.programs.common import choose_package, show, show_weights


def train(folder: str, num_epochs: int, resume: str | None = None) -> tuple[nn.Module, Any]:
    """Train, and return the model and its average."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration
    from diffusers import DDPMScheduler, UNet2DModel
    from diffusers.optimization import get_scheduler
    from diffusers.training_utils import EMAModel

    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        mixed_precision="no",
        project_config=ProjectConfiguration(project_dir=folder, logging_dir=os.path.join(folder, "logs")),
        cpu=True,
    )
    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    average = EMAModel(model.parameters(), decay=0.9, model_cls=UNet2DModel, model_config=model.config)

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        if accelerator.is_main_process:
            average.save_pretrained(os.path.join(output_dir, "unet_ema"))
            for each in models:
                each.save_pretrained(os.path.join(output_dir, "unet"))
                weights.pop()

    def load(models: list[Any], input_dir: str) -> None:
        loaded = EMAModel.from_pretrained(os.path.join(input_dir, "unet_ema"), UNet2DModel)
        average.load_state_dict(loaded.state_dict())
        for _ in range(len(models)):
            each = models.pop()
            kept = UNet2DModel.from_pretrained(input_dir, subfolder="unet")
            each.register_to_config(**kept.config)
            each.load_state_dict(kept.state_dict())

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    noises = DDPMScheduler(num_train_timesteps=50)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images = torch.rand(24, 1, 8, 8, generator=torch.Generator().manual_seed(1)) * 2 - 1
    loader = torch.utils.data.DataLoader(images, batch_size=4)  # pyright: ignore[reportArgumentType]
    schedule = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=2, num_training_steps=len(loader) * 2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    first_epoch = 0
    if resume is not None:
        accelerator.load_state(resume)
        first_epoch = 1
    for epoch in range(first_epoch, num_epochs):
        model.train()
        draws = torch.Generator().manual_seed(epoch)
        for batch in loader:
            noise = torch.randn(batch.shape, generator=draws)
            times = torch.randint(0, 50, (batch.shape[0],), generator=draws)
            with accelerator.accumulate(model):
                predicted = model(noises.add_noise(batch, noise, times), times).sample
                loss = nn.functional.mse_loss(predicted, noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                average.step(model.parameters())
            show(f"loss{epoch}", loss.item())
        if epoch == 0 and resume is None:
            accelerator.save_state(os.path.join(folder, "checkpoint-1"))
    accelerator.wait_for_everyone()
    show("rate", schedule.get_last_lr()[0])
    return accelerator.unwrap_model(model), average


if __name__ == "__main__":
    choose_package()
    folder = os.environ.get("FOLDER") or tempfile.mkdtemp()
    trained, average = train(folder, 2)
    show_weights(trained)
    average.copy_to(trained.parameters())
    show_weights(trained, "average")
    resumed, _ = train(folder, 2, os.path.join(folder, "checkpoint-1"))
    show_weights(resumed, "resumed")
