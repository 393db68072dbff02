"""A model whose partial sums are observed, and what coding one of them does to its outputs."""

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit import escape
from lowbit.codecs.base import Codec, Summable
from lowbit.tensor_parallel.calibration import Calibration
from lowbit.tensor_parallel.cut import emulate
from lowbit.tensor_parallel.inputs import INPUT_GROUP, input_format, send_inputs
from lowbit.tensor_parallel.plan import Plan
from lowbit.tensor_parallel.reduce import SumSettings
from lowbit.tensor_parallel.rowwise import Watch, install
from lowbit.tensor_parallel.sums import ModelSum

log = escape.logger(__name__)

_CODED = SumSettings(small=0, algorithm="one_shot")
_TRIED_BITS = 6  # of inputs whose effect is measured
_PROGRESS_SECONDS = 30.0  # between lines of the log
_MASKED = -1e4  # logits from here down are masks: some models write -1e9, or the lowest float16


def logged_progress(title: str, total: int) -> Callable[[int], None]:
    """Return a function that takes the number of finished items, and logs it at most every half minute."""
    shown = time.monotonic()

    def show(done: int) -> None:
        nonlocal shown
        if time.monotonic() - shown > _PROGRESS_SECONDS:
            shown = time.monotonic()
            log.info("%s: %d of %d", title, done, total)

    return show


@dataclass(frozen=True)
class ObservedModel:
    """A model whose partial sums are observed; rank `ranks` stands for the sum over all ranks."""

    model: nn.Module
    layers: Mapping[str, ModelSum]
    group: dist.ProcessGroup | None
    plan: Plan | None
    ranks: int

    def show(
        self, batches: Iterable[Tensor], look: Callable[[str, int, Tensor], None], after: Callable[[int], None]
    ) -> None:
        """Call `look` with the partial sums of all batches, by layer and rank, and `after` with each batch's length."""
        shape = torch.Size((1, 1))
        first = 0 if self.group is None else dist.get_rank(self.group)

        def by_sequence(x: Tensor) -> Tensor:
            """Undo the reshaping for experts, which get all sequences as one, some once for each expert."""
            return x.view(-1, *shape, x.shape[-1]).transpose(0, 1).reshape(shape[0], -1, x.shape[-1])

        def see(layer: str, partials: Sequence[Tensor], total: Tensor) -> None:
            for rank, partial in enumerate(partials, first):
                look(layer, rank, by_sequence(partial))
            look(layer, self.ranks, by_sequence(total))

        with self.coding({}, SumSettings(), see):
            for batch in batches:
                shape = batch.shape
                self.output(batch)
                after(len(batch))

    def output(self, batch: Tensor) -> Any:
        options = {"use_cache": False} if hasattr(self.model, "config") else {}
        return self.model(batch.to(next(self.model.parameters()).device), **options)

    @contextlib.contextmanager
    def coding(
        self, codecs: Mapping[str, Codec], settings: SumSettings, watch: Watch | None = None,
        inputs: Mapping[str, Summable] | None = None,
    ) -> Iterator[None]:  # fmt: skip
        """Code the sums, or the inputs, of these layers, and show all sums to `watch`, on real or emulated ranks."""
        model, ranks = self.model, self.ranks
        training = {module: module.training for module in model.modules()}
        model.eval()
        if self.group is not None:
            installed = install(self.layers, codecs, self.group, settings, watch=watch)
            send_inputs(installed, self.layers, inputs or {}, self.group)
        else:
            formats = codecs, inputs or {}
            installed = emulate(model, ranks, lambda _: formats, settings=settings, plan=self.plan, watch=watch)
        try:
            with installed:
                yield
        finally:
            for module, mode in training.items():
                module.training = mode


class _Blocks:
    """The blocks of a model, such as decoder layers: a pass may skip the first ones, whose outputs are known.

    Args:
        names: of the layers that are measured. Blocks are the modules of the one list that holds all of them; without
            such a list nothing is skipped.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        places = {name: re.match(r"(.*?)\.(\d+)\.", name) for name in names}
        lists = {place and place[1] for place in places.values()}
        path = lists.pop() if len(lists) == 1 else None
        self.modules = list(model.get_submodule(path).children()) if path else []
        self.index = {name: int(place[2]) for name, place in places.items() if place and path}
        self.outputs: list[list[Any]] = []  # by pass and block

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Keep the outputs of the blocks of one pass."""
        seen: list[Any] = []
        hooks = [block.register_forward_hook(lambda *each: seen.append(each[2])) for block in self.modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.outputs.append(seen)

    @contextlib.contextmanager
    def skipped(self, count: int, which: int) -> Iterator[None]:
        """Let the first blocks return what the last of them did in an earlier pass, without computing it."""
        before = [(block, block.__dict__.get("forward")) for block in self.modules[:count]]
        for block, _ in before:
            block.__dict__["forward"] = lambda *_, **__: self.outputs[which][count - 1]
        try:
            yield
        finally:
            for block, forward in before:
                block.__dict__.pop("forward")
                if forward is not None:
                    block.__dict__["forward"] = forward

    def check(self, compute: Callable[[], Tensor], exact: Tensor) -> None:
        """Skip nothing unless the last block alone computes what all do: blocks may hand on more than their outputs."""
        same = len(self.outputs[0]) == len(self.modules)
        try:
            with self.skipped(len(self.modules) - 1, 0):
                same = same and torch.equal(compute(), exact)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            same = False
        if not same:
            self.modules, self.index = [], {}


def effects_of(
    run: ObservedModel,
    calibration: Calibration,
    offered: Mapping[str, Mapping[int, float]],
    batches: Sequence[Tensor],
) -> tuple[dict[str, float], dict[str, dict[int, tuple[float, float]]]]:
    """Return, by layer, the squared relative error of the model's outputs when only this layer's sum is coded.

    The errors of the sums are not enough: sums are added to a residual stream whose size differs from token to token,
    and a few tokens make up most of the power of many sums. Outputs are logits, or else the last hidden states; each
    token's error is relative to its own output's deviation from its mean, and all tokens count equally. Masked logits
    (-10,000 and below) and outputs that are not finite do not count.

    Also return those of coded inputs, with their bits per row, for the layers and formats in `offered`. One format is
    measured; the others' errors are scaled by the square of their step.
    """

    def output(batch: Tensor) -> Tensor:
        return _counted(run.output(batch))

    measured = [name for name in calibration.features if name not in calibration.inputs]
    blocks, exact = _Blocks(run.model, measured), list[Tensor]()
    with run.coding({}, _CODED):
        for batch in batches:
            with blocks.recorded():
                exact.append(output(batch))
        blocks.check(lambda: output(batches[0]), exact[0])
    power = [(one - one.mean(1, keepdim=True)).square().sum(1).clamp(min=1e-30) for one in exact]

    def effect(name: str, inputs: Mapping[str, Summable]) -> float:
        shares = []
        with run.coding({name: calibration.codec(name)}, _CODED, inputs=inputs):
            for which, batch in enumerate(batches):
                with blocks.skipped(blocks.index.get(name, 0), which):
                    shares.append((output(batch) - exact[which]).square().sum(1) / power[which])
        return float(torch.cat(shares).double().mean())

    total = len(measured) + len(offered)
    log.info(
        "choosing bits: measuring what coding does to the outputs, %d layers on %d batches each", total, len(batches)
    )
    effects: dict[str, float] = {}
    offers: dict[str, dict[int, tuple[float, float]]] = {}
    show = logged_progress("choosing bits", total)
    for name in measured:
        effects[name] = effect(name, {})
        show(len(effects))
    for name, rows in offered.items():
        show(len(effects) + len(offers))
        tried = min(rows, key=lambda bits: abs(bits - _TRIED_BITS))
        error = effect(name, {name: input_format(tried, INPUT_GROUP)})
        steps = {bits: 2 ** (bits - 1) - 1 for bits in rows}
        offers[name] = {bits: (row, error * (steps[tried] / steps[bits]) ** 2) for bits, row in rows.items()}
    return effects, offers


def _counted(outputs: Any) -> Tensor:
    """Return a model's logits, or else its last hidden states, float32 (tokens, ...), with zeros for masked ones."""
    if isinstance(outputs, Tensor):
        y, lowest = outputs, _MASKED
    elif getattr(outputs, "logits", None) is not None:
        y, lowest = outputs.logits, _MASKED
    else:
        y, lowest = outputs.last_hidden_state, -torch.inf
    return y.float().where((y > lowest) & (y < torch.inf), 0.0).flatten(0, -2)  # NaN is neither
