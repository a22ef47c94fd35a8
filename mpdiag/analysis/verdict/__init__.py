"""The verdict: what was shown, what is expected, and what was not looked at."""

from mpdiag.analysis.verdict.judgement import Case, judge
from mpdiag.plan import Verdict

__all__ = ["Case", "Verdict", "judge"]
