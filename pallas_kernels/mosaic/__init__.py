"""The toolkit of Mosaic GPU that kernels share."""
