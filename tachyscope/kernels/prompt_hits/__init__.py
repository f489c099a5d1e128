"""Count the queries that are nearest to each prompt token."""
