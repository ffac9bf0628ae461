"""Training on a file of examples: reward models, supervised fine-tuning, direct preference optimization.

    examples -> a score per sequence -> loss -> update -> metrics, checkpoints, at the end a model folder

`examples` reads and orders, `objective` says what a kind is and takes the steps, `reward` and `likelihood` are the
kinds, `run` is the run.
"""
