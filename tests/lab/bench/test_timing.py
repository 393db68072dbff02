import pytest
import torch

from lowbit_lab.bench import timing


def test_operations_take_turns_on_changing_buffers():
    calls: list[tuple[str, int]] = []
    operations = {name: lambda i, name=name: calls.append((name, i)) for name in ("copy", "encode", "slow")}
    seconds = timing.in_turn(operations, rounds=3, buffers=4, fewer={"slow": 1})
    assert calls[:3] == [("copy", 0), ("encode", 0), ("slow", 0)]  # not timed
    assert [name for name, _ in calls[3:]] == ["copy", "encode", "slow"] + ["copy", "encode"] * 2
    assert [i for _, i in calls[3:]] == [1, 2, 3, 0, 1, 2, 3]
    assert {name: len(values) for name, values in seconds.items()} == {"copy": 3, "encode": 3, "slow": 1}
    assert min(min(values) for values in seconds.values()) > 0


def test_buffers_are_together_more_than_the_cache(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timing, "last_level_cache", lambda device: 100)
    assert timing.buffers_for(10) * 10 > 200
    assert timing.buffers_for(10**6) == 3


def test_this_machine_tells_a_plausible_cache():
    assert 2**18 <= timing.last_level_cache() <= 2**34


def test_threads_are_put_back_after_an_error():
    before = torch.get_num_threads()
    seen = []

    def fail() -> None:
        with timing.threads(before + 1):
            seen.append(torch.get_num_threads())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == [before + 1]
    assert torch.get_num_threads() == before
