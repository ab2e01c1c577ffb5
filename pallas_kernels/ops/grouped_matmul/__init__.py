"""Matmuls of rows in groups, such as the experts of a mixture of experts."""
