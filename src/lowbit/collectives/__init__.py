"""What several ranks do together: so far, agreeing before they talk and finding out who died."""

from __future__ import annotations

from lowbit.collectives.agreement import AgreementError, agree
from lowbit.collectives.failure import PeerError

__all__ = ["AgreementError", "PeerError", "agree"]
