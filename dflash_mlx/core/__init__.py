"""The words that every other room uses: settings, errors, trees, acceptance, sampling, statistics.

Begin with `tree.py`: everything that is drafted is a prefix tree.
"""
