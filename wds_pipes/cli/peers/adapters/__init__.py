"""One class per row of the comparison: how a library does what is measured."""
