"""A machine of a tutorial: a shell on a host of a slow link, with a home folder of its own."""

import os
import subprocess
import sys
import time
from pathlib import Path

from lowbit_lab.network import SlowLink

ROOT = Path(__file__).parents[2]
_DONE = "@done@"
_SCP = """#!/bin/sh
# Copies to the other machine, as `scp -r FILE... ADDRESS:` does.
for target; do :; done
while [ $# -gt 1 ]; do case $1 in -*) ;; *) cp -r "$1" "$OTHER_HOME/${target#*:}" ;; esac; shift; done
"""


class Machine:
    """Types commands into one shell, so that what they export stays.

    Args:
        link, host: where it is. address: of the host, as the page has it.
        folder: for its home. other: home of the machine that `scp` copies to.
    """

    def __init__(self, link: SlowLink, host: int, *, address: str, home: Path, other: Path) -> None:
        interface = link.interface(host)  # whose only address is the page's: by the first one the run finds it
        link._namespaces[host].ip(f"address flush dev {interface}", f"address add {address}/24 dev {interface}")
        self.home, self.log = home, home / ".terminal"
        programs = home / ".bin"
        programs.mkdir(parents=True)
        _program(programs / "lowbit", f'#!/bin/sh\nexec "{sys.executable}" -m lowbit "$@"\n')
        _program(programs / "python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        _program(programs / "scp", _SCP)
        (home / "lowbit").symlink_to(ROOT)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("LOWBIT", "MASTER_", "GLOO", "RANK", "WORLD"))}
        environment = kept | {
            "HOME": str(home), "OTHER_HOME": str(other), "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        with self.log.open("wb") as log:
            self._shell = link.popen(
                host, ["bash", "--norc"], env=environment, cwd=home, stdin=subprocess.PIPE, stdout=log, stderr=log,
                text=True, bufsize=1,
            )  # fmt: skip
        self._start = 0

    def type(self, commands: str) -> None:
        """Begin to run commands; what they print is `output`, from here on."""
        self._start = self.log.stat().st_size
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"{commands}\necho {_DONE}$?\n")

    @property
    def output(self) -> str:
        """What the last commands have printed so far."""
        with self.log.open("rb") as log:
            log.seek(self._start)
            return log.read().decode(errors="replace")

    @property
    def code(self) -> int | None:
        """Exit code of the last commands; None while they run."""
        _, done, rest = self.output.partition(_DONE)
        return int(rest.split()[0]) if done and rest.endswith("\n") else None

    def wait(self, seconds: float) -> str:
        """What the last commands printed, once they have ended."""
        self.wait_for(lambda: self.code is not None, seconds)
        return self.output.partition(_DONE)[0]

    def wait_for(self, condition, seconds: float) -> None:
        """Until a condition holds; fails the test, with the output, if it does not in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"after {seconds} s:\n{self.output}"
            time.sleep(0.1)


def _program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
