"""The same from one machine: `lowbit doctor` on a list of hosts, over the system's ssh."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import subprocess
import threading
from pathlib import Path
from typing import Any

from lowbit.config import ConfigError
from lowbit.doctor.messages import Finding
from lowbit.doctor.settings import PORT, DoctorSettings
from lowbit.terminal import printable
from lowbit.wire.checksum import SECRET

_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
_WAIT_SECONDS = 60.0  # at most, for machines that are all started now
_MOST_BYTES = 1 << 20
_LIMIT_SECONDS = 3600.0


class _Host(threading.Thread):
    """`lowbit doctor` on one host; `rows` if it gave any, `problem` if ssh or the command failed."""

    def __init__(self, host: str, command: str, secret: str) -> None:
        super().__init__(daemon=True)
        self.host, self.rows, self.problem = host, None, ""
        self._secret = secret
        self.process = subprocess.Popen(
            [*_SSH, host, command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def run(self) -> None:
        """Wait for it."""
        limit = threading.Timer(_LIMIT_SECONDS, self.process.kill)
        limit.start()
        lines: list[bytes] = []
        reader = threading.Thread(target=lambda: lines.append(self.process.stderr.read(_MOST_BYTES)))  # pyright: ignore
        reader.start()
        with contextlib.suppress(OSError):
            self.process.stdin.write(f"{self._secret}\n".encode())  # pyright: ignore
            self.process.stdin.close()  # pyright: ignore
        output = self.process.stdout.read(_MOST_BYTES)  # pyright: ignore
        if len(output) == _MOST_BYTES:
            self.process.kill()
        code = self.process.wait()
        reader.join(5)
        limit.cancel()
        with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
            self.rows = json.loads(output)["rows"]
        if self.rows is None:
            said = [line for line in b"".join(lines).decode(errors="replace").splitlines() if line.strip()]
            self.problem = printable(said[-1][:300]) if said else f"ssh ended with code {code}"


def from_hosts(settings: DoctorSettings) -> tuple[list[Any], list[Finding]]:
    """The rows that the hosts give, and a finding for each host that gave none.

    Raises:
        ConfigError: there is no ssh.
        ConnectionError: no host gave any.
    """
    first = settings.hosts[0].rpartition("@")[2]
    place = settings.meet or f"{first}:{PORT}"
    folder = Path.cwd()
    with contextlib.suppress(ValueError):
        folder = folder.relative_to(Path.home())
    secret = os.environ.get(SECRET) or secrets.token_hex(32)
    hosts: list[_Host] = []
    try:
        for name in settings.hosts:
            words = [
                "doctor", *([settings.recipe] if settings.recipe else []), "--meet", place, "--machines",
                str(len(settings.hosts)), "--name", name.rpartition("@")[2], "--output", "", "--json", "-",
                "--wait", str(min(settings.wait, _WAIT_SECONDS)), "--seconds", str(settings.seconds),
                *(word for text in settings.formats for word in ("--format", text)),
            ]  # fmt: skip
            command = f"cd {shlex.quote(str(folder))} && IFS= read -r {SECRET} && export {SECRET} && "
            hosts.append(_Host(name, f"{command}exec {settings.program} {shlex.join(words)}", secret))
            hosts[-1].start()
        for host in hosts:
            host.join()
    except FileNotFoundError:
        raise ConfigError("hosts needs the program ssh; allowed: a machine that has it") from None
    finally:
        for host in hosts:
            host.process.kill()
    problems = [
        Finding(level="stop", machine=host.host, what=f"it gave no report: {host.problem}",
                mend=f"try: ssh {host.host} 'cd {folder} && {settings.program} --version'")
        for host in hosts if host.rows is None
    ]  # fmt: skip
    if not os.environ.get(SECRET):
        problems.append(Finding(
            level="warning", what=f"{SECRET} is not set here; the hosts used one that was made for this check",
            mend="export a secret before the training, the same on all machines (docs/security.md)",
        ))  # fmt: skip
    rows = max((host.rows for host in hosts if isinstance(host.rows, list)), key=len, default=None)
    if rows is None:
        raise ConnectionError("no host gave a report: " + "; ".join(f"{host.host}: {host.problem}" for host in hosts))
    pages = [host.rows for host in hosts if isinstance(host.rows, list)]  # a machine that met nobody has its own
    alone = [row for page in pages for row in page if isinstance(row, dict) and row.get("kind") == "finding"]
    alone = [row for row in alone if row not in rows]
    return [*alone, *rows], problems
