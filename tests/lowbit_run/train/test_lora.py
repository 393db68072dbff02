import builtins
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.qlora import by_peft
from lowbit_run.config import ConfigError
from lowbit_run.train import TrainConfig, train
from lowbit_run.train.checkpoints.manifest import step_name
from lowbit_run.train.metrics import read_metrics
from lowbit_run.train.prepare import prepare
from tests.lowbit_run.train.runs import ONE, RESUME, again, answering, base, curve, losses, tiny
from tests.lowbit_run.train.test_gradients import weights
from tests.processes import Ranks
from tests.refused import refused

peft = pytest.importorskip("peft")


def adapted(folder: Path, family: str = "llama", **sections: dict[str, Any]) -> TrainConfig:
    model = {"pretrained": base(folder, family)}
    lora = {"rank": 4} | sections.pop("lora", {})
    return answering(folder, model=model, lora=lora, **sections)


V_SHAPED = {"schedule": "ZBVZeroBubble", "stages_per_rank": 2}


@pytest.mark.parametrize(
    ("family", "pipeline"), [("llama", {}), pytest.param("gpt2", {}, marks=pytest.mark.slow), ("llama", V_SHAPED)]
)
def test_a_pipeline_trains_the_adapters_that_peft_does(
    ranks: Ranks, tmp_path: Path, family: str, pipeline: dict[str, Any]
):
    config = adapted(tmp_path, family, pipeline=pipeline, run={"save_model": True, "steps": 4}, data={"batch": 4})
    expected, (*_, adapters) = zip(*by_peft(config), strict=True)
    assert ranks.run(losses, config)[0][:-1] == pytest.approx(expected, rel=1e-5)
    folder = tmp_path / "run" / "model"
    saved = load_file(folder / "adapter_model.safetensors")
    assert saved.keys() == adapters.keys()
    for name, value in adapters.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-3, atol=1e-5)
    model = AutoModelForCausalLM.from_pretrained(config.model.pretrained)
    plain = {name: value.clone() for name, value in model.named_parameters()}
    loaded = peft.PeftModel.from_pretrained(model, folder)
    for name, value in loaded.named_parameters():
        if "lora_" in name:
            torch.testing.assert_close(value.detach(), saved[name.replace(".default", "")], rtol=0, atol=0)
    merged = loaded.merge_and_unload()
    changed = [name for name, value in merged.named_parameters() if not torch.equal(value, plain[name])]
    assert len(changed) == 4 * (7 if family == "llama" else 4), "linear layers"
    again_loaded = AutoModelForCausalLM.from_pretrained(folder)  # Transformers finds the base model by its path
    assert any("lora_" in name for name, _ in again_loaded.named_parameters())


def test_replicas_exchange_adapters_only(ranks: Ranks, tmp_path: Path):
    config = adapted(tmp_path, pipeline={"ranks": 1, "data_parallel": 2, "microbatches": 2}, data={"batch": 4})
    config = again(config, gradients={"all_reduce": "fp32"})
    assert ranks.run(losses, config)[0][:-1] == pytest.approx([loss for loss, _ in by_peft(config)], rel=1e-5)
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    layers, rank, dim, ffn = 4, 4, 32, 64
    elements = layers * rank * (4 * 2 * dim + 3 * (dim + ffn))
    assert metrics[0]["bytes_sent"] == pytest.approx(2 * 4 * elements, rel=0.01), "of two ranks, and no base weight"


def test_a_resume_goes_on_with_the_same_losses(ranks: Ranks, tmp_path: Path):
    run = {"steps": 4, "checkpoint_every": 2}
    config = adapted(tmp_path, run=run, lora={"dropout": 0.1}, gradients={"storage": "fp8"}, data={"batch": 4})
    config = again(config, pipeline={"forward": "transform"})
    ranks.run(losses, config)
    whole = curve(config)
    saved = weights(config, 0)
    assert len(saved) == 2 * 2 * 7, "two layers with seven adapters of two matrices"
    assert all("lora_" in name for name in saved)
    for rank in (0, 1):  # the last checkpoint is lost
        (tmp_path / "run" / "checkpoints" / step_name(4) / f"rank-{rank}" / "manifest.json").write_text("{}")
    ranks.run(losses, again(config, run=RESUME))
    assert curve(config) == whole
    train(again(config, pipeline=ONE, run=RESUME))  # both halves in one process


def test_a_pretrained_model_is_trained_with_dropout_from_the_first_step(tmp_path: Path):
    config = tiny(tmp_path, model={"pretrained": base(tmp_path)}, pipeline=ONE, run={"steps": 1})
    plain = losses(config)
    assert losses(again(config, model={"dropout": 0.5}))[0] != plain[0]


def test_a_resume_with_other_adapters_is_refused(tmp_path: Path):
    config = adapted(tmp_path, pipeline=ONE, run={"checkpoint_every": 1, "steps": 1}, data={"batch": 4})
    train(config)
    rows = [
        ({"rank": 2}, "lora.rank was 4 and is 2 now.*cannot change"),
        ({"rank": 0}, "lora.rank was 4 and is 0 now.*cannot change"),
        ({"targets": ["q_proj"]}, r"lora.targets was \['self_attn.q_proj', .*cannot change"),
        ({"alpha": 4.0}, "lora.alpha was 16.0 and is 4.0 now(?!.*cannot change)"),
        *(
            ({"targets": [target]}, f"^lora.targets has '{target}', which no decoder layer has; allowed: al")
            for target in ("c_attn", "lm_head")
        ),
    ]
    refused(*(
        (lambda lora=lora: prepare(again(config, run=RESUME, lora=lora), ranks=1), ConfigError, text)
        for lora, text in rows
    ))  # fmt: skip


def test_adapters_need_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config, imported = adapted(tmp_path), builtins.__import__

    def without_peft(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "peft":
            raise ImportError(name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_peft)
    with pytest.raises(ConfigError, match=r"^lora.rank is 4, which needs: pip install 'lowbit\[frameworks\]'$"):
        prepare(config, ranks=1)
