"""Configuration: frozen sections that check themselves, read from TOML and from a command line, written as TOML.

@section("model")
class ModelConfig:
    dim: Positive = 256
    '''Width.'''

resolve(ModelConfig, "model.toml", [("dim", "128")])
"""

from lowbit_run.config.section import (
    ConfigError,
    NonNegative,
    Positive,
    Setting,
    build,
    resolve,
    section,
    settings_of,
    to_toml,
)

__all__ = [
    "ConfigError",
    "NonNegative",
    "Positive",
    "Setting",
    "build",
    "resolve",
    "section",
    "settings_of",
    "to_toml",
]
