"""Where `MegatronBackend` will live. Importing it fails, since there is no class yet that could keep the contract."""

from drivetrain_backend_api import DrivetrainError
from drivetrain_backend_megatron.spec import NOT_BUILT

raise DrivetrainError(NOT_BUILT)
