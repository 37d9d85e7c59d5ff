"""Making a draft for a target: own text of the target, a few of its layers, training, export.

The steps, each resumable and each in its own file:

    prompts   what the target is asked
    corpus    what it answers, and its distribution at every position of the answers
    student   the draft as a network that can be trained
    loss      how far the draft's distribution is from the target's
    train     the loop
    evaluate  acceptance on held-out prompts, cost per draft token
    export    the file that `engines.distilled` runs
    run       all of it, in order: `distill(config)`

Import `outrider.distill.run`; this file stays empty because torch is heavy.
"""
