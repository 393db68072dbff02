"""The plug-in in vLLM's own engine and server on CPUs: two tensor-parallel ranks (`make test-vllm` installs it)."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

if not importlib.util.find_spec("vllm"):
    pytest.skip("vLLM is not installed", allow_module_level=True)

pytestmark = pytest.mark.timeout(900)  # an engine takes a minute to start, more on a busy machine
LIMIT = 600
INT8 = {"format": "GroupInt(bits=8, group=64)", "small": 1024}
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(
        model=sys.argv[1], tensor_parallel_size=2, enforce_eager=True, max_model_len=256, max_num_seqs=4,
        skip_tokenizer_init=True, enable_prefix_caching=False,
    )
    prompts = [{"prompt_token_ids": ids} for ids in json.loads(sys.argv[2])]
    for _ in range(2):  # the first answers have vLLM's sums, next to which the others are checked
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=6, detokenize=False, logprobs=0))
    print("TOKENS", json.dumps([list(each.outputs[0].token_ids) for each in outputs]))
    print("LIKELY", json.dumps([each.outputs[0].cumulative_logprob for each in outputs]))
"""
PROMPTS = [[(7 * place + start) % 250 for place in range(40)] for start in (1, 2, 3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama whose likeliest token is far ahead of the others: its output matrix repeats its embedding."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 32,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    whole = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True))  # pyright: ignore[reportCallIssue]
    whole.to(torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(256)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w255").save_pretrained(folder)
    return folder


def environment(settings: dict[str, Any] | None) -> dict[str, str]:
    """Return vLLM's environment on a few cores, with the plug-in unless `settings` is None."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("LOWBIT", "TRITON"))}
    given |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    return given | ({} if settings is None else {"LOWBIT_VLLM": json.dumps(settings)})


def answered(model: Path, settings: dict[str, Any] | None) -> tuple[list[list[int]], str]:
    """Return the tokens of an engine's answers (none if it failed), and all that it printed."""
    command = [sys.executable, "-c", PROGRAM, str(model), json.dumps(PROMPTS)]
    done = subprocess.run(
        command, env=environment(settings), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        timeout=LIMIT,
    )  # fmt: skip
    found = [line.removeprefix("TOKENS ") for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    return (json.loads(found[0]) if found else []), done.stdout


def _likely(log: str) -> list[float]:
    """Logarithms of the probabilities of an engine's answers."""
    (found,) = [line.removeprefix("LIKELY ") for line in log.splitlines() if line.startswith("LIKELY ")]
    return json.loads(found)


def test_the_engine_answers_as_without_and_says_what_it_codes(model: Path):
    plain, without = answered(model, None)
    coded, log = answered(model, INT8)
    assert plain
    assert coded == plain, log[-2000:]
    exact, rounded = (_likely(each) for each in (without, log))
    assert rounded != exact, "the sums of the second round were coded"
    assert rounded == pytest.approx(exact, abs=0.1)
    assert "lowbit: 4 row-parallel layers sum prefills in few bits over 2 ranks: GroupInt(bits=8" in log
    assert "lowbit: 4 layers checked: errors of their sums" in log


def test_a_limit_that_no_format_keeps_ends_the_engine_with_a_line_that_names_the_layer(model: Path):
    tokens, log = answered(model, INT8 | {"check": 1e-6, "over": "refuse"})
    assert tokens == []
    assert "model.layers.0.self_attn.o_proj: sums in few bits differ from vLLM's by" in log


def test_calibrated_sums(model: Path, tmp_path: Path):
    """4 bits by feature, chosen on this model by `calibrate`, as `lowbit calibrate` does."""
    from transformers import AutoModelForCausalLM

    from lowbit.tensor_parallel import calibrate

    whole: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    ids = [torch.randint(250, (1, 64), generator=torch.Generator().manual_seed(seed)) for seed in range(8)]
    calibrate(whole, ids, ranks=2).save(tmp_path / "calibration.safetensors")
    _, log = answered(model, {"calibration": str(tmp_path / "calibration.safetensors"), "small": 1024, "check": 0.5})
    assert "row-parallel layers sum prefills in few bits over 2 ranks: FeatureInt" in log, log[-2000:]


@contextmanager
def served(model: Path, settings: dict[str, Any], port: int) -> Iterator[str]:
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)),
        *("--tensor-parallel-size", "2", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4"),
        *("--served-model-name", "small"),
    ]
    address = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, env=environment(settings), start_new_session=True) as server:
        try:
            end = time.monotonic() + LIMIT
            while time.monotonic() < end and server.poll() is None:
                try:
                    urllib.request.urlopen(f"{address}/health", timeout=5).read()
                    break
                except OSError:
                    time.sleep(1)
            assert server.poll() is None, "the server ended"
            yield address
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)


def test_the_server_answers_a_client_of_its_interface(model: Path):
    from openai import OpenAI  # pyright: ignore[reportMissingImports]

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with served(model, INT8, port) as address:
        client = OpenAI(base_url=f"{address}/v1", api_key="none")
        text = " ".join(f"w{number}" for number in PROMPTS[0])
        answer = client.completions.create(model="small", prompt=text, max_tokens=6, temperature=0.0)
        again = client.completions.create(model="small", prompt=text, max_tokens=6, temperature=0.0)
    assert answer.choices[0].text
    assert again.choices[0].text == answer.choices[0].text
