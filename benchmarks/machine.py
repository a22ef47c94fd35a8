"""What a benchmark ran on, for its results."""

import platform
from datetime import date
from typing import Any

import torch


def machine(**others: Any) -> dict[str, Any]:
    """Processor, threads, torch and today's date; ``others`` add to them."""
    return {
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **others,
        "date": date.today().isoformat(),
    }
