"""One module per kind of experiment; each offers `run(config, workdir)`.

`run` takes an `ml_collections.ConfigDict` and a folder that exists, prints
what a person wants to see, writes `summary.json` into the folder and returns
the same flat dictionary. `kvjax.run` finds the module by `config.experiment`.
"""
