"""One rank, started by `lowbit.train.launch`: the configuration comes on standard input, which stays open meanwhile.

When the launcher ends, for whatever reason, standard input closes and the rank ends too: none is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading

from lowbit.train.config_file import from_mapping
from lowbit.train.launch import CAUSE


def main() -> None:
    """Train, or print one line of error and exit with code 1."""
    config = from_mapping(json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_launcher, name="lowbit-launcher", daemon=True).start()
    from lowbit.train.loop import train

    try:
        train(config)
    except KeyboardInterrupt:
        end(130)
    except Exception as error:
        complain(error)
        end(1)


def complain(error: Exception) -> None:
    """Say which rank failed, and why; where the cause is not a known kind of error, say where, too."""
    from lowbit.collectives import AgreementError, PeerError
    from lowbit.train.loop import DivergedError

    if not isinstance(error, AgreementError | PeerError | DivergedError | ValueError | OSError):
        import traceback

        traceback.print_exception(error)
    text, rank = " ".join(str(error).split()), os.environ["RANK"]
    sys.stderr.write(f"rank {rank}: error: {text}\n")
    names_its_cause = isinstance(error, AgreementError | PeerError | DivergedError)
    _tell_launcher(text if names_its_cause else f"rank {rank}: {text}")


def _tell_launcher(cause: str) -> None:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return  # whoever started this keeps no store
    from torch._C._distributed_c10d import TCPStore

    with contextlib.suppress(RuntimeError):  # it is gone, too
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        TCPStore(host, port, is_master=False, wait_for_workers=False).compare_set(CAUSE, "", cause)


def end(code: int) -> None:
    """Exit at once: destructors of a broken process group can wait for peers that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_launcher() -> None:
    sys.stdin.read()
    end(1)


if __name__ == "__main__":
    main()
