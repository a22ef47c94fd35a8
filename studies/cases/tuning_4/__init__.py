"""Cases, a family to a file; each file holds a tuple ``CASES``."""
