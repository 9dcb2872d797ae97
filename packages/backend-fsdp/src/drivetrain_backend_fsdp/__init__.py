"""Train backend on PyTorch FSDP2, for dense causal language models as transformers defines them.

Importing this package imports no torch; discovery reads `spec`, which loads `backend` when it is chosen.
"""
