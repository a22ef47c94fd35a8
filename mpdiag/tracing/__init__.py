"""What happens inside a training step: dispatched operations, module names, source lines."""
