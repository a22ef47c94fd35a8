"""``python -m mpdiag`` is ``mpdiag``: a user's ``click.py`` is not taken for the package."""

import sys
from pathlib import Path

_HERE, _OURS = str(Path.cwd()), str(Path(__file__).resolve().parents[1])
if sys.path[0] == _HERE != _OURS and not getattr(sys.flags, "safe_path", False):
    sys.path[0] = str(Path(sys.executable).parent)  # what the installed command has there

from mpdiag.cli import main  # noqa: E402 - not found in the present folder

if __name__ == "__main__":
    main()
