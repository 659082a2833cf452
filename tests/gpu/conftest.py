"""The GPU check stands beside these tests, as `launch/gpu_check.sh` finds it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
