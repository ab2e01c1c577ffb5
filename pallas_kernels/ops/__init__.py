"""The operations: one folder each with public functions, references and kernels."""
