"""State the memory of each stage of a run before anything is loaded: what it keeps, and what a micro-batch adds.

Weights are counted on a model without data (the meta device), layer by layer. What a micro-batch holds is counted in
a forward and backward pass over fake tensors, for each kind of layer once.
"""

import contextlib
import functools
import logging
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from operator import add
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowbit.activations import LayerAware, LayerChoice, LayerPlan, compress_saved_, restore_
from lowbit.codecs import parse
from lowbit_run.simulate.held import InFlight, in_flight
from lowbit_run.simulate.step import order_of
from lowbit_run.train.config import FULL_PRECISION, TrainConfig
from lowbit_run.train.cut import Share, attention_of, class_for, parts_of, whole_class
from lowbit_run.train.layout import PipelineLayout
from lowbit_run.train.model import StageModule, add_adapters, hugging_face_config, next_token_loss, targets_of
from lowbit_run.train.optim import state_bytes
from lowbit_run.train.schedules import SCHEDULES
from lowbit_run.train.tied import expected_rows
from lowbit_run.train.weights import share_inputs, weights_of
from lowbit_run.train.widened import widen_

log = logging.getLogger(__name__)

_NF4_BLOCK, _SCALES_BLOCK = 64, 256  # weights that share a scale, and scales that share one
_FED_BACK = 8  # bytes that `elastic.error_feedback` keeps for each trained number
_NF4_TABLES = (64, 64 + 1024 + 4)  # bytes of each matrix: the 16 values; with double quantization 256 more, and a mean


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes that parts of a model take between steps.

    Attributes:
        weights: of the model, in the width in which they are kept. adapters: of LoRA, in float32.
        gradients, optimizer: of what is trained.
        anchors: of token anchors at the ends of boundaries, when they take most.
        elements, trained: numbers, not bytes, of the model's own parameters, and of those that are trained.
    """

    elements: int = 0
    trained: int = 0
    weights: int = 0
    adapters: int = 0
    gradients: int = 0
    optimizer: int = 0
    anchors: int = 0

    @property
    def total(self) -> int:
        """Bytes of all of it."""
        return self.weights + self.adapters + self.gradients + self.optimizer + self.anchors

    def __add__(self, other: "Held") -> "Held":
        return Held(**{f.name: add(*(getattr(each, f.name) for each in (self, other))) for f in fields(self)})


@dataclass(frozen=True, kw_only=True)
class ModelBytes:
    """What each part of a model takes.

    Attributes:
        layers: of each decoder layer. first, last: of the embedding, and of what follows the layers.
        tied: of a tied embedding, which the last stage has as well; otherwise zeros.
        rows: bytes of the rows of a trained tied embedding as the first stage has them, which the last one keeps.
        anchor: bytes of a token anchor at an end of a boundary in the warm-up, while it is solved for, and later.
    """

    layers: tuple[Held, ...]
    first: Held
    last: Held
    tied: Held = Held()
    rows: int = 0
    anchor: tuple[int, int, int] = (0, 0, 0)

    def stage(self, layers: Iterable[int], *, first: bool, last: bool) -> Held:
        """Bytes of a stage with these layers; `first`, `last`: whether it has the embedding, and the output matrix."""
        total = sum((self.layers[layer] for layer in layers), Held())
        copied = self.tied if last and not first else Held()
        return total + (self.first if first else Held()) + (self.last if last else Held()) + copied

    def rank(self, layout: PipelineLayout, rank: int) -> Held:
        """Bytes of all stages of a rank."""
        last, stages = layout.stages - 1, layout.stages_of(rank)
        total = sum((self.stage(layout.layers_of(s), first=s == 0, last=s == last) for s in stages), Held())
        if layout.rank_of(0) != layout.rank_of(last):  # the first rank's copy of a tied embedding follows the last's
            if 0 in stages:
                total = replace(total, optimizer=total.optimizer - self.tied.optimizer)
            if last in stages:
                total = replace(total, weights=total.weights + self.rows)
        return replace(total, anchors=self.anchors(layout, stages))

    def anchors(self, layout: PipelineLayout, stages: Iterable[int]) -> int:
        """Bytes of token anchors at the ends of the boundaries of stages of one rank, when they take most."""
        sides = (side for s in stages for side in (s - 1, s) if 0 <= side < layout.stages - 1)
        ends, (first, solving, later) = sum(layout.crosses(side) for side in sides), self.anchor
        return max(ends * first + solving, ends * later) if ends else 0


@functools.lru_cache(maxsize=8)
def model_bytes(config: TrainConfig, *, vocab: int, autocast: torch.dtype | None) -> ModelBytes:
    """Count what each part of a run's model takes, whatever its family.

    Args:
        vocab: entries of the embedding, of a model from scratch. autocast: dtype of matrix products, or None.
    """
    model = _without_data(config, vocab)
    count = _Counter(config, model, weights_of(config, autocast))
    before, layers, _ = parts_of(model.config)
    prefix = f"{model.base_model_prefix}."
    each = [Held() for _ in getattr(model.base_model, layers)]
    first = last = Held()
    for name, module, parameter in _parameters(model):
        bytes_of = count(name, module, parameter)
        path = name.removeprefix(prefix).split(".")
        if path[0] == layers:
            each[int(path[1])] += bytes_of
        elif path[0] in before:
            first += bytes_of
        else:
            last += bytes_of
    embedding = model.get_input_embeddings()
    tied, rows = Held(), 0
    if model.get_output_embeddings().weight is embedding.weight:
        tied = count("", embedding, embedding.weight)
        rows = 4 * embedding.weight.numel() if tied.gradients and config.pipeline.tied_rows != FULL_PRECISION else 0
    anchor = _anchor_bytes(config, embedding.weight, model.config.hidden_size)
    return ModelBytes(layers=tuple(each), first=first, last=last, tied=tied, rows=rows, anchor=anchor)


def _anchor_bytes(config: TrainConfig, embedding: Tensor, width: int) -> tuple[int, int, int]:
    if not config.pipeline.anchor:
        return 0, 0, 0
    vocab, features = embedding.shape
    columns, seen = features + 1, expected_rows(config.run.steps * config.step_tokens, vocab)
    sums, weights = 4 * columns * (columns + width) + 9 * vocab, 2 * columns * width  # with tokens' places
    solving = 8 * columns * (3 * columns + 5 * width)  # in float64: sums, factor and inverse, and the weights
    return sums, solving, weights + 3 * seen * width + 8 * vocab  # the table grows by half


def _without_data(config: TrainConfig, vocab: int) -> Any:
    exact: Any = hugging_face_config(config.model, vocab=vocab, sequence=config.data.sequence)
    exact._attn_implementation = attention_of(exact)
    with torch.device("meta"):
        return whole_class(exact)(exact)


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    seen: set[nn.Parameter] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                yield f"{path}.{name}", module, parameter


class _Counter:
    """Counts bytes of a parameter, and of the adapter of its module, if it has one."""

    def __init__(self, config: TrainConfig, model: Any, weights: str) -> None:
        self.config, self.dtype = config, 4 if weights == "fp32" else 2
        self.bits, self.double = _quantized(config, model.config)
        self.whole = _kept_whole(model) if self.bits else []
        self.exact = [
            re.compile(re.escape(part)) for part in getattr(model, "_keep_in_fp32_modules_strict", None) or ()
        ]
        self.targets = targets_of(config) if config.lora.rank else ()

    def __call__(self, name: str, module: nn.Module, parameter: nn.Parameter) -> Held:
        weights, elements = self._weights(name, module, parameter), parameter.numel()
        if not self.config.lora.rank:
            return replace(self._trained(parameter, weights // elements), weights=weights, elements=elements)
        path, _, kind = name.rpartition(".")
        if kind != "weight" or parameter.dim() != 2 or not any(path.endswith(f".{end}") for end in self.targets):
            return Held(weights=weights, elements=elements)
        rank = self.config.lora.rank
        pair = [torch.empty(shape, device="meta") for shape in ((rank, side) for side in parameter.shape)]
        trained = sum((self._trained(adapter, 4) for adapter in pair), Held())
        return replace(trained, weights=weights, elements=elements, adapters=sum(adapter.nbytes for adapter in pair))

    def _weights(self, name: str, module: nn.Module, parameter: nn.Parameter) -> int:
        elements = parameter.numel()
        if self.bits and _is_matrix(module, parameter) and not _kept(name.rpartition(".")[0], self.whole):
            if self.bits == 8:
                outputs = parameter.shape[0 if type(module) is nn.Linear else 1]
                return elements + 4 * outputs  # a float32 scale for each
            scales = -(-elements // _NF4_BLOCK)
            of_scales = scales + 4 * -(-scales // _SCALES_BLOCK) if self.double else 4 * scales
            return -(-elements // 2) + of_scales + _NF4_TABLES[self.double]
        return elements * (4 if any(part.search(name) for part in self.exact) else self.dtype)

    def _trained(self, parameter: Tensor, itemsize: int) -> Held:
        storage, elements = self.config.gradients.storage, parameter.numel()
        gradient = elements * itemsize if storage == FULL_PRECISION else parse(storage).nbytes(parameter.shape)
        states = state_bytes(elements, self.config.optimizer)
        if self.config.elastic.lighthouse and self.config.elastic.error_feedback:
            states += _FED_BACK * elements
        return Held(trained=elements, gradients=gradient, optimizer=states)


def _is_matrix(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Whether bitsandbytes replaces the module of this parameter: not tensors of experts, nor biases."""
    from transformers.pytorch_utils import Conv1D

    return parameter.dim() == 2 and (type(module) is nn.Linear or isinstance(module, Conv1D))


def _quantized(config: TrainConfig, exact: Any) -> tuple[int, bool]:
    """Return the bits of linear layers' weights, 0 for full precision, and whether scales are quantized as well."""
    stored = getattr(exact, "quantization_config", None)
    if stored:
        values = stored if isinstance(stored, dict) else stored.to_dict()
        return (4 if values.get("load_in_4bit") else 8), bool(values.get("bnb_4bit_use_double_quant"))
    return {"int8": 8, "nf4": 4}.get(config.model.weights or "", 0), config.model.double_quantization


def _kept_whole(model: Any) -> list[str]:
    from transformers.quantizers.base import get_keys_to_not_convert

    return [*get_keys_to_not_convert(model), *(getattr(model, "_keep_in_fp32_modules", None) or ())]


def _kept(name: str, patterns: Sequence[str]) -> bool:
    from transformers.quantizers.quantizers_utils import should_convert_module

    return not should_convert_module(name, list(patterns))


@dataclass(frozen=True, kw_only=True)
class Line:
    """Bytes that grow with the windows of a micro-batch: `fixed`, and `window` for each of them.

    `halfway`: further bytes for each between the passes of a split backward, for the inputs and for the weights.
    """

    fixed: int = 0
    window: int = 0
    halfway: int = 0

    def of(self, rows: int) -> int:
        """Bytes with `rows` windows."""
        return max(0, self.fixed + rows * self.window)

    def __add__(self, other: "Line") -> "Line":
        return Line(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __sub__(self, other: "Line") -> "Line":
        return Line(**{f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(self)})


@dataclass(frozen=True, kw_only=True)
class BatchBytes:
    """What a micro-batch takes in each part of a model.

    Attributes:
        layers: held by each decoder layer from forward to backward, with copies of weights that autocast makes.
        first, middle, last: held by a stage without layers, with its input and output.
        extra, extra_last: the most beyond that while a micro-batch runs, on the last stage (logits) and on others.
        output: a stage's output, which the next one has as its input.
    """

    layers: tuple[Line, ...]
    first: Line
    middle: Line
    last: Line
    extra: Line
    extra_last: Line
    output: Line = Line()

    def ends(self, *, first: bool, last: bool) -> Line:
        """What a stage holds besides its layers."""
        return (self.first if first else self.middle) + (self.last if last else self.middle) - self.middle


LayerSaves = LayerAware | LayerPlan | None
"""What layers save: in the bits of a policy; as a plan for one layer says; or, None, as PyTorch does."""


class _Live(TorchDispatchMode):
    """Counts the bytes of all tensors that are made in a `with` block, as long as anything holds them.

    A model's parameters, their gradients and its buffers are not counted.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        tensors = (*model.parameters(), *model.buffers())
        self._known = {id(t.untyped_storage()) for each in tensors for t in (each, each.grad) if t is not None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and id(storage := tensor.untyped_storage()) not in self._known:
                self._known.add(id(storage))
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, id(storage), storage.nbytes())
        return result

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


@functools.lru_cache(maxsize=8)
def batch_meter(
    config: TrainConfig, *, vocab: int, autocast: torch.dtype | None, boundary: torch.dtype = torch.float32,
    splits: bool | None = None,
) -> "BatchMeter":  # fmt: skip
    """Return a function that counts the bytes of a micro-batch.

    Args:
        vocab, autocast: as above. boundary: dtype between stages.
        splits: whether backward passes are split in two; None: as the run's schedule does.
    """
    splits = SCHEDULES[config.pipeline.schedule].splits if splits is None else splits
    return BatchMeter(
        config, vocab=vocab, autocast=autocast, boundary=boundary, splits=splits and not config.checkpoints
    )


class BatchMeter:
    """Counts what a micro-batch takes, by a pass over fake tensors with each kind of layer.

    These have no values: norms count as if they had no outliers.
    """

    def __init__(self, config: TrainConfig, **arguments: Any) -> None:
        self.config = config
        self._known: dict[str, BatchBytes] = {}
        self._sample = functools.cache(lambda coded: _Sample(config, **arguments, coded=coded))

    def __call__(self, saves: LayerSaves = None) -> BatchBytes:
        """Count a micro-batch in stages whose layers all save this; None: what they do in the run without bits."""
        if saves is None and self.config.checkpoints:
            saves = LayerPlan(stages=((LayerChoice(checkpoint=True),),))
        if (key := repr(saves)) not in self._known:
            coded = isinstance(saves, LayerAware) or (saves is not None and saves.stages[0][0].is_coded)
            self._known[key] = self._sample(coded).count(saves)
        return self._known[key]


def _kind(config: Any, number: int, layer: nn.Module) -> Any:
    types = getattr(config, "layer_types", None) or ()
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    return types[number] if number < len(types) else "", shapes


class _Sample:
    """A model with a few layers and without data, to run micro-batches of one and two windows."""

    def __init__(
        self, config: TrainConfig, *, vocab: int, autocast: torch.dtype | None, boundary: torch.dtype, splits: bool,
        coded: bool,
    ) -> None:  # fmt: skip
        self.config, self.autocast, self.splits = config, autocast, splits
        self.packed = config.data.format == "jsonl" and config.data.packing
        whole = _without_data(config, vocab)
        self.type = whole.config.model_type
        layers = list(getattr(whole.base_model, parts_of(whole.config)[1]))
        self.kinds = [_kind(whole.config, number, layer) for number, layer in enumerate(layers)]
        of_first = [number for number, kind in enumerate(self.kinds) if kind == self.kinds[0]]
        self.measured = {kind: self.kinds.index(kind) for kind in self.kinds} | {self.kinds[0]: of_first[-1]}
        with torch.device("meta"):
            share = Share(layers=frozenset({0, *self.measured.values()}), first=True, last=True)
            self.model = class_for(whole.config, share)(whole.config)
        # PyTorch's products of experts have no fake form in float32: those of bfloat16 are counted twice.
        experts = any(p.dim() > 2 for p in self.model.parameters()) and not coded
        wide = weights_of(config, autocast) == "fp32"
        self.double = 2 if experts and wide else 1
        self.boundary = torch.bfloat16 if self.double == 2 else boundary
        self.model.to(torch.bfloat16 if experts or not wide else torch.float32)
        if self.double == 2:
            self.autocast = None
        widened = autocast is None and not wide and not experts and config.lora.rank > 0
        if widened:
            widen_(self.model)
        if config.lora.rank:
            add_adapters(self.model, config)
            share_inputs(self.model, config, autocast)
        self.model.train()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        with self._fake:
            self.model.to_empty(device="cpu")
        matrices = [p.numel() for p in self.model.parameters() if p.dim() == 2 and not p.requires_grad]
        # Products with quantized weights make them whole, one matrix at a time.
        embedding = self.model.get_input_embeddings().weight.numel()
        quantized = _quantized(config, whole.config)[0] > 0
        self.whole = (
            (4 if widened else 2) * max((count for count in matrices if count != embedding), default=0) * quantized
        )

    def count(self, saves: LayerSaves) -> BatchBytes:
        """Measure each kind of layer, and both ends."""
        try:
            return self._count(saves)
        except (DynamicOutputShapeException, DataDependentOutputException):  # such as of experts that are not grouped
            log.warning("the activations of a %s model cannot be counted in advance: plans leave them out", self.type)
            none = Line()
            return BatchBytes(
                layers=(none,) * len(self.kinds), first=none, middle=none, last=none, extra=none, extra_last=none
            )

    def _count(self, saves: LayerSaves) -> BatchBytes:
        rows, (ends, extra), each = self.config.rows, self._lines(saves, 0), {}
        widest, added = (), Line()  # the layer that takes most while it runs, besides the first
        for kind, number in self.measured.items():
            if not number:
                each[kind] = ends
                continue
            line, more = self._lines(saves, 0, number)
            each[kind] = line - ends
            if not widest or more.of(rows) > extra.of(rows):
                widest, added, extra = (number,), each[kind], more
        base = each[self.kinds[0]]
        first, last = self._lines(saves, 0, first=True), self._lines(saves, 0, *widest, last=True)
        return BatchBytes(
            layers=tuple(each[kind] for kind in self.kinds), first=first[0] - base, middle=ends - base,
            last=last[0] - base - added, extra=extra, extra_last=last[1],
            output=Line(window=self.double * self.config.data.sequence * self.width * self.boundary.itemsize),
        )  # fmt: skip

    def _lines(self, saves: LayerSaves, *layers: int, first: bool = False, last: bool = False) -> tuple[Line, Line]:
        """Return the bytes held after a forward, and the most beyond them."""
        stage = StageModule(
            self.model, layers=layers, first=first, last=last, autocast=self.autocast, boundary_dtype=self.boundary  # pyright: ignore
        )  # fmt: skip
        self.width = stage.width
        if isinstance(saves, LayerPlan):
            replace(saves, stages=(saves.stages[0] * len(layers),)).apply_(stage)
        elif saves is not None:
            compress_saved_(stage, saves)
        try:
            with self._fake, contextlib.nullcontext() if self.packed else _one_sample_each():
                for parameter in stage.parameters():
                    parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
                one, two = (self._run(stage, rows) for rows in (1, 2))
                halfway = 0 if stage.first or not self.splits else self._halfway(stage) - one[0]
        finally:
            restore_(stage)
        held, extra = (
            Line(fixed=self.double * (2 * a - b), window=self.double * (b - a)) for a, b in zip(one, two, strict=True)
        )
        return replace(held, halfway=self.double * halfway), extra + Line(fixed=self.whole)

    def _run(self, stage: StageModule, rows: int) -> tuple[int, int]:
        """Bytes held after a forward pass, and the most beyond these."""
        with _Live(stage) as live:
            whole = self._forward(stage, rows)
            held = live.now
            whole[-1].backward(torch.ones_like(whole[-1]))
        return held, live.peak - held

    def _halfway(self, stage: StageModule) -> int:
        """Bytes held of a window between the passes of a backward."""
        from torch.distributed.pipelining._backward import stage_backward_input

        with _Live(stage) as live:
            x, output, result = self._forward(stage, 1)
            gradient = None if stage.last else [torch.ones_like(result)]
            passed = stage_backward_input([result], gradient, [x], iter(stage.parameters()))
            if stage.last:  # PyTorch's stage frees them
                del output, result
            now = live.now
        del passed
        return now

    def _forward(self, stage: StageModule, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a stage's input, its output, which a pipeline holds as well, and the loss on the last stage."""
        shape = (rows, self.config.data.sequence)
        ids = torch.zeros(shape, dtype=torch.int64)
        x = ids if stage.first else torch.randn(*shape, stage.width, dtype=self.boundary, requires_grad=True)
        output = stage(x, ids) if self.packed else stage(x)
        return x, output, next_token_loss(output, ids) if stage.last else output


@contextlib.contextmanager
def _one_sample_each() -> Iterator[None]:
    """Let windows hold one sample: Transformers cannot read fake positions, and would build an attention mask."""
    from transformers import masking_utils

    own, masking_utils.find_packed_sequence_indices = masking_utils.find_packed_sequence_indices, lambda positions: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = own


def rank_bytes(
    kept: ModelBytes, batch: Callable[[LayerSaves], BatchBytes], layout: PipelineLayout, rank: int, *, rows: int,
    held: InFlight, saved: Sequence[Sequence[LayerSaves]],
) -> int:  # fmt: skip
    """Predict the most bytes of a rank: what it keeps, and what micro-batches of `rows` windows take.

    An evaluation takes less, since it runs as many windows at a time and keeps nothing.

    Args:
        saved: what each layer of each stage saves.
    """
    last, stages = layout.stages - 1, layout.stages_of(rank)
    of_stage: dict[int, Line] = {}
    extra = 0
    for s in stages:
        every = [batch(saves) for saves in saved[s]]
        parts = [each.layers[layer] for each, layer in zip(every, layout.layers_of(s), strict=True)]
        of_stage[s] = sum(parts, every[0].ends(first=s == 0, last=s == last))
        if held.stays(s):  # its output counts as the next stage's input
            of_stage[s] -= every[0].output
        extra = max(extra, *((each.extra_last if last in stages else each.extra).of(rows) for each in every))
    worst = max(
        sum(m.held[s] * of_stage[s].of(rows) + m.halfway[s] * rows * of_stage[s].halfway for s in stages)
        for m in held.moments[rank]
    )
    return kept.rank(layout, rank).total + worst + extra


def held_batches(config: TrainConfig, layout: PipelineLayout) -> InFlight:
    """Count the micro-batches that the stages of a run hold."""
    run = config.pipeline
    order = order_of(
        run.schedule, ranks=layout.ranks, stages_per_rank=layout.stages_per_rank, microbatches=run.microbatches,
        split=not config.checkpoints,
    )  # fmt: skip
    return in_flight(order)
