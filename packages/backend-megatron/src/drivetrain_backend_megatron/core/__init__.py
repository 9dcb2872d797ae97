"""Every import of Megatron-Core, behind names of our own; the rest of the backend never sees one of its classes.

Importing this package patches what needs patches (`patches`) and silences remarks on what is not installed or is ours
to choose: a user could do nothing about them.
"""

import logging
import warnings

from drivetrain_backend_megatron.core import patches

REMARKS = (
    # no CUDA runtime; asked for by megatron-core 0.16 to 0.19 on import
    "torch.utils.cpp_extension",
    # GPTModel has a successor, and lays out buffers better if told how; megatron-core 0.19
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.distributed.distributed_data_parallel",
)
"""Loggers of which only errors are shown."""

for _name in REMARKS:
    logging.getLogger(_name).setLevel(logging.ERROR)
patches.before_import()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.models.gpt.gpt_model
    import megatron.core.pipeline_parallel  # noqa: F401
patches.after_import()
