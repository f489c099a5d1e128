"""What a run cost and what it is worth: compare, its report, rates, quality."""
