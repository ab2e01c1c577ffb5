"""Shared code of the experiments: results files, timing, cases, tables, compilation."""
