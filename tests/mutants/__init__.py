"""Do the tests hold the rules, or only run them? Changes one thing at a time and looks whether a test notices.

``make mutants N=200`` samples mutants (a comparison, ``in``, ``and``/``or``, a ``not``, a condition, a number, True or
False changed) with a printed seed, runs the tests of the changed file's package on a copy of the tree, and reports the
share that was noticed, by package, and each mutant that was not. Changes are made by cosmic-ray's operators.
"""
