"""`lowbit doctor` on a list of hosts, started from one machine over the system's ssh."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lowbit.config import ConfigError
from lowbit.doctor.messages import Finding
from lowbit.doctor.settings import PORT, DoctorSettings
from lowbit.terminal import one_line
from lowbit.wire.checksum import SECRET

_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
_WAIT_SECONDS = 60.0  # at most, for machines that are all started now
_LIMIT_SECONDS = 3600.0
_MOST_BYTES = 1 << 20  # of a host's output, and of its errors


def from_hosts(settings: DoctorSettings) -> tuple[list[Any], list[Finding]]:
    """Return the rows that the hosts report, and a finding for each host without a report.

    Raises:
        ConfigError: ssh is not installed.
        ConnectionError: no host gave a report.
    """
    place = settings.meet or f"{settings.hosts[0].rpartition('@')[2]}:{PORT}"
    folder = Path.cwd()
    with contextlib.suppress(ValueError):
        folder = folder.relative_to(Path.home())
    secret = os.environ.get(SECRET) or secrets.token_hex(32)
    processes: list[subprocess.Popen[bytes]] = []
    pool = ThreadPoolExecutor(len(settings.hosts))
    try:
        for name in settings.hosts:
            words = [
                "doctor", *filter(None, [settings.recipe]), "--meet", place, "--machines", str(len(settings.hosts)),
                "--name", name.rpartition("@")[2], "--output", "", "--json", "-",
                "--wait", str(min(settings.wait, _WAIT_SECONDS)), "--seconds", str(settings.seconds),
                *(word for text in settings.formats for word in ("--format", text)),
            ]  # fmt: skip
            command = f"cd {shlex.quote(str(folder))} && IFS= read -r {SECRET} && export {SECRET} && "
            command += f"exec {settings.program} {shlex.join(words)}"
            pipe = subprocess.PIPE
            processes.append(subprocess.Popen([*_SSH, name, command], stdin=pipe, stdout=pipe, stderr=pipe))
        pages = dict(zip(settings.hosts, pool.map(lambda each: _page(each, secret), processes), strict=True))
    except FileNotFoundError:
        raise ConfigError("hosts needs the program ssh; allowed: a machine that has it") from None
    finally:
        for process in processes:
            process.kill()
        pool.shutdown()
    failed = {host: page for host, page in pages.items() if isinstance(page, str)}
    problems = [
        Finding(level="stop", machine=host, what=f"it gave no report: {problem}",
                fix=f"try: ssh {host} 'cd {folder} && {settings.program} --version'")
        for host, problem in failed.items()
    ]  # fmt: skip
    if not os.environ.get(SECRET):
        problems.append(Finding(
            level="warning", what=f"{SECRET} is not set here; the hosts used a secret that was made for this check",
            fix="export a secret before the training, the same on all machines (docs/security.md)",
        ))  # fmt: skip
    if len(failed) == len(pages):
        raise ConnectionError("no host gave a report: " + "; ".join(f"{host}: {why}" for host, why in failed.items()))
    rows = max((page for page in pages.values() if isinstance(page, list)), key=len)
    # A machine that met nobody has a page of its own.
    alone = [row for page in pages.values() if isinstance(page, list) for row in page if row not in rows]
    return [*(row for row in alone if isinstance(row, dict) and row.get("kind") == "finding"), *rows], problems


def _page(process: subprocess.Popen[bytes], secret: str) -> list[Any] | str:
    """The rows that a host reports, or the reason why there are none."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    limit = threading.Timer(_LIMIT_SECONDS, process.kill)
    limit.start()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(process.stderr.read, _MOST_BYTES)
        with contextlib.suppress(OSError):  # it has ended already
            process.stdin.write(f"{secret}\n".encode())
            process.stdin.close()
        output = process.stdout.read(_MOST_BYTES)
        if len(output) == _MOST_BYTES:
            process.kill()
        errors = reading.result()
    process.wait()
    if not limit.is_alive():
        return f"it took longer than {_LIMIT_SECONDS:.0f} s"
    limit.cancel()
    with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
        if isinstance(rows := json.loads(output)["rows"], list):
            return rows
    lines = [line for line in errors.decode(errors="replace").splitlines() if line.strip()]
    return one_line(lines[-1] if lines else f"it ended with {process.returncode}", 300)
