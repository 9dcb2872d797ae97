"""Train backend on Megatron-Core."""
