"""Rollout engines: the interface, the actor that hosts one, and the engines themselves."""
