"""A memory plan: what autograd keeps of each layer of each stage, and the file that `lowbit plan memory` writes.

A plan by stage is one whose stages each treat all of their modules alike.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import nn

from lowbit import files
from lowbit.activations.checkpoint import checkpoint_
from lowbit.activations.policy import WHOLE, LayerAware
from lowbit.activations.saved import Compressed, check_new, compress
from lowbit.activations.structure import linear_like, norm_like
from lowbit.codecs import Codec, StatefulCodec, parse
from lowbit.codecs.checks import check_int
from lowbit.escape import shown

FORMAT, VERSION = "lowbit plan of saved activations", 3
PLANNED = ("norm", "mlp", "linear")
"""Layer types whose bits a plan chooses."""
_MOST_LAYERS, _MOST_CHARACTERS, _MOST_BYTES = 1 << 13, 300, 1 << 22


@dataclass(frozen=True, kw_only=True)
class LayerChoice:
    """What autograd keeps of one layer.

    Without arguments PyTorch keeps what it always keeps.

    Args:
        norm, mlp, linear, attention: as in `LayerAware`; if the first three are all 16, attention is also saved
            unchanged by default. In a checkpointed layer they apply while it runs again.
        checkpoint: keep only the layer's input, and run the layer again in backward.
        input: format of that input for `lowbit.codecs.parse`, such as "GroupInt(bits=8, group=64)"; empty: unchanged.

    Raises:
        TypeError, ValueError: bits that `LayerAware` refuses, an unknown format or one with state, a format for the
            input of a layer that is not checkpointed.
    """

    norm: Any = WHOLE
    mlp: Any = WHOLE
    linear: Any = WHOLE
    attention: Any = None
    checkpoint: bool = False
    input: str = ""

    def __post_init__(self) -> None:
        LayerAware(**self.bits)
        for name, allowed in (("checkpoint", bool), ("input", str)):
            if type(getattr(self, name)) is not allowed:
                raise TypeError(f"{name} is {shown(getattr(self, name))}; allowed: {allowed.__name__}")
        if self.input and not self.checkpoint:
            raise ValueError(
                f"input is {shown(self.input)} of a layer that is not checkpointed; allowed: checkpoint=True"
            )
        _ = self.codec

    @property
    def codec(self) -> Codec | None:
        """The format of the input; None: unchanged."""
        codec = parse(self.input) if self.input else None
        if isinstance(codec, StatefulCodec):
            raise ValueError(f"input is {shown(self.input)}, a format with state; allowed: formats without")
        return codec

    @property
    def bits(self) -> dict[str, Any]:
        """Bits by layer type, including attention."""
        bits = {kind: getattr(self, kind) for kind in PLANNED}
        is_whole = self.attention is None and all(each == WHOLE for each in bits.values())
        return bits | {"attention": WHOLE if is_whole else self.attention}

    @property
    def is_coded(self) -> bool:
        """Whether modules of the layer save in few bits."""
        return any(bits != WHOLE for bits in self.bits.values())

    def __str__(self) -> str:
        inside = "/".join(str(self.bits[kind]) for kind in PLANNED)
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
        rest: for each stage, bits of the modules outside its layers (the final norm, the output matrix); if omitted,
            these are not changed.
        group: elements that share a scale.
        made_for: settings that the plan depends on, by name: texts, numbers, booleans or None. "layer" and "layer
            parameters" (class and number of parameters of a layer) are compared with the model.

    Raises:
        TypeError, ValueError: no stage, a stage without layers, or invalid choices or settings.
    """

    stages: tuple[tuple[LayerChoice, ...], ...]
    rest: tuple[LayerChoice, ...] = ()
    group: int = 64
    made_for: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layers = sum(len(stage) for stage in self.stages)
        if not self.stages or not all(self.stages) or layers > _MOST_LAYERS:
            raise ValueError(
                f"stages has {len(self.stages)} stages of {layers} layers; allowed: at least one layer each, "
                f"at most {_MOST_LAYERS} in all"
            )
        object.__setattr__(self, "rest", self.rest or (KEEP,) * len(self.stages))
        object.__setattr__(self, "made_for", dict(self.made_for))
        for choice in (*self.rest, *(choice for stage in self.stages for choice in stage)):
            if not isinstance(choice, LayerChoice):
                raise TypeError(f"stages has {shown(choice)}; allowed: LayerChoice")
        if len(self.rest) != len(self.stages) or any(choice.checkpoint for choice in self.rest):
            raise ValueError(f"rest is {self.rest}; allowed: bits alone, for each of {len(self.stages)} stages")
        LayerAware(group=self.group)
        for name, value in self.made_for.items():
            if not isinstance(value, str | int | float | None) or len(f"{name}{value}") > _MOST_CHARACTERS:
                raise ValueError(
                    f"made_for[{name!r}] is {shown(value)}; allowed: a short text, a number, a boolean or None"
                )

    @classmethod
    def by_stage(cls, bits: Sequence[Mapping[str, Any]], *, layers: Sequence[int], group: int = 64) -> "LayerPlan":
        """A plan with the same bits for all modules of a stage, as AGoQ has it (arXiv 2605.00539).

        Args:
            bits: for each stage, in order, by layer type: {"norm": 8, "mlp": 4, "linear": 16}. Attention is not coded.
            layers: number of layers of each stage.
        """
        for stage, each in enumerate(bits):
            if each.keys() != set(PLANNED):
                raise ValueError(f"bits[{stage}] is {shown(each)}; allowed: bits for {', '.join(PLANNED)}")
        choices = tuple(LayerChoice(attention=WHOLE, **{kind: each[kind] for kind in PLANNED}) for each in bits)
        stages = tuple((choice,) * count for choice, count in zip(choices, layers, strict=True))
        return cls(stages=stages, rest=choices, group=group)

    @property
    def is_by_stage(self) -> bool:
        """Whether every stage treats all of its modules alike."""
        return all(self._choice_of(stage) for stage in range(len(self.stages)))

    def policy(self, stage: int, *, rounding: str = "nearest") -> LayerAware:
        """Return the policy of a stage that treats all of its modules alike, for `compress_saved_`.

        Raises:
            ValueError: no such stage, or its layers differ or are checkpointed (`compress_saved_` takes the plan).
        """
        check_int("stage", stage, 0, len(self.stages) - 1)
        if (choice := self._choice_of(stage)) is None:
            raise ValueError(f"stage is {stage}, whose layers differ; allowed: a stage with the same bits throughout")
        return self._policy(choice, rounding)

    def _choice_of(self, stage: int) -> LayerChoice | None:
        """The choice for all modules of a stage; None if there are several, or if layers are checkpointed."""
        different = {*self.stages[stage], self.rest[stage]}
        return different.pop() if len(different) == 1 else None

    def _policy(self, choice: LayerChoice, rounding: str) -> LayerAware:
        return LayerAware(**choice.bits, group=self.group, rounding=rounding)

    def apply_(self, model: nn.Module, *, stage: int = 0, rounding: str = "nearest") -> Compressed:
        """Make a model, or the module of a stage, save its activations as planned; called by `compress_saved_`.

        Raises:
            ValueError: a model that the plan was not made for, or that is compressed or checkpointed already.
        """
        check_int("stage", stage, 0, len(self.stages) - 1)
        layers, choices, rest = layers_of(model), self.stages[stage], self.rest[stage]
        self._check(layers, choices)
        check_new(model)
        applied = Compressed(model, {})

        def code(choice: LayerChoice, parts: Mapping[str, nn.Module]) -> None:
            for prefix, module in parts.items() if choice.is_coded else ():
                done = compress(module, self._policy(choice, rounding))
                applied.attention += [bits for bits in done.attention if bits not in applied.attention]
                applied.bits.update({f"{prefix}.{name}".strip("."): bits for name, bits in done.bits.items()})

        try:
            if self._choice_of(stage):  # compress it as a whole, so that functions between the layers are included
                code(rest, {"": model})
                return applied
            for (name, layer), choice in zip(layers.items(), choices, strict=True):
                code(choice, {name: layer})
                if choice.checkpoint:
                    checkpoint_(layer, codec=choice.codec, name=name)
            code(rest, _outside(model, layers))
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
        """Write the plan as JSON, atomically: a reader finds the old file or the whole new one.

        Raises:
            OSError: the file cannot be written.
        """
        values = {"format": FORMAT, "version": VERSION, **asdict(self)}
        files.write(Path(path), json.dumps(values, indent=1, allow_nan=False) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> "LayerPlan":
        """Read a plan that `write` wrote. The file need not be trusted: its size and contents are checked.

        Raises:
            ValueError: no such file, or not a plan of this version.
        """
        values = _read_json(Path(path))
        for name, expected in (("format", FORMAT), ("version", VERSION)):
            if (value := values.pop(name, None)) != expected:
                raise ValueError(f"{path} has {name} {_cut(repr(value))}; allowed: {expected!r}")
        match values:
            case {"made_for": dict(made_for), "group": group, "rest": [*rest], "stages": [*stages]} if len(values) == 4:
                try:
                    return cls(stages=tuple(map(_choices, stages)), rest=_choices(rest), group=group, made_for=made_for)
                except (TypeError, ValueError, OverflowError) as error:
                    raise ValueError(f"{path} is not a memory plan: {_cut(str(error))}") from None
        raise ValueError(
            f"{path} is not a memory plan: it lacks made_for, group, rest or stages, or has more than these"
        )


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model, in order: the children of its largest list that have the same class.

    Lists are `nn.ModuleList` and `nn.Sequential`, except those inside layers. ValueError without one.
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


def _choices(values: Any) -> tuple[LayerChoice, ...]:
    names = {f.name for f in fields(LayerChoice)}
    for each in values if isinstance(values, list) else [values]:
        if not isinstance(each, dict) or each.keys() != names:
            raise ValueError(f"a layer is {shown(each)}; allowed: {', '.join(sorted(names))}")
    return tuple(LayerChoice(**each) for each in values)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = files.read_bounded(path, _MOST_BYTES)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from None
    try:
        values = files.parse_json(data)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return values


def _cut(text: str) -> str:
    """Shorten a text from an untrusted file for a message."""
    return text if len(text) <= 120 else f"{text[:120]}..."


def _describe(count: int, kind: Mapping[str, Any]) -> str:
    parameters = kind["layer parameters"]
    return f"{count} x {kind['layer']} of {f'{parameters:,}' if isinstance(parameters, int) else parameters} parameters"
