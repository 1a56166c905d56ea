"""Heads compute in the precision of what they read, also where autocast is on for the trunk, as in the published code:
cameras and depths in bfloat16 would be coarse, and their derivatives would mix types."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """The meta device, on which shapes can be tried out, knows no autocast to switch off."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
