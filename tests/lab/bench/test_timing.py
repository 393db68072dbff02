import pytest

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
