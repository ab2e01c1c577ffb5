"""Experiments on 8-bit optimizer states: errors, drift and training curves."""
