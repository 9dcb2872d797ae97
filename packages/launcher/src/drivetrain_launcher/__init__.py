"""The `drivetrain` command, its train loop, the train worker and the algorithms."""
