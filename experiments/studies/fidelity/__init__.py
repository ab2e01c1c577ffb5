"""Costs in loss of each step of the FP8 recipes, from many small paired trainings.

    uv run python -m experiments.studies.fidelity --regime text --variants bf16,coat

- `texts`: the tokens of both regimes, as arrays.
- `operands`: matmuls with some operands rounded to 8 bits.
- `variants`: what is trained: `bf16` with one change, or a recipe.
- `model`: a small Llama, with layers of any recipe.
- `training`: the compiled programs of a variant, and a training with one seed.
- `summary`: differences to the reference with their intervals, as table and figure.
- `join`: one results file of several processes' files.
"""
