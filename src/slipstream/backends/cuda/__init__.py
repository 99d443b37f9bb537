"""The GPU backend: a round as one captured graph, its pass over the weights a chain of Triton kernels or one kernel."""
