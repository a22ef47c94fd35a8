"""The built-in demonstration: workloads trained in FP32, without a scale and by the plan."""
