"""Bridges to libraries people train with; each module needs its library, and is imported by name.

``torch_amp`` (plain ``torch.amp``), ``lightning``, ``huggingface``, ``accelerate`` and ``boards``
(TensorBoard, W&B). The extra of each, such as ``lightning``, brings what it needs.
"""
