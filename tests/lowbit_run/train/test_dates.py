"""Chat templates that write today's date: a run has one date, whatever the clocks of its machines say."""

import contextlib
import datetime
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from transformers.utils import chat_template_utils

from lowbit_run.train import ConfigError, TrainConfig, dates, run, train
from lowbit_run.train.checkpoints.manifest import FOLDER, seal, shares_newest_first
from lowbit_run.train.data import load_data
from lowbit_run.train.prepare import prepare
from tests.lowbit_run.train.runs import LIMIT, ONE, RESUME, again, curve, losses, stopped, tiny
from tests.lowbit_run.train.test_answers import CHATML, chat_tokenizer
from tests.lowbit_run.train.test_launch import _process_of_rank, _wait_for_lines
from tests.processes import Ranks

WEST, EAST = "WEST+12", "EAST-14"
"""Two time zones in which it is never the same day."""
# As Llama 3.2's begins.
DATED = (
    "{%- if not date_string is defined %}\n    {%- if strftime_now is defined %}\n"
    '        {%- set date_string = strftime_now("%d %b %Y") %}\n    {%- endif %}\n{%- endif %}\n'
    "{{- 'Today Date: ' + date_string + '\n' }}\n" + CHATML
)


@contextlib.contextmanager
def zone(name: str) -> Iterator[str]:
    """The date in a time zone, which is that of this process and of those that it starts."""
    try:
        with mock.patch.dict(os.environ, TZ=name):
            time.tzset()
            yield datetime.date.today().isoformat()
    finally:
        time.tzset()


def chatting(folder: Path, template: str = DATED, **sections: Any) -> TrainConfig:
    """A `tiny` run on conversations, in the words of a template."""
    folder.mkdir(parents=True, exist_ok=True)
    chat_tokenizer(folder / "chat", template)
    said = [[("user", f"{n} + {n} ="), ("assistant", str(2 * n))] for n in range(40)]
    lines = [{"messages": [{"role": role, "content": content} for role, content in each]} for each in said]
    (folder / "said.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {
        "format": "jsonl", "text": str(folder / "said.jsonl"), "tokenizer": str(folder / "chat"), "sequence": 64,
        "held_out_share": 0.2, "batch": 4, **sections.pop("data", {}),
    }  # fmt: skip
    return tiny(folder, data=data, **{"model": {"layers": 2}, **sections})


class Noon(datetime.datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return cls(2024, 2, 29)


@pytest.mark.parametrize(
    "template",
    [
        DATED,
        "\n  {% if true %}{{ strftime_now('%A, %-d %B %y, day %j, 100%% at %H:%M, %%d') }}{% endif %}\n" + CHATML,
        "{% macro day() %}{{ strftime_now('%Y-%m-%d') | upper }}{% endmacro %}  {{ day() }}\n\n" + CHATML,
    ],
)
def test_a_template_writes_what_transformers_writes_on_that_day(tmp_path: Path, template: str):
    tokenizer = chat_tokenizer(tmp_path, template)
    messages = [{"role": "user", "content": "u"}]
    with mock.patch.object(chat_template_utils, "datetime", Noon):
        expected = tokenizer.apply_chat_template(messages, tokenize=False)
    dated = dates.on_day(tokenizer, "2024-02-29")
    assert dated is not None
    assert dated.apply_chat_template(messages, tokenize=False) == expected
    assert tokenizer.chat_template == template, "which is saved with the model"
    several: Any = {"default": template, "tool_use": "{{ strftime_now('%d') }}"}
    tokenizer.chat_template = several
    dated = dates.on_day(tokenizer, "2024-02-29")
    assert dated is not None
    assert dated.apply_chat_template(messages, tokenize=False) == expected


def test_only_what_depends_on_the_date_has_one(tmp_path: Path):
    config = chatting(tmp_path)
    data = load_data(config.data, date="2024-02-29")
    assert data.date == "2024-02-29"
    assert data.notes == ("the chat template writes today's date: in this run it is always 2024-02-29 (data.date)",)
    assert data.fingerprint() != load_data(config.data, date="2024-03-01").fingerprint()
    plain = load_data(chatting(tmp_path / "plain", CHATML, data={"date": "2024-02-29"}).data)
    assert (plain.date, plain.notes) == ("", ("data.date is 2024-02-29, and no chat template writes a date",))
    for wrong in ("yesterday", "20240229", "2024-02-30", "2024-02-29 10:00"):
        with pytest.raises(ConfigError, match=f"^data.date is '{wrong}'; allowed: a day such as 2026-07-24, or noth"):
            again(config, data={"date": wrong})
    with pytest.raises(ConfigError, match="data.date is '2024-02-29' and data.format is text; allowed: with data.form"):
        again(config, data={"date": datetime.date(2024, 2, 29), "format": "text"})


def test_a_template_with_random_values_is_refused(tmp_path: Path):
    for expression, problem in {
        "range(100000) | random": "writes the same messages differently each time; allowed: a template without random",
        "range(1000000) | random": "refuses the messages: Range too big",
        "1 // 0": "refuses the messages: ",
    }.items():
        config = chatting(tmp_path, f"{{{{ {expression} }}}}{CHATML}")
        with pytest.raises(ConfigError, match=rf"said.jsonl line \d+: the chat template {problem}"):
            load_data(config.data)


def test_a_run_keeps_its_date_when_it_resumes_on_another_day(tmp_path: Path):
    sections: Any = {"pipeline": ONE, "run": {"steps": 4, "checkpoint_every": 2}}
    with zone(WEST) as before:
        train(whole := chatting(tmp_path / "whole", **sections))
        resumed = stopped(chatting(tmp_path / "parts", **sections), 3)
    with zone(EAST) as after:
        assert prepare(resumed, ranks=1).identity["data.date"] == before != after
        train(resumed)
        assert curve(resumed) == curve(whole)
        assert json.loads((tmp_path / "parts/run/config.json").read_text())["data"]["date"] == before
        other = again(resumed, data={"date": after})
        expected = f"data.date was {before} and is {after} now;\n.*data.text was .*--allow-change data.date"
        with pytest.raises(ConfigError, match=f"(?s){expected}"):
            train(other)
        _forget_date(resumed)  # as older versions did
        with pytest.raises(ConfigError, match=f"data.date was not recorded and is {after} now;\n.*data.text was "):
            train(resumed)
        train(again(resumed, data={"date": before}))


def _forget_date(config: TrainConfig) -> None:
    (Path(config.run.output) / "config.json").unlink()
    for share in shares_newest_first(Path(config.run.output) / FOLDER):
        values = json.loads((share / "manifest.json").read_text())
        del values["sha256"], values["identity"]["data.date"]
        (share / "manifest.json").write_bytes(seal(values))


def test_an_attempt_that_ended_before_its_first_checkpoint_had_a_date_too(tmp_path: Path):
    config = chatting(tmp_path, pipeline=ONE, run={"resume": "auto", "overwrite": False})
    with zone(WEST) as before:
        stopped(config, 1)
    with zone(EAST):
        assert prepare(config, ranks=1).data.date == before


def _in_two_zones(config: TrainConfig, zones: tuple[str, str]) -> tuple[list[float], str]:
    """Losses, and the date of this rank's clock; each has a disk of its own."""
    rank = dist.get_rank()
    with zone(zones[rank]) as day:
        return losses(again(config, run={"output": f"{config.run.output}-{rank}"})), day


@pytest.mark.slow
def test_machines_in_two_time_zones_have_one_date(ranks: Ranks, tmp_path: Path):
    """That of rank 0; on a resume the checkpoints', though rank 0 has none, as on a new machine."""
    config = chatting(tmp_path, run={"steps": 4, "checkpoint_every": 2})
    (east, day), (west, other) = ranks.run(_in_two_zones, config, (EAST, WEST), timeout=LIMIT)
    alone = losses(again(config, pipeline=ONE, data={"date": day}))
    assert day != other
    assert east == west == pytest.approx(alone, rel=1e-6)
    _lose_last_step_and_first_disk(Path(config.run.output))
    for outcome, _ in ranks.run(_in_two_zones, again(config, run=RESUME), (WEST, EAST), timeout=LIMIT):
        assert outcome == pytest.approx(alone[2:], rel=1e-6)


def _lose_last_step_and_first_disk(run: Path) -> None:
    first, second = (run.with_name(f"{run.name}-{rank}") for rank in (0, 1))
    (first / FOLDER / "step-00000002" / "rank-0").rename(second / FOLDER / "step-00000002" / "rank-0")
    shutil.rmtree(first)
    shutil.rmtree(second / FOLDER / "step-00000004")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_supervised_run_over_midnight_has_the_same_losses(tmp_path: Path):
    """A rank is killed before midnight, and again after it."""
    sections: Any = {"run": {"steps": 30, "checkpoint_every": 5, "overwrite": False, "timeout_seconds": 20}}
    config = chatting(tmp_path, **sections)
    whole = again(config, run={"output": str(tmp_path / "whole"), "checkpoint_every": 0})
    with zone(WEST), ThreadPoolExecutor(1) as pool:
        run(whole)
        running = pool.submit(run, again(config, run={"supervise": True}))
        for lines in (7, 17):
            _wait_for_lines(config.run.output, lines, running.done)
            os.kill(_process_of_rank(1), signal.SIGKILL)
            time.sleep(1)
            os.environ["TZ"] = EAST  # of the ranks that start from now on
        summary = running.result(timeout=150)
    assert curve(config) == curve(whole)
    assert summary is not None
    assert 0 < summary.steps_here < 30
