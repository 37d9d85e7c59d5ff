"""Prompts of `outrider demo` and of the bench scripts that need only a few."""

from __future__ import annotations

from typing import Final

PROMPTS: Final = (
    "Write a Python function that checks whether a number is prime, and explain how it works.",
    "What causes the seasons on Earth? Answer in a few sentences.",
    "Write a short letter to a neighbour who found my lost cat.",
    "List five things to check before a long bicycle tour, with a reason for each.",
    "Tom has 12 apples, gives away 5 and buys 8 more. How many has he? Explain step by step.",
    "Rewrite this sentence more politely: Send me the report now, I have been waiting for days.",
    "Explain to a child why the sky is blue.",
    "What is the difference between a list and a tuple in Python? Give an example of each.",
)
"""Different tasks, none of them taken from a benchmark."""
