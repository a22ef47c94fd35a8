"""The views of the dashboard, in the order of its menu and of the HTML report.

A view is a file in ``reports/views``, a page of the same name in ``app/views``, and a line here.
"""

from collections.abc import Iterator

from mpdiag.profiler import is_installed, part
from mpdiag.reports.contents import RunContents
from mpdiag.reports.picture import Picture
from mpdiag.reports.views import (
    compare,
    formats,
    layers,
    operations,
    overview,
    precision,
    runs,
    training,
    updates,
    verdict,
)
from mpdiag.reports.views.gradients import pictures as gradients

VIEWS = (
    runs.VIEW,
    overview.VIEW,
    verdict.VIEW,
    precision.VIEW,
    gradients.VIEW,
    layers.VIEW,
    updates.VIEW,
    operations.VIEW,
    formats.VIEW,
    *((part("views.tensor_cores").VIEW,) if is_installed() else ()),
    training.VIEW,
    compare.VIEW,
)


def reported_pictures(contents: RunContents) -> Iterator[Picture]:
    """The pictures of a run's HTML report, view by view."""
    for view in VIEWS:
        yield from view.pictures(contents)
