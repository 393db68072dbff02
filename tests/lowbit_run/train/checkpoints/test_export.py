"""A model that `lowbit export` makes of a checkpoint is the one that the run saves at its end."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowbit_run.train import TrainConfig, train
from lowbit_run.train.pretrained import ByteTokenizer
from tests.command_line import invoke
from tests.lowbit_run.train.runs import LIMIT, ONE, base, tiny
from tests.processes import Ranks

RUN = {"steps": 2, "checkpoint_every": 1, "save_model": True}


def run_of(folder: Path, kind: str) -> TrainConfig:
    given: dict[str, Any] = {
        "tied, on two ranks": {"model": {"family": "gpt2"}},
        "untied": {"pipeline": ONE},
        "in bfloat16": {"model": {"weights": "bf16", "tied": True}},
        "pretrained": {"model": {"pretrained": base(folder)}, "pipeline": ONE, "run": {"save_dtype": "bf16"}},
        "adapters": {"model": {"pretrained": base(folder)}, "lora": {"rank": 2}},
    }[kind]
    return tiny(folder, **given | {"run": RUN | given.get("run", {})})


KINDS = [
    "tied, on two ranks", "untied", "in bfloat16", "pretrained",
    pytest.param("adapters", marks=pytest.mark.skipif(not find_spec("peft"), reason="PEFT")),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_model_that_the_run_saves(ranks: Ranks, tmp_path: Path, kind: str):
    config = run_of(tmp_path, kind)
    count = config.pipeline.ranks
    ranks.run(train, config, ranks=count, timeout=LIMIT)
    run, saved = tmp_path / "run", tmp_path / "run" / "model"
    result = invoke("export", str(run))
    assert result.exit_code == 0, (result.output, result.exception)
    made = run / "step-00000002"
    assert str(made) in result.stdout
    assert f'lowbit generate {made} --prompt "..."' in result.stdout
    assert {path.name for path in made.iterdir()} == {path.name for path in saved.iterdir()}
    for path in saved.iterdir():
        if path.name == "adapter_config.json":  # PEFT writes a set, whose order differs between processes
            one, other = (json.loads((folder / path.name).read_text()) for folder in (made, saved))
            assert {**one, "target_modules": sorted(one["target_modules"])} == {
                **other, "target_modules": sorted(other["target_modules"])
            }  # fmt: skip
        else:
            assert (made / path.name).read_bytes() == path.read_bytes(), path.name
    earlier = invoke("export", str(run / "checkpoints" / "step-00000001"), "--output", str(tmp_path / "earlier"))
    assert earlier.exit_code == 0, earlier.output
    (weights,) = saved.glob("*.safetensors")
    assert load_file(tmp_path / "earlier" / weights.name).keys() == load_file(weights).keys()
    assert (tmp_path / "earlier" / weights.name).read_bytes() != weights.read_bytes()
    if kind == "adapters":
        changed = json.loads((run / "config.json").read_text())
        changed["lora"]["alpha"] = 32.0
        (run / "config.json").write_text(json.dumps(changed))
        result = invoke("export", str(run / "checkpoints" / "step-00000001"), "--output", str(tmp_path / "other"))
        assert f"lora.alpha of {run / 'config.json'} is 32.0, and was '16.0' for checkpoint" in result.stderr
    else:
        AutoModelForCausalLM.from_pretrained(made)
    assert AutoTokenizer.from_pretrained(made)("a")["input_ids"]


def test_what_cannot_be_a_model_is_one_line(ranks: Ranks, tmp_path: Path):
    config = tiny(tmp_path, run=RUN | {"save_model": False})
    ranks.run(train, config, timeout=LIMIT)
    run, step = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-00000002"

    def refused(*words: object) -> str:
        result = invoke("export", *map(str, words))
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
        assert not list(run.glob(".step*")), "nothing is left behind"
        return result.stderr

    assert "checkpoint is 'gone', and there is none; allowed: the folder of a run, or of a step" in refused("gone")
    assert "which exists; allowed: an empty folder" in refused(run, "--output", tmp_path)
    kept = (run / "config.json").read_text()
    (run / "config.json").write_text(json.dumps(json.loads(kept) | {"model": {"pretrained": base(tmp_path)}}))
    assert "which is not the model that checkpoint" in refused(step)
    ByteTokenizer().hugging_face().save_pretrained(tmp_path / "own")
    changed = json.loads(kept)
    changed["data"]["tokenizer"] = str(tmp_path / "own")
    (run / "config.json").write_text(json.dumps(changed))
    assert "config.json is '" in (text := refused(step))
    assert "and was 'bytes' for checkpoint" in text
    (run / "config.json").unlink()
    assert "config.json, the settings of the run, cannot be used: No such file" in refused(step)
    (run / "config.json").write_text(kept)
    tensors = step / "rank-1" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"x")
    assert "rank-1 has a tensors.safetensors that was changed; allowed: one with the shares of all" in refused(step)
    shutil.rmtree(step / "rank-1")
    assert "rank-1 is not here; allowed: one with the shares of all ranks of a pipeline" in refused(step)
