"""Bridges to libraries people train with; each module needs its library, and is imported by name.

``loop`` (a loop of one's own), ``torch_amp`` (plain ``torch.amp``), ``lightning``, ``huggingface``,
``accelerate`` and ``boards`` (TensorBoard, W&B, MLflow). The extra of each, such as ``lightning``,
brings what it needs.
"""
