"""For all tests: one torch thread a process, since several processes share few cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
