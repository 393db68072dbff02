"""Tensors and codec states of a rank in a checkpoint, under names that do not depend on the pipeline's layout.

model/NAME, optimizer/NAME/KEY        a parameter by its name in the whole model, and AdamW's moments of it
random/cpu, random/cuda               generators of the rank
tied/NAME                             a tied embedding as the first stage has it, at both ends of the pipeline
codecs/after layer 3 forward out/...  state of the codec at one end of a boundary; "anchor": of its token anchor
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowbit_run.train.optim import parts_of, state_of
from lowbit_run.train.stages import Pipeline

FOLLOWED = "tied/"
ANCHOR = "anchor"  # the direction of a boundary's token anchor
OF_ANCHOR = ", token anchor"  # behind the name of the lane that it predicts


@dataclass(frozen=True)
class End:
    """One end of one direction of a boundary, by its place in the model."""

    after_layer: int
    direction: str
    outgoing: bool

    @property
    def prefix(self) -> str:
        """Prefix of the names of this end's tensors."""
        side = "out" if self.outgoing else "in"
        return f"codecs/after layer {self.after_layer} {self.direction} {side}/"

    @property
    def other(self) -> "End":
        """The same direction's end on the other side of the boundary."""
        return End(self.after_layer, self.direction, not self.outgoing)


def ends_of(pipeline: Pipeline, stage: int) -> Iterator[tuple[str, End, str]]:
    """Yield lane name, end and full format for each direction of each boundary of a stage, and for token anchors."""
    layout, codecs = pipeline.layout, pipeline.codecs
    for boundary in (stage - 1, stage):
        if not 0 <= boundary < layout.stages - 1:
            continue
        after = layout.layers_of(boundary)[-1]
        for direction, of_boundaries in (("forward", codecs.forward), ("backward", codecs.backward)):
            outgoing = (direction == "forward") == (boundary == stage)
            yield f"boundary {boundary} {direction}", End(after, direction, outgoing), repr(of_boundaries[boundary])
        if pipeline.anchor is not None and (pipeline.config.pipeline.is_auto or not codecs.forward[boundary].is_plain):
            end = End(after, ANCHOR, outgoing=boundary == stage)
            yield f"boundary {boundary} forward{OF_ANCHOR}", end, repr(pipeline.anchor)


def collect(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Collect weights, optimizer moments, and the states of codecs and random generators.

    Returns:
        Tensors by name (weights and moments are not copied); and for each end of a boundary whose codec has state:
        place, format, and all values that are not tensors.
    """
    tensors = {"random/cpu": torch.get_rng_state()}
    if pipeline.device.type == "cuda":
        tensors["random/cuda"] = torch.cuda.get_rng_state(pipeline.device)
    tensors |= {FOLLOWED + name: followed for name, followed in pipeline.followed.items()}
    for name, parameter in parameters_of(pipeline).items():
        tensors[f"model/{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors |= {f"optimizer/{name}/{key}{part}": tensor for part, tensor in parts_of(value).items()}
    codecs = []
    for index, stage in pipeline.lowbit_stages.items():
        state = stage.codec_state_dict()
        lanes = state["lanes"] | {lane + OF_ANCHOR: fits for lane, fits in state.get("anchors", {}).items() if fits}
        for lane, end, codec in ends_of(pipeline, index):
            if lane in lanes:
                flat = flatten(lanes[lane])
                tensors |= {end.prefix + path: value for path, value in flat.items() if isinstance(value, Tensor)}
                values = {path: value for path, value in flat.items() if not isinstance(value, Tensor)}
                codecs.append(vars(end) | {"codec": codec, "values": values})
    return tensors, codecs


def restore(
    pipeline: Pipeline,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    lanes: Mapping[str, dict[str, Any]],
    *,
    steps: int,
) -> None:
    """Load a snapshot into the pipeline, the optimizer and the random generators.

    Args:
        tensors: by the names of `collect`; generators and `Pipeline.followed` may be missing.
        lanes: states of the codecs at this rank's boundaries, by the names of `ends_of`, flat.
        steps: done so far.
    """
    if "random/cpu" in tensors:
        torch.set_rng_state(tensors["random/cpu"])
    if "random/cuda" in tensors and pipeline.device.type == "cuda":
        torch.cuda.set_rng_state(tensors["random/cuda"], pipeline.device)
    for index, stage in pipeline.lowbit_stages.items():
        names = [name for name, _, _ in ends_of(pipeline, index)]
        states = {name: unflatten(lanes[name]) for name in names if name in lanes}
        anchors = {n.removesuffix(OF_ANCHOR): states.pop(n) for n in list(states) if n.endswith(OF_ANCHOR)}
        stage.load_codec_state_dict({"steps": steps, "lanes": states, "anchors": anchors})
    for name, followed in pipeline.followed.items():
        if FOLLOWED + name in tensors:
            followed.copy_(tensors[FOLLOWED + name])
    for name, parameter in parameters_of(pipeline).items():
        parameter.data.copy_(tensors[f"model/{name}"])
        prefix = f"optimizer/{name}/"
        moments: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            if key.startswith(prefix):
                moment, slash, part = key.removeprefix(prefix).partition("/")
                moments.setdefault(moment, {})[slash + part] = tensor.to(parameter.device)
        optimizer.state[parameter] = {moment: state_of(parts) for moment, parts in moments.items()}


def parameters_of(pipeline: Pipeline) -> dict[str, nn.Parameter]:
    """Return this rank's trained parameters by their names in the whole model."""
    pairs = ((name, p) for module in pipeline.modules.values() for p, name in module.names.items())
    return {name: parameter for name, parameter in pairs if parameter.requires_grad}


def aliases_of(pipeline: Pipeline) -> dict[str, str]:
    """Return the original's name for each of this rank's parameters that is a copy."""
    return {name: original for module in pipeline.modules.values() for name, original in module.aliases.items()}


def flatten(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one with paths such as "a/b"; keys must not contain "/"."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        assert "/" not in key, key
        flat |= flatten(value, f"{path}{key}/") if isinstance(value, Mapping) else {path + key: value}
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Invert `flatten`."""
    values: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split("/")
        node = values
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return values
