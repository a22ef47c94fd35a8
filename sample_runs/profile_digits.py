"""Twelve steps of the digits workload, for ``mpdiag profile``."""

from mpdiag import workloads
from mpdiag.workloads.protocol import start

session = start(workloads.load("digits"), seed=0, steps=12)
session.run(on_step=lambda step, loss: None)
