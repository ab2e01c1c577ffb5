"""Mixtures of experts: routers, rows sorted by expert, and their matmuls.

Every token is multiplied by the weights of the experts that its router chooses. No
token is dropped, and no group of tokens has a fixed size: rows are sorted by expert,
and the sizes of groups stay on the device.
"""
