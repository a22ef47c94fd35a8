"""Forms of loops: closures, loops written for ``GradScaler``, and steps past the trainer."""
