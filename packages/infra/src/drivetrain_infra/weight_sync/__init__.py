"""Moving weights from a train backend to rollout engines: one session protocol, several transports."""
