"""One rank, started by `lowbit.train.launch`: the configuration comes on standard input, which stays open meanwhile.

When the launcher ends, for whatever reason, standard input closes and the rank ends too: none is left behind. The
rank gives a sign of life on a pipe of its own twice a second, so that the launcher notices one that hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time

from lowbit.ranks.process import ALONE, DIVERGED, FAILED, PULSE, USAGE
from lowbit.train.config_file import from_mapping

_PULSE_SECONDS = 0.5


def main() -> None:
    """Train, or print one line of error and exit with the code that tells its kind."""
    config = from_mapping(json.loads(sys.stdin.readline()))
    for work in (_end_with_launcher, _pulse):
        threading.Thread(target=work, name=f"lowbit-{work.__name__[1:]}", daemon=True).start()
    from lowbit.train.loop import train

    try:
        train(config)
    except Exception as error:
        complain(error)
        end(exit_code(error))
    # The others are done, too: killed in its destructors, it would be started again and wait for them.
    end(0)


def exit_code(error: Exception) -> int:
    """What an error means for another attempt."""
    from lowbit.ranks.meeting import AloneError
    from lowbit.ranks.peers import AbsentError
    from lowbit.train.checkpoint import TransientError
    from lowbit.train.loop import DivergedError
    from lowbit.train.section import ConfigError

    kinds = {
        DivergedError: DIVERGED, AloneError: ALONE, AbsentError: ALONE,
        TransientError: FAILED,  # a full disk may have room again
        ConfigError: USAGE,
    }  # fmt: skip
    return next((code for kind, code in kinds.items() if isinstance(error, kind)), FAILED)


def complain(error: Exception) -> None:
    """Say which rank failed, and why; where the cause is not a known kind of error, say where, too."""
    from lowbit.collectives import AgreementError, PeerError
    from lowbit.train.checkpoint import CheckpointError
    from lowbit.train.loop import DivergedError

    if not isinstance(error, AgreementError | PeerError | DivergedError | ValueError | OSError):
        import traceback

        traceback.print_exception(error)
    text, rank = " ".join(str(error).split()), int(os.environ.get("RANK", "0"))
    sys.stderr.write(f"rank {rank}: error: {text}\n")
    names_its_cause = isinstance(error, AgreementError | CheckpointError | DivergedError | PeerError)
    _raise_alarm(rank, text if names_its_cause else f"rank {rank}: {text}")


def _raise_alarm(rank: int, text: str) -> None:
    """Tell the launcher and the other ranks, where this rank failed before it watched them; the first cause counts."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return  # whoever started this keeps no store
    from lowbit.ranks.meeting import reach, run_secret
    from lowbit.ranks.peers import ALARM, Cause

    with contextlib.suppress(RuntimeError, OSError):  # it is gone, too
        store = reach(rank, timeout=5, patience=5)
        secret = run_secret()
        store.compare_set(ALARM, "", Cause(rank, text).signed(secret))


def end(code: int) -> None:
    """Exit at once: destructors of a broken process group can wait for peers that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _pulse() -> None:
    if PULSE not in os.environ:
        return
    with contextlib.suppress(OSError):
        while True:
            os.write(int(os.environ[PULSE]), b".")
            time.sleep(_PULSE_SECONDS)


def _end_with_launcher() -> None:
    sys.stdin.read()
    end(FAILED)


if __name__ == "__main__":
    main()
