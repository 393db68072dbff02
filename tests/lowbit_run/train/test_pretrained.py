"""Folders of models as people have them: half copied, of another model, or made by somebody hostile.

Each is one line and exit code 2, before a process or a connection exists.
"""

import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Fast
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lowbit_run.train import from_mapping, pretrained
from lowbit_run.train.config import ModelConfig
from lowbit_run.train.model import build_model
from lowbit_run.train.prepare import Prepared, prepare
from lowbit_run.train.pretrained import MODEL_FILES, ByteTokenizer, FolderTokenizer, copy_files
from tests.command_line import invoke

WEIGHTS = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
CODE = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoTokenizer": ["code.T", None]}


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("intact") / "model"
    config = ModelConfig(dim=32, layers=2, heads=2, ffn=32)
    build_model(config, vocab=256, sequence=64, seed=0).save_pretrained(folder)
    ByteTokenizer().hugging_face().save_pretrained(folder)
    return folder


def rewrite(name: str, **values: Any) -> Callable[[Path], None]:
    """Change values of a file of JSON."""

    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def config(**values: Any) -> Callable[[Path], None]:
    return rewrite("config.json", **values)


def write(name: str, data: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(data)


def cut(name: str, share: float = 0.5) -> Callable[[Path], None]:
    """Leave the beginning of a file, as an interrupted copy does."""
    return lambda folder: os.truncate(folder / name, int((folder / name).stat().st_size * share))


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def rewritten(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return rewritten


def pickled(content: Callable[[dict[str, torch.Tensor]], Any], share: float = 1.0) -> Callable[[Path], None]:
    """The weights in PyTorch's older format."""

    def rewritten(folder: Path) -> None:
        torch.save(content(load_file(folder / WEIGHTS)), folder / "pytorch_model.bin")
        (folder / WEIGHTS).unlink()
        cut("pytorch_model.bin", share)(folder)

    return rewritten


def with_index(index: Any) -> Callable[[Path], None]:
    def written(folder: Path) -> None:
        (folder / WEIGHTS).unlink(missing_ok=True)
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))

    return written


def sharded(folder: Path) -> None:
    """Two files and their index, of which one file is missing."""
    tensors = load_file(folder / WEIGHTS)
    names = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    with_index({"metadata": {}, "weight_map": names})(folder)
    first = {n: x for n, x in tensors.items() if "00001-of" in names[n]}
    save_file(first, folder / "model-00001-of-00002.safetensors", metadata={"format": "pt"})


def instead(name: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Something that is no regular file, in the place of one."""

    def made(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return made


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch was-run",)


PLAIN = dict.fromkeys(("special", "single_word", "lstrip", "rstrip", "normalized"), False)
MORE = [{"id": 256 + i, "content": f"<{i}>", **PLAIN} for i in range(8)]
BITS = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False}


def entry(start: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [1], "data_offsets": [start, end]}


def headed(header: Any, nbytes: int) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(nbytes)


NO_JSON, SHORT = "config.json is not JSON: ", "is cut short or cannot be read: it has "
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "No such file or directory; allowed: a folder with a saved"),
    "empty config": (write("config.json", b""), NO_JSON),
    "config cut short": (cut("config.json"), NO_JSON),
    "config not UTF-8": (write("config.json", b'{"model_type": "\xff"}'), NO_JSON),
    "config a list": (write("config.json", b"[1]"), "does not hold a JSON object"),
    "config nested": (write("config.json", b"[" * 100_000), NO_JSON),
    "config a pointer": (write("config.json", b"version https://git-lfs.github.com/spec/v1\n"), "pointer of Git LFS"),
    "config a loop": (instead("config.json", lambda p: p.symlink_to(p)), "Too many levels of symbolic links"),
    "NaN": (config(rms_norm_eps=float("nan")), "it holds NaN"),
    "text for a size": (config(hidden_size="x"), "has hidden_size 'x'; allowed: an integer from 1 to"),
    "a negative size": (config(hidden_size=-32), "has hidden_size -32; allowed"),
    "no size": (config(hidden_size=None), "model.pretrained"),
    "a huge size": (config(vocab_size=10**30), "has vocab_size 1000000000000000000000000000000; allowed"),
    "huge layers": (config(num_hidden_layers=4000), "config.json has 4000 layers, the weights are of 2"),
    "heads that do not divide": (config(num_attention_heads=7, num_key_value_heads=7, head_dim=None), "pretrained"),
    "unknown activation": (config(hidden_act="sigmoidish"), "config.json does not describe a valid model: "),
    "rope of nothing": (config(rope_parameters=7, rope_scaling=7), "model.pretrained"),
    "another architecture": (config(model_type="mamba"), "a model of type 'mamba', which cannot be cut"),
    "unknown architecture": (config(model_type="mine", auto_map=CODE), "a model of type 'mine', which cannot be cut"),
    "architecture a list": (config(model_type=["llama"]), "a model of type ['llama'], which cannot be cut"),
    "quantized": (config(quantization_config={"quant_method": "gptq"}), "is quantized (gptq); allowed: bitsandbytes"),
    "quantized by a list": (config(quantization_config=[1]), "which is quantized ([1]); allowed: bitsandbytes"),
    "quantized by nobody": (config(quantization_config={}), "which is quantized (None); allowed: bitsandbytes"),
    "quantized by 7": (config(quantization_config={"quant_method": ["x"]}), "is quantized (['x']); allowed: "),
    "quantized to no bits": (config(quantization_config=BITS), "load_in_4bit False and load_in_8bit False; "),
    "quantized to text": (config(quantization_config=BITS | {"load_in_4bit": "x"}), "has load_in_4bit 'x' and"),
    "quantized to type 7": (
        config(quantization_config=BITS | {"load_in_4bit": True, "bnb_4bit_quant_type": 7}), "bnb_4bit_quant_type 7; "
    ),
    "quantized, weights are not": (config(quantization_config=BITS | {"load_in_4bit": True}), "4 or 8 bits"),
    "adapters": (
        lambda f: [shutil.rmtree(f), f.mkdir(), (f / "adapter_config.json").write_text("{}")],
        "holds adapters, not a model; allowed",
    ),
    "generation not JSON": (write("generation_config.json", b"x"), "generation_config.json is not JSON: "),
    "generation invalid": (
        write("generation_config.json", b'{"watermarking_config": 3}'), "generation_config.json cannot be used: Attrib"
    ),
    "generation a list": (write("generation_config.json", b"[]"), "generation_config.json does not hold a JSON object"),
    "tokenizer with code": (
        rewrite("tokenizer_config.json", tokenizer_class="Mine", auto_map=CODE),
        "it needs code of its own (auto_map), which lowbit never runs",
    ),
    "tokenizer cut short": (cut("tokenizer.json"), "data.tokenizer"),
    "tokenizer empty": (write("tokenizer.json", b"{}"), "data.tokenizer"),
    "tokenizer a list": (write("tokenizer_config.json", b"[]"), "data.tokenizer"),
    "tokenizer without a model": (rewrite("tokenizer.json", model={"type": "none"}), "data.tokenizer"),
    "tokenizer of more tokens": (
        rewrite("tokenizer.json", added_tokens=MORE), "the model's vocabulary has 256 entries, the tokenizer 264"
    ),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "which holds no weights; allowed: a folder with model.safetens"),
    "weights cut short": (cut(WEIGHTS), SHORT),
    "weights cut within the header": (cut(WEIGHTS, 0.001), SHORT),
    "weights empty": (write(WEIGHTS, b""), f"{SHORT}0 bytes"),
    "weights a pointer": (write(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\noid 7"), "pointer of Git LFS"),
    "weights a folder": (instead(WEIGHTS, os.mkdir), "it is not a regular file"),
    "a huge header": (write(WEIGHTS, struct.pack("<Q", 1 << 60) + b"{}"), SHORT),
    "a header of lies": (
        write(WEIGHTS, struct.pack("<Q", 60) + b'{"x":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'.ljust(60)),
        SHORT,
    ),
    "weights that overlap": (write(WEIGHTS, headed({"x": entry(0, 4), "y": entry(2, 6)}, 6)), SHORT),
    "weights of type X": (write(WEIGHTS, headed({"x": entry(0, 4) | {"dtype": "X"}}, 4)), SHORT),
    "a shard is missing": (sharded, "which lacks model-00002-of-00002.safetensors of 2 files"),
    "index a list": (with_index([]), "model.safetensors.index.json cannot be used: "),
    "index to elsewhere": (with_index({"weight_map": {"x": "../../secret"}}), "names of files in the same folder"),
    "a weight is missing": (weights(lambda w: w.pop("model.norm.weight")), "which has no weights model.norm.weight"),
    "another shape": (
        weights(lambda w: w.update({EMBEDDING: torch.zeros(255, 32)})),
        "has shape (255, 32), config.json says (256, 32)",
    ),
    "more in a layer": (
        weights(lambda w: w.update({"model.layers.0.mlp.extra.weight": torch.zeros(2)})), "which llama does not have"
    ),
    "integers": (
        weights(lambda w: w.update({EMBEDDING: torch.zeros(256, 32, dtype=torch.int8)})), "which is quantized"
    ),
    "pickled, cut short": (pickled(lambda w: w, share=0.5), SHORT),
    "pickled, with code": (pickled(lambda w: w | {"x": Hostile()}), SHORT),
    "pickled, no weights": (pickled(lambda w: [1, 2]), "it holds list; allowed: weights by name"),
}  # fmt: skip


def start(folder: Path, *more: str, columns: int = 160) -> Any:
    # Python's standard library is text enough, and its first bytes are read quickly.
    options = ("--data.max_bytes", "20000", "--data.sequence", "32", "--run.output", str(folder.parent / "run"), *more)
    return invoke("train", "--model.pretrained", str(folder), *options, columns=columns)


def dry_run(folder: Path) -> Any:
    return start(folder, "--dry-run", "--data.tokenizer", str(folder))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_one_line(
    name: str, intact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question on the terminal"))
    shutil.copytree(intact, folder := tmp_path / "model")
    damage, line = BROKEN[name]
    damage(folder)
    result = dry_run(folder)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert line in result.stderr
    assert capfd.readouterr().err == "", "beside the error"
    assert not Path("was-run").exists()


INTACT: dict[str, Callable[[Path], Any]] = {
    "as it is": lambda folder: None,
    "pickled": pickled(lambda w: w),
    "code that is not needed": config(auto_map=CODE),
    "a bare decoder": weights(lambda w: [w.update({n.removeprefix("model."): w.pop(n)}) for n in sorted(w)]),
    "of an older version": weights(lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})),
    "with a head of another task": weights(lambda w: w.update({"v_head.weight": torch.ones(8)})),
    "in halves": weights(lambda w: w.update({n: x.bfloat16() for n, x in w.items()})),
}


@pytest.mark.parametrize("name", INTACT)
def test_an_intact_folder_is_taken(name: str, intact: Path, tmp_path: Path):
    shutil.copytree(intact, folder := tmp_path / "model")
    INTACT[name](folder)
    result = dry_run(folder)
    assert result.exit_code == 0, (result.output, result.exception)
    model = build_model(ModelConfig(pretrained=str(folder)), vocab=256, sequence=32, seed=0)
    assert torch.isfinite(model(torch.zeros(1, 4, dtype=torch.long)).logits).all()


def other_tokenizer(folder: Path) -> str:
    """Replace a folder's tokenizer by one of two words."""
    for path in folder.glob("*token*"):
        path.unlink()
    fast = Fast(models.WordLevel({"<unk>": 0, "import": 1, "<end>": 2}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="<unk>", eos_token="<end>").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("line", ["text", "jsonl"])
def test_a_pretrained_model_keeps_its_tokenizer(line: str, intact: Path, tmp_path: Path):
    """It would be ruined, silently, by tokens that mean something else to it."""
    shutil.copytree(intact, model := tmp_path / "model")
    words, text = other_tokenizer(model), tmp_path / "text"
    text.write_text('{"prompt": "import ", "answer": "it"}\n' * 400)

    def prepared(**data: Any) -> Prepared:
        data = {"text": str(text), "format": line, "sequence": 16, "batch": 8} | data
        run = {"output": str(tmp_path / "run")}
        return prepare(from_mapping({"model": {"pretrained": words}, "data": data, "run": run}), ranks=2)

    own, named, others = prepared(), prepared(tokenizer=words), prepared(tokenizer="bytes")
    assert isinstance(own.data.tokenizer, FolderTokenizer)
    assert own.data.fingerprint() == named.data.fingerprint() != others.data.fingerprint()
    assert own.identity == named.identity, "a checkpoint of a run that named it goes on"
    told = f"data.tokenizer is 'bytes', which is not the tokenizer of the model {words!r}"
    assert (own.data.notes, named.data.notes, others.data.notes[0]) == ((), (), told)
    assert "tokenizer  " in start(model, "--dry-run").stdout
    assert told in " ".join(start(model, "--dry-run", "--data.tokenizer", "bytes", columns=300).stdout.split())


def test_a_model_without_a_tokenizer_says_what_to_name(intact: Path, tmp_path: Path):
    shutil.copytree(intact, model := tmp_path / "model", ignore=shutil.ignore_patterns("*token*"))
    refused = start(model, "--dry-run")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "which holds no tokenizer, and data.tokenizer is empty; allowed: the folder of" in refused.stderr
    assert start(model, "--dry-run", "--data.tokenizer", "bytes").exit_code == 0


def test_files_that_come_along_are_files_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A saved model is published: a link in a foreign folder does not add the user's files to it."""
    monkeypatch.setattr(pretrained, "MOST_BYTES", 100)
    cache, target = tmp_path / "models--a--b", tmp_path / "saved"
    folder = cache / "snapshots" / "1234"  # as the cache of Hugging Face Hub is laid out
    for path in (folder, cache / "blobs", target):
        path.mkdir(parents=True)
    (tmp_path / "secret").write_text("mine")
    (cache / "blobs" / "77").write_text("{}")
    (folder / "generation_config.json").symlink_to("../../blobs/77")
    (folder / "LICENSE").write_text("theirs")
    (folder / "LICENSE.txt").symlink_to(tmp_path / "secret")
    (folder / "LICENSE.md").symlink_to("../../../secret")
    (folder / "NOTICE").symlink_to("NOTICE")
    (folder / "NOTICE.txt").symlink_to("gone")
    (folder / "notice").mkdir()
    os.mkfifo(folder / "COPYING")
    (folder / "USE_POLICY.md").write_bytes(bytes(101))
    (folder / "README.md").write_text("of another model")
    copy_files(str(folder), target, MODEL_FILES)
    assert {path.name: path.read_text() for path in target.iterdir()} == {
        "generation_config.json": "{}", "LICENSE": "theirs"
    }  # fmt: skip
    assert not (target / "generation_config.json").is_symlink()
    assert caplog.text.count("is not saved with the model: ") == 7
    assert caplog.text.count("it is a link out of the folder, or not a file") == 4


@pytest.mark.parametrize("command", ["train --data.tokenizer", "evaluate"])
def test_a_name_of_the_hub_says_how_to_download_it(command: str, tmp_path: Path, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)
    result = invoke(*command.split(), "Qwen/Qwen3-0.6B")
    assert result.exit_code == 2
    how = "run hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B and give the folder Qwen3-0.6B\n"
    assert how in result.stderr
    assert result.stderr.count("\n") == 1


OTHERS = ["evaluate", "calibrate", "generate --prompt x", "plan memory --budget 1gb --model.pretrained",
          "bench spectrum", "bench generation --link unlimited --pretrained"]  # fmt: skip


@pytest.mark.parametrize("command", OTHERS)
def test_other_commands_refuse_it_in_one_line_too(command: str, intact: Path, tmp_path: Path):
    shutil.copytree(intact, folder := tmp_path / "model")
    sharded(folder)
    result = invoke(*command.split(), str(folder))
    assert result.exit_code == 2, (result.output, result.exception)
    assert [line[:7] for line in result.stderr.strip().splitlines()] == ["error: "]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_each_rank_refuses_it_before_it_meets_the_others(
    intact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str
):
    shutil.copytree(intact, folder := tmp_path / "model")
    cut(WEIGHTS)(folder)
    there = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "RANK": rank}  # nobody listens
    for name, value in there.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os._exit", lambda code: sys.exit(code))
    monkeypatch.setattr("lowbit_run.job.decline._PATIENCE", 0.0)
    result = start(folder)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert SHORT in result.stderr
