"""Calibration of the `credit` controller on real text of a target and its draft.

The steps, each in its own file:

    questions  what the target is asked
    record     the target's own text, and what a draft would have guessed at every position
    trace      those records: values, and their JSON lines
    sweep      cost of every threshold and window by credit; the label of each bin of credit
    train      the five-layer predictor (torch)
    replay     a controller against recorded text: seconds a token, quality
    plot       pictures (matplotlib)
    run        all of it, in order: `calibrate(traces, settings)`

This file stays empty because torch and matplotlib are heavy.
"""
