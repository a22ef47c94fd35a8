"""Watching a training: counting on the device, hooks, the recorder."""
