"""Derives from the survey what is wrong, on which machine, and how to fix it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lowbit.doctor import ports as doors
from lowbit.doctor.messages import Facts, Finding, Measured
from lowbit.doctor.survey import MachineSurvey, SurveyedMachine
from lowbit.wire.checksum import SECRET
from lowbit.wire.sockets import ADVICE, FASTER, is_lossy

_CLOCK_MS = 1000.0
_SLOW_DIRECTION = 3.0  # times the other one
_LOSS = 0.02
_MOST_KEYS = 5  # of settings that differ
_WORDS = {
    doors.DROPPED: "nothing answers: packets are dropped",
    doors.REFUSED: "connections are refused",
    doors.UNREACHABLE: "it cannot be reached",
    doors.OTHER: "another machine or program answers",
}


def findings(survey: MachineSurvey) -> list[Finding]:
    """All findings; those that would stop the training come first."""
    sources = (_absent, _versions, _recipes, _network, _links)
    found = [finding for source in sources for finding in source(survey)]
    return sorted(dict.fromkeys(found), key=lambda each: ("stop", "warning", "note").index(each.level))


def _absent(survey: MachineSurvey) -> Iterator[Finding]:
    """Findings about the meeting, and about machines that did not come or that left."""
    settings, every = survey.settings, [machine.facts for machine in survey.machines.values()]
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
    elif survey.alone:
        fix = f"check that the first machine has this address and runs `{again}`; open the port there: "
        yield _stop(first.name, survey.alone, fix + _open(first.firewall, first.address, f"{port}"))
    elif missing > 0:
        what = f"{missing} of {settings.count} machines did not come to {settings.where} within {settings.wait:g} s"
        fix = f"start it there: {again}; if it cannot reach port {port}, open it here: "
        yield _stop(first.name, what, fix + _open(first.firewall, "", f"{port}"))
    if first.meet_address.startswith("127.") and not host.startswith(("127.", "localhost")) and not survey.alone:
        what = f"{host} is {first.meet_address} here: no other machine can reach it"
        fix = f"meet at an address of this machine, such as {first.address}:{port}, or correct /etc/hosts"
        yield _stop(first.name, what, fix)
    if survey.left and not survey.stalled:
        rank, how = survey.left
        name = survey.machines[rank].facts.name if rank in survey.machines else ""
        yield _stop(name, f"it left before the end: {how}", f"start it again on all machines: {again}")
    for own in every:
        if not own.secret:
            what = f"{SECRET} is not set: anyone who can reach this machine can take part"
            yield _warn(own.name, what, f"export {SECRET}, the same on all machines (docs/security.md)")


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
        if machine.speed.problem and not own.recipe_problem:
            yield _warn(own.name, f"its speed was not measured: {machine.speed.problem}", "without it, no plan")


def _recipes(survey: MachineSurvey) -> Iterator[Finding]:
    """Findings about the configuration and its text."""
    first = survey.machines[0].facts
    for own in (machine.facts for machine in survey.machines.values()):
        if own.recipe_problem:
            fix = "copy the recipe and its text from the machine that has them"
            yield _stop(own.name, own.recipe_problem, fix)
        elif bool(own.recipe) != bool(first.recipe):
            given, without = (own, first) if own.recipe else (first, own)
            what = f"it was started without a recipe, {given.name} with {given.recipe}: nothing is compared"
            yield _warn(without.name, what, f"lowbit doctor {given.recipe}")
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
    """Findings about addresses, ports and the process group."""
    machines, explained = survey.machines, False
    for rank, machine in machines.items():
        own = machine.facts
        closed = {caller: _closed(survey, caller, rank) for caller in machines if (caller, rank) in survey.states}
        explained = explained or bool(own.gloo_problem) or any(closed.values())
        if own.gloo_problem:
            yield _stop(own.name, own.gloo_problem, f"on {own.name}: {_interface(own)}")
        elif closed and own.gloo_address != own.address and all(len(c) == len(own.ports) for c in closed.values()):
            name = f" ({'GLOO_SOCKET_IFNAME=' if own.chosen else ''}{own.gloo_interface})" if own.gloo_interface else ""
            ways = f"{own.interface} ({own.address})" if own.interface else own.address
            callers = " and ".join(machines[caller].facts.name for caller in closed)
            what = f"Gloo would listen at {own.gloo_address or 'no address'}{name}, where {callers} cannot reach it"
            yield _stop(own.name, f"{what}; {ways} leads to the others", f"on {own.name}: {_interface(own)}")
        else:
            for caller, states in closed.items():
                yield from _closed_ports(machines[caller], machine, states)
    for rank, problem in survey.problems.items():
        if not explained:
            yield _stop(machines[rank].facts.name, problem, "look for a firewall between the machines")
    misled = [m.facts for m in machines.values() if m.facts.gloo_interface and not m.facts.chosen]
    if misled := [own for own in misled if own.host_address != own.gloo_address]:
        addresses = ", ".join(dict.fromkeys(own.host_address or "none" for own in misled))
        names = " or ".join(dict.fromkeys(own.gloo_interface for own in misled))
        yield Finding(
            level="note", machine=" and ".join(own.name for own in misled),
            what=f"Gloo left alone would listen at {addresses}, where the host name leads; "
            "lowbit train leads it to the right address",
            fix=f"for scripts of your own: export GLOO_SOCKET_IFNAME={names}",
        )  # fmt: skip


def _links(survey: MachineSurvey) -> Iterator[Finding]:
    """Findings about links and clocks."""
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
    for (a, b), measured in survey.links.items():
        one, other = survey.machines[a].facts.name, survey.machines[b].facts.name
        back = survey.links.get((b, a), Measured()).mbit
        if measured.mbit and back >= _SLOW_DIRECTION * measured.mbit:
            what = f"{one} to {other} carries {measured.mbit:.3g} Mbit/s, the other direction {back:.3g}"
            fix = "activations and gradients need both: look for an upload limit, a bad cable or weak Wi-Fi"
            yield _warn(one, what, fix)
        if measured.loss and measured.loss > _LOSS:
            what = f"TCP sent {measured.loss:.0%} of its segments to {other} again: the link loses packets"
            yield _warn(one, what, "a cable instead of Wi-Fi, or another cable or switch")
        elif is_lossy(measured.loss or 0.0, measured.again) and measured.control != FASTER:
            control, faster = measured.control.upper() or "TCP", FASTER.upper()
            what = (
                f"the link to {other} loses packets (TCP sent {measured.loss:.2%} of its segments again), and "
                f"{control} slows down for each: it carries {measured.mbit:.3g} Mbit/s"
            )
            fix = f"lowbit train uses {faster} by itself; for other programs: " if measured.permitted else ""
            yield _warn(one, what, f"{fix}{ADVICE}")


def _closed(survey: MachineSurvey, caller: int, called: int) -> dict[int, str]:
    """Ports of `called` at Gloo's address that `caller` cannot use, with the state that it found there."""
    own = survey.machines[called].facts
    found = survey.states.get((caller, called), {})
    return {p: state for (address, p), state in found.items() if address == own.gloo_address and state != doors.OPEN}


def _closed_ports(caller: SurveyedMachine, called: SurveyedMachine, states: Mapping[int, str]) -> Iterator[Finding]:
    own, source = called.facts, caller.facts.address
    for state in dict.fromkeys(states.values()):
        numbers = [port for port, each in states.items() if each == state]
        whole = len(numbers) == len(own.ports)
        which = f"{own.port_low} to {own.port_high}" if whole else ", ".join(map(str, numbers))
        tried = f"all {len(numbers)}" if whole else f"{len(numbers)} of {len(own.ports)}"
        what = f"ports {which} are closed for {caller.facts.name} ({tried} that were tried)"
        fix = f"on {own.name}: {_open(own.firewall, source, f'{own.port_low}:{own.port_high}')}"
        for each in (called, caller):
            if each.seen and each.seen.isdisjoint(each.facts.addresses):
                fix = f"{each.facts.name} is behind a router (NAT), as {min(each.seen)}: connect the machines by a VPN"
        yield _stop(own.name, f"{what}: {_WORDS.get(state, 'an unknown state')}", fix)


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
