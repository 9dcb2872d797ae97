"""The runtime that every train backend shares: placement, engines, weight sync, run folder, tracking."""
