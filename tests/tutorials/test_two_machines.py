"""docs/tutorials/two-machines.md, typed into two machines: network namespaces joined by a link of 25 Mbit/s."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from lowbit_lab.network import SlowLink
from lowbit_run.plan.cluster import Cluster
from lowbit_run.train.metrics import read_metrics
from tests.tutorials.machines import ROOT, Machine

PAGE = (ROOT / "docs" / "tutorials" / "two-machines.md").read_text(encoding="utf-8")
COMMANDS = re.compile(
    r"^\*\*(?:Machine|Both) (?P<machines>A|B|machines)\*\*[^\n]*\n\n```bash\n(?P<body>.*?)^```$", re.M | re.S
)
LIMIT = 20  # seconds of `run.timeout_seconds` here
SMALLER = {
    "warmup_steps": 5,
    "dim": 64,
    "heads": 2,
    "sequence": 64,
    "steps": 30,
    "checkpoint_every": 5,
    "timeout_seconds": LIMIT,
}
WAITS = "lowbit doctor"  # for the other machine
Machines = dict[str, Machine]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(SlowLink.available() is not None, reason=f"no shaped link here: {SlowLink.available()}"),
]


@pytest.fixture
def link() -> Iterator[SlowLink]:
    with SlowLink(hosts=2, rate_mbit=25) as opened:
        yield opened


@pytest.fixture
def machines(link: SlowLink, tmp_path: Path) -> Machines:
    a, b = tmp_path / "a", tmp_path / "b"
    return {
        "A": Machine(link, 0, address="192.168.1.10", home=a, other=b),
        "B": Machine(link, 1, address="192.168.1.11", home=b, other=a),
    }


def test_all_steps_of_the_page(link: SlowLink, machines: Machines):
    """The link is cut as step 8 has it, and the losses are those of a run without a link."""
    steps = commands()
    a, b = machines["A"], machines["B"]
    for number in ("1", "2", "3"):
        follow(steps[number], machines)
    assert (a.home / "lowbit-secret").read_text() == (b.home / "lowbit-secret").read_text() != ""
    for machine in machines.values():
        shrink(machine.home / "two-machines" / "two-machines.toml")
    *_, first, second = follow(steps["4"], machines)
    assert all("Nothing would stop the training." in page for page in (first, second))
    (rates,) = Cluster.read(a.home / "two-machines" / "cluster.toml").links
    assert 15 < rates.mbit < 26
    (planned,) = follow(steps["5"], machines)
    assert "laptop" in planned
    dry, *_ = follow(steps["6"], machines)
    assert "format 3" in dry
    for machine in machines.values():  # or the run on one machine would choose others
        replaced(machine.home / "two-machines" / "two-machines.toml", {"forward": '"transform"'})

    start_a, start_b = steps["7"][:2]
    a.type(start_a[1])
    a.wait_for(lambda: "waits up to" in a.output, 120)
    b.type(start_b[1])
    a.wait_for(lambda: newest(a) >= 10 or a.code is not None, 300)
    link.cut(1)
    for machine in machines.values():
        machine.wait_for(lambda machine=machine: "Starting again from step" in machine.output, LIMIT + 30)
    link.restore(1)
    first, second = a.wait(600), b.wait(120)
    assert a.code == b.code == 0, first + second
    assert "rank 1 (stage 1) did not answer" in first or "stopped answering" in first, first
    assert "stopped answering" in second or "did not answer" in second, second

    listed, of_b = follow(steps["10"], machines)
    assert "model" in listed.split()
    assert "summary.json" in listed.split()
    assert "model" not in of_b.split()
    a.type(
        "unset WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT; "
        "lowbit train two-machines.toml --ranks 2 --run.output runs/local"
    )
    text = a.wait(300)
    assert a.code == 0, text
    runs = a.home / "two-machines" / "runs"
    assert losses(runs / "two-machines") == losses(runs / "local")


def test_what_the_page_says_when_it_does_not_work(link: SlowLink, machines: Machines):
    steps = commands()
    for number in ("2", "3"):
        follow(steps[number], machines)
    for machine in machines.values():
        shrink(machine.home / "two-machines" / "two-machines.toml")
    follow(steps["4"][:1], machines)
    a, b = machines["A"], machines["B"]

    b.type("export LOWBIT_SECRET=another")
    b.wait(10)
    for text in fail(machines):
        assert said("did not prove knowledge of this run's secret") in text
    b.type("export LOWBIT_SECRET=$(cat ~/lowbit-secret); echo more >> texts/reference.txt")
    b.wait(10)
    for text in fail(machines):
        assert said("the ranks do not agree: text: ") in text
    a.type("scp -r texts 192.168.1.11:two-machines")
    a.wait(10)

    firewall = link._namespaces[0].ip
    firewall("rule add pref 20 lookup local", "rule del pref 0")
    for ports, expected in (("29400", "did not meet all 2 ranks"), ("30000-65534", "did not connect to all 2 ranks")):
        firewall(f"rule add pref 10 iif {link.interface(0)} ipproto tcp dport {ports} blackhole")
        for text in fail(machines):
            assert said(expected) in text
        firewall("rule del pref 10")


def commands() -> dict[str, list[tuple[str, str]]]:
    """The page's blocks of commands: on which machines ("A", "B" or "AB") and what, by the number of the step."""
    _, *parts = re.split(r"^## ([^.\n]+).*$", PAGE, flags=re.M)
    return {
        number: [(found["machines"].replace("machines", "AB"), found["body"]) for found in COMMANDS.finditer(text)]
        for number, text in zip(parts[::2], parts[1::2], strict=True)
    }


def follow(blocks: list[tuple[str, str]], machines: Machines) -> list[str]:
    """Type the commands; returns what each block printed. One that waits for the other machine goes on meanwhile."""
    printed: list[str] = []
    waiting: Machine | None = None
    for names, body in blocks:
        for name in names:
            machines[name].type(body)
            if WAITS in body and waiting is None:
                waiting = machines[name]
                continue
            text = machines[name].wait(300)
            assert machines[name].code == 0, text
            if waiting is not None:
                printed.append(waiting.wait(30))
                assert waiting.code == 0, printed[-1]
                waiting = None
            printed.append(text)
    return printed


def fail(machines: Machines) -> list[str]:
    """What both ranks print of a run that must fail."""
    for rank, machine in enumerate(machines.values()):
        machine.type(f"RANK={rank} lowbit train two-machines.toml --run.output runs/other")
    texts = [machine.wait(180) for machine in machines.values()]
    assert [machine.code for machine in machines.values()] == [1, 1], texts
    return texts


def said(text: str) -> str:
    """A text that the page shows."""
    assert text in PAGE
    return text


def shrink(configuration: Path) -> None:
    """The page's configuration in a size for tests."""
    replaced(configuration, SMALLER)
    configuration.write_text(configuration.read_text() + "eval_batches = 2\nthreads = 1\n")


def replaced(configuration: Path, values: Mapping[str, object]) -> None:
    text = configuration.read_text()
    for key, value in values.items():
        text, count = re.subn(rf"^{key} = \S+", f"{key} = {value}", text, flags=re.M)
        assert count == 1, key
    configuration.write_text(text)


def newest(machine: Machine) -> int:
    folder = machine.home / "two-machines" / "runs" / "two-machines" / "checkpoints"
    steps = [int(path.name.removeprefix("step-")) for path in folder.glob("step-*") if path.name[5:].isdigit()]
    return max(steps, default=0)


def losses(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_metrics(run / "metrics.jsonl")]
