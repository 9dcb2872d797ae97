"""Train backend on PyTorch FSDP2, Hugging Face native."""
