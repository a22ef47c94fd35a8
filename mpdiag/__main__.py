"""``python -m mpdiag`` is ``mpdiag``."""

from mpdiag.cli import main

if __name__ == "__main__":
    main()
