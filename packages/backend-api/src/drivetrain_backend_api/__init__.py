"""The contract between a reinforcement-learning loop and a training backend.

This module imports no torch: it offers discovery, specs, configuration and errors. What needs tensors is in the
submodules `backend`, `algorithm`, `batch`, `packing`, `attention`, `log_probs`, `reductions`, `weights`, `offload`,
`collectives`, `hf_folder`; `schedule` needs none.
"""

from drivetrain_backend_api.config import Option, OptionGroup, TrainConfig, option, options
from drivetrain_backend_api.discovery import (
    ALGORITHMS,
    TRAIN_BACKENDS,
    PluginKind,
    installed,
    load_implementation,
    load_spec,
    select_backend,
)
from drivetrain_backend_api.errors import (
    ApiVersionError,
    ConfigError,
    DataError,
    DiscoveryError,
    DrivetrainError,
    DuplicateNameError,
    IllegalStateError,
    NotInstalledError,
    PluginImportError,
    UnsupportedModelError,
)
from drivetrain_backend_api.spec import (
    API_VERSION,
    AlgorithmSpec,
    BackendSpec,
    Capabilities,
    PluginSpec,
    ProbeResult,
    merge_environments,
)

__all__ = [
    "ALGORITHMS",
    "API_VERSION",
    "TRAIN_BACKENDS",
    "AlgorithmSpec",
    "ApiVersionError",
    "BackendSpec",
    "Capabilities",
    "ConfigError",
    "DataError",
    "DiscoveryError",
    "DrivetrainError",
    "DuplicateNameError",
    "IllegalStateError",
    "NotInstalledError",
    "Option",
    "OptionGroup",
    "PluginImportError",
    "PluginKind",
    "PluginSpec",
    "ProbeResult",
    "TrainConfig",
    "UnsupportedModelError",
    "installed",
    "load_implementation",
    "load_spec",
    "merge_environments",
    "option",
    "options",
    "select_backend",
]
