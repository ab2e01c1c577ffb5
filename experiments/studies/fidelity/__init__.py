"""Measures the cost in loss of each part of the FP8 recipes, in many paired trainings.

    uv run python -m experiments.studies.fidelity --regime text --variants bf16,coat

- `__main__`: the command line, and the results file of its trainings.
- `texts`: the tokens of both regimes, as arrays.
- `operands`: matmuls with some operands rounded to 8 bits.
- `variants`: the recipes to train, and `bf16` with one change.
- `model`: a small Llama, with layers of any recipe.
- `training`: the compiled programs of a variant, and a training with one seed.
- `summary`: differences to the reference with their intervals, as table and figure.
- `join`: joins the results files of several processes.
"""
