import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowbit.activations import LayerAware, compress_saved_, counted
from lowbit_run.train import weights
from lowbit_run.train.cut import Share
from lowbit_run.train.weights import build_share
from tests.lowbit_run.train.runs import ONE, base, tiny

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
IDS = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(1))
WIDTH, INNER, LAYERS = 64, 128, 2


def step(folder: Path, form: str, policy: LayerAware | None = None, **lora: Any) -> tuple[dict[str, Any], int]:
    """Gradients of all adapters of a tiny model, and the bytes that autograd saved."""
    model: dict[str, Any] = {"dim": WIDTH, "ffn": INNER, "layers": LAYERS}
    pretrained = base(folder, **model)
    config = tiny(
        folder, model={"pretrained": pretrained, "weights": form}, lora={"rank": 4} | lora, pipeline=ONE,
        run={"precision": "bf16"}, activations={"checkpoint": False},
    )  # fmt: skip
    share = Share(layers=frozenset(range(LAYERS)), first=True, last=True)
    built = build_share(config, share, vocab=256, device=torch.device("cpu"), autocast=torch.bfloat16)
    for name, parameter in built.named_parameters():
        if "lora_B" in name:  # zeros, which would hide the other half of the gradients
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    if policy is not None:
        compress_saved_(built, policy)
    with counted(built) as saved, torch.autocast("cpu", torch.bfloat16):
        loss = built(input_ids=IDS, use_cache=False).logits.float().logsumexp(-1).mean()
    loss.backward()
    return {name: p.grad for name, p in built.named_parameters() if p.requires_grad}, saved.total


@pytest.mark.parametrize("form", ["bf16", "nf4", "int8"])
def test_compressed_saving_keeps_the_gradients_of_adapters(tmp_path: Path, form: str):
    plain, bytes_plain = step(tmp_path / "plain", form)
    coded, bytes_coded = step(tmp_path / "coded", form, LayerAware(bits=8))
    assert plain.keys() == coded.keys()
    assert len(plain) == LAYERS * 7 * 2
    for name, gradient in plain.items():
        assert float((coded[name] - gradient).norm() / gradient.norm()) < 0.05, name
    assert bytes_coded < 0.7 * bytes_plain


def test_adapters_of_one_input_save_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    once, few = step(tmp_path / "once", "bf16")
    monkeypatch.setattr(weights, "share_inputs", lambda *_: None)
    copied, many = step(tmp_path / "copied", "bf16")
    assert few <= many - LAYERS * IDS.numel() * 3 * WIDTH * 2, "two of three, and one of two"
    assert all(torch.equal(once[name], copied[name]) for name in once)


FREES = """
from pathlib import Path
import torch
from lowbit_run.train import weights

def anonymous() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("RssAnon"))

with weights._returned_memory():
    torch.ones(12 << 20)  # freed at once, after which glibc would keep all that is smaller
    before = anonymous()
    tensors = [torch.ones(1 << 20) for _ in range(40)]  # 4 MiB each
    assert anonymous() > before + 150
    del tensors[:-1:2]
    assert anonymous() < before + 100
"""


@pytest.mark.skipif(weights._MALLOC is None, reason="another C library")
def test_loading_gives_back_what_it_frees():
    """In a process of its own: other tests' threads and garbage change what a process holds."""
    subprocess.run([sys.executable, "-c", FREES], check=True, timeout=120)


@pytest.mark.skipif(weights._MALLOC is None, reason="another C library")
def test_loading_keeps_no_pages_of_files_that_it_has_read(tmp_path: Path):
    """While a tensor of the file is in use, and nothing that was changed is lost."""

    def mapped() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssFile"))

    values = torch.arange(8 << 20, dtype=torch.float32)
    for name in ("read", "changed"):
        save_file({"x": values}, tmp_path / f"{name}.safetensors")
    tensors = {name: load_file(tmp_path / f"{name}.safetensors")["x"] for name in ("read", "changed")}
    with weights._returned_memory():
        tensors["changed"][7] = -1
        assert torch.equal(tensors["read"], values)
        before = mapped()
    assert mapped() < before - 30_000
    assert torch.equal(tensors["read"], values)
    assert tensors["changed"][7] == -1
