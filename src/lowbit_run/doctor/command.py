"""`lowbit doctor`: derives what is wrong, where, and how to fix it, and describes the machines in cluster.toml."""

import ipaddress
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

from lowbit.wire.agreement import listed
from lowbit.wire.checksum import SECRET
from lowbit.wire.connections import ADVICE, FASTER
from lowbit_run.config.edited import check_written, write_unless_changed
from lowbit_run.config.section import in_toml
from lowbit_run.doctor.facts import Described, Facts
from lowbit_run.doctor.settings import DoctorSettings, check_place
from lowbit_run.doctor.survey import OPEN, WORDS, MachineSurvey, Measured, SurveyedMachine, take
from lowbit_run.plan.cluster import Cluster
from lowbit_run.report import Column, Command, Row, Table, check_output
from lowbit_run.train.fits import PROCESS_BYTES

_CLOCK_MS = 1000.0
_SLOW_DIRECTION = 3.0  # times the other one
_FASTER = 1.25  # by which another way of sending must gain
_LOSS = 0.02  # share of segments sent again that is worth a line although no other way is faster
_BUSY = 0.15  # share of the cores that other programs use
_MOST_KEYS = 5  # of settings that differ
_VPN = (
    "connect the machines by a VPN (docs/security.md): WireGuard, with its UDP port forwarded by the router of one of "
    "them, or one that needs no forwarded port, such as Tailscale; then meet at an address of the VPN"
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem that the user should know before the training starts.

    Attributes:
        level: "stop" if the training would not start, or would hang; "warning", "note".
        machine: where it is. what: the problem. fix: how to fix it.
    """

    level: str
    machine: str = ""
    what: str
    fix: str = ""


def rounded(mbit: float) -> str:
    """Write a rate with three digits: "9.62" or "6,270"."""
    return f"{float(f'{mbit:.3g}'):,g}"


def findings(survey: MachineSurvey) -> list[Finding]:
    """All findings; those that would stop the training come first."""
    sources = (_absent, _machines, _versions, _recipes, _network, _links)
    found = [finding for source in sources for finding in source(survey)]
    return sorted(dict.fromkeys(found), key=lambda each: ("stop", "warning", "note").index(each.level))


def _absent(survey: MachineSurvey) -> Iterator[Finding]:
    """Findings about the meeting, and about machines that did not come or that left."""
    settings, every = survey.settings, _every(survey)
    first = every[0]
    host, port = settings.place
    missing = settings.count - len(every)
    again = " ".join(["lowbit doctor", *filter(None, [settings.recipe]), "--meet", settings.where])
    again += f" --machines {settings.count}" if settings.count != 2 else ""
    if survey.strangers:
        for name in survey.strangers:
            what = f"it does not know the secret ({SECRET}) of {first.name}"
            yield _stop(name, what, f"export the same {SECRET} on all machines")
        return
    if survey.alone.startswith("the first machine is gone"):
        yield _stop(first.name, survey.alone, f"start it again on all machines: {again}")
    elif survey.alone and (router := _router(first)):
        yield _stop(first.name, survey.alone, f"{router}: {_VPN}")
    elif survey.alone:
        fix = f"check that the first machine has this address and runs `{again}`; open the port there: "
        yield _stop(first.name, survey.alone, fix + _open(first.firewall, first.address, f"{port}"))
    elif missing > 0:
        what = f"{missing} of {settings.count} machines did not come to {settings.where} within {settings.wait:g} s"
        fix = f"start it there: {again}; if it runs and cannot reach this machine, its own page has the reason"
        yield _stop(first.name, what, fix)
    if first.meet_address.startswith("127.") and not host.startswith(("127.", "localhost")) and not survey.alone:
        what = f"{host} is {first.meet_address} here: no other machine can reach it"
        fix = f"meet at an address of this machine, such as {first.address}:{port}, or correct /etc/hosts"
        yield _stop(first.name, what, fix)
    if survey.left and not survey.stalled:
        rank, how = survey.left
        name = survey.machines[rank].facts.name if rank in survey.machines else ""
        yield _stop(name, f"it left before the end: {how}", f"start it again on all machines: {again}")
    if open_to_all := " and ".join(own.name for own in every if not own.secret):
        what = f"{SECRET} is not set: anyone who can reach {settings.where} can take part in the training"
        fix = f"export {SECRET}=a-long-random-text, the same on all machines (docs/security.md)"
        yield _warn(open_to_all, what, fix)


def _versions(survey: MachineSurvey) -> Iterator[Finding]:
    """Findings about versions, compared with the first machine's, and about speeds that could not be measured."""
    first = survey.machines[0].facts
    for machine in survey.machines.values():
        own = machine.facts
        if own.torch_problem:
            yield _stop(own.name, own.torch_problem)
        for name, here, there in (("lowbit", own.lowbit, first.lowbit), ("torch", own.torch, first.torch)):
            if here != there:
                version, _, build = there.partition("+")
                source = f" --index-url https://download.pytorch.org/whl/{build}" if build and name == "torch" else ""
                what = f"{'PyTorch' if name == 'torch' else name} is {here}, and {there} on {first.name}"
                yield _stop(own.name, what, f"on {own.name}: pip install {name}=={version}{source}")
        if own.python.rsplit(".", 1)[0] != first.python.rsplit(".", 1)[0]:
            what = f"Python is {own.python}, and {first.python} on {first.name}"
            yield _warn(own.name, what, "the same version is safer")
        alike = [each for each in survey.machines.values() if own.machine == each.facts.machine != ""]  # containers
        cores = machine.speed.busy - sum(each.speed.own for each in alike or [machine])
        if cores > _BUSY * own.cores and not own.gpus:
            what = f"other programs use {cores:.1f} of its {own.cores} cores, so it was measured slower than it is"
            yield _warn(own.name, what, f"end these programs (top on {own.name} lists them), and check again")
        if machine.speed.problem and not own.recipe_problem:
            yield _warn(own.name, f"its speed was not measured: {machine.speed.problem}", "without it, no plan")


def _recipes(survey: MachineSurvey) -> Iterator[Finding]:
    first = survey.machines[0].facts
    for rank, own in ((rank, machine.facts) for rank, machine in survey.machines.items()):
        if own.recipe_problem:
            fix = f"correct {own.recipe}, or copy it and its text from a machine where this is right"
            yield _stop(own.name, own.recipe_problem, fix)
        elif bool(own.recipe) != bool(first.recipe):
            given, without = (own, first) if own.recipe else (first, own)
            what = f"it was started without a recipe, {given.name} with {given.recipe}: nothing is compared"
            yield _warn(without.name, what, f"lowbit doctor {given.recipe}")
        if rank < len(own.needs) and own.gpus < 2 and own.needs[rank] > own.memory_bytes:
            what = f"its rank {rank} will likely need {own.needs[rank] / 1e9:.1f} GB, with weights in {own.weights}"
            fix = "fewer layers there (pipeline.layers), model.weights nf4 with lora.rank, or a shorter data.sequence"
            yield _warn(own.name, f"{what}, and {own.memory_bytes / 1e9:.1f} GB of memory are free", fix)
        if own.settings and first.settings and own.settings != first.settings:
            keys = sorted(k for k in {*own.settings, *first.settings} if own.settings.get(k) != first.settings.get(k))
            some = ", ".join(f"{k} is {own.settings.get(k)} and {first.settings.get(k)}" for k in keys[:_MOST_KEYS])
            more = f", and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else ""
            weights = " and the folder of model.pretrained" if "model.pretrained" in keys else ""
            what = f"its recipe differs from that of {first.name}: {some}{more}"
            yield _stop(own.name, what, f"copy {own.recipe}{weights} to it")
        if own.text and first.text and own.text != first.text:
            what = f"its text differs from that of {first.name}: digest {own.text}, not {first.text}"
            yield _stop(own.name, what, f"copy the files of data.text from {first.name}")


def _network(survey: MachineSurvey) -> Iterator[Finding]:
    machines, explained = survey.machines, False
    for rank, machine in machines.items():
        own = machine.facts
        closed = {caller: _closed(survey, caller, rank) for caller in machines if (caller, rank) in survey.states}
        explained = explained or bool(own.gloo_problem) or any(closed.values())
        behind = _behind(machine)
        callers = " and ".join(machines[caller].facts.name for caller, states in closed.items() if states)
        if own.gloo_problem:
            yield _stop(own.name, own.gloo_problem, f"on {own.name}: {_interface(own)}")
        elif behind and callers:
            what = f"it is behind a router (NAT): the others see it as {behind}, and {callers} cannot reach it at"
            yield _stop(own.name, f"{what} {own.address}", _VPN)
        elif closed and own.gloo_address != own.address and all(len(c) == len(own.ports) for c in closed.values()):
            name = f" ({'GLOO_SOCKET_IFNAME=' if own.chosen else ''}{own.gloo_interface})" if own.gloo_interface else ""
            ways = f"{own.interface} ({own.address})" if own.interface else own.address
            what = f"Gloo would listen at {own.gloo_address or 'no address'}{name}, where {callers} cannot reach it"
            yield _stop(own.name, f"{what}; {ways} leads to the others", f"on {own.name}: {_interface(own)}")
        else:
            for caller, states in closed.items():
                yield from _closed_ports(machines[caller], machine, states)
    for rank, problem in survey.problems.items():
        if not explained:
            yield _stop(machines[rank].facts.name, problem, "look for a firewall between the machines")


def _links(survey: MachineSurvey) -> Iterator[Finding]:
    for machine in survey.machines.values():
        if machine.clock_ms is not None and abs(machine.clock_ms) > _CLOCK_MS:
            own, way = machine.facts, "ahead of" if machine.clock_ms > 0 else "behind"
            what = f"its clock is {abs(machine.clock_ms) / 1e3:,.0f} s {way} that of {survey.machines[0].facts.name}"
            yield _warn(own.name, what, f"on {own.name}: sudo timedatectl set-ntp true")
    if survey.stalled:
        one, other = (survey.machines[rank].facts for rank in survey.stalled)
        reason = survey.left[1] if survey.left else ""
        what = f"it connects to {other.name}, but larger messages to it do not arrive ({reason})"
        fix = f"large packets may be lost, as in a VPN: sudo ip link set {one.interface} mtu 1280"
        yield _stop(one.name, what, fix)
    for a, b in combinations(survey.machines, 2):
        yield from _lossy(survey, a, b)
        for one, other in ((a, b), (b, a)):
            ways = (survey.links.get(pair, Measured()) for pair in ((one, other), (other, one)))
            there, back = (max(way.mbit, way.better_mbit) for way in ways)
            if there and back >= _SLOW_DIRECTION * there:
                first, second = (survey.machines[rank].facts.name for rank in (one, other))
                what = f"{first} to {second} carries {rounded(there)} Mbit/s, the other direction {rounded(back)}"
                what += f": 10 MB take {80 / there:.2g} s"
                key = "forward" if one < other else "backward"
                fix = f"look for a bad cable or weak Wi-Fi; if it is an upload limit: fewer bits in pipeline.{key}"
                yield _warn(first, what, fix)


def _machines(survey: MachineSurvey) -> Iterator[Finding]:
    networks = sorted(((own.machine, own.network), own.name, own.cores) for own in _every(survey) if own.machine)
    for _, same in groupby(networks, key=lambda each: each[0]):
        if len(alike := [*same]) > 1:
            names = " and ".join(name for _, name, _ in alike)
            what = f"these are one machine, whose {alike[0][2]} cores they share: link and speed are not those of two"
            yield _warn(names, what, "start lowbit doctor once on each machine")
    for machine in survey.machines.values():
        if machine.shared_name:
            name = machine.facts.name
            what = f"another machine has the same name, {machine.shared_name}, so this page calls this one {name}"
            yield Finding(level="note", machine=name, what=what, fix="lowbit doctor --name NAME gives it another one")


def _lossy(survey: MachineSurvey, a: int, b: int) -> Iterator[Finding]:
    """Whether a link would carry more if TCP took losses otherwise; measured, not derived from the losses."""
    slow, losses = {}, {}
    for one, other in ((a, b), (b, a)):
        link, name = survey.links.get((one, other), Measured()), survey.machines[other].facts.name
        if link.control != FASTER and link.better_mbit >= _FASTER * link.mbit > 0:
            usual = link.control.upper() or "TCP"
            better = f"{rounded(link.better_mbit)} {'with' if link.way == FASTER.upper() else 'over'} {link.way}"
            seconds = f"10 MB take {80 / link.mbit:.2g} s instead of {80 / link.better_mbit:.2g}"
            slow[one] = f"to {name} {rounded(link.mbit)} Mbit/s with {usual}, {better} ({seconds})"
        elif link.better_loss > _LOSS and link.way == FASTER.upper():  # several connections overflow a queue
            losses[one] = f"{link.better_loss:.0%} of the segments to {name} even with {link.way}"
    if slow:
        names = " and ".join(survey.machines[rank].facts.name for rank in slow)
        what = f"the link loses packets, and TCP slows down for each: {'; '.join(slow.values())}"
        refusing = {rank: None for (rank, _), link in survey.links.items() if not link.permitted}
        chosen = {own.connections for own in _every(survey)} - {"auto"}
        if chosen:
            fix = 'set run.connections = "auto", with which lowbit train chooses the faster way by itself'
            yield _warn(names, what, fix)
        elif refusing:
            whose = " and ".join(survey.machines[rank].facts.name for rank in refusing)
            fix = f"lowbit train uses several connections by itself; BBR, not permitted on {whose}, is faster still"
            yield _warn(names, what, f"{fix}: {ADVICE}")
        else:
            fix = f"nothing to do for lowbit train, which changes to BBR by itself; for other programs: {ADVICE}"
            yield Finding(level="note", machine=names, what=what, fix=fix)
    elif losses:
        names = " and ".join(survey.machines[rank].facts.name for rank in losses)
        what = f"TCP sent again {' and '.join(losses.values())}: the link loses many packets"
        yield _warn(names, what, "a cable instead of Wi-Fi, or another cable or switch")


def _closed(survey: MachineSurvey, caller: int, called: int) -> dict[int, str]:
    """Ports of `called` at Gloo's address that `caller` cannot use, with the state that it found there."""
    own = survey.machines[called].facts
    found = survey.states.get((caller, called), {})
    return {p: state for (address, p), state in found.items() if address == own.gloo_address and state != OPEN}


def _closed_ports(caller: SurveyedMachine, called: SurveyedMachine, states: Mapping[int, str]) -> Iterator[Finding]:
    own, source = called.facts, caller.facts.address
    for state in dict.fromkeys(states.values()):
        numbers = [port for port, each in states.items() if each == state]
        whole = len(numbers) == len(own.ports)
        which = f"{own.port_low} to {own.port_high}" if whole else ", ".join(map(str, numbers))
        tried = f"all {len(numbers)}" if whole else f"{len(numbers)} of {len(own.ports)}"
        what = f"ports {which} are closed for {caller.facts.name} ({tried} that were tried)"
        fix = f"on {own.name}: {_open(own.firewall, source, f'{own.port_low}:{own.port_high}')}"
        if behind := _behind(caller):
            fix = f"{caller.facts.name} is behind a router (NAT), as {behind}: {_VPN}"
        yield _stop(own.name, f"{what}: {WORDS.get(state, 'an unknown state')}", fix)


def _behind(machine: SurveyedMachine) -> str:
    """The address of the router (NAT) behind which a machine is; empty if it is seen at its own address."""
    return min(machine.seen) if machine.seen and machine.seen.isdisjoint(machine.facts.addresses) else ""


def _router(own: Facts) -> str:
    """Why a router may keep this machine from the first one, to be followed by a remedy; empty within one network."""
    if own.near or own.vpn or not own.meet_address:
        return ""
    if _is_private(own.meet_address):
        return (
            f"{own.meet_address} is a private address of another network than this machine's ({own.address}); if a "
            "router joins both, check that the first machine runs and that its firewall lets the port pass, otherwise"
        )
    why = f"{own.meet_address} may be the address of a router (NAT), which lets nothing through to the first machine"
    is_first = f"; if this is the first machine, it has {own.address} and is behind one"
    return why + (is_first if _is_private(own.address) else "")


def _is_private(address: str) -> bool:
    try:
        return not ipaddress.ip_address(address).is_global
    except ValueError:
        return False


def _every(survey: MachineSurvey) -> list[Facts]:
    return [machine.facts for machine in survey.machines.values()]


def _open(firewall: str, source: str, ports: str) -> str:
    """The command that opens ports in a machine's firewall."""
    if firewall == "firewall-cmd":
        only = f" source address={source}" if source else ""
        rule = f"rule family=ipv4{only} port port={ports.replace(':', '-')} protocol=tcp accept"
        return f"sudo firewall-cmd --add-rich-rule='{rule}'"
    if firewall == "ufw":
        return f"sudo ufw allow proto tcp from {source or 'any'} to any port {ports}"
    return f"sudo iptables -I INPUT -p tcp{f' -s {source}' if source else ''} --dport {ports} -j ACCEPT"


def _interface(own: Facts) -> str:
    """The command that makes Gloo use the right interface."""
    if own.interface:
        return f"export GLOO_SOCKET_IFNAME={own.interface}"
    return "unset GLOO_SOCKET_IFNAME" if own.chosen else "export GLOO_SOCKET_IFNAME to the interface that leads there"


def _stop(machine: str, what: str, fix: str = "") -> Finding:
    return Finding(level="stop", machine=machine, what=what, fix=fix)


def _warn(machine: str, what: str, fix: str) -> Finding:
    return Finding(level="warning", machine=machine, what=what, fix=fix)


_PROGRAM = "lowbit doctor"


def examine(settings: DoctorSettings) -> tuple[list[Row], bool]:
    """Check the machines; return the rows of the page, equal on all of them, and whether this one writes `output`.

    Rows have the kinds "finding", "machine" and "link", and None where nothing could be measured.

    Raises:
        ConfigError: no place to meet, or an output that somebody has changed.
        ConnectionError: the machines cannot meet there.
        ValueError: an output that cannot be written.
    """
    check_place(settings)
    if settings.output:
        check_output(Path(settings.output))
        check_written(settings.output, _PROGRAM, overwrite=settings.overwrite)
    survey = take(settings)
    machines, links = [], []
    auto = {machine.facts.connections for machine in survey.machines.values()} == {"auto"}

    def rate(link: Measured) -> float | None:  # that training will reach
        return max(link.mbit, link.better_mbit if auto else 0.0) or None

    for rank, machine in survey.machines.items():
        own = machine.facts
        needs = own.needs[rank] if rank < len(own.needs) else None
        described = {each.name: getattr(own, each.name) for each in fields(Described)}
        described["address"] = own.gloo_address if own.gloo_address in machine.reached else own.address
        measured = {**vars(machine.speed), "clock_ms": machine.clock_ms, "needs_bytes": needs}
        machines.append({"kind": "machine", **described, **measured})
    for (a, first), (b, second) in combinations(survey.machines.items(), 2):
        there, back = (survey.links.get(pair, Measured()) for pair in ((a, b), (b, a)))
        links.append({
            "kind": "link", "first": first.facts.name, "second": second.facts.name, "mbit": rate(there),
            "back_mbit": rate(back), "rtt_ms": there.rtt_ms or None, "loss": there.loss, "back_loss": back.loss,
        })  # fmt: skip
    rows = [*({"kind": "finding", **vars(each)} for each in findings(survey)), *machines, *links]
    return rows, survey.first


def write_output(settings: DoctorSettings, rows: Sequence[Row]) -> str:
    """Write `output`, and return a line that says what it contains; empty without an output."""
    if not settings.output:
        return ""
    machines = [row for row in rows if row["kind"] == "machine" and (row["layer_seconds"] or row["tflops"])]
    names = {machine["name"] for machine in machines}
    whole = [row for row in rows if row["kind"] == "link" and row["mbit"] and row["back_mbit"]]
    links = [row for row in whole if {row["first"], row["second"]} <= names]
    if not machines:
        return f"{settings.output} was not written: the speed of no machine is known."
    came = sum(row["kind"] == "machine" for row in rows)
    if came < settings.count and Path(settings.output).exists():  # perhaps with all of them
        return f"{settings.output} was not written again: {came} of {settings.count} machines came."
    left_out = [row["name"] for row in rows if row["kind"] == "machine" and row["name"] not in names]
    left_out += [
        f"the link of {row['first']} and {row['second']}" for row in rows if row["kind"] == "link" and row not in whole
    ]
    text = "".join(map(_table, (*machines, *links)))
    Cluster.from_mapping(tomllib.loads(text))
    write_unless_changed(settings.output, _PROGRAM, text, overwrite=settings.overwrite)
    recipe = f" --recipe {settings.recipe}" if settings.recipe else ""
    without = f", but not {listed(left_out)}, which could not be measured" if left_out else ""
    what = "the machines and links" if came >= settings.count else f"{came} of {settings.count} machines"
    return f"{settings.output} has {what}{without}: lowbit plan pipeline {settings.output}{recipe}"


def _table(row: Row) -> str:
    if row["kind"] == "link":
        values, names = {"between": (row["first"], row["second"])}, ("mbit", "back_mbit", "rtt_ms")
    else:
        values = {"name": row["name"], "address": row["address"], "cores": max(1, row["cores"]), "gpus": row["gpus"]}
        rest = row["memory_bytes"] - PROCESS_BYTES["cuda" if row["gpus"] else "cpu"]  # what a plan may use
        values["memory"] = f"{rest / 1e9:.1f}gb" if rest >= 1e8 else ""
        names = ("layer_seconds", "layer_tokens", "layer_overhead", "tflops", "optimizer_ns", "coding")
    values |= {name: float(f"{row[name]:.4g}") if isinstance(row[name], float) else row[name] for name in names}
    lines = [f"{name} = {in_toml(value)}" for name, value in values.items() if value not in (None, "", 0, ())]
    return "\n".join(["", f"[[{row['kind']}]]", *lines, ""])


def measure(settings: DoctorSettings, earlier: Sequence[Row] = ()) -> Iterator[Sequence[Row]]:
    """Check the machines; yields the rows of the page once."""
    yield examine(settings)[0]


def _of(kind: str) -> Any:
    return lambda rows: [row for row in rows if row["kind"] == kind]


def _loss(row: Row) -> str | None:
    shares = [f"{share:.1%}" for share in (row["loss"], row["back_loss"]) if share is not None]
    return " / ".join(shares) or None


COMMAND = Command(
    name="doctor",
    summary="Check several machines before they train together, and write cluster.toml.",
    examples=(
        "lowbit doctor run.toml --meet 192.168.1.10:29400",
    ),
    settings=DoctorSettings,
    measure=measure,
    live=False,
    tables=(
        Table(
            rows=_of("finding"),
            columns=(
                Column("", "level"), Column("machine", "machine"), Column("what is wrong", "what"),
                Column("how to fix it", "fix"),
            ),
        ),
        Table(
            rows=_of("machine"),
            columns=(
                Column("machine", "name"), Column("address", "address"),
                Column("computes on", lambda r: f"{r['gpus']} x {r['device']}" if r["gpus"] else f"{r['cores']} cores"),
                Column("free", lambda row: row["memory_bytes"] / 1e9, "{:.1f} GB"),
                Column("needs", lambda row: (row.get("needs_bytes") or 0) / 1e9 or None, "{:.1f} GB"),
                Column("PyTorch", "torch"),
                Column("lowbit", "lowbit"), Column("clock", "clock_ms", lambda ms: f"{round(ms):+d} ms"),
                Column("layer", lambda row: 1e3 * row["layer_seconds"] or None, "{:.1f} ms"),
            ),
        ),
        Table(
            rows=_of("link"),
            columns=(
                Column("from", "first"), Column("to", "second"), Column("Mbit/s", "mbit", rounded),
                Column("back", "back_mbit", rounded), Column("round trip", "rtt_ms", "{:.1f} ms"),
                Column("sent again", _loss),
            ),
        ),
    ),
)  # fmt: skip
