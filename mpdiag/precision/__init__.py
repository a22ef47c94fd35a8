"""What precision a training really has, and what that does: the audit."""
