"""Token anchors: what a token's id already says about its activation, which need not be sent.

Both ends of a boundary know the ids of a batch. They fit the same linear regression of activations on an embedding of
the ids, from tensors that cross at full precision, and code only what it leaves.

V: vocabulary, F: features (an embedding's, after a constant), C: channels, R: tokens
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from lowbit import escape
from lowbit.codecs.checks import check_int
from lowbit.escape import shown

log = escape.logger(__name__)

EXACT = 1024
"""Tokens of one matrix product: float32 adds up to 1024 products of 7-bit integers without rounding."""
MOST_LEFT = 0.8
"""Share of the energy that a fit that is used leaves at most."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenAnchor:
    """Code at the boundaries of a pipeline only what the token ids do not already say.

    During the warm-up, activations cross exactly. From these, both ends of a boundary fit the same ridge regression of
    an activation x (C channels) on the embedding e of its token, by weighted least squares. Afterwards, x minus the
    prediction p = w + e W is what the codec codes, and the receiver adds p again. A token counts with the inverse
    square of its norm, of at least the median norm of its message, since the norms of sinks, such as the first token of
    a sequence, may be 100 times those of others. The ridge is the mean square of an embedding, with the same weights.
    Gradients are coded as without.

    The sums of the fit are those of integers (7 bits of what each column holds in up to 1024 tokens), which are exact
    in any order and on every device, so that both ends solve for the same fit; last bits of solutions may differ.

    A fit is used if it leaves at most 80 % of the weighted energy, as estimated for other tokens from what it leaves of
    those that it has seen, its degrees of freedom and the number of different tokens; one line of the log says so. It
    applies to tensors (batch, sequence, C) that are coded, when `set_tokens` has given ids (batch, sequence); to all
    others, and while the codec sends plain numbers, nothing changes.

    Each end of a boundary keeps 2 (E + 1) C bytes, 2 C for each token that has occurred, and, until the fit is final,
    4 (E + 1) (E + 1 + C) + V.

    Args:
        embedding: (V, E), any floating dtype, on the CPU: row i has the features of token i. It must be the same on all
            ranks and must not change: for a pretrained model, its own embeddings before training, such as a
            tensor from a safetensors file, of which only rows of tokens that occur are read.
        renew: interval of training steps after the warm-up. At each, the first micro-batch crosses at full precision
            and updates the fit, in which earlier tokens then count half. 0: the fit stays as the warm-up left it.

    Raises:
        TypeError, ValueError: an argument that is not allowed; the message names it.
    """

    embedding: Tensor
    renew: int = 0

    def __post_init__(self) -> None:
        x = self.embedding
        if not isinstance(x, Tensor) or x.dim() != 2 or not x.is_floating_point() or not x.numel():
            kind = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else shown(x)
            raise TypeError(f"embedding is {kind}; allowed: a floating tensor (vocabulary, features)")
        if x.requires_grad or x.device.type != "cpu":
            state = "requires a gradient" if x.requires_grad else f"is on {x.device}"
            raise ValueError(f"embedding {state}; allowed: a frozen copy on the CPU (weight.detach().cpu().clone())")
        check_int("renew", self.renew, 0, 2**31)

    def __repr__(self) -> str:
        """Show properties that peers compare: shape, dtype and a digest of up to 64 rows."""
        shape, dtype = tuple(self.embedding.shape), str(self.embedding.dtype).removeprefix("torch.")
        digest = _digest(self.embedding[:: -(-len(self.embedding) // 64)])
        return f"{type(self).__name__}(embedding={dtype} {shape} [{digest}], renew={self.renew})"

    def stated(self, ids: Tensor) -> str:
        """Return what ranks compare of a pass's tokens: the shape, and a digest of ids and of their rows."""
        return f"{tuple(ids.shape)} [{_digest(ids)}, rows {_digest(self.embedding[ids.unique()])}]"

    @property
    def features(self) -> int:
        return self.embedding.shape[1]

    def checked(self, ids: Tensor) -> Tensor:
        """Return ids as int64 on the CPU; TypeError, ValueError: as `LowBitStage.set_tokens`."""
        if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            given = ids.dtype if isinstance(ids, Tensor) else shown(ids, 60)
            raise TypeError(f"ids are {given}; allowed: a tensor of integers")
        if ids.dim() != 2 or not ids.numel():
            raise ValueError(f"ids have shape {tuple(ids.shape)}; allowed: (batch, sequence)")
        ids = ids.detach().cpu().long()
        low, high = (int(each) for each in ids.aminmax())
        if low < 0 or high >= len(self.embedding):
            raise ValueError(
                f"ids are from {low} to {high}; allowed: 0 to {len(self.embedding) - 1}, rows of the embedding"
            )
        return ids

    def rows(self, ids_R: Tensor, device: torch.device) -> Tensor:
        """Return the features of tokens: float32 (R, F), the first one constant."""
        rows_RE = self.embedding[ids_R].to(device, torch.float32)
        if not rows_RE.isfinite().all():
            row = int(ids_R[int((~rows_RE.isfinite()).any(1).nonzero()[0])])
            raise ValueError(f"embedding has NaN or Inf in row {row}; allowed: finite features")
        return torch.cat([rows_RE.new_ones(len(rows_RE), 1), rows_RE], 1)

    def renews(self, steps: int, warmup_steps: int) -> bool:
        """Whether the training step after `steps` of them renews the fit."""
        return self.renew > 0 and steps >= warmup_steps and (steps - warmup_steps + 1) % self.renew == 0


def _digest(x: Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(x.contiguous().view(-1).view(torch.uint8).numpy().data)


class Fit:
    """The prediction of one tensor at one end of a boundary, and the sums that it comes from.

    Both ends call `learn` and `predict` with the same ids and tensors in the same order.
    """

    def __init__(self, anchor: TokenAnchor, name: str, channels: int, device: torch.device) -> None:
        self._anchor, self._name, self._channels, self._device = anchor, name, channels, device
        self._size = anchor.features + 1
        self._sums: Tensor | None = None  # float32 (F, F + C): products of features with features and channels
        self._tokens, self._energy = 0, 0.0  # in the sums, both
        self._seen: Tensor | None = None  # bool (V,): tokens in the sums
        self._stale = True  # the sums have changed
        self._source = 0  # digest of the sums that the weights are fitted to
        self._was_useful: bool | None = None  # the last time
        self._news: tuple[Any, ...] = ()  # level and line of the log, of a fit that nobody has used yet
        self._weights: Tensor | None = None  # bfloat16 (F, C)
        self._forget()

    def learn(self, ids: Tensor, x: Tensor) -> None:
        """Add tensors that both ends hold exactly: ids int64 (...) on the CPU, x (..., C); not if any is not finite."""
        x_RC = x.reshape(-1, self._channels).float()
        if not x_RC.isfinite().all():
            return
        if self._sums is None:
            self._sums = x_RC.new_zeros(self._size, self._size + self._channels)
            self._seen = torch.zeros(len(self._anchor.embedding), dtype=torch.bool, device="cpu")
        assert self._seen is not None
        self._seen[ids] = True
        for ids_R, part_RC in zip(ids.flatten().split(EXACT), x_RC.split(EXACT), strict=True):
            power_R = part_RC.double().square().sum(1)
            weight_R = 1 / power_R.clamp_min(max(float(power_R.median()), 1e-30))
            both = torch.cat([self._anchor.rows(ids_R, self._device), part_RC], 1) * weight_R.sqrt().float()[:, None]
            scale = (both.abs().amax(0) / 127).clamp_min(1e-30)
            both.div_(scale).round_()
            sums = both[:, : self._size].T @ both
            self._sums += sums.mul_(scale[: self._size, None]).mul_(scale)
            self._energy += float((weight_R * power_R).sum())
        self._tokens += len(x_RC)
        self._stale = True

    @torch.inference_mode(False)  # what it keeps is changed outside of inference mode, too
    @torch.no_grad()
    def settle(self) -> None:
        """Fit to all that was learned, so that a final fit no longer keeps the sums."""
        if self._stale:
            self._solve()

    @torch.inference_mode(False)
    @torch.no_grad()
    def predict(self, ids: Tensor) -> Tensor | None:
        """Return predictions, float32 (..., C), for ids int64 (...) on the CPU; None while there is no useful fit."""
        self.settle()
        if self._news:
            level, *line = self._news
            log.log(level, *line)
            self._news = ()
        if self._weights is None:
            return None
        places = self._places[ids]
        if (missing := ids[places < 0]).numel():
            new = missing.unique()
            used, needed = self._used, self._used + len(new)
            if needed > len(self._table):  # grows by half, so that it is rarely copied
                table = self._table.new_empty(max(needed, 3 * used // 2), self._channels)
                self._table = torch.cat([self._table[:used], table[used:]])
            # In float64, a row's bits do not depend on the rows that it is computed with.
            weights = self._weights.double()
            for first in range(0, len(new), EXACT):
                rows = self._anchor.rows(new[first : first + EXACT], self._device).double()
                self._table[used + first :][: len(rows)] = rows @ weights
            self._places[new] = torch.arange(used, needed)
            self._used, places = needed, self._places[ids]
        found = self._table.index_select(0, places.flatten().to(self._device))
        if found.is_cuda:  # passes outside the schedule use another stream, which may free or have made the table
            self._table.record_stream(torch.cuda.current_stream(self._device))
        return found.float().view(*ids.shape, -1)  # arithmetic with mixed dtypes is slow on CPUs

    def nbytes(self) -> int:
        """Bytes that are kept."""
        kept = [x.nbytes for x in (self._weights, self._sums, self._seen) if x is not None]
        return sum(kept) + 2 * self._used * self._channels

    def state_dict(self) -> dict[str, Any]:
        tensors = {"weights": self._weights, "sums": self._sums, "seen": self._seen}
        numbers = {"tokens": self._tokens, "energy": self._energy, "stale": self._stale, "source": self._source}
        return {name: x.clone() for name, x in tensors.items() if x is not None} | numbers

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`; ValueError: of another embedding or width, or of something else."""
        vocabulary, size, channels = len(self._anchor.embedding), self._size, self._channels
        kept = {
            "weights": (torch.bfloat16, (size, channels), self._device),
            "sums": (torch.float32, (size, size + channels), self._device),
            "seen": (torch.bool, (vocabulary,), torch.device("cpu")),
        }
        numbers = {"tokens", "energy", "stale", "source"}
        wrong = f"missing or unknown entries: {sorted(unlike)}" if (unlike := numbers ^ (state.keys() - kept)) else ""
        for name, (dtype, shape, _) in kept.items():
            x = state.get(name)
            if x is not None and (not isinstance(x, Tensor) or x.dtype != dtype):
                wrong = f"{name}, {x.dtype if isinstance(x, Tensor) else type(x).__name__}; allowed: {dtype}"
            elif x is not None and x.shape != shape:
                wrong = f"{name} of shape {tuple(x.shape)}; allowed: {shape}"
            elif x is not None and not x.isfinite().all():
                wrong = f"{name} with NaN or Inf; allowed: finite numbers"
        for name in sorted(numbers & state.keys()):
            if not isinstance(state[name], int | float) or not 0 <= state[name] < torch.inf:
                wrong = f"{name} {shown(state[name])}; allowed: a number from 0"
        if ("sums" in state) != ("seen" in state) or ("sums" in state and not state.get("tokens")):
            wrong = wrong or "sums, seen or tokens without the others"
        if wrong:
            raise ValueError(f"{self._name}: state has {wrong}")
        self._weights, self._sums, self._seen = (
            state[name].to(device, copy=True) if name in state else None for name, (_, _, device) in kept.items()
        )
        self._tokens, self._energy = int(state["tokens"]), float(state["energy"])
        self._stale, self._source = bool(state["stale"]), int(state["source"])
        self._forget()

    def digest(self) -> str:
        """Return what must be equal at both ends: of weights, whose last bits depend on the processor, the sums."""
        numbers = self._tokens, self._stale, self._weights is None, self._source, self._sums_digest()
        return xxhash.xxh3_64_hexdigest(repr(numbers).encode())

    def _sums_digest(self) -> int:
        if self._sums is None:
            return 0
        return xxhash.xxh3_64_intdigest(self._sums.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)

    def _forget(self) -> None:
        """Forget predictions, which are computed when a token occurs."""
        self._places = torch.full((len(self._anchor.embedding),), -1, device="cpu")  # rows in the table
        self._table = torch.empty(0, self._channels, dtype=torch.bfloat16, device=self._device)
        self._used = 0

    def _solve(self) -> None:
        self._stale = False
        if self._sums is None:
            if not self._anchor.renew:
                text = "%s: token anchor is off: no activations crossed exactly with token ids"
                self._news = logging.WARNING, text, self._name
            return
        self._source = self._sums_digest()
        weights, left = self._fitted()
        useful = left <= MOST_LEFT
        if useful != self._was_useful:
            self._news = (
                logging.INFO if useful else logging.WARNING,
                "%s: token anchor is %s: tokens leave %.0f %% of the activations' energy",
                self._name, "on" if useful else "off", 100 * left,
            )  # fmt: skip
        self._was_useful = useful
        self._weights = weights if useful else None
        self._forget()
        if self._anchor.renew:
            self._sums /= 2
            self._tokens, self._energy = self._tokens // 2, self._energy / 2
        else:
            self._sums = self._seen = None

    def _fitted(self) -> tuple[Tensor, float]:
        """Return weights, bfloat16 (F, C), and the estimated share of other tokens' energy that they leave."""
        assert self._sums is not None
        assert self._seen is not None
        products, targets = self._sums.double().split([self._size, self._channels], 1)
        # An embedding of zeros says nothing, and leaves the mean.
        penalty = torch.full_like(products[0], max(float(products.diagonal()[1:].sum()) / self._tokens, 1e-30))
        penalty[0] = 0
        factor, fault = torch.linalg.cholesky_ex(products + penalty.diag())
        if fault or not self._energy:  # of a state that nobody fitted, or of zeros
            return torch.zeros_like(targets, dtype=torch.bfloat16), 1.0
        weights = torch.cholesky_solve(targets, factor).bfloat16()
        own = weights.double()
        left = 1 + float((own * (products @ own - 2 * targets)).sum()) / self._energy
        # The fit knows these tokens. One that occurs again says little new, so that different ones count.
        free, different = self._size - float(torch.cholesky_inverse(factor).diagonal() @ penalty), int(self._seen.sum())
        return weights, min(1.0, left * (different + free) / (different - free)) if different > free else 1.0


class Anchors:
    """The fits of all tensors at one end of one boundary; `lane` is its name in errors and the log."""

    def __init__(self, anchor: TokenAnchor, lane: str, device: torch.device) -> None:
        self._anchor, self._lane, self._device = anchor, lane, device
        self._fits: dict[str, Fit] = {}
        self._has_said = False

    def say_without_ids(self) -> None:
        """Log, once, that a pass has no token ids."""
        if not self._has_said:
            log.warning("%s: token anchor is off in passes without token ids; set_tokens gives them", self._lane)
        self._has_said = True

    def fit(self, index: int, channels: int) -> Fit:
        name = f"tensor {index}, width {channels}"
        if name not in self._fits:
            self._fits[name] = Fit(self._anchor, f"{self._lane}, tensor {index}", channels, self._device)
        return self._fits[name]

    def nbytes(self) -> int:
        return sum(fit.nbytes() for fit in self._fits.values())

    def state_dict(self) -> dict[str, dict[str, Any]]:
        return {name: fit.state_dict() for name, fit in self._fits.items()}

    def load_state_dict(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore a `state_dict`; ValueError: of something else, or of another embedding."""
        self._fits.clear()
        for name, state in states.items():
            match name.replace(",", "").split():
                case ["tensor", index, "width", width] if index.isdecimal() and width.isdecimal():
                    self.fit(int(index), int(width)).load_state_dict(state)
                case _:
                    raise ValueError(f"{self._lane}: state has {shown(name)}; allowed: tensors with their widths")

    def digest(self) -> str:
        return ", ".join(f"{name}: {fit.digest()}" for name, fit in sorted(self._fits.items())) or "none"
