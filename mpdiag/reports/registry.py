"""What a run's HTML report draws, in its order: each function yields the pictures of one view."""

from collections.abc import Iterator

from mpdiag.profiler import is_installed, part
from mpdiag.reports.contents import RunContents
from mpdiag.reports.picture import Picture
from mpdiag.reports.views import formats, operations, training, updates
from mpdiag.reports.views.gradients import pictures as gradients

REPORTED = (
    gradients.reported,
    updates.reported,
    operations.reported,
    formats.reported,
    *((part("views.tensor_cores").reported,) if is_installed() else ()),
    training.reported,
)


def reported_pictures(contents: RunContents) -> Iterator[Picture]:
    """The pictures of a run's HTML report, view by view."""
    for pictures in REPORTED:
        yield from pictures(contents)
