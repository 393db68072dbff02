"""Compare LoRA over two ranks with PEFT and bitsandbytes in one process.

`python -m benchmarks.qlora run.toml` trains as `lowbit train run.toml` does, which should send fp32, and then the same
adapters with PEFT, PyTorch and, for weights in 4 or 8 bits, bitsandbytes alone. It prints the losses of both.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit_run.train import TrainConfig, from_mapping
from lowbit_run.train.data import Order, load_data
from lowbit_run.train.optim import learning_rate, make_optimizer, set_learning_rate


def by_peft(config: TrainConfig) -> Iterator[tuple[float, dict[str, Tensor]]]:
    """Train a run's adapters in one process: yield each step's loss, and the adapters after it.

    Products are computed in float32, or, with `run.precision` bf16, in bfloat16.
    """
    import peft

    model: Any = _model(config)
    torch.manual_seed(config.run.seed)
    adapters = peft.LoraConfig(
        r=config.lora.rank, lora_alpha=int(config.lora.alpha), target_modules="all-linear", task_type="CAUSAL_LM",
        fan_in_fan_out=model.config.model_type == "gpt2",
    )  # fmt: skip
    model = peft.get_peft_model(model, adapters).train()
    optimizer = make_optimizer([pair for pair in model.named_parameters() if pair[1].requires_grad], config.optimizer)
    windows = load_data(config.data).train
    order = Order(samples=len(windows), batch=config.data.batch, seed=config.run.seed)
    for step in range(config.run.steps):
        ids = order.ids(step)
        inputs, targets = windows.batch(ids)
        positions, total = windows.positions(ids), 0.0
        for rows in torch.arange(len(ids)).chunk(config.pipeline.microbatches):  # products round by their sizes
            rest = {} if positions is None else {"position_ids": positions[rows]}
            with torch.autocast("cpu", torch.bfloat16, enabled=config.run.precision == "bf16"):
                logits = model(input_ids=inputs[rows], use_cache=False, **rest).logits.float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[rows].flatten(), reduction="sum")
            loss = loss / (targets >= 0).sum()
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
        set_learning_rate(optimizer, learning_rate(config.optimizer, step=step, steps=config.run.steps))
        optimizer.step()
        optimizer.zero_grad()
        yield total, peft.get_peft_model_state_dict(model)


def _model(config: TrainConfig) -> Any:
    import peft
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    weights, folder = config.model.weights, config.model.pretrained
    if weights not in ("int8", "nf4"):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    narrow = config.run.precision == "bf16"
    bits = BitsAndBytesConfig(load_in_8bit=True) if weights == "int8" else BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=config.model.double_quantization,
        bnb_4bit_compute_dtype=torch.bfloat16 if narrow else torch.float32,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=bits, attn_implementation="sdpa"
    )
    return model if narrow else peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


if __name__ == "__main__":
    import tomllib

    settings = Path(sys.argv[1])
    config = from_mapping(tomllib.loads(settings.read_text("utf-8")))
    subprocess.run([sys.executable, "-m", "lowbit", "train", str(settings), "--run.overwrite=true"], check=True)
    lines = map(json.loads, (Path(config.run.output) / "metrics.jsonl").read_text("utf-8").splitlines())
    ours = [line["loss"] for line in lines if "tokens_per_second" in line]
    for step, (loss, (other, _)) in enumerate(zip(ours, by_peft(config), strict=True)):
        sys.stdout.write(f"step {step + 1}: {loss:.6f} {other:.6f}, {abs(loss - other):.1e} apart\n")
        sys.stdout.flush()
