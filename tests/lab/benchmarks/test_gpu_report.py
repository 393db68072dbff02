"""The report of a GPU, made on a CPU: what runs, what fails, and what a page without a GPU says."""

from pathlib import Path

import pytest
import torch

from benchmarks import gpu_report
from benchmarks.which_model import replaced
from lowbit.config import ConfigError

TESTS = "import pytest\n\ndef test_a(): pass\n\ndef test_b(): assert False\n\ndef test_c(): pytest.skip()\n"


def test_a_section_has_tests_tables_and_failures(tmp_path: Path):
    (tmp_path / "test_three.py").write_text(TESTS)
    steps = {
        "Codecs": "bench codecs --codec int4,fp8 --data gaussian --dtype float32 --shape 1,8,64 --rounds 1 --thread 1 "
        "--no-reference",
        "Nothing": "bench codecs --codec nonsense",
    }
    text = gpu_report.section(steps, [f"{tmp_path}/test_three.py", "-p", "no:cacheprovider"], tmp_path / "out")
    assert "1 tests passed, 1 failed, 1 were skipped." in text
    assert "| int4 | " in text
    assert "### Nothing\n\n**Failed**: error: " in text
    assert "nonsense" in text
    page = replaced("before\n<!-- measured -->\nold\n<!-- end -->\nafter\n", "measured", text)
    assert page.startswith("before\n<!-- measured -->\n\n")
    assert page.endswith("<!-- end -->\nafter\n")
    assert "old" not in page


def test_the_page_has_its_marks_and_the_commands_exist():
    replaced(gpu_report.PAGE.read_text("utf-8"), "measured", "")
    for words in gpu_report.BENCHMARKS.values():
        name = words.split()[1]
        assert gpu_report.command_of(words).name == f"bench {name}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU would be measured")
def test_without_a_gpu_nothing_is_written():
    with pytest.raises(ConfigError, match="PyTorch can use no GPU on this machine; allowed"):
        gpu_report.main([])
