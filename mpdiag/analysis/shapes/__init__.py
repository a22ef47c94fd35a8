"""Which sizes of a recorded model to pad: one set for the whole model."""
