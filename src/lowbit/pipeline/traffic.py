"""What a stage sent, and what that cost it in time."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class Traffic:
    """Counts since the start, or since `reset`. What one stage sends; neighbours on the same rank get nothing sent.

    Attributes:
        forward_bytes: bytes of activations sent to the next stage, as they travel, with their checksums.
        forward_elements: elements of the tensors in them.
        backward_bytes: bytes of gradients sent to the previous stage.
        backward_elements: elements of the tensors in them.
        codec_seconds: spent encoding what was sent and decoding what was received (on GPUs: launching that).
        checksum_seconds: spent on checksums, by the thread that runs the schedule (on GPUs with NCCL: launching that).
        wait_seconds: spent blocked until something expected had arrived, or, at the end of a step, until what was sent
            had left (the last stage of a rank to finish waits for all of them).
    """

    forward_bytes: int = 0
    forward_elements: int = 0
    backward_bytes: int = 0
    backward_elements: int = 0
    codec_seconds: float = 0.0
    checksum_seconds: float = 0.0
    wait_seconds: float = 0.0

    @property
    def forward_bits(self) -> float:
        """Bits per element forward, every byte counted (0 if nothing was sent)."""
        return 8 * self.forward_bytes / self.forward_elements if self.forward_elements else 0.0

    @property
    def backward_bits(self) -> float:
        """Bits per element backward, every byte counted (0 if nothing was sent)."""
        return 8 * self.backward_bytes / self.backward_elements if self.backward_elements else 0.0

    def reset(self) -> None:
        """Count from zero again."""
        for field in fields(self):
            setattr(self, field.name, field.default)

    def count(self, direction: str, nbytes: int, elements: int) -> None:
        """Add one message that was sent "forward" or "backward"."""
        if direction == "forward":
            self.forward_bytes += nbytes
            self.forward_elements += elements
        else:
            self.backward_bytes += nbytes
            self.backward_elements += elements
