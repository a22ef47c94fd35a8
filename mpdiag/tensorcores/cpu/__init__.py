"""The matrix unit of a CPU (AMX): what ran on it, from oneDNN's log."""
