"""Configuration: frozen sections that check themselves, read from TOML, changed by overrides, written back as TOML.

@section("model")
class ModelConfig:
dim: Positive = 256
'''Width.'''

resolve(ModelConfig, "model.toml", [("dim", "128")])
"""

from __future__ import annotations

from lowbit.config.files import override, read_toml, resolve, to_toml
from lowbit.config.section import ConfigError, NonNegative, Positive, Setting, build, section, settings_of

__all__ = [
    "ConfigError",
    "NonNegative",
    "Positive",
    "Setting",
    "build",
    "override",
    "read_toml",
    "resolve",
    "section",
    "settings_of",
    "to_toml",
]
