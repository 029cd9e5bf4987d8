"""Mix: several pipelines to one, in exact proportions.

The order of draws is the earliest-deadline form of Tijdeman's algorithm (R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980). With n
sources and shares s_i that sum to 1, let y_i(t) = s_i * t + e_i be what source i should have given after t draws; the phases e_i sum to 0 and are smaller
than 1/m, where m = 2n - 2. Draw j of source i may come from the first t on with y_i(t) >= j - 1 + 1/m, and must have come at the first t with
y_i(t) > j - 1/m; of those that may come, the one that must come first is drawn.

Why that always works: in the draws p + 1 to q there must lie fewer than y_i(q) - y_i(p) + 2/m draws of source i. Over k < n sources that is together less than
q - p + 1, so at most q - p. Over all n sources, the last of these draws have numbers below y_i(q) + 1/m, which sum to less than q + 2, hence to at most q
as whole numbers below n places that sum to q; likewise from below. So there is always room, and taking the earliest deadline finds it (Hall; Jackson).
Then the number of draws differs from y_i(t) by at most 1 - 1/m, and from s_i * t by less than 1.
"""
