from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from lowbit.config import ConfigError
from lowbit.job.process_group import MeetingError, interface_towards, joined, world

WHOLE = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch):
    for name in WHOLE:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_launcher_tells_the_rank(environment: pytest.MonkeyPatch):
    assert world() == (0, 1)
    for name, value in WHOLE.items():
        environment.setenv(name, value)
    assert world() == (1, 3)


def test_half_an_environment_is_refused(environment: pytest.MonkeyPatch):
    environment.setenv("RANK", "0")
    environment.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ConfigError, match="has RANK, MASTER_ADDR but not WORLD_SIZE, MASTER_PORT"):
        world()


def test_one_process_needs_no_launcher():
    with joined(5):
        assert dist.get_world_size() == 1
        with joined(5):  # the group there is
            assert world() == (0, 1)
        assert dist.is_initialized()
    assert not dist.is_initialized()


def test_ranks_that_do_not_come_are_waited_for_so_long_only(environment: pytest.MonkeyPatch):
    for name, value in (WHOLE | {"RANK": "0", "MASTER_PORT": "0", "WORLD_SIZE": "2"}).items():
        environment.setenv(name, value)
    with pytest.raises(ConnectionError, match=r"rank 0 did not meet all 2 ranks at 127.0.0.1:0"), joined(1):
        pass


def test_the_interface_is_the_one_that_leads_there():
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no.such.host.invalid") is None


def test_data_ports_that_nothing_reaches_are_an_error_in_time(environment: pytest.MonkeyPatch):
    """As behind a firewall: Gloo itself would try five times as long."""
    environment.setattr(dist, "init_process_group", lambda *args, **kwargs: time.sleep(20))
    begin = time.monotonic()
    expected = "rank 0 did not connect to all 1 ranks within 0.8 s: .* firewalls"
    with pytest.raises(MeetingError, match=expected), joined(1):
        pass
    assert time.monotonic() - begin < 5
