"""Puts this folder, whose helpers the tests share with the processes that they start, on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
