"""Training as people write it with other libraries: one example a file, shown by a page of `docs/ecosystem`.

`train` of each trains a small model from code alone, without a download. `test_examples` compares its results
under retrograd with eager's; `gains` measures what a step takes.
"""
