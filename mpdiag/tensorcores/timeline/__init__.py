"""When the GPU worked and when it did not: steps, idle time and its causes, ranks side by side."""
