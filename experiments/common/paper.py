"""The tables that the paper (arXiv 2410.19313) and its poster print."""

# Errors of Adam's update, percent. Keys are codes of the first moment, columns codes of
# the second. Table 1 has the first four columns.
MOMENT_CODES = ("E4M3", "E4M3+Expand", "E5M2", "E5M2+Expand", "DE8", "DE8+Expand")
TABLE_1 = {
    "E4M3": (20.10, 18.08, 25.65, 18.16),
    "E4M3+Expand": (15.13, 12.31, 21.96, 12.43),
    "E5M2": (37.02, 35.96, 40.30, 36.00),
    "E5M2+Expand": (17.79, 15.48, 23.84, 15.57),
}
# Saved activations of a layer in U, by operation. The paper has no counterpart of
# `coat_max` or `jax.checkpoint`.
TABLE_2_COLUMNS = (
    "RMSNorm",
    "Act Func",
    "RoPE",
    "FlashAttn",
    "Linear",
    "total",
    "ratio",
)
TABLE_2 = {
    "bf16": (4, 8, 2, 3, 5.66, 22.66, 1.0),
    "te": (2, 8, 2, 3, 3.33, 18.33, 1.23),
    "coat": (1, 4, 2, 3, 3.33, 13.33, 1.69),
}
LOSS_COLUMNS = ("train loss", "WikiText ppl", "C4 ppl", "Pile ppl", "average ppl")
TASK_COLUMNS = ("COPA", "ARC easy", "SciQ", "HellaSwag", "average accuracy")
# Rows have the columns of losses, then the columns of tasks.
TABLE_3 = {
    "bf16": (2.995, 30.499, 27.966, 17.405, 25.29, 0.6, 0.456, 0.673, 0.337, 0.516),
    "te": (3.001, 30.736, 28.064, 17.434, 25.411, 0.62, 0.454, 0.639, 0.338, 0.513),
    "coat": (3.008, 30.619, 28.099, 17.453, 25.391, 0.61, 0.442, 0.676, 0.337, 0.515),
}
POSTER = {
    "bf16": (2.366, 12.053, 12.874, 8.596, 11.174, 0.83, 0.657, 0.875, 0.569, 0.732),
    "coat": (2.379, 12.166, 12.988, 8.684, 11.279, 0.81, 0.619, 0.872, 0.606, 0.727),
}
POSTER_TOKENS = 300e9
# Exact match after fine-tuning Llama-2-7B, percent.
TABLE_4_COLUMNS = ("Mathematics", "SVAMP", "NumGLUE", "GSM8k", "average")
TABLE_4 = {
    "before": (6.0, 14.6, 34.5, 29.9, 21.3),
    "bf16": (46.3, 64.2, 54.8, 57.7, 55.7),
    "te": (45.3, 66.1, 53.5, 57.7, 55.6),
    "coat": (47.8, 64.4, 53.3, 56.6, 55.5),
}
# VILA1.5-7B after fine-tuning (stage 3), percent.
TABLE_5_COLUMNS = (
    *("VideoMME", "POPE", "VizWiz", "GQA", "VQAv2", "TextVQA", "SEED image"),
    *("SEED video", "MMMU val", "average"),
)
TABLE_5 = {
    "bf16": (42.96, 86.9, 61.42, 64.55, 81.47, 65.6, 73.4, 45.65, 38.56, 62.8),
    "te": (43.19, 87.64, 57.61, 64.53, 81.34, 64.7, 73.51, 43.12, 35.89, 61.88),
    "coat": (44.56, 87.43, 61.36, 64.44, 81.2, 64.65, 73.36, 43.76, 37.22, 62.51),
}
# A layer on an H100 at batch 4, by hidden size and sequence: milliseconds forward,
# milliseconds backward, and MiB of saved activations.
TABLE_6 = {
    (2048, 2048): {
        "bf16": (3.36, 8.47, 1457),
        "te": (2.96, 5.32, 1210),
        "coat": (2.88, 5.16, 883),
    },
    (2048, 4096): {
        "bf16": (6.88, 17.24, 2914),
        "te": (5.94, 11.29, 2420),
        "coat": (5.89, 10.82, 1766),
    },
    (4096, 2048): {
        "bf16": (7.77, 18.78, 2914),
        "te": (6.19, 11.79, 2420),
        "coat": (5.89, 10.96, 1766),
    },
    (4096, 4096): {
        "bf16": (16.37, 38.43, 5828),
        "te": (12.66, 24.58, 4840),
        "coat": (12.16, 23.44, 3533),
    },
}
# Optimizer, activations and peak in GB, largest batch, and tokens/s of a GPU. Keys are
# the model, the number of H100s with 80 GB, and the batch of a GPU. Sequences have
# 2,048 tokens (1,024 for 30B). None: not in the paper; (): memory does not suffice.
TABLE_7_COLUMNS = ("optimizer", "activations", "peak", "largest batch", "tokens/s")
TABLE_7: dict[tuple[str, int, int], dict[str, tuple[float | None, ...]]] = {
    ("Llama-2-7B", 1, 1): {"bf16": (), "te": (), "coat": (13.1, 8.1, 79.3, 1, 5906)},
    ("Llama-2-7B", 2, 2): {
        "bf16": (None, None, None, 1, 6130),
        "te": (None, None, None, 1, 6842),
        "coat": (6.5, 16.9, 52.8, 4, 11351),
    },
    ("Llama-2-7B", 4, 2): {
        "bf16": (13.1, 25.8, 55.1, 2, 7730),
        "te": (13.1, 21.9, 51.1, 2, 9577),
        "coat": (3.2, 16.9, 35.6, 4, 11257),
    },
    ("Llama-2-7B", 8, 2): {
        "bf16": (6.5, 25.8, 41.2, 4, 8238),
        "te": (6.5, 21.9, 37.2, 4, 11704),
        "coat": (1.6, 16.9, 27.0, 8, 11241),
    },
    ("Llama-2-13B", 2, 1): {"bf16": (), "te": (), "coat": (12.6, 10.1, 73.2, 1, 2137)},
    ("Llama-2-13B", 4, 1): {
        "bf16": (25.1, 20.1, 76.1, 1, 2345),
        "te": (25.1, 17.2, 73.0, 1, 2851),
        "coat": (6.3, 13.2, 49.1, 2, 5295),
    },
    ("Llama-2-13B", 8, 1): {
        "bf16": (12.6, 20.1, 49.4, 2, 3907),
        "te": (12.6, 17.2, 46.5, 2, 5604),
        "coat": (3.1, 13.2, 32.5, 4, 5650),
    },
    ("Llama-30B", 8, 1): {"bf16": (), "te": (), "coat": (7.8, 24.2, 70.5, 1, 1363)},
}
TABLE_8 = {
    "E4M3+Expand": (15.13, 12.31, 21.96, 12.43, 14.01, 18.84),
    "DE8": (12.11, 8.27, 20.02, 8.43, 10.54, 16.25),
    "DE8+Expand": (11.57, 7.47, 19.69, 7.65, 9.91, 15.81),
}
# The models' names in table 7, by preset of this library.
MODELS = {
    "llama2-7b": "Llama-2-7B",
    "llama3-8b": "Llama-3-8B",
    "llama2-13b": "Llama-2-13B",
    "llama-30b": "Llama-30B",
}
FIGURES = {
    1: "shares of a step's memory",
    2: "dynamic range of optimizer states before and after the expansion",
    3: "use of E4M3's range before and after the expansion",
    4: "quantization error and time of granularities",
    5: "loss curves of OLMo-1B",
    6: "loss curves of OLMo-7B",
    7: "loss curves of VILA1.5-7B",
    8: "captions of one image",
    9: "distributions of both moments before and after the expansion",
}


def saved_units(recipe: str) -> float | None:
    """Returns a recipe's total in table 2, in U; None if table 2 lacks the recipe."""
    return TABLE_2[recipe][-2] if recipe in TABLE_2 else None
