"""The smallest Drivetrain train backend: one process, plain torch, a plain transformers model.

Found by its entry point; nobody imports it by name.
"""
