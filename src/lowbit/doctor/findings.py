"""What is wrong, where, and how to mend it: drawn from what the machines found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from lowbit.doctor import ports as doors
from lowbit.doctor.messages import Facts, Finding
from lowbit.doctor.survey import Seat, Survey
from lowbit.wire.checksum import SECRET

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
_Level = Literal["stop", "warning", "note"]


def findings(survey: Survey) -> list[Finding]:
    """All findings; those that stop a training first."""
    found = [*_absent(survey), *_versions(survey), *_recipes(survey), *_network(survey), *_speeds(survey)]
    return sorted(dict.fromkeys(found), key=lambda each: ("stop", "warning", "note").index(each.level))


def _absent(survey: Survey) -> Iterator[Finding]:
    """Machines that did not come or left, and the meeting itself."""
    first, settings = survey.seats[0].facts, survey.settings
    host, port = settings.place
    where = f"{host}:{port}"
    missing = settings.count - len(survey.seats)
    again = " ".join(["lowbit doctor", *filter(None, [settings.recipe]), "--meet", where])
    again += f" --machines {settings.count}" if settings.count != 2 else ""
    if survey.alone.startswith("the first machine is gone"):
        yield _stop(first, survey.alone, f"start it again on all machines: {again}")
    elif survey.alone:
        yield _stop(
            first, f"port {port} of {host} cannot be reached from here within {settings.wait:g} s: {survey.alone}",
            f"check that the first machine has this address and runs `{again}`; open the port there: "
            + _open(first.firewall, first.address, f"{port}"),
        )  # fmt: skip
    elif missing > 0:
        yield _stop(
            first, f"{missing} of {settings.count} machines did not come to {where} within {settings.wait:g} s",
            f"start it there: {again}; if it cannot reach port {port}, open it here: "
            + _open(first.firewall, "", f"{port}"),
        )  # fmt: skip
    if first.meet_address.startswith("127.") and not host.startswith(("127.", "localhost")) and not survey.alone:
        yield _stop(
            first, f"{host} is {first.meet_address} here: no other machine can reach it",
            f"meet at an address of this machine, such as {first.address}:{port}, or correct /etc/hosts",
        )  # fmt: skip
    for seat in survey.seats:
        if seat.lost:
            yield _stop(seat.facts, f"it left before the end: {seat.lost}", f"start it again on all machines: {again}")
    for address, problem in survey.strangers.items():
        if "secret" in problem:
            if address in (seat.seen for seat in survey.seats):  # it came again, with the right one
                continue
            yield Finding(
                level="stop", machine=address, what=f"it does not know the secret ({SECRET}) of {first.name}",
                mend=f"export the same {SECRET} on all machines",
            )  # fmt: skip
        else:
            yield Finding(
                level="warning", machine=address, what=f"it connected to {first.name} and was ignored: {problem}",
                mend="let the firewall pass the machines of the training only",
            )  # fmt: skip
    for seat in survey.seats:
        if not seat.facts.secret:
            yield Finding(
                level="warning", machine=seat.facts.name, what=f"{SECRET} is not set: whoever reaches it can take part",
                mend=f"export {SECRET}, the same on all machines (docs/security.md)",
            )  # fmt: skip


def _versions(survey: Survey) -> Iterator[Finding]:
    """Versions, each compared with the first machine's."""
    first = survey.seats[0].facts
    for seat in survey.seats:
        own = seat.facts
        if own.torch_problem:
            yield _stop(own, own.torch_problem, "")
        for name, here, there in (("lowbit", own.lowbit, first.lowbit), ("torch", own.torch, first.torch)):
            if here != there:
                version, _, build = there.partition("+")
                source = f" --index-url https://download.pytorch.org/whl/{build}" if build and name == "torch" else ""
                what = f"{'PyTorch' if name == 'torch' else name} is {here}, and {there} on {first.name}"
                yield _stop(own, what, f"on {own.name}: pip install {name}=={version}{source}")
        if own.python.rsplit(".", 1)[0] != first.python.rsplit(".", 1)[0]:
            yield _warn(own, f"Python is {own.python}, and {first.python} on {first.name}", "the same version is safer")


def _recipes(survey: Survey) -> Iterator[Finding]:
    """The configuration and its text."""
    first = survey.seats[0].facts
    for seat in survey.seats:
        own = seat.facts
        if own.recipe_problem:
            yield _stop(own, own.recipe_problem, "copy the recipe and its text from the machine that has them")
        elif bool(own.recipe) != bool(first.recipe):
            given, without = (own, first) if own.recipe else (first, own)
            what = f"it was started without a recipe, {given.name} with {given.recipe}: nothing is compared"
            yield _warn(without, what, f"lowbit doctor {given.recipe}")
        if own.settings and first.settings and own.settings != first.settings:
            keys = sorted(k for k in {*own.settings, *first.settings} if own.settings.get(k) != first.settings.get(k))
            some = ", ".join(f"{k} is {own.settings.get(k)} and {first.settings.get(k)}" for k in keys[:_MOST_KEYS])
            more = f", and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else ""
            weights = " and the folder of model.pretrained" if "model.pretrained" in keys else ""
            said = f"its recipe differs from that of {first.name}: {some}{more}"
            yield _stop(own, said, f"copy {own.recipe}{weights} to it")
        if own.text and first.text and own.text != first.text:
            yield _stop(
                own, f"its text differs from that of {first.name}: digest {own.text}, not {first.text}",
                f"copy the files of data.text from {first.name}",
            )  # fmt: skip


def _network(survey: Survey) -> Iterator[Finding]:
    """Addresses, ports, links and clocks."""
    seats = survey.seats
    for number, seat in enumerate(seats):
        own = seat.facts
        closed = {i: _closed(survey, i, number) for i in range(len(seats)) if (i, number) in survey.states}
        if own.gloo_problem:
            yield _stop(own, own.gloo_problem, f"on {own.name}: {_interface(own)}")
        elif _is_wrong_interface(survey, number):
            name = f" ({'GLOO_SOCKET_IFNAME=' if own.chosen else ''}{own.gloo_interface})" if own.gloo_interface else ""
            ways = f"{own.interface} ({own.address})" if own.interface else own.address
            yield _stop(
                own, f"Gloo would listen at {own.gloo_address or 'no address'}{name}, where "
                f"{_names(seats[i] for i in closed)} cannot reach it; {ways} leads to the others",
                f"on {own.name}: {_interface(own)}",
            )  # fmt: skip
        else:
            for caller, states in closed.items():
                yield from _closed_ports(seats[caller], seat, states)
        if seat.clock_ms is not None and abs(seat.clock_ms) > _CLOCK_MS:
            way = "ahead of" if seat.clock_ms > 0 else "behind"
            yield _warn(
                own, f"its clock is {abs(seat.clock_ms) / 1e3:,.0f} s {way} that of {seats[0].facts.name}",
                f"on {own.name}: sudo timedatectl set-ntp true",
            )  # fmt: skip
    misled = [s.facts for s in seats if s.facts.gloo_interface and s.facts.host_address != s.facts.gloo_address]
    if misled := [own for own in misled if not own.chosen]:
        yield Finding(
            level="note", machine=" and ".join(own.name for own in misled),
            what="Gloo left alone would listen at " + ", ".join(dict.fromkeys(o.host_address or "none" for o in misled))
            + ", where the host name leads; lowbit train leads it to the right address",
            mend="for scripts of your own: export GLOO_SOCKET_IFNAME="
            + " or ".join(dict.fromkeys(own.gloo_interface for own in misled)),
        )  # fmt: skip
    yield from _links(survey)


def _links(survey: Survey) -> Iterator[Finding]:
    names = [seat.facts.name for seat in survey.seats]
    for (a, b), problem in survey.stalled.items():
        yield Finding(
            level="stop", machine=names[a],
            what=f"it connects to {names[b]}, but little or nothing of 64 KiB messages to it arrives ({problem})",
            mend=f"large packets may be lost, as in a VPN: sudo ip link set {survey.seats[a].facts.interface} mtu 1280",
        )  # fmt: skip
    for (a, b), rate in survey.rates.items():
        back = survey.rates.get((b, a))
        if back and back.mbit >= _SLOW_DIRECTION * rate.mbit:
            yield Finding(
                level="warning", machine=names[a],
                what=f"{names[a]} to {names[b]} carries {rate.mbit:.3g} Mbit/s, the other direction {back.mbit:.3g}",
                mend="activations and gradients need both: look for a limit of the upload, a bad cable or weak Wi-Fi",
            )  # fmt: skip
        if rate.loss and rate.loss > _LOSS:
            yield Finding(
                level="warning", machine=names[a],
                what=f"TCP sent {rate.loss:.0%} of its segments to {names[b]} again: the link loses packets",
                mend="a cable instead of Wi-Fi, or another cable or switch",
            )  # fmt: skip


def _speeds(survey: Survey) -> Iterator[Finding]:
    for seat in survey.seats:
        if seat.speed.problem and not seat.lost and not seat.facts.recipe_problem and not survey.alone:
            yield _warn(seat.facts, f"its speed was not measured: {seat.speed.problem}", "without it, no plan")


def _closed(survey: Survey, caller: int, called: int) -> dict[int, str]:
    """Ports where Gloo would listen on a machine, by what another one gets there instead of it."""
    own = survey.seats[called].facts
    found = survey.states.get((caller, called), {})
    return {p: state for (address, p), state in found.items() if address == own.gloo_address and state != doors.OPEN}


def _is_wrong_interface(survey: Survey, number: int) -> bool:
    """Whether Gloo listens where nobody reaches it, though another address leads to the others or is nobody else's."""
    own = survey.seats[number].facts
    others = [index for index in range(len(survey.seats)) if (index, number) in survey.states]
    if not others or own.gloo_address in (own.address, survey.seats[number].seen):
        return False
    return all(len(_closed(survey, i, number)) == len(own.ports) for i in others)


def _closed_ports(caller: Seat, called: Seat, states: Mapping[int, str]) -> Iterator[Finding]:
    own, all_ports = called.facts, called.facts.ports
    for state in dict.fromkeys(states.values()):
        numbers = [port for port, each in states.items() if each == state]
        whole = len(numbers) == len(all_ports)
        which = f"{own.port_low} to {own.port_high}" if whole else ", ".join(map(str, numbers))
        tried = f"all {len(numbers)}" if whole else f"{len(numbers)} of {len(all_ports)}"
        what = f"ports {which} are closed for {caller.facts.name} ({tried} that were tried)"
        source = caller.seen or caller.facts.address
        wanted = f"{own.port_low}:{own.port_high}"
        mend = f"on {own.name}: {_open(own.firewall, source, wanted)}"
        if caller.seen and caller.seen != caller.facts.address:
            mend = f"{caller.facts.name} is behind a router (NAT), as {caller.seen}: connect the machines by a VPN"
        yield _stop(own, f"{what}: {_WORDS.get(state, 'an unknown state')}", mend)


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
    """The command that leads Gloo to the right interface."""
    if own.interface:
        return f"export GLOO_SOCKET_IFNAME={own.interface}"
    return "unset GLOO_SOCKET_IFNAME" if own.chosen else "export GLOO_SOCKET_IFNAME to the interface that leads there"


def _names(seats: Iterator[Seat]) -> str:
    return " and ".join(seat.facts.name for seat in seats)


def _stop(own: Facts, what: str, mend: str) -> Finding:
    return Finding(level="stop", machine=own.name, what=what, mend=mend)


def _warn(own: Facts, what: str, mend: str) -> Finding:
    return Finding(level="warning", machine=own.name, what=what, mend=mend)
