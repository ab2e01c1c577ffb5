"""Oracles and what tests of several folders share."""
