"""Fine-tune with Hugging Face's Trainer, Accelerate or Lightning: saved activations and gradients in few bits.

python examples/frameworks.py trainer --steps 20
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lowbit.activations import compress_saved_
from lowbit.gradients import GradientStorage


def small_model() -> LlamaForCausalLM:
    """A small Llama for bytes."""
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, **sizes))


def samples() -> list[dict[str, torch.Tensor]]:
    """This file, in pieces of 64 bytes."""
    pieces = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, 64, 16)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def by_trainer(model: LlamaForCausalLM, steps: int) -> list[float]:
    """Trainer clips gradients and calls the optimizer itself."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir="trainer", max_steps=steps, per_device_train_batch_size=8, gradient_accumulation_steps=2,
        max_grad_norm=1.0, learning_rate=3e-3, lr_scheduler_type="constant", logging_steps=1, save_strategy="no",
        report_to=[], disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=samples())  # pyright: ignore
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def by_accelerate(model: LlamaForCausalLM, steps: int) -> list[float]:
    """A loop of one's own with Accelerate, which accumulates and clips."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches: Any = DataLoader(samples(), batch_size=8, shuffle=True)  # pyright: ignore
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    losses: list[float] = []
    while len(losses) < steps:
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
            if len(losses) == steps:
                break
    return losses


def by_lightning(model: LlamaForCausalLM, steps: int) -> list[float]:
    """Lightning's Trainer, which runs backward in a closure of the optimizer's step."""
    import lightning  # pyright: ignore[reportMissingImports]

    losses: list[float] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.model(**batch).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    trainer = lightning.Trainer(
        max_steps=steps, accumulate_grad_batches=2, gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        accelerator="gpu" if torch.cuda.is_available() else "cpu", devices=1,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(samples(), batch_size=8, shuffle=True))  # pyright: ignore
    return losses[1::2]


FRAMEWORKS = {"trainer": by_trainer, "accelerate": by_accelerate, "lightning": by_lightning}


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    model = small_model().train()
    compress_saved_(model)  # before the framework wraps or moves the model
    storage = GradientStorage(model)
    losses = FRAMEWORKS[options.framework](model, options.steps)
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {len(losses)} steps")
    parameters = sum(p.numel() for p in model.parameters())
    print(f"stored gradients: {storage.nbytes / parameters:.3f} bytes per parameter")


if __name__ == "__main__":
    main()
