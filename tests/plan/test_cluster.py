from __future__ import annotations

from pathlib import Path

import pytest

from lowbit.config import ConfigError
from lowbit.plan.cluster import Cluster

TWO = """
[[machine]]
name = "desk"
cores = 8
memory = "16gb"
tflops = 0.5
coding = ["transform=0.9/1.6"]

[[machine]]
name = "server"
gpus = 2
layer_seconds = 0.01
"""


def read(folder: Path, text: str) -> Cluster:
    (folder / "cluster.toml").write_text(text)
    return Cluster.read(folder / "cluster.toml")


def test_machines_and_links_are_read(tmp_path: Path):
    cluster = read(tmp_path, TWO + '[[link]]\nbetween = ["server", "desk"]\nmbit = 50\nback_mbit = 20\nrtt_ms = 40\n')
    desk, server = cluster.machines
    assert (desk.bytes, desk.ranks, server.ranks) == (16e9, 1, 2)
    assert desk.coding_speeds == {"transform": (0.9e9, 1.6e9)}
    assert [machine.name for machine in cluster.of_ranks] == ["desk", "server", "server"]
    link = cluster.link("desk", "server")
    assert link is not None
    assert (link.mbit, link.back_mbit, link.rtt_ms) == (50, 20, 40)
    assert cluster.link("server", "server") is None


def test_a_link_between_nobody_is_of_all_other_pairs(tmp_path: Path):
    third = '[[machine]]\nname = "laptop"\ntflops = 0.1\n'
    links = '[[link]]\nmbit = 10\n[[link]]\nbetween = ["desk", "server"]\nmbit = 1000\n'
    cluster = read(tmp_path, TWO + third + links)
    found = [cluster.link(*pair) for pair in (("desk", "server"), ("laptop", "desk"))]
    assert [link.mbit for link in found if link] == [1000, 10]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ('[[link]]\nbetween = ["desk", "sever"]\nmbit = 1', "there is no machine 'sever'; known: desk, server"),
        ('[[link]]\nbetween = ["desk"]\nmbit = 1', "link.between is .* allowed: two machines, or nothing"),
        ('[[link]]\nbetween = ["desk", "desk"]\nmbit = 1', "link.between is .* allowed: two machines, or nothing"),
        ('[[link]]\nbetween = ["desk", "server"]', "link.mbit is missing"),
        ("[[link]]\nmbit = 0", "link.mbit is 0; allowed: more than 0"),
        ("[[link]]\nmbit = 1\n[[link]]\nmbit = 2", "two links between all other pairs"),
        ("[[link]]\nmbit = 1\nback_mbit = 2\nhalf_duplex = true", "link.half_duplex is true; allowed: one rate"),
        ("[[link]]\nmbit = 1\nmbits = 2", "unknown key link.mbits; did you mean link.mbit"),
        ('[[machine]]\nname = "desk"\ntflops = 1', "machines .* allowed: at least one, each with its own name"),
        ('[[machine]]\ntflops = 1\nname = ""', "machine.name is empty"),
        ('[[machine]]\nname = "c"', "machine 'c' has no speed; allowed: layer_seconds or tflops"),
        (
            '[[machine]]\nname = "c"\nlayer_seconds = 1\nlayer_overhead = 2',
            "machine 'c' has layer_overhead 2; allowed: at most layer_seconds, 1",
        ),
        ('[[machine]]\nname = "c"\ntflops = 1\nmemory = "lots"', "machine 'c': memory is 'lots'; allowed: bytes"),
        ('[[machine]]\nname = "c"\ntflops = 1\ncoding = ["int4"]', "machine 'c' has coding 'int4'; allowed: such as"),
        (
            '[[link]]\nmbit = 1\nshared = "home"\n[[link]]\nbetween = ["desk", "server"]\nmbit = 2\nshared = "home"',
            "links that share 'home' have different rates or round trips; allowed: the same for all",
        ),
        ("[machines]\na = 1", r"has machines; known: \[\[machine\]\], \[\[link\]\]"),
        ("[link]\nmbit = 1", r"has \[link\]; allowed: \[\[link\]\], once for each"),
        ("a = [", "is not TOML"),
    ],
)
def test_mistakes_are_named_in_one_line(tmp_path: Path, more: str, message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, TWO + more + "\n")
    assert "\n" not in str(caught.value)


def test_a_missing_file_or_link_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="configuration file .*: No such file"):
        Cluster.read(tmp_path / "nothing.toml")
    with pytest.raises(ConfigError, match="the cluster has no link between desk and server"):
        read(tmp_path, TWO).link("desk", "server")
    with pytest.raises(ConfigError, match="at least one, each with its own name"):
        read(tmp_path, "")
