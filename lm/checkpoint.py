"""Keep the names that were here before version 0.4.0. Import them from training.checkpoint."""

from training.checkpoint import Run as Run
from training.checkpoint import resume as resume
