"""Every import of Megatron-Core, behind names of our own; the rest of the backend never sees one of its classes.

Importing this package patches what needs patches (`patches`) and silences Megatron's remarks about what is not
installed: nothing of it is used.
"""

import warnings

from drivetrain_backend_megatron.core import patches

patches.before_import()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.models.gpt.gpt_model
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel
    import megatron.core.dist_checkpointing  # noqa: F401
patches.after_import()
