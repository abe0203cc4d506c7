"""The Python API: one class per algorithm, the results of a run, and a model to generate with."""
