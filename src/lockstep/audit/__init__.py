"""`lockstep audit`: whether a recipe, or a run, is what it says; every question an engineer asks when rewards go flat.

    report = audit(load_config("recipes/addition.toml"))
    print(report.text())

`examine.py` is the table of checks and runs them, `subject.py` what they look at; the checks are in tokens.py,
record.py, syncs.py, training.py and runs.py, one small function each. docs/audit.md says what each of them means.
"""
