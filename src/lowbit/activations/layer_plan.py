"""A plan for each layer of a model: what autograd keeps of it. One file, which `lowbit plan memory` writes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import nn

from lowbit.activations.bit_plan import FORMAT, PLANNED, cut, read_json, write_json
from lowbit.activations.changes import Compressed, compress
from lowbit.activations.checkpoint import MARK, checkpoint_, restore_checkpointed
from lowbit.activations.policy import WHOLE, Format, LayerAware
from lowbit.activations.structure import linear_like, norm_like
from lowbit.codecs import Codec, StatefulCodec, parse
from lowbit.codecs.checks import check_int

VERSION = 2
_MOST_LAYERS, _MOST_CHARACTERS = 1 << 13, 300
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LayerChoice:
    """What autograd keeps of one layer.

    Without arguments PyTorch keeps what it always keeps.

    Args:
        norm, mlp, linear: as in `LayerAware`, with its 8 bits for attention; 16 everywhere: the modules are left
            as they are. Of a checkpointed layer they count while it runs again.
        checkpoint: keep the layer's input alone, and run the layer again in backward.
        input: format of that input, as `lowbit.codecs.parse` takes it, such as "GroupInt(bits=8, group=64)"; empty: as
            it is.

    Raises:
        TypeError, ValueError: bits that `LayerAware` refuses, an unknown format or one with state, a format for the
            input of a layer that is not checkpointed.
    """

    norm: Any = WHOLE
    mlp: Any = WHOLE
    linear: Any = WHOLE
    checkpoint: bool = False
    input: str = ""

    def __post_init__(self) -> None:
        LayerAware(norm=self.norm, mlp=self.mlp, linear=self.linear)
        for name, allowed in (("checkpoint", bool), ("input", str)):
            if type(getattr(self, name)) is not allowed:
                raise TypeError(f"{name} is {getattr(self, name)!r}; allowed: {allowed.__name__}")
        if self.input and not self.checkpoint:
            raise ValueError(f"input is {self.input!r} of a layer that is not checkpointed; allowed: checkpoint=True")
        _ = self.codec

    @property
    def codec(self) -> Codec | None:
        """The format of the input; None: as it is."""
        codec = parse(self.input) if self.input else None
        if isinstance(codec, StatefulCodec):
            raise ValueError(f"input is {self.input!r}, a format with state; allowed: formats without")
        return codec

    @property
    def bits(self) -> dict[str, Any]:
        """Bits by layer type."""
        return {kind: getattr(self, kind) for kind in PLANNED}

    @property
    def is_coded(self) -> bool:
        """Whether modules of the layer save in few bits."""
        return any(bits != WHOLE for bits in self.bits.values())

    def __str__(self) -> str:
        inside = "/".join(str(bits) for bits in self.bits.values())
        if not self.checkpoint:
            return f"low-bit {inside}" if self.is_coded else "keep"
        codec = self.codec
        of = f", input {getattr(codec, 'bits', None) or codec}" if codec else ""
        return f"checkpoint{of}{f', inside {inside}' if self.is_coded else ''}"


KEEP = LayerChoice()


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """What autograd keeps of every layer of a model, or of the stages of a pipeline.

    Args:
        stages: for each stage, in order, the choices for its layers, in order. A model in one process has one stage.
        rest: bits by layer type for modules outside the layers (the final norm, the output matrix); absent: as they
            are.
        group: elements that share a scale.
        made_for: settings that the plan depends on, by name: texts, numbers, booleans or None. "layer" and "layer
            parameters" (class and number of parameters of a layer) are compared with the model.

    Raises:
        TypeError, ValueError: no stage or layer, other choices, other settings.
    """

    stages: tuple[tuple[LayerChoice, ...], ...]
    rest: LayerChoice = KEEP
    group: int = 64
    made_for: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layers = sum(len(stage) for stage in self.stages)
        if not self.stages or not all(self.stages) or layers > _MOST_LAYERS:
            raise ValueError(
                f"stages has {len(self.stages)} stages of {layers} layers; allowed: at least one layer each, "
                f"at most {_MOST_LAYERS} in all"
            )
        for choice in (self.rest, *(choice for stage in self.stages for choice in stage)):
            if not isinstance(choice, LayerChoice):
                raise TypeError(f"stages has {choice!r}; allowed: LayerChoice")
        if self.rest.checkpoint:
            raise ValueError("rest is checkpointed; allowed: bits alone")
        LayerAware(group=self.group)
        for name, value in self.made_for.items():
            if not isinstance(value, str | int | float | None) or len(f"{name}{value}") > _MOST_CHARACTERS:
                raise ValueError(f"made_for[{name!r}] is {value!r}; allowed: a short text, a number, a boolean or None")

    def policy(self, choice: LayerChoice, *, rounding: str = "nearest") -> LayerAware:
        """The policy for the modules of a layer."""
        return LayerAware(**choice.bits, group=self.group, rounding=rounding)

    def apply_(self, model: nn.Module, *, stage: int = 0, rounding: str = "nearest") -> Applied:
        """Make a model, or the module of a stage, save its activations as planned; `compress_saved_` calls it.

        Raises:
            ValueError: a model that the plan was not made for, or that is compressed or checkpointed already.
        """
        check_int("stage", stage, 0, len(self.stages) - 1)
        layers, choices = layers_of(model), self.stages[stage]
        self._check(layers, choices)
        applied = Applied(model)
        try:
            for (name, layer), choice in zip(layers.items(), choices, strict=True):
                if choice.is_coded:
                    policy = self.policy(choice, rounding=rounding)
                    applied.add(name, compress(layer, policy, report=False))
                if choice.checkpoint:
                    checkpoint_(layer, codec=choice.codec, name=name)
            if self.rest.is_coded:
                policy = self.policy(self.rest, rounding=rounding)
                for name, module in _outside(model, layers).items():
                    applied.add(name, compress(module, policy, report=False))
        except BaseException:
            applied.remove()
            raise
        return applied

    def _check(self, layers: Mapping[str, nn.Module], choices: tuple[LayerChoice, ...]) -> None:
        one = next(iter(layers.values()))
        mine = {"layer": type(one).__name__, "layer parameters": sum(p.numel() for p in one.parameters())}
        planned = {name: self.made_for.get(name, value) for name, value in mine.items()}
        if len(layers) != len(choices) or planned != mine:
            raise ValueError(
                f"the plan is for {_describe(len(choices), planned)}; this model has {_describe(len(layers), mine)}; "
                "allowed: the model that it was made for, or a plan for this one (lowbit plan memory, plan_layers)"
            )

    def write(self, path: str | Path) -> None:
        """Write the plan as JSON; a reader finds the old file or the new one, never a part.

        Raises:
            OSError: the file cannot be written.
        """
        stages = [[asdict(choice) for choice in stage] for stage in self.stages]
        write_json(path, {
            "format": FORMAT, "version": VERSION, "made_for": dict(self.made_for), "group": self.group,
            "rest": asdict(self.rest), "stages": stages,
        })  # fmt: skip

    @classmethod
    def read(cls, path: str | Path) -> LayerPlan:
        """Read a plan that `write` wrote. The file may be hostile: it is data, bounded and checked.

        Raises:
            ValueError: no such file, or something else than a plan of this version.
        """
        values = read_json(path, VERSION)
        match values:
            case {"made_for": dict(made_for), "group": group, "rest": rest, "stages": [*stages]} if len(values) == 6:
                try:
                    choices = tuple(tuple(map(_choice, stage)) for stage in stages if isinstance(stage, list))
                    if len(choices) < len(stages):
                        raise ValueError("stages has what is no list")
                    return cls(stages=choices, rest=_choice(rest), group=group, made_for=made_for)
                except (TypeError, ValueError, OverflowError) as error:
                    raise ValueError(f"{path} is not a memory plan: {cut(str(error))}") from None
        raise ValueError(
            f"{path} is not a memory plan: it lacks made_for, group, rest or stages, or has more than these"
        )


class Applied:
    """What a plan changed in a model.

    Attributes:
        bits: layer type and bits of each module that was changed, by name, as in `Compressed`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._compressed: list[Compressed] = []
        self.bits: dict[str, tuple[str, Format]] = {}

    def add(self, prefix: str, compressed: Compressed) -> None:
        """Note what `compress_saved_` changed in a part of the model."""
        self._compressed.append(compressed)
        self.bits |= {f"{prefix}.{name}".strip("."): value for name, value in compressed.bits.items()}

    def remove(self) -> None:
        """Restore the modules' own forward."""
        for module in self._model.modules():
            restore_checkpointed(module)
        for compressed in self._compressed:
            compressed.remove()

    def __repr__(self) -> str:
        checkpointed = sum(MARK in vars(module) for module in self._model.modules())
        return f"Applied({checkpointed} x checkpoint, {len(self.bits)} modules in few bits)"


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model, in order: the children of its largest list that have the same class.

    Lists are `nn.ModuleList` and `nn.Sequential`, those inside layers aside.

    Raises:
        ValueError: a model without such a list.
    """
    best: dict[str, nn.Module] = {}
    size, inside = 0, []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or any(name.startswith(n) for n in inside):
            continue
        inside.append(f"{name}." if name else "")
        children = {n: m for n, m in module.named_children() if next(m.parameters(), None) is not None}
        if not children:
            continue
        common = Counter(type(m) for m in children.values()).most_common(1)[0][0]
        same = {f"{name}.{n}".strip("."): m for n, m in children.items() if type(m) is common}
        if (own := sum(p.numel() for m in same.values() for p in m.parameters())) > size:
            best, size = same, own
    if not best:
        raise ValueError(
            f"model ({type(model).__name__}) has no list of layers; allowed: models with their layers in an "
            "nn.ModuleList or nn.Sequential"
        )
    return best


def _outside(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The largest modules that hold no layer and have something to compress."""
    around = {".".join(name.split(".")[:end]) for name in layers for end in range(len(name.split(".")))}
    found = {}
    for name, module in model.named_modules():
        if name in around or any(name == n or name.startswith(f"{n}.") for n in (*layers, *found)):
            continue
        if any(linear_like(m) or norm_like(m) for m in module.modules()):
            found[name] = module
    return found


def _choice(values: Any) -> LayerChoice:
    names = {f.name for f in fields(LayerChoice)}
    if not isinstance(values, dict) or values.keys() != names:
        raise ValueError(f"a layer is {values!r}; allowed: {', '.join(sorted(names))}")
    return LayerChoice(**values)


def _describe(count: int, kind: Mapping[str, Any]) -> str:
    parameters = kind["layer parameters"]
    return f"{count} x {kind['layer']} of {f'{parameters:,}' if isinstance(parameters, int) else parameters} parameters"
