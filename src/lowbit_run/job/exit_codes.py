"""Exit codes: failed, may be retried; wrong usage, do not retry; the loss diverged; other ranks did not come."""

FAILED, USAGE, DIVERGED, ALONE = 1, 2, 3, 4
