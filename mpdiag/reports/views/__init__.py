"""One file a subject of the dashboard and the reports: table, figure, receipt and picture of it."""
