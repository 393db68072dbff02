"""LoRA adapters from a folder that PEFT or `lowbit train` wrote, on a model or on a rank's share of it."""

from pathlib import Path
from typing import Any

import torch

from lowbit_run.config import ConfigError
from lowbit_run.train.cut import uncut, whole_class
from lowbit_run.train.pretrained import headers_of, read_json, reason

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def base_of(folder: Path) -> str:
    """Return the folder of the model that adapters name as theirs; empty if they name none."""
    try:
        values = read_json(folder / CONFIG)
        name = values.get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"folder is {str(folder)!r}; {folder / CONFIG} cannot be read: {reason(error)}") from error
    return name if isinstance(name, str) else ""


def check_adapters(folder: Path, exact: Any, base: str) -> Any:
    """Check that adapters fit a model of Transformers' configuration `exact`; return their own (PEFT's).

    Raises:
        ConfigError: they are of another model or kind, cannot be read, or PEFT is missing.
    """
    given = f"folder is {str(folder)!r}"
    peft = _peft(given)
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
        kind, initial = config.peft_type, getattr(config, "init_lora_weights", None)
    except Exception as error:  # PEFT raises many kinds of errors
        raise ConfigError(f"{given}; {folder / CONFIG} cannot be read: {reason(error)}") from error
    if kind != "LORA" or not (isinstance(initial, bool) or initial == "gaussian"):
        raise ConfigError(f"{given}, adapters of type {kind} ({initial}); allowed: LORA that leaves the model as it is")
    stored = {name: shape for name, (shape, _) in headers_of(given, [folder / WEIGHTS]).items()}
    with torch.device("meta"):
        model = whole_class(exact)(exact)
    try:
        peft.inject_adapter_in_model(config, model)
    except Exception as error:
        raise ConfigError(f"{given}, adapters that do not fit the model {base}: {reason(error)}") from error
    expected = {name: tuple(parameter.shape) for name, parameter in _adapters(model).items()}
    if strange := sorted(stored.keys() ^ expected.keys()):
        which = "lack" if strange[0] in expected else "also have"
        raise ConfigError(f"{given}, adapters that do not fit the model {base}: they {which} {strange[0]}")
    if other := next((name for name, shape in expected.items() if stored[name] != shape), None):
        raise ConfigError(
            f"{given}, adapters that do not fit the model {base}: {other} has shape {stored[other]}; "
            f"allowed: {expected[other]}"
        )
    return config


def add_adapters(model: Any, config: Any, folder: Path) -> None:
    """Add the adapters of the layers that a share has, in float32, from a folder that `check_adapters` accepts."""
    from safetensors import safe_open

    with uncut(model):
        _peft("").inject_adapter_in_model(config, model)
    with safe_open(folder / WEIGHTS, "pt") as file:
        for name, parameter in _adapters(model).items():
            parameter.data = file.get_tensor(name).to(parameter.device, torch.float32)


def _adapters(model: Any) -> dict[str, torch.nn.Parameter]:
    """Return a model's adapters by their names in PEFT's files."""
    found = {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name}
    return {_PREFIX + name.replace(".default", ""): parameter for name, parameter in found.items()}


def _peft(given: str) -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"{given}, adapters, which need: pip install 'lowbit[frameworks]'") from error
    return peft
