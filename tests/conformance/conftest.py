"""Small operations are faster, and the same everywhere, on one thread."""

from support import one_thread

__all__ = ["one_thread"]
